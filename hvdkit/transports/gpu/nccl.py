"""NCCL communicators of hvdkit's own, whose failure never ends the process."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hvdkit.environments.libraries import for_a_while, nccl_host
from hvdkit.errors import AuthenticationError, PeerLostError
from hvdkit.transports.gpu.device import DeviceCollectives
from hvdkit.transports.gpu.streams import CudaStream
from hvdkit.transports.security.admission import NEVER, absent_after
from hvdkit.transports.waiters import TimedCall

T = TypeVar("T")

logger = logging.getLogger("hvdkit")

# NCCL's watchdog may end a communicator, never the process. Torch has no argument for it.
WATCHDOG = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # monitoring would end a process whose watchdog waits for long
}

_warned: list[list[list[int]]] = []  # lists of ranks that share GPUs, which were logged


def nccl_available() -> bool:
    """True if this process can use NCCL."""
    return dist.is_available() and dist.is_nccl_available() and torch.cuda.is_available()


def nccl_version() -> int:
    """Return the version of PyTorch's NCCL as one number (22703 for 2.27.3), or 0 without NCCL or CUDA."""
    if not nccl_available():
        return 0
    version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    major, minor, patch = (*version, 0, 0)[:3]
    return int(major * 10000 + minor * 100 + patch)


def gpu_of(device: torch.device) -> str:
    """Return a name of this GPU, unlike those of others. Hosts differ by NCCL_HOSTID, as for NCCL.

    With a different NCCL_HOSTID on each rank, ranks can share a GPU by NCCL, which then sends over a network.
    """
    properties = torch.cuda.get_device_properties(device)
    uuid = getattr(properties, "uuid", f"{os.uname().nodename}/{device.index}")
    return f"{nccl_host()}/{uuid}"


def shared_gpus(gpus: Sequence[str]) -> list[list[int]]:
    """Return lists of ranks that share a GPU, which NCCL refuses."""
    by_gpu: dict[str, list[int]] = {}
    for rank, gpu in enumerate(gpus):
        by_gpu.setdefault(gpu, []).append(rank)
    return [ranks for ranks in by_gpu.values() if len(ranks) > 1]


def open_nccl(store: Any, rank: int, size: int, name: str, timeout_seconds: float) -> DeviceCollectives | None:
    """Connect the ranks that use ``store``, each with its GPU ``name``. Collective, and blocks.

    Returns None on every rank if ranks share a GPU. Raises PeerLostError if a rank does not connect in time.
    """
    device = torch.device(name)
    if device.index is None:
        device = torch.device(device.type, torch.cuda.current_device())
    if shared := shared_gpus(exchange(store, rank, size, gpu_of(device), timeout_seconds)):
        if rank == 0 and shared not in _warned:
            _warned.append(shared)
            logger.warning("ranks %s share a GPU, so tensors on CUDA travel through host memory, not by NCCL", shared)
        return None

    def connect() -> DeviceCollectives:
        torch.cuda.set_device(device)
        with for_a_while(WATCHDOG):
            options: Any = dist.ProcessGroupNCCL.Options()
            options._timeout = NEVER  # deadlines are the engine's, which notices lost ranks over the transport
            nccl: Any = dist.ProcessGroupNCCL  # its collectives are missing from the stubs
            # The watchdog asks the store without Python.
            group = nccl(getattr(store, "plain", store), rank, size, options)
        # The first collective makes the communicator, and blocks until all ranks are there.
        group.allreduce([torch.zeros(1, device=device)]).wait()
        torch.cuda.current_stream(device).synchronize()
        return DeviceCollectives(group, device, CudaStream())

    return within(timeout_seconds, connect, "NCCL to connect")


def exchange(store: Any, rank: int, size: int, text: str, timeout_seconds: float) -> list[str]:
    """Exchange texts over a store, and return the texts of all ranks."""
    keys = [f"word/{peer}" for peer in range(size)]
    try:
        store.set(keys[rank], text)
        if absent := absent_after(store, keys, timeout_seconds):
            raise PeerLostError(
                f"waited {timeout_seconds:g} s (HVDKIT_START_TIMEOUT_SECONDS) for the GPUs of ranks {absent} of "
                f"the {size} that take part.\nHINT: see what these ranks printed."
            )
        return [store.get(key).decode() for key in keys]
    except AuthenticationError as error:
        raise PeerLostError(str(error)) from error
    except dist.DistError as error:
        raise PeerLostError(f"the store where the ranks met is gone: {str(error).splitlines()[0]}") from error


def within(timeout_seconds: float, action: Callable[[], T], what: str) -> T:
    """Return the result of ``action`` on a thread of its own. Raises PeerLostError if it fails or is late."""
    call = TimedCall(action, "hvdkit-connect")
    if not call.within(timeout_seconds):
        raise PeerLostError(
            f"waited {timeout_seconds:g} s for {what} (HVDKIT_START_TIMEOUT_SECONDS).\n"
            "HINT: see what the other ranks printed; set NCCL_DEBUG=INFO to see what NCCL waits for."
        )
    try:
        return call.result()
    except BaseException as error:
        raise PeerLostError(f"{what} failed: {str(error).splitlines()[0]}") from error
