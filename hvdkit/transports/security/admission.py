"""Admission of ranks to a job of the ``torch`` transport: one attempt to start it, and the proof of its secret.

torchrun starts ranks anew where one has died, and its store keeps what dead ranks wrote (each agent of torchrun counts
its starts for itself). So rank 0's fresh nonce is the name of the attempt, and under it each rank writes its
introduction: a nonce, and the address where it listens, sealed with the job's secret if it has one. Rank 0 answers,
once it has all introductions, with a digest of them. A rank that follows a dead rank 0 finds no answer, or an answer to
another introduction than its own, and waits until another rank 0 has come. A rank 0 that was only taken for dead sees
its successor before it answers, and gives up.

The secret of the session follows from all nonces. Each rank proves it over every connection, and it seals the addresses
where device collectives meet (``SealedStore``). Without a secret of the job, it is as open as the store, and keeps out
processes that are here by mistake.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from time import monotonic
from typing import Any

import numpy as np
import torch
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from hvdkit.environments.base import World
from hvdkit.errors import AuthenticationError, TransportUnavailableError
from hvdkit.transports.security.credentials import NONCE_BYTES, TAG_BYTES, Credentials, NotAuthenticError, new_nonce
from hvdkit.transports.security.listening import listen
from hvdkit.transports.security.store import pause
from hvdkit.transports.waiters import LONGEST_ANSWER_SECONDS, STOPPED, ends_process_after

STRANGERS = (
    "HINT: give all ranks the same HVDKIT_SECRET_FILE, or none; if all have the same secret, somebody else is on this "
    "network, see SECURITY.md."
)
NEVER = timedelta(days=3650)  # Gloo breaks every connection when a wait times out; deadlines are the engine's, per peer
_ADDRESS = struct.Struct("<46sH")  # host and port
LEADER = "rank 0"  # the key of rank 0's word, whose nonce is the attempt's name
ANSWER = "met"
DIGEST_BYTES = hashlib.sha256().digest_size  # of rank 0's answer
LISTING_SECONDS = 1.0

Address = tuple[str, int]


@dataclass(frozen=True)
class Admission:
    """The attempt's part of the store (None with a ticket), the credentials of the session, and where ranks listen."""

    store: Any
    session: Credentials
    addresses: list[Address]


def admit(
    store: Any, world: World, credentials: Credentials | None, generation: int, address: Address, timeout_seconds: float
) -> Admission:
    """Wait at ``store`` until every rank is there, so that connecting cannot wait for a rank that never started.

    ``credentials`` are of the job's secret, if it has one; this rank listens at ``address``. Raises
    TransportUnavailableError or AuthenticationError that names ranks which did not come, or do not know the secret.
    """
    authenticator = Authenticator(world.rank, credentials)
    late = f"rank {world.rank} got no reply from the store where the ranks meet.\n{STOPPED}"
    try:
        with ends_process_after(timeout_seconds + LONGEST_ANSWER_SECONDS, late):
            attempt = _Attempt(store, world, new_nonce(), address, authenticator)
            attempt_store, words = attempt.lead(timeout_seconds) if world.rank == 0 else attempt.follow(timeout_seconds)
    except TransportUnavailableError:
        raise
    except RuntimeError as error:
        raise TransportUnavailableError(
            f"rank {world.rank} lost the store where the ranks meet: {str(error).splitlines()[0]}\n"
            "HINT: the process that serves the store has ended; see what rank 0 and the launcher printed."
        ) from error
    introductions = [authenticator.introduction(rank, word) for rank, word in enumerate(words)]
    job = credentials or Credentials(b"", world.job, generation)
    session = job.for_session([nonce for nonce, _ in introductions])
    return Admission(attempt_store, session, [address for _, address in introductions])


def pack_address(address: Address) -> bytes:
    return _ADDRESS.pack(address[0].encode(), address[1])


def unpack_address(raw: bytes) -> Address:
    host, port = _ADDRESS.unpack(raw)
    return host.rstrip(b"\0").decode(), port


