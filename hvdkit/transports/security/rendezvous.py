"""The store at which the ranks of the ``torch`` transport meet, found by each launcher's own way."""

from __future__ import annotations

import hashlib
import secrets
import socket
import time
import urllib.error
import urllib.request
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from hvdkit.environments.base import Rendezvous, World
from hvdkit.environments.network import job_secret
from hvdkit.errors import AuthenticationError, TransportUnavailableError
from hvdkit.transports.mpi import MEETING_TAG, start_mpi
from hvdkit.transports.security.admission import STRANGERS
from hvdkit.transports.security.credentials import Credentials, NotAuthenticError
from hvdkit.transports.security.listening import addresses_for, listen, meeting_addresses
from hvdkit.transports.security.store import RendezvousStore, StoreServer, connect
from hvdkit.transports.waiters import LONGEST_ANSWER_SECONDS, STOPPED, ends_process_after

# By host and port, as long as the process lives: a second hvd.init(), also of some ranks, meets at the same store.
_stores: dict[tuple[str, int], Any] = {}
_servers: dict[tuple[str, int], StoreServer] = {}

ADDRESS_BYTES = 1024  # more than an address ever needs, or an error that says why there is none
SECRET_BYTES = 32
ADDRESS_TAG = MEETING_TAG + 1
ADDRESS_LABEL = "where the store is"


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """Follow no redirection: another server is not the launcher's."""


# Neither a proxy, which is for other networks, nor a redirection comes between a rank and its launcher.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect)

NOT_RANK_0 = (
    "rank {} reached {} port {}, but another program answers there, or rank 0 asks for a secret that this rank lacks.\n"
    "HINT: if another program has the port, choose another MASTER_PORT. Give all ranks the same HVDKIT_SECRET_FILE, or "
    "none."
)


def open_store(world: World, generation: int, timeout_seconds: float) -> tuple[Any, bytes | None]:
    """Return a store that all ranks of ``world`` reach, for this job and generation only, and the job's secret.

    Raises TransportUnavailableError where the launcher gave no meeting place or no store answers there in time.
    """
    prefix = f"hvdkit/{world.job}/{generation}"
    secret = job_secret()
    if dist.is_initialized():
        # The store of the user's own process group is shared, its collectives are left alone.
        from torch.distributed.distributed_c10d import _get_default_store

        return PrefixStore(prefix, _get_default_store()), secret
    rendezvous = world.rendezvous
    if rendezvous is None and world.mpi:
        rendezvous, made = rendezvous_by_mpi(world, generation, timeout_seconds)
        secret = secret or made
    elif rendezvous is not None and rendezvous.kind == "http":
        credentials = None if secret is None else Credentials(secret, world.job, generation)
        rendezvous = _rendezvous_by_http(world, rendezvous, prefix, credentials, timeout_seconds)
    if rendezvous is None:
        raise TransportUnavailableError(
            f"launcher {world.launcher!r} does not say where the ranks of the torch transport can meet.\n"
            "HINT: set MASTER_ADDR and MASTER_PORT on every rank, or start the job with hvdkitrun or torchrun."
        )
    return PrefixStore(prefix, _store_at(world, rendezvous, secret, timeout_seconds)), secret


def _store_at(world: World, rendezvous: Rendezvous, secret: bytes | None, timeout_seconds: float) -> Any:
    key, me = (rendezvous.host, rendezvous.port), world.launched[world.rank]
    others = set(world.launched) - {me}
    server = _servers.get(key)
    if server is not None:
        # Ranks that took no part in earlier jobs need the port that was closed.
        server.expect(others, listen(*server.address) if server.lacks(others) else None)
    if key in _stores and not getattr(_stores[key], "is_broken", False):
        return _stores[key]
    if rendezvous.kind == "agent":
        _stores[key] = _agents_store(world, rendezvous, timeout_seconds)
        return _stores[key]
    session = Credentials(secret or b"", world.job, 0).for_session([b"meeting store"])
    host, listener = rendezvous.host, None
    if rendezvous.kind == "tcp":
        host, address = meeting_addresses(world, host)
        listener = listen(address, rendezvous.port) if world.rank == 0 else None
    elif rendezvous.kind == "fd" and world.rank == 0:
        listener = socket.socket(fileno=rendezvous.listen_fd)
    if listener is not None:
        _servers[key] = server = StoreServer(session, listener.getsockname()[:2])
        server.expect(others, listener)
        _stores[key] = RendezvousStore(server, timeout_seconds)
        return _stores[key]
    try:
        _stores[key] = connect(session, me, (host, rendezvous.port), timeout_seconds)
    except AuthenticationError as error:
        if secret is None:
            raise AuthenticationError(NOT_RANK_0.format(world.rank, host, rendezvous.port)) from None
        raise AuthenticationError(f"{error}\n{STRANGERS}") from None
    except OSError as error:
        raise _unreached(world, rendezvous, timeout_seconds, error) from error
    return _stores[key]


def refused_ranks(world: World) -> list[int]:
    """Return the ranks that have not come, but in whose place a process without the job's secret was refused."""
    refused = {rank for server in _servers.values() for rank in server.refused if server.lacks([rank])}
    return [rank for rank, launched in enumerate(world.launched) if launched in refused]


def _agents_store(world: World, rendezvous: Rendezvous, timeout_seconds: float) -> Any:
    timeout = timedelta(seconds=timeout_seconds)
    address = f"{rendezvous.host}:{rendezvous.port}"
    late = f"rank {world.rank} got no reply from the launcher's store at {address}.\n{STOPPED}"
    try:
        with ends_process_after(timeout_seconds + LONGEST_ANSWER_SECONDS, late):
            return TCPStore(rendezvous.host, rendezvous.port, is_master=False, timeout=timeout, wait_for_workers=False)
    except RuntimeError as error:
        raise _unreached(world, rendezvous, timeout_seconds, error) from error


