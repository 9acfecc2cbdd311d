"""Who may take part in a job of the ``torch`` transport: who knows its secret, if it has one.

Each rank tells a nonce at the store, and where it listens, sealed with the secret. From all nonces follows a secret of
this session, which seals the addresses at which Gloo connects, and which each rank proves over every connection before
anything that comes over it is looked at. Without a secret of the job, that of the session is as open as the store: it
keeps out who is here by mistake. How ranks are told from dead ones is in ``attempt``.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from hvdkit.environments.base import World
from hvdkit.errors import AuthenticationError, TransportUnavailableError
from hvdkit.transports.last_resort import LONGEST_ANSWER_SECONDS, STOPPED, ends_process_after
from hvdkit.transports.security.attempt import Attempt, here
from hvdkit.transports.security.credentials import NONCE_BYTES, TAG_BYTES, Credentials, NotAuthenticError, new_nonce
from hvdkit.transports.security.listening import listen

NEVER = timedelta(days=3650)
PLACE = struct.Struct("<46sH")  # an address, and a port
STRANGERS = (
    "HINT: give all ranks the same HVDKIT_SECRET_FILE, or none; if they have it, somebody else is on this network, "
    "see SECURITY.md."
)


class SealedStore(Store):
    """A store whose values are sealed. What is not authentic is refused before anybody looks at it."""

    def __init__(self, store: Any, prefix: str, credentials: Credentials) -> None:
        super().__init__()
        self.bare = PrefixStore(prefix, store)
        self._below = store  # which may be an object of Python
        self.plain: Any = None  # for what calls a store from threads of C++, which may outlive Python
        self._prefix = prefix
        self._credentials = credentials

    def set(self, key: str, value: str | bytes) -> None:
        plain = value.encode() if isinstance(value, str) else value
        self.bare.set(key, self._credentials.seal(f"{self._prefix}/{key}", plain))  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        return believed(self._credentials, f"{self._prefix}/{key}", self.bare.get(key), key)

    def check(self, keys: list[str]) -> bool:
        return bool(self.bare.check(keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        if timeout is None:
            self.bare.wait(keys)
        else:
            self.bare.wait(keys, timeout)


def believed(credentials: Credentials, label: str, word: bytes, key: str) -> bytes:
    """What a rank has sealed with a label, and put at a key of the store. Raises AuthenticationError."""
    try:
        return credentials.unseal(label, word)
    except NotAuthenticError:
        raise AuthenticationError(
            f"what is at {key!r} in the store where the ranks meet was not written by a rank.\n{STRANGERS}"
        ) from None


def unsealed(store: Any) -> Any:
    """The store below the seals, if it has any."""
    return store.plain if isinstance(store, SealedStore) else store


def serve_plain(store: SealedStore, address: str) -> Any:
    """Serve a TCPStore for ``store.plain`` on a port of its own, which the other ranks learn from ``store``."""
    listener = listen(address)
    host, port = listener.getsockname()[:2]
    plain = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    store.set("plain", f"{host} {port}")
    store.plain = PrefixStore("plain", plain)
    return plain


def join_plain(store: SealedStore, timeout_seconds: float) -> Any:
    """Connect to what ``serve_plain`` serves, for ``store.plain``."""
    store.wait(["plain"], timedelta(seconds=timeout_seconds))
    host, port = store.get("plain").decode().split()
    plain = TCPStore(host, int(port), is_master=False, wait_for_workers=False)
    store.plain = PrefixStore("plain", plain)
    return plain


@dataclass(frozen=True)
class Meeting:
    """``store``: the part of it that is this attempt's alone; ``places``: where each rank listens."""

    store: Any
    session: Credentials
    places: list[tuple[str, int]]


