"""A rank that trains until it is killed: it uses all that lies in its node's memory, and says so in a file."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

import hvdkit.torch as hvd

GOOD_STEPS = 3


def main(folder: str) -> None:
    hvd.init()
    model = torch.nn.Linear(1000, 500)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    step = 0
    while True:
        optimizer.zero_grad()
        model(torch.ones(2, 1000)).sum().backward()
        optimizer.step()
        hvd.allreduce(torch.ones(500_000), name="large")
        step += 1
        if step == GOOD_STEPS:
            Path(folder, f"{hvd.rank()}").write_text(f"{os.getpid()}\n")


if __name__ == "__main__":
    main(sys.argv[1])
