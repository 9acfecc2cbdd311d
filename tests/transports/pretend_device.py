"""A device without a GPU: tensors on the CPU travel as tensors on CUDA do, Gloo in NCCL's place, a thread for a stream.

What is real: everything from the adapter to the process group, in its order of launching. What is not: streams, events
and NCCL itself. ``python -m tests.transports.pretend_device MODULE FOLDER`` is what a rank runs, as in tests.ranks.
"""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hvdkit.engine.steps import registration
from hvdkit.transports.gpu.device import DeviceCollectives
from hvdkit.transports.gpu.nccl import exchange
from hvdkit.transports.gpu.streams import HostCopies
from hvdkit.transports.torch_distributed import TorchTransport
from tests import ranks
from tests.transports.launched import COUNT

FAIL_AT: list[int] = []  # numbers of launches that fail
# Not empty: these ranks share their device, so that gradients are copied to the host and back.
SHARED: list[bool] = [True] if os.environ.get("TESTS_SHARED_DEVICE") else []
HOSTS: list[int] = []  # ranks whose gradients are in host memory, while those of others are on a device
LONGEST_WAIT_SECONDS = 120  # of a collective for the other ranks, whose machine may be busy
COPY_SECONDS = 0.002  # later than who does not wait for them would look


class ThreadEnd:
    def __init__(self, future: Future) -> None:
        self._future = future

    def query(self) -> bool:
        if not self._future.done():
            return False
        if error := self._future.exception():
            raise RuntimeError(str(error))  # anew: Python would lengthen the traceback of the same error at each query
        return True

    def synchronize(self) -> None:
        self._future.result()


class ThreadStream:
    """Runs what is launched one after the other, while the launching thread goes on."""

    seconds = 0.0  # before each

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "pretend-stream")

    def mark(self, device: torch.device) -> Any:
        return "a mark"

    def launch(self, device, after, tensors, work) -> ThreadEnd:
        assert all(mark == "a mark" for mark in after)
        self._count()

        def run() -> None:
            time.sleep(self.seconds)
            with torch.no_grad():
                work(lambda one: one.wait())

        return ThreadEnd(self._thread.submit(run))

    def _count(self) -> None:
        COUNT[0] += 1
        if COUNT[0] in FAIL_AT:
            raise RuntimeError("pretended failure at launch")


class CopyingStream(ThreadStream):
    """A stream on which nothing but copies are launched, and late."""

    seconds = COPY_SECONDS

    def _count(self) -> None:
        """A copy is no collective."""


class Unlocked:
    """Memory of the host that copies may reach."""

    def close(self) -> None:
        """Nothing is to be undone."""


def open_pretend(store, rank, size, device, timeout_seconds):
    exchange(store, rank, size, device, timeout_seconds)
    if SHARED:
        return None
    group = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=LONGEST_WAIT_SECONDS))
    return DeviceCollectives(group, torch.device(device), ThreadStream())


def open_pretended_copies(device):
    if not SHARED or this_rank() in HOSTS:
        return None
    return lambda block: HostCopies(torch.device(device), CopyingStream(), Unlocked())


def this_rank() -> int:
    return int(os.environ["RANK"])


def pretend() -> None:
    """Let the CPU be a device from the next hvd.init() on."""
    real_init = TorchTransport.__init__

    def init(self, world, generation, start_timeout_seconds) -> None:
        real_init(self, world, generation, start_timeout_seconds)
        self.device_types = frozenset({"cpu"})

    TorchTransport.__init__ = init
    TorchTransport._open_device = staticmethod(open_pretend)
    registration.copies_opener = open_pretended_copies


if __name__ == "__main__":
    # Cases import this module by its name, which is not the name that it runs under.
    from tests.transports import pretend_device

    pretend_device.pretend()
    ranks.main(sys.argv[1], sys.argv[2])
