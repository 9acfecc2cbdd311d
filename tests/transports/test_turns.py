"""Turns: operations that the ranks of a node begin in one order, on threads as ranks, in one memory file."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import numpy as np
import pytest

from hvdkit.kernels import ReduceOp, Scale
from tests.transports.shared import bells_in, in_thread, memory_file, native, needs_native

MOST_BYTES, PATIENCE = 1024, 10.0
BUSY, OPEN, COMPLETE, WITHDRAWN, DIFFERENT = range(5)
NOTHING, REDUCE, GATHER, COPY = range(4)
ALIKE = (1, 2, 3, 4, 0, 0)

pytestmark = needs_native


def turns_of(ranks: int) -> list:
    """Return the turns of each rank, in memory that all share."""
    begin = 64 * ranks
    nbytes = begin + native.Turns.bytes_needed(ranks, MOST_BYTES)
    with memory_file(nbytes) as descriptor:
        windows = [native.Window(descriptor, 0, nbytes) for _ in range(ranks)]
    return [
        native.Turns(window, begin, ranks, me, MOST_BYTES, bells_in(window, ranks)) for me, window in enumerate(windows)
    ]


def at_once(ranks: int, call: Callable[[int], object]) -> list:
    """What ``call(rank)`` returns on threads that begin together."""
    barrier = threading.Barrier(ranks)

    def run(rank: int) -> object:
        barrier.wait()
        return call(rank)

    return [outcome.result(60) for outcome in [in_thread(run, rank) for rank in range(ranks)]]


def reduce(turns, turn, array, seconds=PATIENCE, source=None, words=ALIKE):
    """Sum an array of all ranks in place, or withdraw the turn after ``seconds``. Return the state of the turn."""
    reading = array, REDUCE, 0, 0, ReduceOp.SUM, Scale(1.0)
    state = turns.run(turn, words, array if source is None else source, *reading, seconds)
    if state in (BUSY, OPEN):
        turns.withdraw(turn)
        state = turns.wait(turn, PATIENCE)
        if state == COMPLETE:
            turns.read(turn, *reading)
    return state


def test_all_ranks_get_the_sum_in_rank_order_in_place_or_out_of_a_source():
    three = turns_of(3)
    values = [np.array([1e8, 1.0], np.float32), np.array([-1e8, 2.0], np.float32), np.array([0.5, 3.0], np.float32)]
    arrays = [values[0].copy(), np.empty(2, np.float32), values[2].copy()]
    sources = [None, values[1], None]
    states = at_once(3, lambda me: reduce(three[me], 1, arrays[me], source=sources[me]))
    assert states == [COMPLETE] * 3
    for array in arrays:
        np.testing.assert_array_equal(array, (values[0] + values[1]) + values[2])


def test_a_rank_reads_a_part_of_all_parts_or_all_of_one():
    three = turns_of(3)
    sources = [np.arange(6, dtype=np.float32) + 10 * me for me in range(3)]

    def read(how, begin, elements, root=0):
        turn[0] += 1
        targets = [np.zeros(elements, np.float32) for _ in range(3)]
        at_once(
            3,
            lambda me: three[me].run(
                turn[0], ALIKE, sources[me], targets[me], how, begin(me), root, ReduceOp.SUM, Scale(1.0), PATIENCE
            ),
        )
        return targets

    turn = [0]
    for me, target in enumerate(read(GATHER, lambda me: 0, 18)):
        np.testing.assert_array_equal(target, np.concatenate(sources), str(me))
    for me, target in enumerate(read(GATHER, lambda me: 8 * me, 6)):
        np.testing.assert_array_equal(target, np.concatenate([source[2 * me : 2 * me + 2] for source in sources]))
    for me, target in enumerate(read(REDUCE, lambda me: 8 * me, 2)):
        np.testing.assert_array_equal(target, sum(sources)[2 * me : 2 * me + 2])
    for me, target in enumerate(read(COPY, lambda me: 8 * me, 2, root=1)):
        np.testing.assert_array_equal(target, sources[1][2 * me : 2 * me + 2])


def test_descriptions_that_differ_are_seen_by_all_and_nothing_is_read():
    three = turns_of(3)
    arrays = [np.full(2, me, np.float32) for me in range(3)]
    words = [ALIKE, ALIKE, (1, 2, 3, 5, 0, 0)]
    assert at_once(3, lambda me: reduce(three[me], 1, arrays[me], words=words[me])) == [DIFFERENT] * 3
    for me in range(3):
        np.testing.assert_array_equal(arrays[me], me)
        assert [tuple(each) for each in three[me].words(1)] == words
        three[me].finish(1)
    # The last words are each rank's own.
    words = [(*ALIKE[:4], me, 7 * me) for me in range(3)]
    assert at_once(3, lambda me: reduce(three[me], 2, arrays[me], words=words[me])) == [COMPLETE] * 3


def test_a_rank_that_waits_too_long_withdraws_the_turn_for_all():
    two = turns_of(2)
    array = np.ones(2, np.float32)
    assert reduce(two[0], 1, array, seconds=0.001) == WITHDRAWN
    np.testing.assert_array_equal(array, 1)
    assert reduce(two[1], 1, array, seconds=PATIENCE) == WITHDRAWN, "at once"
    arrays = [np.ones(2, np.float32), np.ones(2, np.float32)]
    assert at_once(2, lambda me: reduce(two[me], 2, arrays[me])) == [COMPLETE] * 2
    np.testing.assert_array_equal(arrays[1], 2)


def test_ranks_at_different_turns_reduce_nothing():
    two = turns_of(2)
    states = at_once(2, lambda me: reduce(two[me], (3, 5)[me], np.ones(2, np.float32), 0.05))
    assert states == [WITHDRAWN] * 2


def test_a_rank_that_is_two_turns_ahead_of_a_reader_waits_for_it():
    two = turns_of(2)
    part = np.ones(2, np.float32)
    assert [each.arrive(1, ALIKE, part) for each in two] == [OPEN] * 2
    assert [each.wait(1, PATIENCE) for each in two] == [COMPLETE] * 2
    assert two[0].absent(1, 0.0) == []
    two[0].finish(1)
    assert two[0].arrive(2, ALIKE, part) == OPEN
    assert two[0].absent(2, 0.0) == [1]
    assert two[1].arrive(2, ALIKE, part) == OPEN
    two[0].finish(2)
    assert two[0].arrive(3, ALIKE, part) == BUSY, "rank 1 reads what rank 0 published at turn 1"
    assert two[0].readers(1, 0.0) == [1]
    two[1].finish(1)
    assert two[0].readers(1, 0.0) == []
    assert two[0].arrive(3, ALIKE, part) == OPEN


@pytest.mark.parametrize("watches", [False, True])
def test_a_rank_that_watches_is_rung_when_all_are_there_and_when_another_has_read(watches):
    ranks, begin = 2, 128
    nbytes = begin + native.Turns.bytes_needed(ranks, MOST_BYTES)
    with memory_file(nbytes) as descriptor:
        window = native.Window(descriptor, 0, nbytes)
    bells = bells_in(window, ranks)
    two = [native.Turns(window, begin, ranks, me, MOST_BYTES, bells) for me in range(ranks)]
    if watches:
        two[0].watch(1)
    two[0].arrive(1, ALIKE, None)
    assert bells[0].count() == 0
    two[1].arrive(1, ALIKE, None)
    assert bells[0].count() == watches
    two[1].finish(1)
    assert bells[0].count() == 2 * watches


@pytest.mark.parametrize("seed", range(20))
def test_each_turn_ends_alike_on_all_ranks_whatever_they_do(seed):
    ranks, count = 3, 60
    everyone, chance = turns_of(ranks), random.Random(seed)
    ways = [[chance.choice(("wait", "wait", "hurry", "submit")) for _ in range(count)] for _ in range(ranks)]
    ends = [[None] * count for _ in range(ranks)]
    # As the coordinator does: a rank that has not reduced a turn goes on when all ranks have come to it.
    arrived = [threading.Barrier(ranks) for _ in range(count)]

    def run(me: int) -> None:
        for turn in range(1, count + 1):
            way, array = ways[me][turn - 1], np.full(4, turn * 10.0**me, np.float64)
            if way == "submit":
                everyone[me].withdraw(turn)
                done = False
            else:
                done = reduce(everyone[me], turn, array, PATIENCE if way == "wait" else 1e-5) == COMPLETE
            ends[me][turn - 1] = done
            if done:
                np.testing.assert_array_equal(array, turn * 111.0)
            else:
                arrived[turn - 1].wait(30)

    at_once(ranks, run)
    assert ends[0] == ends[1] == ends[2]
    if any(set(turn) == {"wait"} for turn in zip(*ways, strict=True)):
        assert True in ends[0]


def test_the_last_rank_to_leave_is_told():
    assert [turns.leave() for turns in turns_of(3)] == [False, False, True]


def test_arguments_that_would_leave_the_memory_are_errors():
    (turns,) = turns_of(1)
    large = np.zeros(MOST_BYTES // 4 + 1, np.float32)
    with pytest.raises(ValueError, match="too large"):
        turns.arrive(1, ALIKE, large)
    for how, begin, root in ((REDUCE, 8, 0), (GATHER, MOST_BYTES, 0), (COPY, 0, 1)):
        with pytest.raises((ValueError, IndexError)):
            turns.read(1, large[:-1], how, begin, root, ReduceOp.SUM, Scale(1.0))
