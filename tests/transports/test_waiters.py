"""Waiter threads: calls that block take turns on few threads, and no call that must be made waits for ever."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from time import monotonic, sleep

import pytest

from hvdkit.transports.waiters import CALLS_IN_TURN, MOST_IDLE, STUCK_SECONDS, Waiters

SECONDS = 20.0


def eventually(condition) -> bool:
    """True if ``condition()`` holds within ``SECONDS``."""
    deadline = monotonic() + SECONDS
    while not condition():
        if monotonic() > deadline:
            return False
        sleep(0.001)
    return True


class Blocked:
    """Calls that note that they were made, and return when they are let."""

    def __init__(self) -> None:
        self.made: list[int] = []
        self._returns: dict[int, threading.Event] = {}

    def __call__(self, number: int):
        self._returns[number] = threading.Event()

        def call() -> None:
            self.made.append(number)
            self._returns[number].wait(SECONDS)

        return call

    def let(self, *numbers: int) -> None:
        for number in numbers:
            self._returns[number].set()


@pytest.fixture
def waiters() -> Iterator[Waiters]:
    pool = Waiters("test-wait")
    yield pool
    pool.close(SECONDS)
    assert not threads()


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("test-wait")]


def test_calls_in_turn_are_made_in_their_order_by_few_threads(waiters: Waiters) -> None:
    blocked = Blocked()
    for number in range(20):
        waiters.run_in_turn(blocked(number))
    for number in range(20):
        expected = min(20, number + CALLS_IN_TURN)
        assert eventually(lambda expected=expected: len(blocked.made) == expected)
        assert len(threads()) == CALLS_IN_TURN
        blocked.let(number)
    assert sorted(blocked.made[:CALLS_IN_TURN]) == list(range(CALLS_IN_TURN))
    assert blocked.made[CALLS_IN_TURN:] == list(range(CALLS_IN_TURN, 20))


def test_other_calls_wait_for_none(waiters: Waiters) -> None:
    blocked = Blocked()
    for number in range(10):
        waiters.run_in_turn(blocked(number))
    waiters.run(blocked(10))
    assert eventually(lambda: 10 in blocked.made)
    assert len(blocked.made) == CALLS_IN_TURN + 1
    blocked.let(*range(11))


def test_queued_calls_are_made_where_earlier_ones_are_stuck(waiters: Waiters) -> None:
    blocked = Blocked()
    for number in range(10):
        waiters.run_in_turn(blocked(number))
    waiters.relieve()
    assert len(threads()) == CALLS_IN_TURN, "nothing was stuck yet"
    sleep(STUCK_SECONDS)
    waiters.relieve()
    assert eventually(lambda: len(blocked.made) == 10)
    waiters.run_in_turn(blocked(10))  # which the peer may wait for too
    assert eventually(lambda: 10 in blocked.made)
    blocked.let(*range(CALLS_IN_TURN, 11))
    assert eventually(lambda: len(threads()) <= CALLS_IN_TURN + MOST_IDLE)
    blocked.let(*range(CALLS_IN_TURN))
    for number in range(11, 20):
        waiters.run_in_turn(blocked(number))
    assert eventually(lambda: len(blocked.made) == 11 + CALLS_IN_TURN), "they take turns again"
    sleep(STUCK_SECONDS / 2)
    assert len(blocked.made) == 11 + CALLS_IN_TURN
    blocked.let(*range(11, 20))


def test_the_end_waits_for_queued_calls(waiters: Waiters) -> None:
    blocked = Blocked()
    for number in range(10):
        waiters.run_in_turn(blocked(number))
    blocked.let(*range(10))
    waiters.close(SECONDS)
    assert len(blocked.made) == 10
