"""Where the ranks of the ``torch`` transport meet: one torch.distributed store, found by each launcher's own way."""

from __future__ import annotations

import socket
import time
import urllib.error
import urllib.request
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from hvdkit.environments.base import Rendezvous, World
from hvdkit.errors import TransportUnavailableError

# A TCPStore that this process serves lives as long as the process: a second hvd.init() meets at the same place.
_served: dict[tuple[str, int], Any] = {}


def open_store(world: World, generation: int, timeout_seconds: float) -> Any:
    """A store that all ranks of ``world`` reach, with keys of this job and generation only.

    Raises TransportUnavailableError where the launcher gave no meeting place or nobody answers there in time.
    """
    prefix = f"hvdkit/{world.job}/{generation}"
    if dist.is_initialized():
        # The user's own process group knows where to meet; its store is shared, its collectives are left alone.
        from torch.distributed.distributed_c10d import _get_default_store

        return PrefixStore(prefix, _get_default_store())
    timeout = timedelta(seconds=timeout_seconds)
    rendezvous = world.rendezvous
    if rendezvous is None and world.mpi:
        rendezvous = _meet_through_mpi(world)
    elif rendezvous is not None and rendezvous.kind == "http":
        rendezvous = _meet_through_http(world, rendezvous, prefix, timeout_seconds)
    if rendezvous is None:
        raise TransportUnavailableError(
            f"launcher {world.launcher!r} does not say where the ranks of the torch transport can meet.\n"
            "HINT: set MASTER_ADDR and MASTER_PORT on every rank, or start the job with hvdkitrun or torchrun."
        )
    return PrefixStore(prefix, _tcp_store(world, rendezvous, timeout))


def _tcp_store(world: World, rendezvous: Rendezvous, timeout: timedelta) -> Any:
    place = (rendezvous.host, rendezvous.port)
    if place in _served:
        return _served[place]
    serves = world.rank == 0 and rendezvous.kind in ("tcp", "fd")
    try:
        store = TCPStore(
            rendezvous.host,
            rendezvous.port,
            is_master=serves,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=rendezvous.listen_fd is None,
            master_listen_fd=rendezvous.listen_fd if serves else None,
        )
    except (RuntimeError, dist.DistError) as error:
        role = "serve" if serves else "reach"
        raise TransportUnavailableError(
            f"rank {world.rank} could not {role} the meeting place {rendezvous.host}:{rendezvous.port} "
            f"within {timeout.total_seconds():g} s: {str(error).splitlines()[0]}\n"
            "HINT: check that rank 0 runs, that the address is right on every host and the port is free and not "
            "filtered; raise HVDKIT_START_TIMEOUT_SECONDS on a cluster that starts slowly."
        ) from error
    _served[place] = store
    return store


def _meet_through_mpi(world: World) -> Rendezvous:
    """Under mpirun with HVDKIT_TRANSPORT=torch: rank 0 picks an address, MPI tells the others."""
    from mpi4py import MPI

    place = None
    if world.rank == 0:
        listener = socket.create_server(("", 0))
        place = (socket.gethostname() if world.local_size != world.size else "127.0.0.1", listener.getsockname()[1])
        _listeners.append(listener)
        rendezvous = Rendezvous("fd", place[0], place[1], listen_fd=listener.fileno())
    place = MPI.COMM_WORLD.bcast(place, root=0)
    return rendezvous if world.rank == 0 else Rendezvous("tcp", place[0], place[1])


_listeners: list[socket.socket] = []  # their descriptors serve the store for the life of the process


def _meet_through_http(world: World, rendezvous: Rendezvous, prefix: str, timeout_seconds: float) -> Rendezvous:
    """Under horovodrun's Gloo mode: rank 0 publishes where its store is at horovodrun's key-value server."""
    url = f"http://{rendezvous.host}:{rendezvous.port}/{prefix.replace('/', '.')}/store"
    if world.rank == 0:
        listener = socket.create_server(("", 0))
        _listeners.append(listener)
        port = listener.getsockname()[1]
        host = _address_towards(rendezvous.host, rendezvous.port)
        request = urllib.request.Request(url, data=f"{host} {port}".encode(), method="PUT")
        urllib.request.urlopen(request, timeout=timeout_seconds).close()  # noqa: S310 (http only)
        return Rendezvous("fd", host, port, listen_fd=listener.fileno())
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            with urllib.request.urlopen(url, timeout=timeout_seconds) as answer:
                host, port_text = answer.read(1024).decode().split()
            return Rendezvous("tcp", host, int(port_text))
        except urllib.error.HTTPError as error:
            if error.code != 404:  # 404: rank 0 has not published yet
                raise
        if time.monotonic() > deadline:
            raise TransportUnavailableError(
                f"rank 0 did not publish its store at {rendezvous.host}:{rendezvous.port} in {timeout_seconds:g} s.\n"
                "HINT: see what rank 0 printed; raise HVDKIT_START_TIMEOUT_SECONDS on a cluster that starts slowly."
            )
        time.sleep(0.05)


def _address_towards(host: str, port: int) -> str:
    """This host's address on the route to ``host``."""
    with socket.create_connection((host, port), timeout=10) as probe:
        return str(probe.getsockname()[0])
