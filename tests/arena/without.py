"""What a rank does where gradients cannot be born in the arena: python -m tests.arena.without nothing|LIBRARY [RANK]

LIBRARY replaces entries of PyTorch's import table first. RANK has few addresses left.
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from pathlib import Path

import torch

import hvdkit.torch as hvd
from hvdkit.arena import ARENA

ELEMENTS = 1 << 16
STEPS = 4
ADDRESSES = 2 << 30  # enough for a step, and not for an arena


def main(library: str, short_rank: str = "") -> None:
    if short_rank == os.environ["RANK"]:
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGESIZE")
        _, highest = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (mapped + ADDRESSES, highest))
    if library != "nothing":
        assert ctypes.CDLL(library).replace_entries() > 0
    hvd.init()
    weights = [torch.nn.Parameter(torch.zeros(ELEMENTS)) for _ in range(3)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(weights, lr=1.0), op=hvd.Sum)
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        (sum(weight.sum() for weight in weights) * (hvd.rank() + 1) * step).backward()
        assert short_rank or not any(ARENA.contains(weight.grad.data_ptr()) for weight in weights)
        optimizer.step()
        expected = step * sum(range(1, hvd.size() + 1))
        assert all(bool((weight.grad == expected).all()) for weight in weights)
    print("STEPS ARE RIGHT", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
