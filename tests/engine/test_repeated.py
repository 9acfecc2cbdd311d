"""Small allreduces that come again: agreed on by two threads, as the ranks of a node would, in one memory file."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

from hvdkit.engine.loop.coordinator import Coordinator
from hvdkit.engine.loop.messages import Join
from hvdkit.engine.ops.allreduce import region_for
from hvdkit.engine.ops.requests import Key, Request
from hvdkit.kernels import ReduceOp, Scale
from tests.engine.test_coordinator import allreduce, ask, sent_to, taken
from tests.transports.shared import in_thread, memory_file, needs_native

REGIONS, MOST_BYTES, PATIENCE = 4, 1024, 10.0


def areas(ranks: int) -> list:
    """One for each rank, in memory that they share."""
    from hvdkit.kernels._native import Repeated, Window

    nbytes = Repeated.bytes_needed(ranks, REGIONS, MOST_BYTES)
    with memory_file(nbytes) as descriptor:
        windows = [Window(descriptor, 0, nbytes) for _ in range(ranks)]
    return [Repeated(window, 0, ranks, me, REGIONS, MOST_BYTES) for me, window in enumerate(windows)]


def at_once(ranks: int, call: Callable[[int], object]) -> list:
    """What ``call(rank)`` returns on threads that begin together."""
    barrier = threading.Barrier(ranks)

    def run(rank: int) -> object:
        barrier.wait()
        return call(rank)

    return [outcome.result(60) for outcome in [in_thread(run, rank) for rank in range(ranks)]]


def reduce(area, turn, array, seconds=PATIENCE, source=None, region=0, scale=Scale(1.0)):  # noqa: B008 (it never changes)
    return area.allreduce(region, turn, array, ReduceOp.SUM, scale, source, seconds)


@needs_native
def test_all_ranks_get_the_sum_in_rank_order_in_place_or_out_of_a_source():
    three = areas(3)
    values = [np.array([1e8, 1.0], np.float32), np.array([-1e8, 2.0], np.float32), np.array([0.5, 3.0], np.float32)]
    arrays = [values[0].copy(), np.empty(2, np.float32), values[2].copy()]
    sources = [None, values[1], None]
    done = at_once(3, lambda me: reduce(three[me], 1, arrays[me], source=sources[me]))
    assert done == [True] * 3
    for array in arrays:
        np.testing.assert_array_equal(array, (values[0] + values[1]) + values[2])


@needs_native
def test_who_waits_too_long_withdraws_the_turn_for_all():
    two = areas(2)
    array = np.ones(2, np.float32)
    assert not reduce(two[0], 1, array, seconds=0.001)
    np.testing.assert_array_equal(array, 1)
    assert not reduce(two[1], 1, array, seconds=PATIENCE), "at once: it was withdrawn"
    arrays = [np.ones(2, np.float32), np.ones(2, np.float32)]
    assert at_once(2, lambda me: reduce(two[me], 2, arrays[me])) == [True, True]
    np.testing.assert_array_equal(arrays[1], 2)


@needs_native
def test_what_is_submitted_in_another_way_is_withdrawn():
    two = areas(2)
    two[0].withdraw(0, 1)
    assert not reduce(two[1], 1, np.ones(2, np.float32))
    two[0].withdraw(0, 1)
    two[1].withdraw(1, 1)  # another region's
    arrays = [np.ones(2, np.float32), np.ones(2, np.float32)]
    assert at_once(2, lambda me: reduce(two[me], 2, arrays[me])) == [True, True]


@needs_native
def test_a_rank_whose_count_differs_reduces_nothing():
    two = areas(2)
    assert at_once(2, lambda me: reduce(two[me], (3, 5)[me], np.ones(2, np.float32), 0.05)) == [False, False]


@needs_native
@pytest.mark.parametrize("seed", range(20))
def test_each_turn_ends_alike_on_all_ranks_whatever_they_do(seed):
    ranks, turns = 3, 60
    all_areas, chance = areas(ranks), random.Random(seed)
    ways = [[chance.choice(("wait", "wait", "hurry", "submit")) for _ in range(turns)] for _ in range(ranks)]
    ends = [[None] * turns for _ in range(ranks)]
    # What a coordinator is for: who has not reduced a turn goes on when all ranks have come to it.
    arrived = [threading.Barrier(ranks) for _ in range(turns)]

    def run(me: int) -> None:
        for turn in range(1, turns + 1):
            way, array = ways[me][turn - 1], np.full(4, turn * 10.0**me, np.float64)
            if way == "submit":
                all_areas[me].withdraw(0, turn)
                done = False
            else:
                done = reduce(all_areas[me], turn, array, PATIENCE if way == "wait" else 1e-5)
            ends[me][turn - 1] = done
            if done:
                np.testing.assert_array_equal(array, turn * 111.0)
            else:
                arrived[turn - 1].wait(30)

    at_once(ranks, run)
    assert ends[0] == ends[1] == ends[2]
    if any(set(turn) == {"wait"} for turn in zip(*ways, strict=True)):
        assert True in ends[0]


@needs_native
def test_who_leaves_last_is_told():
    three = areas(3)
    assert [one.leave() for one in three] == [False, False, True]


def assign(signature, key=Key(0, "allreduce", "x")):  # noqa: B008 (it never changes)
    assigned = SimpleNamespace(next_region=lambda key, signature: 7)
    return region_for(assigned, key, {0: Request(signature)})


def test_only_small_and_simple_operations_have_regions():
    assert assign(allreduce()) == 7
    for signature in (
        allreduce(device="cuda"),
        allreduce(op=int(ReduceOp.ADASUM)),
        allreduce((400, 400)),
        {**allreduce(), "direct": True},
        {**allreduce(), "prescale": 2.0},
        {**allreduce(), "codec": "int8"},
        {**allreduce(), "shape": [[2], [3]]},
    ):
        assert assign(signature) is None


def run_once(coordinator, signature, name="x", ranks=2):
    ask(coordinator, signature, *range(ranks), name=name)
    (message,) = sent_to(taken(coordinator), 0)
    return message.names[0][1]


def test_what_comes_again_gets_a_region_once():
    coordinator = Coordinator(2, 0)
    assert [run_once(coordinator, allreduce()) for _ in range(4)] == [None, 0, None, None]
    assert [run_once(coordinator, allreduce(), "y") for _ in range(3)] == [None, 1, None]
    # What has no name comes again where all but its number does.
    numbers = (f"allreduce.noname.{number}" for number in range(5))
    shapes = ((3,), (4,), (3,), (4,), (3,))
    regions = [run_once(coordinator, allreduce(shape), name) for name, shape in zip(numbers, shapes, strict=True)]
    assert regions == [None, None, 2, 3, None]
    # Another shape each time is nothing that comes again.
    assert [run_once(coordinator, allreduce((number,)), "z") for number in (1, 2, 1, 1)] == [None, None, None, 4]


def test_after_a_join_regions_are_given_anew():
    coordinator = Coordinator(2, 0)
    assert [run_once(coordinator, allreduce()) for _ in range(2)] == [None, 0]
    coordinator.receive(1, Join(), 0.0)
    taken(coordinator)
    assert [run_once(coordinator, allreduce(), ranks=1) for _ in range(3)] == [None] * 3
    coordinator.receive(0, Join(), 0.0)
    taken(coordinator)
    assert [run_once(coordinator, allreduce()) for _ in range(3)] == [None, 1, None]
