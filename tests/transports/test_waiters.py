"""Waiter threads: calls that block take turns on few threads, and no call that must be made waits for ever."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator
from time import sleep

import pytest

from hvdkit.transports.waiters import CALLS_IN_TURN, MOST_IDLE, STUCK_SECONDS, Waiters
from tests.launch.launching import Result, run_to_end
from tests.transports.shared import needs_native
from tests.waiting import until

SECONDS = 20.0


class Blocked:
    """Calls that are handed to waiters, note that they were made, and return when they are let."""

    def __init__(self, waiters: Waiters) -> None:
        self.made: list[int] = []
        self._waiters = waiters
        self._returns: dict[int, threading.Event] = {}

    def call(self, number: int):
        self._returns[number] = threading.Event()

        def call() -> None:
            self.made.append(number)
            self._returns[number].wait(SECONDS)

        return call

    def run_in_turn(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._waiters.run_in_turn(self.call(number))

    def let(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._returns[number].set()


@pytest.fixture
def waiters() -> Iterator[Waiters]:
    pool = Waiters("test-wait")
    yield pool
    pool.close(SECONDS)
    assert not threads()


@pytest.fixture
def blocked(waiters: Waiters) -> Blocked:
    return Blocked(waiters)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("test-wait")]


def test_calls_in_turn_are_made_in_their_order_by_few_threads(blocked: Blocked) -> None:
    blocked.run_in_turn(range(20))
    for number in range(20):
        expected = min(20, number + CALLS_IN_TURN)
        until(lambda expected=expected: len(blocked.made) == expected)
        assert len(threads()) == CALLS_IN_TURN
        blocked.let([number])
    assert sorted(blocked.made[:CALLS_IN_TURN]) == list(range(CALLS_IN_TURN))
    assert blocked.made[CALLS_IN_TURN:] == list(range(CALLS_IN_TURN, 20))


def test_other_calls_wait_for_none(waiters: Waiters, blocked: Blocked) -> None:
    blocked.run_in_turn(range(10))
    waiters.run(blocked.call(10))
    until(lambda: 10 in blocked.made)
    assert len(blocked.made) == CALLS_IN_TURN + 1
    blocked.let(range(11))


def test_queued_calls_are_made_where_earlier_ones_are_stuck(waiters: Waiters, blocked: Blocked) -> None:
    blocked.run_in_turn(range(10))
    waiters.relieve()
    assert len(threads()) == CALLS_IN_TURN, "nothing was stuck yet"
    sleep(STUCK_SECONDS)
    waiters.relieve()
    until(lambda: len(blocked.made) == 10)
    blocked.run_in_turn([10])  # which the peer may wait for too
    until(lambda: 10 in blocked.made)
    blocked.let(range(CALLS_IN_TURN, 11))
    until(lambda: len(threads()) <= CALLS_IN_TURN + MOST_IDLE)
    blocked.let(range(CALLS_IN_TURN))
    blocked.run_in_turn(range(11, 20))
    until(lambda: len(blocked.made) == 11 + CALLS_IN_TURN, what="that they take turns again")
    sleep(STUCK_SECONDS / 2)
    assert len(blocked.made) == 11 + CALLS_IN_TURN
    blocked.let(range(11, 20))


def test_the_end_waits_for_queued_calls(waiters: Waiters, blocked: Blocked) -> None:
    blocked.run_in_turn(range(10))
    blocked.let(range(10))
    waiters.close(SECONDS)
    assert len(blocked.made) == 10


# -- the end of a process whose library neither comes back nor lets another thread of Python run -----------------------

STUCK = "ctypes.PyDLL(None).sleep(60)"  # holds Python's lock meanwhile
WITHOUT_NATIVE = "sys.modules['hvdkit.kernels._native'] = None"


def ended(seconds: float, inside: str, before: str = "") -> Result:
    """How a process ends that does ``inside`` in a context of so many seconds."""
    program = f"""
import ctypes, sys, time
{before}
from hvdkit.transports.waiters import ends_process_after
with ends_process_after({seconds}, "rank 1 waited.\\nHINT: look."):
    {inside}
time.sleep({seconds + 0.3})
print("went on")
"""
    return run_to_end([sys.executable, "-c", program])


@needs_native
def test_it_says_why_and_ends_the_process():
    done = ended(0.3, STUCK)
    assert (done.status, done.stdout, done.stderr) == (1, "", "hvdkit: rank 1 waited.\nHINT: look.\n")


def test_without_the_native_part_it_shows_where():
    done = ended(0.3, STUCK, WITHOUT_NATIVE)
    assert (done.status, done.stdout) == (1, "")
    assert done.stderr.startswith("Timeout ")
    assert 'File "<string>"' in done.stderr


@pytest.mark.parametrize("before", [pytest.param("", marks=needs_native), WITHOUT_NATIVE], ids=["native", "python"])
def test_what_is_through_in_time_goes_on(before):
    done = ended(2.0, "time.sleep(0.1)", before)
    assert (done.status, done.stdout, done.stderr) == (0, "went on\n", "")