class Authenticator:
    """The seals of the words that rank ``me`` writes to the store and reads there, if the job has a secret."""

    def __init__(self, me: int, credentials: Credentials | None) -> None:
        self._me, self._credentials = me, credentials

    def seal(self, label: str, value: bytes) -> bytes:
        """Return the word that stands in the store for a value."""
        return value if self._credentials is None else self._credentials.seal(label, value)

    def introduction(self, rank: int, word: bytes) -> tuple[bytes, Address]:
        """Return a rank's nonce and address. Raises AuthenticationError that names the rank."""
        value = self.unseal_from(rank, introduction_key(rank), word, NONCE_BYTES + _ADDRESS.size)
        return value[:NONCE_BYTES], unpack_address(value[NONCE_BYTES:])

    def unseal_from(self, rank: int, label: str, word: bytes, nbytes: int = NONCE_BYTES) -> bytes:
        """Return the value, of ``nbytes``, of a rank's word. Raises AuthenticationError that names the rank."""
        if self._credentials is None:
            if len(word) != nbytes:
                raise AuthenticationError(f"rank {rank} asks for a secret that rank {self._me} lacks.\n{STRANGERS}")
            return word
        try:
            value = self._credentials.unseal(label, word)
        except NotAuthenticError:
            value = b""
        if len(value) != nbytes:
            raise AuthenticationError(f"a peer claiming to be rank {rank} does not know the job's secret.\n{STRANGERS}")
        return value


def introduction_key(rank: int) -> str:
    return f"here/{rank}"


def digest(words: Sequence[bytes]) -> bytes:
    """Return rank 0's answer to the introductions of all ranks, in their order."""
    return hashlib.sha256(b"".join(len(word).to_bytes(8, "big") + word for word in words)).digest()


class _Attempt:
    """The introduction of this rank to the others, with its fresh ``nonce``.

    ``lead`` and ``follow`` return the attempt's part of the store and all introductions, sealed.
    """

    def __init__(self, store: Any, world: World, nonce: bytes, address: Address, authenticator: Authenticator) -> None:
        self._store, self._world, self._nonce, self._authenticator = store, world, nonce, authenticator
        self._word = authenticator.seal(introduction_key(world.rank), nonce + pack_address(address))
        self._keys = [introduction_key(rank) for rank in range(world.size)]

    def lead(self, timeout_seconds: float) -> tuple[Any, list[bytes]]:
        leader_word = self._authenticator.seal(LEADER, self._nonce)
        attempt_store = self._enter(leader_word)
        self._store.set(LEADER, leader_word)
        try:
            attempt_store.wait(self._keys, timedelta(seconds=timeout_seconds))
        except RuntimeError as error:
            raise self._late(_missing(attempt_store, self._keys), timeout_seconds) from error
        words = self._words(attempt_store)
        # A rank 0 that was taken for dead, and has a successor already, must not take ranks from the successor.
        if self._store.get(LEADER) != leader_word:
            raise TransportUnavailableError(
                "another process has come as rank 0 of this job, so this attempt to start the job is over.\n"
                "HINT: if no launcher has restarted the job meanwhile, two jobs meet at the same place: give each job "
                "its own MASTER_PORT or HVDKIT_JOB."
            )
        attempt_store.set(ANSWER, self._authenticator.seal(ANSWER, digest(words)))
        return attempt_store, words

    def follow(self, timeout_seconds: float) -> tuple[Any, list[bytes]]:
        began = monotonic()
        following, attempt_store = b"", None
        while True:
            leader_word = self._store.get(LEADER) if self._store.check([LEADER]) else b""
            if leader_word != following:
                following, attempt_store = leader_word, self._enter(leader_word)
                # Checked only now, so that rank 0 checks this rank's introduction too.
                self._authenticator.unseal_from(0, LEADER, leader_word)
            if attempt_store is not None and attempt_store.check([ANSWER]):
                words = self._words(attempt_store)
                answer = self._authenticator.unseal_from(0, ANSWER, attempt_store.get(ANSWER), DIGEST_BYTES)
                # A dead rank 0 has not answered this rank's word. A newer rank 0 may have come just now.
                is_own = answer == digest(words) and words[self._world.rank] == self._word
                if is_own and self._store.get(LEADER) == following:
                    return attempt_store, words
            waited = monotonic() - began
            if waited > timeout_seconds:
                missing: list[int] = []
                if attempt_store is not None and not attempt_store.check([ANSWER]):
                    missing = _missing(attempt_store, self._keys)
                raise self._late(missing or [0], timeout_seconds)  # rank 0 has not come, or was followed by another
            pause(waited)

    def _enter(self, leader_word: bytes) -> Any:
        """Write this rank's introduction in the attempt of a rank 0."""
        attempt_store = PrefixStore(f"attempt/{leader_word[:NONCE_BYTES].hex()}", self._store)
        attempt_store.set(introduction_key(self._world.rank), self._word)  # type: ignore[arg-type]
        return attempt_store

    def _words(self, attempt_store: Any) -> list[bytes]:
        if attempt_store.has_extended_api():
            return list(attempt_store.multi_get(self._keys))
        return [attempt_store.get(key) for key in self._keys]

    def _late(self, ranks: list[int], timeout_seconds: float) -> TransportUnavailableError:
        return TransportUnavailableError(
            f"rank {self._world.rank} waited {timeout_seconds:g} s for all {self._world.size} ranks; missing: {ranks}\n"
            "HINT: see what these ranks printed; raise HVDKIT_START_TIMEOUT_SECONDS on a cluster that starts slowly."
        )


