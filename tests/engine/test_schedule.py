"""When what travels: sizes follow what was measured, pieces cover their buckets, the most urgent goes first."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdkit.compression import CASTS, Int8, PowerSGD
from hvdkit.engine.loop.driver import spin_seconds
from hvdkit.engine.ranks.topology import nodes_that_share, topology_of
from hvdkit.engine.steps.offers import block_offsets
from hvdkit.engine.steps.plan import Slot, load
from hvdkit.engine.steps.schedule import (
    BUCKET_AT_THE_END,
    LARGEST_BUCKET,
    SMALLEST_BUCKET,
    Network,
    Piece,
    choose_sizes,
    cut,
    for_a_device,
    send_order,
    without_overlap,
)
from tests.network import MemoryTransport, Wires

GIGABIT = Network(100e-6, 8e-9)
TEN_GIGABITS = Network(50e-6, 0.8e-9)
few = settings(max_examples=60, deadline=None)


def test_what_is_in_flight_counts_as_what_is_on_the_wire():
    sizes, floats, halves = choose_sizes(GIGABIT, 0, None), np.dtype(np.float32), np.dtype(np.float16)
    assert load(8 << 20, floats, CASTS["none"], sizes) == 8 << 20
    assert load(8 << 20, floats, CASTS["fp16"], sizes) == 4 << 20
    assert load(8 << 20, halves, CASTS["fp16"], sizes) == 8 << 20
    # As a bucket of the usual size, or of the smallest, where a fusion threshold of 0 makes one of each tensor.
    assert load(8 << 20, floats, Int8(), sizes) == 1 << 20
    assert load(8 << 20, floats, PowerSGD(), choose_sizes(GIGABIT, 2 << 20, None)) == 2 << 20
    assert load(1000, floats, Int8(), sizes) == 1000


@pytest.mark.parametrize("network", [GIGABIT, TEN_GIGABITS, Network(0.0, 0.0), Network(10.0, 1e-12), Network(0.0, 1.0)])
def test_buckets_stay_within_their_bounds_on_any_network(network):
    sizes = choose_sizes(network, None, None)
    assert SMALLEST_BUCKET <= sizes.bucket <= LARGEST_BUCKET
    assert 0 < sizes.first_bucket <= sizes.bucket
    assert sizes.in_flight >= sizes.bucket


def test_a_bucket_and_a_tensor_alone_are_not_smaller_than_what_the_transport_finds_worthwhile():
    sizes = choose_sizes(Network(0.0, 0.0), None, None, 16 << 20)
    assert sizes.bucket == sizes.alone == 16 << 20
    assert "worth 16 MiB" in sizes.reason
    usual = choose_sizes(GIGABIT, None, None)
    assert choose_sizes(GIGABIT, None, None, 0).bucket == usual.bucket
    assert usual.alone == choose_sizes(GIGABIT, None, 777).alone == 1 << 20


def test_what_is_summed_at_the_end_goes_in_few_large_buckets():
    usual = choose_sizes(TEN_GIGABITS, None, None)
    sizes = without_overlap(usual)
    assert sizes.bucket == sizes.first_bucket == BUCKET_AT_THE_END > usual.bucket
    assert (sizes.in_flight, sizes.encoded_bucket, sizes.alone) == (usual.in_flight, usual.encoded_bucket, None)
    larger = choose_sizes(TEN_GIGABITS, None, None, 256 << 20)
    assert without_overlap(larger).bucket == larger.bucket


def test_a_quicker_network_gets_larger_buckets_and_one_with_long_trips_more_bytes_in_flight_within_a_bound():
    assert choose_sizes(TEN_GIGABITS, None, None).bucket > choose_sizes(GIGABIT, None, None).bucket
    assert choose_sizes(Network(0.03, 0.8e-9), None, None).in_flight == int(2 * 0.03 / 0.8e-9)
    assert choose_sizes(Network(1.0, 0.0), None, None).in_flight <= 16 * LARGEST_BUCKET


def test_what_the_user_asks_for_wins_and_is_the_reason():
    sizes = choose_sizes(GIGABIT, 12345, 777, 16 << 20)
    assert (sizes.bucket, sizes.first_bucket, sizes.in_flight, sizes.alone) == (12345, 12345, 777, None)
    assert "HVDKIT_FUSION_THRESHOLD" in sizes.reason
    assert "HVDKIT_MAX_BYTES_IN_FLIGHT" in sizes.reason
    assert "1 us" in choose_sizes(Network(1e-6, 1e-9), None, None).reason


@few
@given(st.lists(st.tuples(st.integers(0, 100_000), st.sampled_from([1, 2, 4, 8])), max_size=12), st.integers(0, 50_000))
def test_pieces_cover_each_bucket_once_in_order_and_only_large_ones_are_cut(buckets, largest):
    pieces = cut([count for count, _ in buckets], [itemsize for _, itemsize in buckets], [largest] * len(buckets))
    for index, (count, itemsize) in enumerate(buckets):
        mine = [piece for piece in pieces if piece.bucket == index]
        assert [piece.part for piece in mine] == list(range(mine[0].parts))
        assert len(mine) == mine[0].parts
        assert mine[0].begin == 0
        assert mine[-1].end == count
        assert all(before.end == after.begin for before, after in itertools.pairwise(mine))
        if largest == 0 or count * itemsize <= 2 * largest:
            assert len(mine) == 1
        else:
            assert all((piece.end - piece.begin) * itemsize <= largest + 64 for piece in mine)
            assert all(piece.begin * itemsize % 64 == 0 for piece in mine)
    assert [piece.bucket for piece in pieces] == sorted(piece.bucket for piece in pieces)


def test_on_a_slow_wire_what_the_next_forward_pass_needs_first_overtakes_the_rest_of_a_large_tensor():
    large = [Piece(0, part * 10, part * 10 + 10, part, 4) for part in range(4)]
    urgent = Piece(1, 0, 10, 0, 1)
    # Each piece takes 2 s; the urgent one is ready after 3 s, when the second piece is on the wire.
    order, reasons = send_order([*large, urgent], [0.0, 3.0], [5, 0], [2 * 10**6] * 5, Network(0.0, 1e-6))
    assert order == [0, 1, 4, 2, 3]
    assert reasons[2] == "needed sooner than 2 that were ready before"


@few
@given(st.lists(st.tuples(st.floats(0, 10), st.integers(0, 20), st.integers(1, 10**7)), min_size=1, max_size=30))
def test_every_piece_travels_once_and_none_waits_while_the_wire_has_nothing_better(buckets):
    pieces = [Piece(index, 0, 1, 0, 1) for index in range(len(buckets))]
    ready_at = [at for at, _, _ in buckets]
    nbytes = [size for _, _, size in buckets]
    order, reasons = send_order(pieces, ready_at, [needed for _, needed, _ in buckets], nbytes, GIGABIT)
    assert sorted(order) == list(range(len(buckets)))
    assert len(reasons) == len(order)

    # Work-conserving: the wire is done when any order that never idles would be.
    def end(turns):
        now = 0.0
        for turn in turns:
            now = max(now, ready_at[turn]) + 100e-6 + nbytes[turn] * GIGABIT.seconds_per_byte
        return now

    by_readiness = sorted(range(len(buckets)), key=lambda one: ready_at[one])
    assert end(order) == pytest.approx(end(by_readiness))


def test_a_device_has_buckets_of_its_own_size_unless_one_was_asked_for():
    network = Network(50e-6, 1e-9)
    sizes = for_a_device(choose_sizes(network, None, None))
    assert (sizes.bucket, sizes.first_bucket, sizes.alone) == (25 << 20, 1 << 20, None)
    assert sizes.in_flight >= 2 * sizes.bucket
    asked = for_a_device(choose_sizes(network, 3 << 20, None))
    assert (asked.bucket, asked.first_bucket) == (3 << 20, 3 << 20)


def test_small_gradients_have_one_block_and_large_ones_a_place_in_it_only_where_they_come_from_a_device():
    floats, halves = np.dtype(np.float32), np.dtype(np.float16)
    slots = [Slot("a", (3,), floats), Slot("b", (1 << 20,), floats), Slot("c", (33,), halves), Slot("d", (0,), floats)]
    assert block_offsets(slots) == ([0, None, 64, 192], 192)
    behind = 64 + (4 << 20)
    assert block_offsets(slots, holds_all=True) == ([0, 64, behind, behind + 128], behind + 128)


def test_a_node_on_which_one_rank_cannot_share_memory_falls_into_single_ranks():
    assert nodes_that_share([(0, 1), (2, 3)], []) == [[0, 1], [2, 3]]
    assert nodes_that_share([(0, 2), (1, 3)], [3]) == [[0, 2], [1], [3]]


def test_ranks_that_share_cores_do_not_watch_but_sleep():
    def spins(*cores: list[int], polling: bool = True) -> float:
        launcher = dict.fromkeys(["local_rank", "local_size"])
        reports = [{**launcher, "host": "a", "cores": one, "threads": 1} for one in cores]
        transport = MemoryTransport(0, len(reports), Wires(len(reports)))
        transport.polling = polling
        return spin_seconds(1e-4, transport, topology_of(0, reports))

    everywhere = [0, 1, 2, 3]
    assert spins(*[everywhere] * 4) == 1e-4
    assert spins(*[everywhere] * 5) == 0.0
    assert spins([0], [1]) == 1e-4, "as mpirun binds ranks: each has a core of its own"
    assert spins([0], [0]) == 0.0
    assert spins([0], [0], everywhere) == 0.0, "the first two share one"
    assert spins([0, 1], [0, 1], everywhere, everywhere) == 1e-4
    assert spins(*[everywhere] * 4, polling=False) == 0.0, "nobody rings: events come from threads of this process"
