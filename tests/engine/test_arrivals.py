"""Who came last to an operation: the rank, how late, and what is drawn of a wait for data."""

from __future__ import annotations

import pytest

from hvdkit.engine.telemetry.arrivals import Arrival, FirstData, last_of


def test_the_last_rank_is_told_after_the_one_before_it_and_after_the_first() -> None:
    last = last_of({0: 10.0, 1: 10.5, 2: 10.125})
    assert last == Arrival(1, 0.375, 0.5)
    assert last.activity == "WAIT_FOR_RANK_1"
    assert last.fields == {"last_rank": 1, "ms_after_the_one_before": 375.0, "ms_after_the_first": 500.0}


def test_one_rank_alone_waits_for_nobody() -> None:
    assert last_of({}) is None
    assert last_of({3: 1.0}) is None


def test_of_ranks_that_come_at_once_the_lowest_is_named() -> None:
    assert last_of({2: 5.0, 1: 5.0, 0: 1.0}) == Arrival(1, 0.0, 4.0)


class Flag:
    def __init__(self, peer: int) -> None:
        self.peer, self.is_done = peer, False

    def done(self) -> bool:
        return self.is_done


def test_data_comes_when_the_last_transfer_of_a_peer_is_done() -> None:
    now = [1.0]
    send, receive, other = Flag(1), Flag(1), Flag(2)
    first = FirstData([send, receive, other], lambda: now[0])
    assert not first.done()
    send.is_done = True
    assert not first.done()
    now[0] = 2.0
    other.is_done = True
    assert not first.done()
    assert first.awaited() == [1]
    now[0] = 3.0
    receive.is_done = True
    assert first.done()
    assert first.came == {1: 3.0, 2: 2.0}


def test_a_peer_that_is_lost_is_told_by_who_watches_it() -> None:
    class Broken(Flag):
        def done(self) -> bool:
            raise RuntimeError("lost")

    with pytest.raises(RuntimeError, match="lost"):
        FirstData([Broken(1)]).done()
