"""Where the ranks of the ``torch`` transport meet: one torch.distributed store, found by each launcher's own way."""

from __future__ import annotations

import hashlib
import secrets
import time
import urllib.error
import urllib.request
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from hvdkit.environments.base import Rendezvous, World
from hvdkit.environments.secret import job_secret
from hvdkit.errors import AuthenticationError, TransportUnavailableError
from hvdkit.transports.last_resort import LONGEST_ANSWER_SECONDS, STOPPED, ends_process_after
from hvdkit.transports.mpi import MEETING_TAG, start_mpi
from hvdkit.transports.security.credentials import Credentials, NotAuthenticError
from hvdkit.transports.security.listening import addresses_for, listen, meeting_addresses

# A TCPStore that this process serves lives as long as the process: a second hvd.init() meets at the same place. None:
# another process serves it, also where the ranks of a smaller job meet there.
_served: dict[tuple[str, int], Any] = {}

# More than an address and a port ever need, or an error that says why there are none.
ADDRESS_BYTES = 1024
SECRET_BYTES = 32
ADDRESS_TAG = MEETING_TAG + 1
ADDRESS_LABEL = "where the store is"


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """None: another place is not where the launcher said."""


# Neither a proxy, which is for other networks, nor a redirection comes between a rank and its launcher.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect)


def open_store(world: World, generation: int, timeout_seconds: float) -> tuple[Any, bytes | None]:
    """A store that all ranks of ``world`` reach, with keys of this job and generation only; and the job's secret.

    Raises TransportUnavailableError where the launcher gave no meeting place or nobody answers there in time.
    """
    prefix = f"hvdkit/{world.job}/{generation}"
    secret = job_secret()
    if dist.is_initialized():
        # The user's own process group knows where to meet; its store is shared, its collectives are left alone.
        from torch.distributed.distributed_c10d import _get_default_store

        return PrefixStore(prefix, _get_default_store()), secret
    timeout = timedelta(seconds=timeout_seconds)
    rendezvous = world.rendezvous
    if rendezvous is None and world.mpi:
        rendezvous, made = _meet_through_mpi(world, generation, timeout_seconds)
        secret = secret or made
    elif rendezvous is not None and rendezvous.kind == "http":
        credentials = None if secret is None else Credentials(secret, world.job, generation)
        rendezvous = _meet_through_http(world, rendezvous, prefix, credentials, timeout_seconds)
    if rendezvous is None:
        raise TransportUnavailableError(
            f"launcher {world.launcher!r} does not say where the ranks of the torch transport can meet.\n"
            "HINT: set MASTER_ADDR and MASTER_PORT on every rank, or start the job with hvdkitrun or torchrun."
        )
    return PrefixStore(prefix, _tcp_store(world, rendezvous, timeout)), secret


def _tcp_store(world: World, rendezvous: Rendezvous, timeout: timedelta) -> Any:
    key = (rendezvous.host, rendezvous.port)
    if _served.get(key) is not None:
        return _served[key]
    serves = world.rank == 0 and rendezvous.kind in ("tcp", "fd") and key not in _served
    host, descriptor = rendezvous.host, rendezvous.listen_fd
    if rendezvous.kind == "tcp":
        host, address = meeting_addresses(world, host)
        if serves:
            # Left to itself, the store would listen on all interfaces. It closes what it is given.
            descriptor = listen(address, rendezvous.port).detach()
    keeper = "the launcher" if rendezvous.kind == "agent" else "rank 0"
    late = f"rank {world.rank} was not answered by the store at {host}:{rendezvous.port}, of {keeper}.\n{STOPPED}"
    try:
        with ends_process_after(timeout.total_seconds() + LONGEST_ANSWER_SECONDS, late):
            store = TCPStore(
                host,
                rendezvous.port,
                is_master=serves,
                timeout=timeout,
                wait_for_workers=False,
                # What else this process opens here, as torch.distributed does with MASTER_PORT, shares the server.
                multi_tenant=True,
                master_listen_fd=descriptor if serves else None,
            )
    except (RuntimeError, dist.DistError) as error:
        role = "serve" if serves else "reach"
        raise TransportUnavailableError(
            f"rank {world.rank} could not {role} the meeting place {host}:{rendezvous.port} "
            f"within {timeout.total_seconds():g} s: {str(error).splitlines()[0]}\n"
            "HINT: check that rank 0 runs, that the address is right on every host and the port is free and not "
            "filtered; raise HVDKIT_START_TIMEOUT_SECONDS on a cluster that starts slowly."
        ) from error
    _served[key] = store if serves else None
    return store