def absent_after(store: Any, keys: Sequence[str], seconds: float) -> list[int]:
    """Wait for all keys; return the ranks, by index, whose keys are not there after ``seconds``."""
    deadline = monotonic() + seconds
    # A call that waits would keep the store from the other threads of this process.
    while not store.check(keys):
        if monotonic() > deadline:
            return _missing(store, keys)
        pause(0.0)
    return []


def _missing(store: Any, keys: Sequence[str]) -> list[int]:
    """Return the ranks that did not come, as many as the store tells in a moment: all ranks ask it at once."""
    absent: list[int] = []
    deadline = monotonic() + LISTING_SECONDS
    for rank, key in enumerate(keys):
        if absent and monotonic() > deadline:
            break
        with suppress(RuntimeError):
            if store.check([key]):
                continue
        absent.append(rank)
    return absent


def prove(group: Any, rank: int, peer: int, session: Credentials, tag: int, connected: Callable[[], None]) -> None:
    """Exchange proofs with a peer over a connection of Gloo's, and call ``connected`` when it is made.

    Raises AuthenticationError, RuntimeError where it breaks.
    """
    own = np.frombuffer(bytearray(session.shown_by(rank, to=peer)), dtype=np.uint8)
    peers = np.zeros(TAG_BYTES, dtype=np.uint8)
    sent = group.send([torch.from_numpy(own)], peer, tag)
    received = group.recv([torch.from_numpy(peers)], peer, tag)
    connected()
    for work in (sent, received):
        work.wait(NEVER)
    if not hmac.compare_digest(peers.tobytes(), session.shown_by(peer, to=rank)):
        raise AuthenticationError(f"the peer connected as rank {peer} does not know the job's secret.\n{STRANGERS}")


class SealedStore(Store):
    """A store whose values are sealed. A value that is not authentic is refused before anything reads it."""

    def __init__(self, store: Any, prefix: str, credentials: Credentials) -> None:
        super().__init__()
        self._bare = PrefixStore(prefix, store)
        self._below = store  # kept, since it may be an object of Python
        self.plain: Any = None  # for threads of C++, which call a store and may outlive Python
        self._prefix, self._credentials = prefix, credentials

    def set(self, key: str, value: str | bytes) -> None:
        plain = value.encode() if isinstance(value, str) else value
        self._bare.set(key, self._credentials.seal(f"{self._prefix}/{key}", plain))  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        try:
            return self._credentials.unseal(f"{self._prefix}/{key}", self._bare.get(key))
        except NotAuthenticError:
            raise AuthenticationError(
                f"the value of {key!r} in the store where the ranks meet was not written by a rank.\n{STRANGERS}"
            ) from None

    def check(self, keys: list[str]) -> bool:
        return bool(self._bare.check(keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._bare.wait(keys, *([] if timeout is None else [timeout]))

    def open_plain(self, listens_at: str | None, timeout_seconds: float) -> None:
        """Make ``plain``, a store of its own, which the rank with an address ``listens_at`` serves to the others."""
        if listens_at is not None:
            listener = listen(listens_at)
            host, port = listener.getsockname()[:2]
            served = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
            self.set("plain", f"{host} {port}")
        else:
            self.wait(["plain"], timedelta(seconds=timeout_seconds))
            host, port = self.get("plain").decode().split()
            served = TCPStore(host, int(port), is_master=False, wait_for_workers=False)
        self.plain = PrefixStore("plain", served)
