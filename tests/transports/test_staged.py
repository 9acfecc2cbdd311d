"""Collectives through chunks in shared memory give the bits of the numpy kernels in rank order, whatever the order."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdkit.collectives.group import partition
from hvdkit.collectives.staging import Mode
from hvdkit.kernels import ReduceOp, Scale, numpy_kernels
from hvdkit.kernels.dtypes import DTYPES
from tests.kernels.arrays import KERNEL_OPS, Array, assert_same_bits, misaligned, values
from tests.transports.shared import LINE, bells_in, native, needs_memory_files, needs_native, new_window

pytestmark = [needs_native, needs_memory_files]

FLOAT32 = DTYPES["float32"]
MODES = list(Mode)
Shares = list[tuple[int, int]]


@dataclass
class Operation:
    """One operation of all ranks: what each brings, and what each must have at the end.

    ``apart``: the ranks bring it in read-only memory apart from the arrays, in which something else is at first.
    ``past_cache``: for each rank, what it writes past the cache, by reader. ``measure``: reading a line is timed.
    """

    mode: Mode
    arrays: list[Array]
    shares: Shares
    op: ReduceOp = ReduceOp.SUM
    scale: float | Scale = 1.0
    apart: bool = False
    past_cache: list[list[bool]] | None = None
    measure: bool = False

    def __post_init__(self) -> None:
        given = [array.copy() for array in self.arrays]
        if self.mode == Mode.EXCHANGE:  # of equal shares, out of other memory
            each = given[0].size // len(given)
            self.shares, self.apart = [(rank * each, (rank + 1) * each) for rank in range(len(given))], True
        self.sources: list[Array | None] = [None] * len(given)
        if self.apart:
            for rank, array in enumerate(self.arrays):
                self.sources[rank] = misaligned(array, rank)
                self.sources[rank].flags.writeable = False
                array[...] = 1
        self.expected = [array.copy() for array in self.arrays]
        runs = [(0, given[0].size)] if self.mode == Mode.WHOLE else self.shares
        if self.mode == Mode.EXCHANGE:
            for rank, array in enumerate(self.expected):
                for owner, (begin, end) in enumerate(runs):
                    array[begin:end] = given[owner][slice(*runs[rank])]
            return
        for owner, (begin, end) in enumerate(runs):
            result = given[owner][begin:end]
            if self.mode != Mode.ALLGATHER:
                result = np.empty(end - begin, given[0].dtype)
                numpy_kernels.reduce_into(result, [array[begin:end] for array in given], self.op, self.scale)
            for rank, array in enumerate(self.expected):
                if rank == owner or self.mode != Mode.REDUCE_SCATTER:
                    array[begin:end] = result

    def start(self, area: Any, rank: int) -> Any:
        return native.Staged(
            area,
            int(self.mode),
            self.arrays[rank],
            self.op,
            self.scale,
            self.shares,
            source=self.sources[rank],
            past_cache=self.past_cache[rank] if self.past_cache else [],
            measure=self.measure,
        )

    def check(self) -> None:
        for got, expected in zip(self.arrays, self.expected, strict=True):
            if self.mode in (Mode.ALLGATHER, Mode.EXCHANGE):  # copies, of NaN too
                assert got.tobytes() == expected.tobytes()
            else:
                assert_same_bits(got, expected)


class Party:
    """The ranks of an area, all on one window, and a look at the counters there."""

    def __init__(self, ranks: int, depth: int, slot_bytes: int) -> None:
        window = new_window(ranks * LINE + native.Area.bytes_needed(ranks, depth, slot_bytes))
        self.bells = bells_in(window, ranks)
        self.areas = [
            native.Area(window, ranks * LINE, ranks, me, depth, slot_bytes, self.bells) for me in range(ranks)
        ]
        self._counters = native.Cells(window, ranks * LINE, 3 * ranks)

    def done(self, rank: int) -> list[int]:
        """The chunks that a rank has staged, reduced and finished."""
        return [self._counters.get(3 * rank + which) for which in range(3)]

    def run(self, operations: list[Operation], rng: np.random.Generator) -> None:
        """Every rank runs the operations in order; who goes on next is drawn, and nobody waits for others to begin."""

        def rank_program(rank: int) -> Iterator[list[int]]:
            """Yields, where it cannot go on, for whom it waits; and nobody at the end of an operation."""
            for operation in operations:
                staged = operation.start(self.areas[rank], rank)
                while not staged.advance(0.0):
                    assert staged.awaited()
                    yield staged.awaited()
                assert staged.awaited() == []
                yield []

        running = {rank: rank_program(rank) for rank in range(len(self.areas))}
        while running:
            rank = int(rng.choice(list(running)))
            awaited = next(running[rank], None)
            if awaited is None:
                del running[rank]
            elif awaited:  # whoever is named can go on
                other = int(rng.choice(awaited))
                before = self.done(other)
                while self.done(other) == before:  # an operation without chunks may come first
                    waits = next(running[other])
                    assert not waits or self.done(other) != before, f"{rank} waits for {other}, which cannot go on"
        for operation in operations:
            operation.check()


def arrays(rng: np.random.Generator, dtype: np.dtype[Any], ranks: int, size: int) -> list[Array]:
    return [misaligned(values(rng, dtype, size), rank % 3) for rank in range(ranks)]


def uneven(rng: np.random.Generator, ranks: int, size: int) -> Shares:
    """Runs in any order, of any length, that leave some elements to nobody."""
    cuts = np.sort(rng.integers(0, size + 1, 2 * ranks)).reshape(ranks, 2)
    return [(int(begin), int(end)) for begin, end in rng.permutation(cuts)]


def of_one(rng: np.random.Generator, ranks: int, size: int) -> Shares:
    owner = rng.integers(0, ranks)
    return [(0, size) if rank == owner else (size, size) for rank in range(ranks)]


def whole_slots(mode: Mode, size: int, itemsize: int, ranks: int, lines: int) -> int:
    """Bytes of a slot: ``lines`` cache lines for each rank's piece, or all where everybody reduces everything."""
    return max(LINE, size * itemsize) if mode == Mode.WHOLE else ranks * lines * LINE


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    ranks=st.integers(1, 6),
    size=st.one_of(st.integers(0, 300), st.sampled_from([1, 63, 64, 65, 2049])),
    op=st.sampled_from(KERNEL_OPS),
    scale=st.sampled_from([1.0, 0.5, 1 / 3, -1e30, Scale(divisor=3), Scale(0.1, 7)]),
    depth=st.integers(1, 4),
    lines=st.integers(1, 4),
    shares=st.sampled_from([lambda rng, ranks, size: None, uneven, of_one]),
    apart=st.booleans(),
    past_cache=st.booleans(),
)
def test_every_rank_gets_the_bits_of_the_numpy_kernels(
    mode, dtype, seed, ranks, size, op, scale, depth, lines, shares, apart, past_cache
):
    rng = np.random.default_rng(seed)
    runs = shares(rng, ranks, size) or partition(size, ranks, dtype.itemsize)
    factor = 1.0 if dtype == np.bool_ or mode in (Mode.ALLGATHER, Mode.EXCHANGE) else scale
    apart = apart and mode != Mode.ALLGATHER
    operation = Operation(mode, arrays(rng, dtype, ranks, size), runs, op, factor, apart)
    if past_cache:
        operation.past_cache, operation.measure = rng.integers(0, 2, (ranks, ranks)).astype(bool).tolist(), True
    Party(ranks, depth, whole_slots(mode, size, dtype.itemsize, ranks, lines)).run([operation], rng)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1), ranks=st.integers(1, 6), depth=st.integers(1, 4))
