"""What the tests of shared memory have in common: memory files, bells, ranks that are objects of one process."""

from __future__ import annotations

import collections
import gc
import importlib
import os
import re
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kernels.arrays import Array, native, needs_native
from tests.ranks import OF_OPEN_MPI, ROOT, rank_environment

__all__ = ["native", "needs_native"]

try:
    node_memory: Any = importlib.import_module("hvdkit.transports.node.memory")
except ImportError:
    node_memory = None  # as ``native`` is where nothing was compiled

LINE = 64
FILE_BYTES = 1 << 62  # sparse, as in node_memory.py

needs_memory_files = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this Python has no memfd_create")


@contextmanager
def memory_file(nbytes: int = FILE_BYTES) -> Iterator[int]:
    descriptor = os.memfd_create("hvdkit", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, nbytes)
        yield descriptor
    finally:
        os.close(descriptor)


def new_window(nbytes: int) -> Any:
    """A window on a file of its own, which stays while the window does."""
    with memory_file() as descriptor:
        return native.Window(descriptor, 0, nbytes)


def bytes_of(window: Any) -> Array:
    return np.frombuffer(window, dtype=np.uint8)


def bells_in(window: Any, ranks: int) -> list[Any]:
    return [native.Bell(window, rank * LINE) for rank in range(ranks)]


def message_rings(ranks: int, ring: int = 256, control: int = 256) -> list[Any]:
    """Return each rank's message rings, on one window."""
    window = new_window(ranks * LINE + native.MessageRings.bytes_needed(ranks, ring, control))
    bells = bells_in(window, ranks)
    return [native.MessageRings(window, ranks * LINE, ranks, me, ring, control, bells) for me in range(ranks)]


def settle(ranks: list[Any]) -> None:
    """Drive all message rings until nothing moves any more."""
    moved = True
    while moved:
        moved = False
        for post in ranks:
            moved |= post.progress()


def bytes_by_rank(rank: int, number: int, nbytes: int) -> Array:
    """What a rank puts into its message of a number: the same wherever it is asked for."""
    return np.random.default_rng([rank, number]).integers(0, 256, nbytes, dtype=np.uint8)


@contextmanager
def program(name: str, *arguments: object, descriptors: tuple[int, ...] = ()) -> Iterator[subprocess.Popen[str]]:
    """Run a function of tests.transports.shared_programs in another process, which inherits ``descriptors``."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.transports.shared_programs", name, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=rank_environment(),
        pass_fds=descriptors,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def answer(process: subprocess.Popen[str], question: str | None = None, seconds: float = 60.0) -> str:
    """The next line that a program prints, after it is told something."""
    assert process.stdin is not None
    assert process.stdout is not None
    if question is not None:
        process.stdin.write(question + "\n")
        process.stdin.flush()
    ready, _, _ = select.select([process.stdout], [], [], seconds)
    assert ready, f"the program did not answer within {seconds:g} s"
    line = process.stdout.readline()
    assert line, "the program ended before it answered"
    return line.strip()


def mapped_memory_files() -> int:
    """How many regions of this process are memory files of hvdkit, without its own arena, which stays."""
    maps = Path("/proc/self/maps").read_text()
    return maps.count("memfd:hvdkit") - (1 if "memfd:hvdkit-gradients" in maps else 0)


def open_descriptors() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the one that listed the folder
            continue
    return found


def held() -> dict[str, Any]:
    """What this process has, by kind: descriptors, threads, regions of the node's memory."""
    gc.collect()
    # Sockets and pipes have numbers, which change.
    kinds = collections.Counter(re.sub(r"\d+", "N", target) for target in open_descriptors().values())
    threads = len(os.listdir("/proc/self/task"))
    return {"descriptors": kinds, "threads": threads, "mapped": mapped_memory_files()}


def grown(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What there is more of. What was still on its way out before may be less after; a leak grows with each round."""
    descriptors = collections.Counter(after["descriptors"]) - collections.Counter(before["descriptors"])
    counts = {name: after[name] - before[name] for name in ("threads", "mapped") if after[name] > before[name]}
    return {**({"descriptors": dict(descriptors)} if descriptors else {}), **counts}


def in_thread(action: Callable[..., Any], *arguments: Any) -> Future[Any]:
    """Run the action in a thread for which the end of this process does not wait."""
    outcome: Future[Any] = Future()

    def run() -> None:
        try:
            outcome.set_result(action(*arguments))
        except BaseException as error:  # for the test to look at
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return outcome


def connected(connections: Any) -> list[int]:
    """The ranks to which a rank has connections for control messages."""
    return sorted({link.peer for link in list(connections._open) if link.greeted})


def shared_files() -> set[str]:
    """What lies in /dev/shm, except for what is Open MPI's own."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(OF_OPEN_MPI)}  # noqa: S108
