"""What was launched: collectives on a device, or on Horovod's engine. Cases that hold for both.

Modules with cases of either have it counted when they are imported, so they come first in a job.
"""

from __future__ import annotations

import torch

COUNT = [0]


def launches(action) -> int:
    before = COUNT[0]
    action()
    return COUNT[0] - before


def model_and_optimizer(hvd, **arguments):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 300), torch.nn.ReLU(), torch.nn.Linear(300, 2))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters(), **arguments
    )
    return model, optimizer


def case_allreduce_broadcast_and_allgather_are_launched(hvd):
    assert launches(lambda: hvd.allreduce(torch.ones(3))) == 1
    assert launches(lambda: hvd.broadcast(torch.ones(3), 0)) == 1
    assert launches(lambda: hvd.allgather(torch.ones(3))) == 1


def case_what_is_not_done_there_is_left_to_the_host(hvd):
    assert launches(lambda: hvd.allreduce(torch.ones(3))) == 1
    assert launches(lambda: hvd.allreduce(torch.ones(3, dtype=torch.int32), op=hvd.Average)) == 0
    assert launches(lambda: hvd.allreduce(torch.ones(3, dtype=torch.int16), op=hvd.Sum)) == 0
    assert launches(lambda: hvd.alltoall(torch.ones(hvd.size()))) == 0
    assert launches(lambda: hvd.reducescatter(torch.ones(6))) == 0


def case_halves_are_summed_in_fp32(hvd):
    for dtype, large in ((torch.float16, 2048.0), (torch.bfloat16, 256.0)):
        own = torch.full((7,), large if hvd.rank() == 0 else 1.0, dtype=dtype)
        exact = torch.tensor(large + hvd.size() - 1).to(dtype)
        assert hvd.allreduce(own, op=hvd.Sum).tolist() == [exact.item()] * 7
