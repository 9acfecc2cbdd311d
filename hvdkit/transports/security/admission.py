"""Who may take part in a job of the ``torch`` transport: who knows its secret, if it has one.

Each rank tells a nonce at the store, sealed with the secret. From all nonces follows a secret of this session, which
seals the addresses at which Gloo connects, and which each rank proves over every connection before anything that comes
over it is looked at. Without a secret, ranks only wait for each other. How they tell each other from dead ones
is in ``attempt``.
"""

from __future__ import annotations

import hmac
from datetime import timedelta
from time import monotonic
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from hvdkit.environments.base import World
from hvdkit.errors import AuthenticationError, TransportUnavailableError
from hvdkit.transports.last_resort import LONGEST_ANSWER_SECONDS, STOPPED, ends_process_after
from hvdkit.transports.security.attempt import Attempt, here
from hvdkit.transports.security.credentials import NONCE_BYTES, TAG_BYTES, Credentials, NotAuthenticError, new_nonce

SILENT = (
    "HINT: see whether one of them was stopped, killed or cut off from the network; the others may wait for it. If all "
    "live, somebody else is where one should be: see SECURITY.md."
)
STRANGERS = (
    "HINT: give all ranks the same HVDKIT_SECRET_FILE, or none; if they have it, somebody else is on this network, "
    "see SECURITY.md."
)


class SealedStore(Store):
    """A store whose values are sealed. What is not authentic is refused before anybody looks at it."""

    def __init__(self, store: Any, prefix: str, credentials: Credentials) -> None:
        super().__init__()
        # For what calls a store from threads of C++, which may outlive Python.
        self.bare = PrefixStore(prefix, store)
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
    return store.bare if isinstance(store, SealedStore) else store


def meet(
    store: Any, world: World, credentials: Credentials | None, timeout_seconds: float
) -> tuple[Any, Credentials | None]:
    """Wait until every rank is there, so that connecting cannot wait for one that never started.

    Returns the part of the store that is this attempt's alone, and the credentials of this session. Raises
    TransportUnavailableError that names the ranks which did not come, AuthenticationError that names the one which does
    not know the secret.
    """
    nonce, judge = new_nonce(), Judge(world.rank, credentials)
    late = f"rank {world.rank} was not answered by the store where the ranks meet.\n{STOPPED}"
    try:
        with ends_process_after(timeout_seconds + LONGEST_ANSWER_SECONDS, late):
            attempt_store, words = Attempt(store, world, nonce, judge).meet(timeout_seconds)
    except TransportUnavailableError:
        raise
    except (RuntimeError, dist.DistError) as error:
        raise TransportUnavailableError(
            f"rank {world.rank} lost the store where the ranks meet: {str(error).splitlines()[0]}\n"
            "HINT: see what rank 0 printed, and the launcher; whoever serves the store has ended."
        ) from error
    nonces = [judge.nonce_of(rank, here(rank), word) for rank, word in enumerate(words)]
    return attempt_store, None if credentials is None else credentials.for_session(nonces)


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

    def nonce_of(self, rank: int, label: str, word: bytes) -> bytes:
        """The nonce that a rank said with a label. Raises AuthenticationError that names the rank."""
        if self._credentials is None:
            if len(word) != NONCE_BYTES:
                raise AuthenticationError(f"rank {rank} asks for a secret that rank {self._me} has not.\n{STRANGERS}")
            return word
        try:
            nonce = self._credentials.unseal(label, word)
        except NotAuthenticError:
            nonce = b""
        if len(nonce) != NONCE_BYTES:
            raise AuthenticationError(f"who says to be rank {rank} does not know the job's secret.\n{STRANGERS}")
        return nonce


def greet(group: Any, world: World, session: Credentials, tag: int, timeout_seconds: float) -> None:
    """Prove over each connection who is at its ends. Raises AuthenticationError that names who could not."""
    deadline = monotonic() + timeout_seconds
    peers = [peer for peer in range(world.size) if peer != world.rank]
    shown = {peer: np.frombuffer(bytearray(session.shown_by(world.rank, to=peer)), dtype=np.uint8) for peer in peers}
    heard = {peer: np.zeros(TAG_BYTES, dtype=np.uint8) for peer in peers}
    sent = {peer: group.send([torch.from_numpy(shown[peer])], peer, tag) for peer in peers}
    received = {peer: group.recv([torch.from_numpy(heard[peer])], peer, tag) for peer in peers}
    for peer in peers:
        try:
            for work in (sent[peer], received[peer]):
                work.wait(timedelta(seconds=max(0.001, deadline - monotonic())))
        except RuntimeError as error:
            # All of them: who waits in turn for a rank that was stopped is as silent as that one.
            missing = [rank for rank in peers if not heard[rank].any()] or [peer]
            raise AuthenticationError(
                f"not all ranks proved to rank {world.rank} in {timeout_seconds:g} s (HVDKIT_START_TIMEOUT_SECONDS) "
                f"that they are ranks, missing: {missing}: {str(error).splitlines()[0]}\n{SILENT}"
            ) from error
    for peer in peers:
        if not hmac.compare_digest(heard[peer].tobytes(), session.shown_by(peer, to=world.rank)):
            raise AuthenticationError(f"who is connected as rank {peer} does not know the job's secret.\n{STRANGERS}")