def _unreached(
    world: World, rendezvous: Rendezvous, timeout_seconds: float, error: Exception
) -> TransportUnavailableError:
    return TransportUnavailableError(
        f"rank {world.rank} could not reach the meeting place {rendezvous.host}:{rendezvous.port} "
        f"within {timeout_seconds:g} s: {str(error).splitlines()[0]}\n"
        "HINT: check that rank 0 runs, that the address is right on every host and the port is free and not "
        "filtered; raise HVDKIT_START_TIMEOUT_SECONDS on a cluster that starts slowly."
    )


def rendezvous_by_mpi(world: World, meeting: object, timeout_seconds: float) -> tuple[Rendezvous, bytes]:
    """Meet under mpirun without MPI's transport: rank 0 sends an address and a secret to the others by MPI.

    ``meeting``: what tells it from earlier and later meetings, the same on all ranks.
    """
    MPI = start_mpi(world, timeout_seconds)  # noqa: N806 (mpi4py's name)
    served, message = None, bytearray(ADDRESS_BYTES)
    # Tells this start from messages that an earlier start of these ranks, or of others, left behind.
    label = hashlib.sha256(repr((list(world.launched), meeting)).encode()).hexdigest().encode() + b" "
    if world.rank == 0:
        try:
            served = _listening_rendezvous(addresses_for(world)[0])
            words = f"{secrets.token_hex(SECRET_BYTES)} {served.host} {served.port}"
        except TransportUnavailableError as error:
            words = f"! {error}"  # or the others would wait for ever
        message[:] = (label + words.encode())[:ADDRESS_BYTES].ljust(ADDRESS_BYTES)
    late = f"rank {world.rank} waited {timeout_seconds:g} s for MPI to carry the address of rank 0.\n{STOPPED}"
    with ends_process_after(timeout_seconds, late):
        if world.rank == 0:
            sent = [MPI.COMM_WORLD.Isend([message, MPI.BYTE], rank, ADDRESS_TAG) for rank in world.launched[1:]]
            MPI.Request.Waitall(sent)
        while not message.startswith(label):
            MPI.COMM_WORLD.Recv([message, MPI.BYTE], world.launched[0], ADDRESS_TAG)
    received = bytes(message).removeprefix(label)
    if received.startswith(b"!"):
        raise TransportUnavailableError(received.decode(errors="replace").strip("! "))
    secret, _, address = received.partition(b" ")
    return served or _parsed_rendezvous(address), secret


def _parsed_rendezvous(words: bytes) -> Rendezvous:
    """Return the address of rank 0's store from rank 0's words."""
    try:
        host, port = words.decode().split()
        return Rendezvous("tcp", host, int(port))
    except ValueError:
        raise TransportUnavailableError(
            f"expected the address of rank 0's store, got {words[:80]!r}\n"
            "HINT: another program wrote this; give the ranks an HVDKIT_SECRET_FILE, see SECURITY.md."
        ) from None


def _listening_rendezvous(address: str) -> Rendezvous:
    """Return the address of a new listener, with its descriptor. The store closes it."""
    listener = listen(address)
    return Rendezvous("fd", address, listener.getsockname()[1], listen_fd=listener.detach())


def _rendezvous_by_http(
    world: World, rendezvous: Rendezvous, prefix: str, credentials: Credentials | None, timeout_seconds: float
) -> Rendezvous:
    """Meet in horovodrun's Gloo mode: rank 0 publishes its store's address at horovodrun's key-value server."""
    url = f"http://{rendezvous.host}:{rendezvous.port}/{prefix.replace('/', '.')}/store"
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            if world.rank == 0:
                served = _listening_rendezvous(addresses_for(world)[0])
                words = f"{served.host} {served.port}".encode()
                data = words if credentials is None else credentials.seal(ADDRESS_LABEL, words)
                _OPENER.open(urllib.request.Request(url, data=data, method="PUT"), timeout=timeout_seconds).close()
                return served
            with _OPENER.open(url, timeout=timeout_seconds) as answer:
                words = answer.read(ADDRESS_BYTES)
            return _parsed_rendezvous(words if credentials is None else credentials.unseal(ADDRESS_LABEL, words))
        except NotAuthenticError:
            raise AuthenticationError(
                f"the text at {url} was not written by a rank that knows the secret of rank {world.rank}.\n"
                "HINT: give all ranks the same HVDKIT_SECRET_FILE, or none; see SECURITY.md."
            ) from None
        except OSError as error:
            is_missing = isinstance(error, urllib.error.HTTPError) and error.code == 404
            if world.rank == 0 or not is_missing:  # rank 0 has not published yet
                raise TransportUnavailableError(
                    f"rank {world.rank} cannot use horovodrun's key-value server at {url}: {error}\n"
                    "HINT: see whether horovodrun still runs, and whether this host reaches it; name its network with "
                    "--network-interfaces."
                ) from error
        if time.monotonic() > deadline:
            raise TransportUnavailableError(
                f"rank 0 did not publish its store at {rendezvous.host}:{rendezvous.port} in {timeout_seconds:g} s.\n"
                "HINT: see what rank 0 printed; raise HVDKIT_START_TIMEOUT_SECONDS on a cluster that starts slowly."
            )
        time.sleep(0.05)
