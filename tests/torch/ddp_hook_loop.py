"""What a rank runs in the tests of lost ranks: it trains until something happens.

``python -m tests.torch.ddp_hook_loop MODE``: "endless" steps, "ends" after a few without saying so to anybody, or
"raises" on rank 0 in the middle of a backward pass.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hvdkit.torch as hvd

STEPS = 5
TIMEOUT_SECONDS = 3


def main(mode: str) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(80, 80) for _ in range(6)))
    model = DistributedDataParallel(net, bucket_cap_mb=0.03)
    hook = hvd.ddp_hook(hvd.Compression.topk(0.1), timeout=timedelta(seconds=TIMEOUT_SECONDS))
    hook.register(model)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    steps = 0

    def fail(gradient: torch.Tensor) -> None:
        if mode == "raises" and steps == STEPS and dist.get_rank() == 0:
            raise ZeroDivisionError("on purpose")

    net[0].weight.register_hook(fail)
    while mode != "ends" or steps < STEPS:
        optimizer.zero_grad()
        model(torch.ones(4, 80)).sum().backward()
        optimizer.step()
        steps += 1
        if steps == STEPS:
            print("under way as", os.getpid(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
