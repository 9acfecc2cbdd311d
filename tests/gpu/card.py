"""The device of the cases of this folder: a GPU, or the CPU in its place.

``TESTS_DEVICE`` is "cuda" or "cpu"; ``TESTS_WAY`` is "nccl", or "host": gradients are copied to the host, summed there
and copied back. On "cpu" another process group takes the place of NCCL, and threads those of streams.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator

import torch

from tests.ranks import Skip

DEVICE = torch.device(os.environ.get("TESTS_DEVICE", "cpu"))
WAY = os.environ.get("TESTS_WAY", "nccl")
IS_GPU = DEVICE.type == "cuda"
BUSY_CYCLES = 40_000_000  # about 20 ms


def check_way(lane: object) -> None:
    """Fail where gradients go another way than the one that is tried."""
    reason = lane.reducer.reason  # type: ignore[attr-defined]
    assert lane.on_device, reason  # type: ignore[attr-defined]
    assert ("copied from the device" in reason) == (WAY == "host"), (WAY, reason)
    assert (reason == "the device's collectives") == (WAY == "nccl"), (WAY, reason)


def only_on_a_gpu() -> None:
    """Skip a case that says nothing about the CPU, which has no streams."""
    if not IS_GPU:
        raise Skip("needs a GPU")


def settle() -> None:
    """Have nothing under way, nor left for the collector, which may not run while a CUDA graph is captured."""
    gc.collect()
    if IS_GPU:
        torch.cuda.synchronize()


def keep_busy(cycles: int = BUSY_CYCLES) -> None:
    """Queue work on the current stream that takes so many cycles, so that what follows is late."""
    if IS_GPU:
        torch.cuda._sleep(cycles)


@contextlib.contextmanager
def own_stream() -> Iterator[None]:
    """A stream of the user's own is the current one in this context."""
    if not IS_GPU:
        yield
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The same numbers on every rank and device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)