def _meet_through_mpi(world: World, generation: int, timeout_seconds: float) -> tuple[Rendezvous, bytes]:
    """Under mpirun with HVDKIT_TRANSPORT=torch: rank 0 picks an address and a secret, MPI tells the others."""
    MPI = start_mpi(world, timeout_seconds)  # noqa: N806 (mpi4py's name)
    served, message = None, bytearray(ADDRESS_BYTES)
    # What an earlier start of these ranks, or of others, left behind is not this one's.
    meeting = hashlib.sha256(repr((list(world.launched), generation)).encode()).hexdigest().encode() + b" "
    if world.rank == 0:
        try:
            served = _serve(addresses_for(world)[0])
            words = f"{secrets.token_hex(SECRET_BYTES)} {served.host} {served.port}"
        except TransportUnavailableError as error:
            words = f"! {error}"  # or the others would wait for ever
        message[:] = (meeting + words.encode())[:ADDRESS_BYTES].ljust(ADDRESS_BYTES)
    late = (
        f"rank {world.rank} waited {timeout_seconds:g} s for MPI to bring from rank 0 where the ranks meet.\n{STOPPED}"
    )
    with ends_process_after(timeout_seconds, late):
        if world.rank == 0:
            sent = [MPI.COMM_WORLD.Isend([message, MPI.BYTE], rank, ADDRESS_TAG) for rank in world.launched[1:]]
            MPI.Request.Waitall(sent)
        while not message.startswith(meeting):
            MPI.COMM_WORLD.Recv([message, MPI.BYTE], world.launched[0], ADDRESS_TAG)
    said = bytes(message).removeprefix(meeting)
    if said.startswith(b"!"):
        raise TransportUnavailableError(said.decode(errors="replace").strip("! "))
    secret, _, address = said.partition(b" ")
    return served or _rendezvous_at(address), secret


def _unanswered(world: World, url: str, error: OSError) -> TransportUnavailableError:
    return TransportUnavailableError(
        f"rank {world.rank} cannot use horovodrun's key-value server at {url}: {error}\n"
        "HINT: see whether horovodrun still runs, and whether this host reaches it; name its network with "
        "--network-interfaces."
    )


def _rendezvous_at(words: bytes) -> Rendezvous:
    """Where rank 0 says that its store is."""
    try:
        host, port = words.decode().split()
        return Rendezvous("tcp", host, int(port))
    except ValueError:
        raise TransportUnavailableError(
            f"where rank 0 should say where its store is, there is {words[:80]!r}\n"
            "HINT: another program wrote there; give the ranks an HVDKIT_SECRET_FILE, see SECURITY.md."
        ) from None


def _serve(address: str) -> Rendezvous:
    listener = listen(address)
    port = listener.getsockname()[1]
    return Rendezvous("fd", address, port, listen_fd=listener.detach())  # the store closes it


def _meet_through_http(
    world: World, rendezvous: Rendezvous, prefix: str, credentials: Credentials | None, timeout_seconds: float
) -> Rendezvous:
    """Under horovodrun's Gloo mode: rank 0 publishes where its store is at horovodrun's key-value server."""
    url = f"http://{rendezvous.host}:{rendezvous.port}/{prefix.replace('/', '.')}/store"
    if world.rank == 0:
        served = _serve(addresses_for(world)[0])
        words = f"{served.host} {served.port}".encode()
        data = words if credentials is None else credentials.seal(ADDRESS_LABEL, words)
        try:
            _OPENER.open(urllib.request.Request(url, data=data, method="PUT"), timeout=timeout_seconds).close()
        except OSError as error:
            raise _unanswered(world, url, error) from error
        return served
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            with _OPENER.open(url, timeout=timeout_seconds) as answer:
                words = answer.read(ADDRESS_BYTES)
            return _rendezvous_at(words if credentials is None else credentials.unseal(ADDRESS_LABEL, words))
        except NotAuthenticError:
            raise AuthenticationError(
                f"what is at {url} was not written by a rank that knows the secret of rank {world.rank}.\n"
                "HINT: give all ranks the same HVDKIT_SECRET_FILE, or none; see SECURITY.md."
            ) from None
        except OSError as error:
            if not (isinstance(error, urllib.error.HTTPError) and error.code == 404):  # rank 0 has not published yet
                raise _unanswered(world, url, error) from error
        if time.monotonic() > deadline:
            raise TransportUnavailableError(
                f"rank 0 did not publish its store at {rendezvous.host}:{rendezvous.port} in {timeout_seconds:g} s.\n"
                "HINT: see what rank 0 printed; raise HVDKIT_START_TIMEOUT_SECONDS on a cluster that starts slowly."
            )
        time.sleep(0.05)
