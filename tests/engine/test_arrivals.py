"""Who came last to an operation: the rank, and how late."""

from __future__ import annotations

from hvdkit.engine.telemetry.telemetry import Arrival, last_of


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
