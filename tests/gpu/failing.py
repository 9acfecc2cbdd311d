"""A rank that fails while its GPU has work queued: ``python -m tests.gpu.failing dies|memory``.

The other ranks print what they are told, and end well.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch

from tests.gpu import card, ranks

STEPS = 50
FAILS_AT = 5


def train(how: str) -> None:
    import hvdkit.torch as hvd

    hvd.init()
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8))).to(card.DEVICE)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    inputs = torch.randn(16, 256, device=card.DEVICE)
    started = time.monotonic()
    try:
        for step in range(STEPS):
            if hvd.rank() == 1 and step == FAILS_AT:
                fail(how)
            optimizer.zero_grad()
            for _ in range(20):
                card.keep_busy(card.BUSY_CYCLES // 20)
            model(inputs).square().mean().backward()
            optimizer.step()
        print("trained to the end", flush=True)
    except hvd.HorovodInternalError as error:
        print(f"rank {hvd.rank()} was told: {error}", flush=True)
        print(f"after {time.monotonic() - started:.1f} s", flush=True)
    hvd.shutdown()


def fail(how: str) -> None:
    """End as processes do that are killed, or that have no memory left on their GPU."""
    if how == "dies":
        for _ in range(10):
            card.keep_busy()
        os.kill(os.getpid(), signal.SIGKILL)
    if not card.IS_GPU:
        raise MemoryError("CPU out of memory")
    torch.cuda.set_per_process_memory_fraction(0.05)  # the other rank's part of the GPU is not this one's
    hoard = []
    while True:
        hoard.append(torch.empty(1 << 30, dtype=torch.uint8, device=card.DEVICE))


if __name__ == "__main__":
    ranks.set_up()
    train(sys.argv[1])
