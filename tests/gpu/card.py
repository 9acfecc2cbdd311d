"""The device of the tests of this folder, and the jobs that they run on: a GPU, or the CPU in its place.

``TESTS_DEVICE`` is "cuda" or "cpu"; ``TESTS_WAY`` is "nccl", or "host": gradients are copied to the host, summed there
and copied back. On "cpu" another process group takes the place of NCCL, and threads those of streams.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator

import pytest
import torch

from tests.on_ranks import on_ranks
from tests.ranks import CASES, ROOT, Skip

DEVICE = torch.device(os.environ.get("TESTS_DEVICE", "cpu"))
WAY = os.environ.get("TESTS_WAY", "nccl")
IS_GPU = DEVICE.type == "cuda"
BUSY_CYCLES = 40_000_000  # about 20 ms
WAYS = ["nccl", "host"]
SECONDS = 60  # for a test, or the start


def variables(way: str) -> dict[str, str]:
    """The environment of ranks. On a GPU several jobs take turns, and the first step compiles kernels."""
    return {
        "TESTS_DEVICE": DEVICE.type,
        "TESTS_WAY": way,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # a pool of compilers would keep the pipe of a rank's output open
        "HVDKIT_START_TIMEOUT_SECONDS": "90",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "120",
    }


def on_card(*jobs: int, thorough: bool = False) -> list[pytest.MarkDecorator]:
    """Mark a module's tests to run on jobs of these numbers of ranks, each way."""
    options = {
        "runner": "tests.gpu.ranks",
        "preload": () if IS_GPU else CASES,  # CUDA does not live through a fork
        "seconds": SECONDS,
    }
    ranks = [(size, "torch") for size in jobs]
    return [on_ranks(*ranks, name=way, thorough=thorough, **options, **variables(way)) for way in WAYS]


def check_way(lane: object) -> None:
    """Fail where gradients go another way than the one that is tried."""
    reason = lane.reducer.reason  # type: ignore[attr-defined]
    assert lane.on_device, reason  # type: ignore[attr-defined]
    assert ("copied from the device" in reason) == (WAY == "host"), (WAY, reason)
    assert (reason == "the device's collectives") == (WAY == "nccl"), (WAY, reason)


def only_on_a_gpu() -> None:
    """Skip a test that says nothing about the CPU, which has no streams."""
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
