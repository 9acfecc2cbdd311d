"""When a lane's gradients are reduced: beside the backward pass, or when the step is finished."""

import os
import time

import torch
from torch import nn

from hvdkit.engine.session import runtime
from tests.on_ranks import on_ranks

pytestmark = [
    on_ranks(2, name="in turn", OMP_NUM_THREADS="64"),
    on_ranks(2, name="beside", OMP_NUM_THREADS="64", HVDKIT_FUSION_THRESHOLD="1000000"),
]

LAYERS, WIDTH = 6, 600  # 1.4 MB a matrix


def test_the_computation_and_the_sum_take_turns_where_there_is_no_core_for_both(hvd):
    """OMP_NUM_THREADS says that each rank's threads have all cores; a size of buckets that was asked for is used."""
    takes_turns = "HVDKIT_FUSION_THRESHOLD" not in os.environ
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    alone = [parameter.detach().clone() for parameter in net.parameters()]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())
    assert runtime.engine().topology.is_full
    for step in range(3):
        optimizer.zero_grad()
        torch.stack([(hvd.rank() + 1.0) * parameter.sum() for parameter in net.parameters()]).sum().backward()
        if step > 0:
            (lane,) = runtime.engine().lanes.values()
            assert lane.reducer.takes_turns == takes_turns
            assert len(lane.arrangement.pieces) == (1 if takes_turns else LAYERS)
            assert lane.in_flight
            deadline = time.monotonic() + (0.2 if takes_turns else 60)
            while lane.step.started < LAYERS and time.monotonic() < deadline:
                time.sleep(0.002)
            assert lane.step.started == (0 if takes_turns else LAYERS)
        optimizer.step()
    mean = (hvd.size() + 1) / 2
    for parameter, before in zip(net.parameters(), alone, strict=True):
        torch.testing.assert_close(parameter.detach(), before - 3 * 0.1 * mean)
