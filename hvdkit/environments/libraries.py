"""Environment variables that other libraries read: NCCL, TensorFlow, Open MPI and Horovod's engine."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


def use_the_wire_both_ways() -> None:
    """Have Open MPI, before its start, use two TCP connections for each pair of ranks; a value set by the user stays.

    On a single one a message's announcement waits behind the bytes of another message, so two ranks that send to each
    other take turns, at half of the wire's speed.
    """
    os.environ.setdefault("OMPI_MCA_btl_tcp_links", "2")


def nccl_host() -> str:
    """Return the host name that NCCL_HOSTID gives this process for NCCL, or ""."""
    return os.environ.get("NCCL_HOSTID", "")


@contextmanager
def for_a_while(values: Mapping[str, str | None]) -> Iterator[None]:
    """Set these environment variables, None to unset, for a library that has no arguments for them; then restore."""
    before = {name: os.environ.get(name) for name in values}
    _set(values)
    try:
        yield
    finally:
        _set(before)


def _set(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def horovod_variables(
    controller: str, rank: int, size: int, meeting: tuple[str, int] | None, timeout_seconds: float, interface: str = ""
) -> dict[str, str | None]:
    """Return the variables with which Horovod's engine starts; None: unset, also where the job's environment sets it.

    ``controller``: the way its ranks talk, "mpi" or "gloo". Gloo needs ``meeting``, host and port of a key-value
    server, and, where the user sets none, ``timeout_seconds`` and the network interface on which it listens.
    """
    common: dict[str, str | None] = {
        "HOROVOD_CONTROLLER": controller,
        "HOROVOD_FUSION_THRESHOLD": "0",  # it depends on timing, and with it the order of sums; buckets are fused
        # Operations have unique names and never hit the cache; but without it ranks exchange whole lists in every
        # cycle, also when idle, which takes 25% of a core instead of 5%.
        "HOROVOD_CACHE_CAPACITY": "1024",
        "HOROVOD_LOG_LEVEL": os.environ.get("HOROVOD_LOG_LEVEL", "error"),  # warnings are about the full cache
        "HOROVOD_STALL_CHECK_DISABLE": "1",  # hvdkit's engine notices late ranks
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": None,
        "HOROVOD_TIMELINE": None,  # hvdkit writes that file
        "HOROVOD_AUTOTUNE": None,  # it would choose another fusion
        "HOROVOD_ELASTIC": None,  # it would look up ranks by other keys
        "HOROVOD_DYNAMIC_PROCESS_SETS": "0",  # they take another exchange in every cycle, and hvdkit has its own
    }
    if controller == "mpi":
        return {**common, "HOROVOD_CPU_OPERATIONS": os.environ.get("HOROVOD_CPU_OPERATIONS", "mpi")}
    assert meeting is not None, "Gloo needs a key-value server"
    gloo_timeout = os.environ.get("HOROVOD_GLOO_TIMEOUT_SECONDS", str(max(1, math.ceil(timeout_seconds))))
    named_interface = os.environ.get("HOROVOD_GLOO_IFACE") or os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    return {
        **common,
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": meeting[0],
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(meeting[1]),
        "HOROVOD_GLOO_TIMEOUT_SECONDS": gloo_timeout,
        "HOROVOD_GLOO_IFACE": named_interface or interface or None,
        # Only Horovod's GPU operations use the node of a rank. A single node of all ranks contradicts nothing.
        "HOROVOD_HOSTNAME": "hvdkit",
        **dict.fromkeys(("HOROVOD_RANK", "HOROVOD_LOCAL_RANK"), str(rank)),
        **dict.fromkeys(("HOROVOD_SIZE", "HOROVOD_LOCAL_SIZE"), str(size)),
        "HOROVOD_CROSS_RANK": "0",
        "HOROVOD_CROSS_SIZE": "1",
    }
