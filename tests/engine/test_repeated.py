"""Small allreduces that come again: agreed on by two threads, as the ranks of a node would, in one memory file."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

from hvdkit import kernels
from hvdkit.engine.loop.coordinator import Coordinator
from hvdkit.engine.loop.messages import Ask, Join
from hvdkit.engine.ops.allreduce import region_for
from hvdkit.engine.ops.requests import Key, Request
from hvdkit.kernels import ReduceOp, Scale
from tests.engine.test_coordinator import allreduce, sent_to, taken

needs_native = pytest.mark.skipif(kernels.backend() != "native", reason="needs the native kernels")

REGIONS, MOST_BYTES, PATIENCE = 4, 1024, 10.0


def areas(ranks: int) -> list:
    """One for each rank, in memory that they share."""
    from hvdkit.kernels._native import Repeated, Window

    descriptor = os.memfd_create("hvdkit-test")
    try:
        nbytes = Repeated.bytes_needed(ranks, REGIONS, MOST_BYTES)
        os.ftruncate(descriptor, nbytes)
        windows = [Window(descriptor, 0, nbytes) for _ in range(ranks)]
    finally:
        os.close(descriptor)
    return [Repeated(window, 0, ranks, me, REGIONS, MOST_BYTES) for me, window in enumerate(windows)]


def at_once(*calls: Callable[[], object]) -> list:
    """What each returns, of threads that begin together."""
    results: list = [None] * len(calls)
    barrier = threading.Barrier(len(calls))

    def run(number: int) -> None:
        barrier.wait()
        results[number] = calls[number]()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def reduce(area, turn, array, seconds=PATIENCE, source=None, region=0, scale=Scale(1.0)):  # noqa: B008 (it never changes)
    return area.allreduce(region, turn, array, ReduceOp.SUM, scale, source, seconds)


@needs_native
def test_all_ranks_get_the_sum_in_rank_order_in_place_or_out_of_a_source():
    three = areas(3)
    values = [np.array([1e8, 1.0], np.float32), np.array([-1e8, 2.0], np.float32), np.array([0.5, 3.0], np.float32)]
    arrays = [values[0].copy(), np.empty(2, np.float32), values[2].copy()]
    sources = [None, values[1], None]
    done = at_once(*(lambda me=me: reduce(three[me], 1, arrays[me], source=sources[me]) for me in range(3)))
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
    assert at_once(*(lambda me=me: reduce(two[me], 2, arrays[me]) for me in range(2))) == [True, True]
    np.testing.assert_array_equal(arrays[1], 2)


@needs_native
def test_what_is_submitted_in_another_way_is_withdrawn():
    two = areas(2)
    two[0].withdraw(0, 1)
    assert not reduce(two[1], 1, np.ones(2, np.float32))
    two[0].withdraw(0, 1)
    two[1].withdraw(1, 1)  # another region's
    arrays = [np.ones(2, np.float32), np.ones(2, np.float32)]
    assert at_once(*(lambda me=me: reduce(two[me], 2, arrays[me]) for me in range(2))) == [True, True]


@needs_native
def test_a_rank_whose_count_differs_reduces_nothing():
    two = areas(2)
    results = at_once(
        lambda: reduce(two[0], 3, np.ones(2, np.float32), 0.05), lambda: reduce(two[1], 5, np.ones(2, np.float32), 0.05)
    )
    assert results == [False, False]


@needs_native
@pytest.mark.parametrize("seed", range(20))
def test_each_turn_ends_alike_on_all_ranks_whatever_they_do(seed):
    ranks, turns = 3, 60
    all_areas, chance = areas(ranks), random.Random(seed)
    ways = [[chance.choice(("wait", "wait", "hurry", "submit")) for _ in range(turns)] for _ in range(ranks)]
    ends = [[None] * turns for _ in range(ranks)]
    # What a coordinator is for: who has not reduced a turn goes on when all ranks have come to it.
    arrived = [threading.Barrier(ranks) for _ in range(turns)]

    def run(me: int) -> bool:
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
        return True

    assert at_once(*(lambda me=me: run(me) for me in range(ranks))) == [True] * ranks
    assert ends[0] == ends[1] == ends[2]
    if any(set(turn) == {"wait"} for turn in zip(*ways, strict=True)):
        assert True in ends[0]


@needs_native
def test_who_leaves_last_is_told():
    three = areas(3)
    assert [one.leave() for one in three] == [False, False, True]


@needs_native
@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((9, 1, np.ones(2, np.float32)), IndexError),
        ((0, 1, np.ones(1000, np.float32)), ValueError),
        ((0, 1, np.ones(2, np.complex64)), TypeError),
    ],
)
def test_wrong_arguments_are_refused(arguments, error):
    (one,) = areas(1)
    with pytest.raises(error):
        one.allreduce(*arguments, ReduceOp.SUM, Scale(1.0), None, 0.0)


def assign(signature, key=Key(0, "allreduce", "x")):  # noqa: B008 (it never changes)
    assigned = SimpleNamespace(next_region=lambda key, signature: 7)
    return region_for(assigned, key, {0: Request(signature)})


def test_only_small_and_simple_operations_have_regions():
    assert assign(allreduce()) == 7
    assert assign(allreduce(device="cuda")) is None
    assert assign({**allreduce(), "direct": True}) is None
    assert assign(allreduce(op=int(ReduceOp.ADASUM))) is None
    assert assign({**allreduce(), "prescale": 2.0}) is None
    assert assign({**allreduce(), "codec": "int8"}) is None
    assert assign({**allreduce(), "shape": [[2], [3]]}) is None
    assert assign(allreduce((400, 400))) is None


def run_once(coordinator, signature, name="x", ranks=2):
    for rank in range(ranks):
        coordinator.receive(rank, Ask(signature, name, None), 0.0)
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
