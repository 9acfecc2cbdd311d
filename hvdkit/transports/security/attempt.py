"""Which processes are the ranks of one attempt, at a store that keeps what dead ones wrote.

torchrun starts ranks anew where one has died, and its store stays. So rank 0 makes up a name, that of the attempt, and
the others say under that name who they are. Rank 0 answers, once it has heard from all, with a digest of what each of
them said. A rank that follows a dead rank 0 finds no answer, or one to what somebody else had said in its place, and
waits until another rank 0 has come. Whatever follows stands under the name of the attempt, where nothing can be old.
(How often an agent of torchrun has started its ranks is no name for an attempt: each agent counts for itself.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import timedelta
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from hvdkit.environments.base import World
from hvdkit.errors import TransportUnavailableError
from hvdkit.transports.security.credentials import NONCE_BYTES

if TYPE_CHECKING:
    from hvdkit.transports.security.admission import Judge

LEADER = "rank 0"  # where rank 0 says its word, whose nonce is the attempt's name
ANSWER = "met"
LISTING_SECONDS = 1.0
# The pause between two looks grows with the wait: an eighth of it, so that it adds no more than that.
SHORTEST_PAUSE, LONGEST_PAUSE, PAUSE_OF_WAIT = 0.002, 0.25, 1 / 8


def here(rank: int) -> str:
    """Where a rank says its word."""
    return f"here/{rank}"


def digest(words: Sequence[bytes]) -> bytes:
    """What rank 0 answers to the words of all ranks, in their order."""
    heard = hashlib.sha256()
    for word in words:
        heard.update(len(word).to_bytes(8, "big") + word)
    return heard.digest()


class Attempt:
    """This rank's way to the others, who learn its fresh ``nonce`` and what else it ``says``.

    ``judge`` seals what is said and believes it.
    """

    def __init__(self, store: Any, world: World, nonce: bytes, says: bytes, judge: Judge) -> None:
        self._store = store
        self._world = world
        self._nonce = nonce
        self._judge = judge
        self._word = judge.say(here(world.rank), nonce + says)
        self._everyone = [here(rank) for rank in range(world.size)]

    def meet(self, timeout_seconds: float) -> tuple[Any, list[bytes]]:
        """The part of the store that is this attempt's, and what all ranks said there, when everyone is there.

        Raises TransportUnavailableError that names the ranks which did not come, AuthenticationError for what was not
        written by a rank.
        """
        return self._lead(timeout_seconds) if self._world.rank == 0 else self._follow(timeout_seconds)

    def _lead(self, timeout_seconds: float) -> tuple[Any, list[bytes]]:
        leader_word = self._judge.say(LEADER, self._nonce)
        attempt_store = self._enter(leader_word)
        self._store.set(LEADER, leader_word)
        try:
            attempt_store.wait(self._everyone, timedelta(seconds=timeout_seconds))
        except (RuntimeError, dist.DistError) as error:
            raise self._late(missing(attempt_store, self._everyone), timeout_seconds) from error
        words = self._words(attempt_store)
        # One that was taken for dead, and has others in its place already, must not take ranks from these.
        if self._store.get(LEADER) != leader_word:
            raise TransportUnavailableError(
                "another process has come as rank 0 of this job, so this attempt to start it is over.\n"
                "HINT: if no launcher started the job anew meanwhile, two jobs meet at the same place: give each a "
                "MASTER_PORT, or HVDKIT_JOB, of its own."
            )
        attempt_store.set(ANSWER, self._judge.say(ANSWER, digest(words)))
        return attempt_store, words

    def _follow(self, timeout_seconds: float) -> tuple[Any, list[bytes]]:
        began = monotonic()
        following, attempt_store = b"", None
        while True:
            leader_word = self._store.get(LEADER) if self._store.check([LEADER]) else b""
            if leader_word != following:
                following, attempt_store = leader_word, self._enter(leader_word)
                self._judge.said_by(0, LEADER, leader_word)  # only now: rank 0 shall judge this rank too
            if attempt_store is not None and attempt_store.check([ANSWER]):
                words = self._words(attempt_store)
                answer = self._judge.hear(ANSWER, attempt_store.get(ANSWER))
                # The answer of one that has died is not to this rank's word. A newer rank 0 may have come just now.
                if answer == digest(words) and words[self._world.rank] == self._word and self._leads(following):
                    return attempt_store, words
            waited = monotonic() - began
            if waited > timeout_seconds:
                absent = (
                    []
                    if attempt_store is None or attempt_store.check([ANSWER])
                    else missing(attempt_store, self._everyone)
                )
                raise self._late(absent or [0], timeout_seconds)
            sleep(min(max(waited * PAUSE_OF_WAIT, SHORTEST_PAUSE), LONGEST_PAUSE))

    def _enter(self, leader_word: bytes) -> Any:
        """Say this rank's word in the attempt of a rank 0."""
        attempt_store = PrefixStore(f"attempt/{leader_word[:NONCE_BYTES].hex()}", self._store)
        attempt_store.set(here(self._world.rank), self._word)  # type: ignore[arg-type]
        return attempt_store

    def _leads(self, leader_word: bytes) -> bool:
        return bool(self._store.get(LEADER) == leader_word)

    def _words(self, attempt_store: Any) -> list[bytes]:
        if attempt_store.has_extended_api():
            return list(attempt_store.multi_get(self._everyone))
        return [attempt_store.get(key) for key in self._everyone]

    def _late(self, ranks: Sequence[int], timeout_seconds: float) -> TransportUnavailableError:
        return TransportUnavailableError(
            f"rank {self._world.rank} waited {timeout_seconds:g} s for all {self._world.size} ranks; missing: "
            f"{list(ranks)}\n"
            "HINT: see what those ranks printed; raise HVDKIT_START_TIMEOUT_SECONDS on a cluster that starts slowly."
        )


def absent_after(store: Any, keys: Sequence[str], seconds: float) -> list[int]:
    """Wait for all keys; the ranks, by index, whose keys are not there after ``seconds``."""
    deadline = monotonic() + seconds
    # Asked again and again: a waiting call would keep the store from the other threads of this process.
    while not store.check(keys):
        if monotonic() > deadline:
            return missing(store, keys)
        sleep(SHORTEST_PAUSE)
    return []


def missing(store: Any, everyone: Sequence[str]) -> list[int]:
    """The ranks that did not come, as many of them as the store tells in a moment: all ranks ask it at once."""
    absent: list[int] = []
    deadline = monotonic() + LISTING_SECONDS
    for rank, key in enumerate(everyone):
        if absent and monotonic() > deadline:
            break
        try:
            if not store.check([key]):
                absent.append(rank)
        except (RuntimeError, dist.DistError):
            absent.append(rank)
    return absent