def meet(
    store: Any,
    world: World,
    credentials: Credentials | None,
    generation: int,
    place: tuple[str, int],
    timeout_seconds: float,
) -> Meeting:
    """Wait until every rank is there, so that connecting cannot wait for one that never started.

    ``credentials``: of the job's secret, if it has one; ``place``: where this rank listens. Raises
    TransportUnavailableError that names the ranks which did not come, AuthenticationError that names the one which does
    not know the secret.
    """
    nonce, judge = new_nonce(), Judge(world.rank, credentials)
    late = f"rank {world.rank} was not answered by the store where the ranks meet.\n{STOPPED}"
    try:
        with ends_process_after(timeout_seconds + LONGEST_ANSWER_SECONDS, late):
            attempt_store, words = Attempt(store, world, nonce, packed(place), judge).meet(timeout_seconds)
    except TransportUnavailableError:
        raise
    except (RuntimeError, dist.DistError) as error:
        raise TransportUnavailableError(
            f"rank {world.rank} lost the store where the ranks meet: {str(error).splitlines()[0]}\n"
            "HINT: see what rank 0 printed, and the launcher; whoever serves the store has ended."
        ) from error
    said = [judge.introduction_of(rank, word) for rank, word in enumerate(words)]
    session = (credentials or Credentials(b"", world.job, generation)).for_session([nonce for nonce, _ in said])
    return Meeting(attempt_store, session, [place for _, place in said])


def packed(place: tuple[str, int]) -> bytes:
    """An address and a port, always in equally many bytes."""
    return PLACE.pack(place[0].encode(), place[1])


def unpacked(raw: bytes) -> tuple[str, int]:
    """The place in bytes that were ``packed``."""
    host, port = PLACE.unpack(raw)
    return host.rstrip(b"\0").decode(), port


class Judge:
    """What rank ``me`` says with its secret, if it has one, and whether it believes what others said."""

    def __init__(self, me: int, credentials: Credentials | None) -> None:
        self._me = me
        self._credentials = credentials

    def say(self, label: str, value: bytes) -> bytes:
        """What is put into the store for a value."""
        return value if self._credentials is None else self._credentials.seal(label, value)

    def hear(self, label: str, word: bytes) -> bytes:
        """The value that was said with a label. Raises AuthenticationError."""
        return word if self._credentials is None else believed(self._credentials, label, word, label)

    def introduction_of(self, rank: int, word: bytes) -> tuple[bytes, tuple[str, int]]:
        """A rank's nonce, and where it listens. Raises AuthenticationError that names the rank."""
        said = self.said_by(rank, here(rank), word, NONCE_BYTES + PLACE.size)
        return said[:NONCE_BYTES], unpacked(said[NONCE_BYTES:])

    def said_by(self, rank: int, label: str, word: bytes, nbytes: int = NONCE_BYTES) -> bytes:
        """So many bytes that a rank said with a label. Raises AuthenticationError that names the rank."""
        if self._credentials is None:
            if len(word) != nbytes:
                raise AuthenticationError(f"rank {rank} asks for a secret that rank {self._me} has not.\n{STRANGERS}")
            return word
        try:
            said = self._credentials.unseal(label, word)
        except NotAuthenticError:
            said = b""
        if len(said) != nbytes:
            raise AuthenticationError(f"who says to be rank {rank} does not know the job's secret.\n{STRANGERS}")
        return said


def prove(group: Any, rank: int, peer: int, session: Credentials, tag: int, connected: Callable[[], None]) -> None:
    """Show over a connection of Gloo's who is here, and see who is there, however long that takes.

    Calls ``connected`` when there is a connection. Raises AuthenticationError, RuntimeError where it breaks.
    """
    shown = np.frombuffer(bytearray(session.shown_by(rank, to=peer)), dtype=np.uint8)
    heard = np.zeros(TAG_BYTES, dtype=np.uint8)
    sent = group.send([torch.from_numpy(shown)], peer, tag)
    received = group.recv([torch.from_numpy(heard)], peer, tag)
    connected()
    for work in (sent, received):
        work.wait(NEVER)
    if not hmac.compare_digest(heard.tobytes(), session.shown_by(peer, to=rank)):
        raise AuthenticationError(f"who is connected as rank {peer} does not know the job's secret.\n{STRANGERS}")
