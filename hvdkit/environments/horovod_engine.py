"""The environment variables by which Horovod's own engine is told its place in the job and its options."""

from __future__ import annotations

import math
import os


def variables(
    controller: str,
    rank: int,
    size: int,
    meeting: tuple[str, int] | None,
    timeout_seconds: float,
    interface: str = "",
) -> dict[str, str | None]:
    """What Horovod's engine shall find while it starts; None: not set, whatever the job's environment says.

    ``controller``: how its ranks talk, ``"mpi"`` or ``"gloo"``; ``meeting``: for Gloo, host and port of a key-value
    server; ``interface``: where Gloo listens, if the user names none.
    """
    common: dict[str, str | None] = {
        "HOROVOD_CONTROLLER": controller,
        # A bucket is fused already. What Horovod fused besides would depend on what happens to be ready, and with it
        # the order in which an element is summed.
        "HOROVOD_FUSION_THRESHOLD": "0",
        # Every operation has a name of its own, so there is nothing to find again; but without the cache its ranks
        # exchange whole lists in every cycle, with nothing to do too, which takes a quarter of a core and not 5%.
        "HOROVOD_CACHE_CAPACITY": "1024",
        # Its warning is the cache's, which new names fill.
        "HOROVOD_LOG_LEVEL": os.environ.get("HOROVOD_LOG_LEVEL", "error"),
        # An operation is given to Horovod when all ranks have asked for it; who is late, our own engine knows.
        "HOROVOD_STALL_CHECK_DISABLE": "1",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": None,
        "HOROVOD_TIMELINE": None,  # the file is ours
        "HOROVOD_AUTOTUNE": None,  # it would choose another fusion
        "HOROVOD_ELASTIC": None,  # it would ask for places by other keys
        "HOROVOD_DYNAMIC_PROCESS_SETS": "0",  # one more exchange in every cycle, for sets that it does not carry
    }
    if controller == "mpi":
        return {**common, "HOROVOD_CPU_OPERATIONS": os.environ.get("HOROVOD_CPU_OPERATIONS", "mpi")}
    assert meeting is not None, "Gloo's ranks meet somewhere"
    return {
        **common,
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": meeting[0],
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(meeting[1]),
        "HOROVOD_GLOO_TIMEOUT_SECONDS": os.environ.get(
            "HOROVOD_GLOO_TIMEOUT_SECONDS", str(max(1, math.ceil(timeout_seconds)))
        ),
        "HOROVOD_GLOO_IFACE": os.environ.get("HOROVOD_GLOO_IFACE")
        or os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
        or interface
        or None,
        # Only Horovod's operations on GPUs ask which ranks are on one node. One node of all ranks contradicts nothing.
        "HOROVOD_HOSTNAME": "hvdkit",
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": str(size),
        "HOROVOD_LOCAL_RANK": str(rank),
        "HOROVOD_LOCAL_SIZE": str(size),
        "HOROVOD_CROSS_RANK": "0",
        "HOROVOD_CROSS_SIZE": "1",
    }
