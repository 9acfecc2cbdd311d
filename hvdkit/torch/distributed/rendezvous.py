"""The meeting of ranks that mpirun or srun started, and that torch.distributed does not know by its own variables."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.constants import default_pg_timeout

from hvdkit import config
from hvdkit.engine.session.runtime import end_mpi_with_this_rank
from hvdkit.environments.base import Rendezvous, World
from hvdkit.errors import TransportUnavailableError
from hvdkit.transports import is_installed
from hvdkit.transports.security.listening import listen, meeting_addresses
from hvdkit.transports.security.rendezvous import rendezvous_by_mpi

# By the place where the launcher's variables say that ranks meet, None for MPI: a second process group uses it again.
_stores: dict[Rendezvous | None, Any] = {}
_numbers = itertools.count()  # of process groups, the same on all ranks


def rendezvous(world: World, timeout: timedelta = default_pg_timeout, **_: Any) -> Iterator[tuple[Any, int, int]]:
    """Yield a store that all ranks of ``world`` reach, the rank and the number of ranks, as handlers of torch do.

    Raises TransportUnavailableError where ranks can meet only by MPI, and mpi4py is not installed.
    """
    if world.rendezvous not in _stores:
        try:
            _stores[world.rendezvous] = _open_store(world, timeout)
        except TransportUnavailableError as error:
            raise error.with_traceback(None) from None  # the cause is the user's set-up, not hvdkit's inside
    yield PrefixStore(f"hvdkit/{world.job}/{next(_numbers)}", _stores[world.rendezvous]), world.rank, world.size
    raise RuntimeError("ranks of mpirun and srun cannot meet again")  # torch asks again after its group has failed


def _open_store(world: World, timeout: timedelta) -> TCPStore:
    place = world.rendezvous or _meet_by_mpi(world, timeout.total_seconds())
    if place.listen_fd is None:
        host, address = meeting_addresses(world, place.host)
        place = replace(place, host=host)
        if world.rank == 0:
            place = replace(place, listen_fd=listen(address, place.port).detach())
    return TCPStore(place.host, place.port, world.size, world.rank == 0, timeout, master_listen_fd=place.listen_fd)


def _meet_by_mpi(world: World, seconds: float) -> Rendezvous:
    if not is_installed("mpi4py"):
        raise TransportUnavailableError(
            f"rank {world.rank}: {world.launcher} started {world.size} ranks, which can meet by MPI, but mpi4py is not "
            "installed.\n"
            "HINT: pip install mpi4py, or set MASTER_ADDR and MASTER_PORT on every rank: rank 0's host, a free port."
        )
    end_mpi_with_this_rank()
    seconds = min(seconds, config.from_environment().start_timeout_seconds)
    return rendezvous_by_mpi(world, "torch.distributed", seconds)[0]