def test_one_area_serves_operation_after_operation(data, seed, ranks, depth):
    rng = np.random.default_rng(seed)
    slot_bytes = ranks * LINE * data.draw(st.integers(1, 3))
    operations = []
    for _ in range(data.draw(st.integers(2, 6))):
        mode, dtype = data.draw(st.sampled_from(MODES)), data.draw(st.sampled_from(list(DTYPES.values())))
        most = slot_bytes // dtype.itemsize if mode == Mode.WHOLE else 200
        size = data.draw(st.integers(0, most))
        runs = data.draw(st.sampled_from([partition(size, ranks, dtype.itemsize), uneven(rng, ranks, size)]))
        operations.append(
            Operation(mode, arrays(rng, dtype, ranks, size), runs, data.draw(st.sampled_from(KERNEL_OPS)))
        )
    Party(ranks, depth, slot_bytes).run(operations, rng)


@pytest.mark.parametrize("past_cache", [None, [[True] * 3] * 3], ids=["in the cache", "through memory"])
@pytest.mark.parametrize("extra", [0, 7])
def test_large_results_apart_from_their_sources_come_past_the_cache_unchanged(extra, past_cache):
    rng = np.random.default_rng(extra)
    size = (1 << 22) + extra  # 16 MiB of float32
    inputs = [misaligned(rng.standard_normal(size).astype(np.float32), 4 * rank) for rank in range(3)]
    shares = [(0, size // 3), (size // 3, size - 1), (size - 1, size)]
    operation = Operation(Mode.ALLREDUCE, inputs, shares, scale=Scale(divisor=3), apart=True, past_cache=past_cache)
    Party(3, 4, 3 << 16).run([operation], rng)


@pytest.mark.parametrize("mode", [Mode.ALLREDUCE, Mode.REDUCE_SCATTER, Mode.ALLGATHER], ids=lambda mode: mode.name)
def test_reading_a_line_is_timed_for_one_other_rank_after_the_other(mode):
    rng = np.random.default_rng(0)
    party = Party(3, 4, 3 * LINE)
    for turn in range(4):
        # The lesser of two times: unknown before there are two.
        assert [[seconds > 0 for seconds in area.line_seconds()] for area in party.areas] == [
            [turn >= 3 and other == (me + 1) % 3 for other in range(3)] for me in range(3)
        ]
        party.run([Operation(mode, arrays(rng, FLOAT32, 3, 48), partition(48, 3, 4), measure=True)], rng)
    party.run([Operation(mode, arrays(rng, FLOAT32, 3, 48), partition(48, 3, 4))], rng)
    for me, area in enumerate(party.areas):
        assert [seconds > 0 for seconds in area.line_seconds()] == [other != me for other in range(3)]
        assert max(area.line_seconds()) < 1.0


SHARES = [(0, 4), (4, 8)]
array = np.zeros(9, np.float32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": 5}, "Staged: mode: expected 0 to 4"),
        ({"mode": -1}, "Staged: mode: expected 0 to 4"),
        ({"mode": 4, "shares": [(0, 5), (5, 8)]}, "Staged: shares: expected equal ones for an exchange"),
        ({"mode": 4}, "Staged: source: expected other memory"),
        ({"shares": [(0, 8)]}, "Staged: shares: expected one for each rank"),
        ({"shares": [(0, 4), (4, 9)]}, "Staged: shares: expected runs of the array"),
        ({"shares": [(0, 4), (5, 4)]}, "Staged: shares: expected runs of the array"),
        ({"past_cache": [True]}, "Staged: past_cache: expected one for each rank, or none"),
        ({"source": np.zeros(8, np.float16)}, "Staged: source: expected the dtype of array"),
        ({"source": np.zeros(7, np.float32)}, "Staged: source: expected 8 elements as in destination, got 7"),
        ({"source": [0.0] * 8}, "Staged: source: expected a numpy.ndarray, got list"),
        ({"source": array[:-1], "array": array[1:]}, "got a partial overlap"),
        ({"mode": int(Mode.WHOLE), "array": np.zeros(33, np.float32)}, "the tensor does not fit into a slot"),
    ],
)
def test_wrong_arguments_are_named(changes, message):
    area = Party(2, 2, 2 * LINE).areas[0]
    right = {"mode": 0, "array": array[:8], "shares": SHARES, "source": None, "past_cache": []}
    given = {**right, **changes}
    with pytest.raises((TypeError, ValueError), match=message):
        native.Staged(
            area, given["mode"], given["array"], ReduceOp.SUM, 1.0, given["shares"], given["source"],
            past_cache=given["past_cache"],
        )  # fmt: skip


def test_arrays_live_as_long_as_the_operation_on_them():
    own, source = (np.zeros(8, np.float32) for _ in range(2))
    owners = [weakref.ref(own), weakref.ref(source)]
    staged = native.Staged(Party(2, 2, 2 * LINE).areas[0], 0, own, ReduceOp.SUM, 1.0, SHARES, source=source)
    del own, source
    assert all(owner() is not None for owner in owners)
    assert not staged.advance(0.0)
    del staged
    assert [owner() for owner in owners] == [None, None]


def party_of_three(mode: Mode, size: int, depth: int) -> list[Any]:
    """Ranks 0, 1 and 2 in the same operation, of which nobody has done anything yet."""
    operation = Operation(mode, [np.ones(size, np.float32) for _ in range(3)], partition(size, 3, 4))
    slot_bytes = whole_slots(mode, size, 4, 3, 1)
    return [operation.start(area, rank) for rank, area in enumerate(Party(3, depth, slot_bytes).areas)]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_who_has_not_brought_its_part_is_awaited_and_nobody_else(mode):
    one, other, late = party_of_three(mode, 48, 4)
    assert not one.advance(0.0)
    assert one.awaited() == [1, 2]
    assert not other.advance(0.0)
    # The one has not reduced either, but that is because the late one is late.
    assert one.awaited() == [2]
    assert other.awaited() == [2]
    late.advance(0.0)
    if mode == Mode.ALLREDUCE:
        assert late.awaited() == [0, 1]  # their shares
        assert not one.advance(0.0)
        assert one.awaited() == [1]
        assert late.awaited() == [1]
        other.advance(0.0)
    for staged in (one, other, late):
        assert staged.advance(0.0)
        assert staged.awaited() == []


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_every_step_of_a_rank_rings_the_others(mode):
    party = Party(3, 4, whole_slots(mode, 48, 4, 3, 1))
    operation = Operation(mode, [np.ones(48, np.float32) for _ in range(3)], partition(48, 3, 4))
    ranks = [operation.start(area, rank) for rank, area in enumerate(party.areas)]
    steps = []
    for turn in range(9):  # in turn, so that rank 0 takes every step on its own
        rank = turn % 3
        rings, done = [bell.count() for bell in party.bells], party.done(rank)
        ranks[rank].advance(0.0)
        rung = [bell.count() != before for bell, before in zip(party.bells, rings, strict=True)]
        moved = party.done(rank) != done
        assert rung == [moved and other != rank for other in range(3)]
        steps.append(moved)
    assert steps[::3] == ([True, True, True] if mode == Mode.ALLREDUCE else [True, True, False])
    operation.check()


def test_an_operation_without_elements_is_over_at_once_unless_everybody_reduces_everything():
    for mode in (Mode.ALLREDUCE, Mode.REDUCE_SCATTER, Mode.ALLGATHER):
        assert party_of_three(mode, 0, 1)[0].advance(0.0)
    assert not party_of_three(Mode.WHOLE, 0, 1)[0].advance(0.0)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_reduced_share_goes_to_memory_of_its_own(ranks):
    rng = np.random.default_rng(ranks)
    party = Party(ranks, 2, ranks * LINE)
    sources = [rng.standard_normal(50 * ranks).astype(np.float32) for _ in range(ranks)]
    expected, before = sum(sources), [source.copy() for source in sources]
    shares = [(rank * 50, (rank + 1) * 50) for rank in range(ranks)]
    outs = [np.zeros(50, np.float32) for _ in range(ranks)]
    passes = [
        native.Staged(
            area, int(Mode.REDUCE_SCATTER), sources[rank], ReduceOp.SUM, 1.0, shares, None, [], False, outs[rank]
        )
        for rank, area in enumerate(party.areas)
    ]
    for each in passes:
        each.stage()  # reads nothing of other ranks
    ended = [False]
    while not all(ended):
        ended = [each.advance(0.0) for each in passes]
    for rank, out in enumerate(outs):
        np.testing.assert_allclose(out, expected[slice(*shares[rank])], rtol=1e-5)
        np.testing.assert_array_equal(sources[rank], before[rank])
