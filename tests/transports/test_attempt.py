"""Ranks meet in one attempt to start a job, whatever earlier attempts left in the store."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore, PrefixStore

from hvdkit.environments.base import World
from hvdkit.errors import AuthenticationError, TransportUnavailableError
from hvdkit.transports.security.admission import (
    ANSWER,
    LEADER,
    Authenticator,
    SealedStore,
    admit,
    introduction_key,
    pack_address,
)
from hvdkit.transports.security.credentials import NONCE_BYTES, Credentials
from tests.told import told
from tests.transports.shared import in_thread
from tests.waiting import until

SECONDS = 20.0
SECRET = Credentials(b"a secret of this job", "job", 1)
SIZE = 3

with_and_without_a_secret = pytest.mark.parametrize("credentials", [None, SECRET], ids=["no secret", "secret"])


def start(store: Any, rank: int, credentials: Credentials | None, seconds: float = SECONDS) -> Future[Any]:
    """A rank, on a thread: where it met the others, or an error."""
    place = (f"10.0.0.{rank}", 7000 + rank)
    return in_thread(admit, store, World("torchrun", rank, SIZE), credentials, 1, place, seconds)


def store_of(store: Any) -> Any:
    """The part of the store that belongs to the newest attempt."""
    return PrefixStore(f"attempt/{store.get(LEADER)[:NONCE_BYTES].hex()}", store)


def keys_said(store: Any) -> set[str]:
    return {introduction_key(rank) for rank in range(SIZE) if store_of(store).check([introduction_key(rank)])}


def assert_met(store: Any, ranks: list[Future[Any]]) -> None:
    """All are in the newest attempt, where what one writes all read, and have one session."""
    met = [rank.result(SECONDS) for rank in ranks]
    met[0].store.set("word", b"of this attempt")
    assert [one.store.get("word") for one in met] == [b"of this attempt"] * len(met)
    assert store_of(store).get("word") == b"of this attempt"
    assert len({one.session for one in met}) == 1
    assert [one.addresses for one in met] == [[(f"10.0.0.{rank}", 7000 + rank) for rank in range(SIZE)]] * len(met)


def run_attempt(store: Any, credentials: Credentials | None) -> None:
    assert_met(store, [start(store, rank, credentials) for rank in range(SIZE)])


@with_and_without_a_secret
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_after_an_attempt_that_met_the_next_one_does_in_any_order(order, credentials):
    store = HashStore()
    run_attempt(store, credentials)
    dead = store.get(LEADER)
    ranks = {}
    for rank in order:
        ranks[rank] = start(store, rank, credentials)
        # Each has said who it is, in the dead attempt if rank 0 has not come yet, before the next one does.
        before_rank_0 = 0 not in ranks
        until(lambda before=before_rank_0: before or store.get(LEADER) != dead)
    assert_met(store, list(ranks.values()))
    assert store.get(LEADER) != dead


@with_and_without_a_secret
def test_a_dead_rank_0s_answer_is_not_taken(credentials):
    store = HashStore()
    run_attempt(store, credentials)
    said = store_of(store).get(introduction_key(1))
    hint = "HINT: see what these ranks printed; raise HVDKIT_START_TIMEOUT_SECONDS on a cluster that starts slowly."
    with told(TransportUnavailableError, f"rank 1 waited 0.3 s for all 3 ranks; missing: [0]\n{hint}"):
        start(store, 1, credentials, 0.3).result(SECONDS)
    assert store_of(store).get(introduction_key(1)) != said  # it has tried that one


@with_and_without_a_secret
def test_a_rank_that_follows_a_dead_rank_0_goes_over_to_the_next_one(credentials):
    store = HashStore()
    dead = [start(store, rank, credentials, 0.3) for rank in (0, 1)]  # the third never came
    with pytest.raises(TransportUnavailableError, match=r"missing: \[2\]"):
        dead[0].result(SECONDS)
    with pytest.raises(TransportUnavailableError):  # a moment later, and must not come into the next attempt till then
        dead[1].result(SECONDS)
    early = [start(store, rank, credentials) for rank in (2, 1)]
    # All that the dead rank 0 waited for.
    until(lambda: keys_said(store) == {introduction_key(rank) for rank in range(SIZE)})
    assert not store_of(store).check([ANSWER])
    assert_met(store, [start(store, 0, credentials), *early])


@with_and_without_a_secret
def test_a_rank_0_that_was_given_up_does_not_take_ranks_from_the_next_one(credentials):
    store = HashStore()
    orphan = start(store, 0, credentials)
    until(lambda: store.check([LEADER]))
    its_store, its_word = store_of(store), store.get(LEADER)
    follower = start(store, 1, credentials)
    until(lambda: its_store.check([introduction_key(1)]))
    ranks = [start(store, 0, credentials), follower]
    until(lambda: store.get(LEADER) != its_word)  # till then the newest attempt is the orphan's
    until(lambda: introduction_key(1) in keys_said(store))
    assert not its_store.check([introduction_key(2)])
    key, introduction = introduction_key(2), b"2" * NONCE_BYTES + pack_address(("", 0))
    its_store.set(key, Authenticator(2, credentials).seal(key, introduction))  # all are there, too late
    fact = "another process has come as rank 0 of this job, so this attempt to start the job is over.\n"
    hint = (
        "HINT: if no launcher has restarted the job meanwhile, two jobs meet at the same place: give each job "
        "its own MASTER_PORT or HVDKIT_JOB."
    )
    with told(TransportUnavailableError, fact + hint):
        orphan.result(SECONDS)
    assert not its_store.check([ANSWER])
    assert_met(store, [*ranks, start(store, 2, credentials)])


STRANGERS = (
    "HINT: give all ranks the same HVDKIT_SECRET_FILE, or none; if all have the same secret, somebody else is on this "
    "network, see SECURITY.md."
)


def test_who_has_no_secret_is_told_on_both_sides():
    store = HashStore()
    ranks = [start(store, rank, SECRET if rank != 1 else None, 2.0) for rank in range(SIZE)]
    fact = "a peer claiming to be rank 1 does not know the job's secret."
    with told(AuthenticationError, f"{fact}\n{STRANGERS}"):
        ranks[0].result(SECONDS)
    with told(AuthenticationError, f"rank 0 asks for a secret that rank 1 lacks.\n{STRANGERS}"):
        ranks[1].result(SECONDS)


def test_a_value_that_no_rank_wrote_is_refused():
    store = HashStore()
    PrefixStore("ranks", store).set("word", "of a stranger")
    fact = "the value of 'word' in the store where the ranks meet was not written by a rank."
    with told(AuthenticationError, f"{fact}\n{STRANGERS}"):
        SealedStore(store, "ranks", SECRET).get("word")


class Gone(HashStore):
    """A store whose server has ended."""

    def check(self, keys: list[str]) -> bool:
        raise RuntimeError("Connection reset by peer\nand where in C++")


def test_a_store_that_is_gone_is_told():
    hint = "HINT: the process that serves the store has ended; see what rank 0 and the launcher printed."
    with told(
        TransportUnavailableError, f"rank 1 lost the store where the ranks meet: Connection reset by peer\n{hint}"
    ):
        start(Gone(), 1, None).result(SECONDS)
