"""Every allreduce algorithm gives all ranks the right bits and sends the bytes of its formula, on 2 to 16 ranks."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdkit.collectives.algorithms import MASTER, children
from hvdkit.collectives.allreduce import ALGORITHMS, allreduce, choose_allreduce
from hvdkit.collectives.group import Choice, Group
from hvdkit.collectives.scratch import SCRATCH
from hvdkit.compression import CASTS, Cast
from hvdkit.kernels import ONE, ReduceOp, Scale, numpy_kernels
from tests.collectives.stepping import random_inputs, reduce_everywhere, reduce_in_random_order, run_everywhere

RANKS = [2, 3, 4, 5, 6, 7, 8, 12, 16]
ELEMENTS = [0, 1, 17, 1000]
RANK_ORDER = ["all_to_all", "two_phase", "round_robin", "master_worker"]
OWN_ORDER = ["ring", "tree", "butterfly"]
# A rounding to so many bits loses at most this part of a value.
ROUNDING = {"float64": 2**-53, "float32": 2**-24, "float16": 2**-11, "bfloat16": 2**-8}
NONE, FP16 = CASTS["none"], CASTS["fp16"]


def reduction(inputs: list[np.ndarray], op: ReduceOp, scale: Scale = ONE) -> np.ndarray:
    """In rank order, in one process, by the kernels' oracle."""
    result = np.empty_like(inputs[0])
    numpy_kernels.reduce_into(result, inputs, op, scale)
    return result


def outcomes(
    name: str, inputs: list[np.ndarray], op: ReduceOp = ReduceOp.SUM, scale: Scale = ONE, codec: Cast = NONE
) -> tuple[np.ndarray, list[int]]:
    """The result, of which all ranks have the same bits, and the bytes that each rank sent."""
    return reduce_everywhere(inputs, lambda group, buffer: ALGORITHMS[name](group, buffer, op, scale, codec, 0))


def formula(name: str, size: int, nbytes: int) -> list[int]:
    """What each rank sends if the payload has ``nbytes`` bytes and chunks are equal; else only all ranks' sum holds."""
    if name == "all_to_all":
        return [nbytes * (size - 1)] * size
    if name == "tree":
        return [nbytes * (len(children(rank, size)) + (rank != 0)) for rank in range(size)]
    if name == "master_worker":
        return [nbytes * (size - 1) if rank == MASTER else nbytes for rank in range(size)]
    if name == "butterfly":
        core = 1 << (size.bit_length() - 1)
        exchanged, extras = 2 * nbytes * (core - 1) // core, size - core
        return [nbytes, exchanged + nbytes] * extras + [exchanged] * (size - 2 * extras)
    return [2 * nbytes * (size - 1) // size] * size


def test_the_two_kinds_of_algorithms_here_are_all_there_are():
    assert sorted(ALGORITHMS) == sorted(RANK_ORDER + OWN_ORDER)


# -- bits -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("name", RANK_ORDER)
def test_sums_in_rank_order_have_the_bits_of_one_process_and_round_once(name, dtype, size):
    for elements in ELEMENTS:
        inputs = random_inputs(size, elements, dtype)
        result, _ = outcomes(name, inputs, scale=Scale(divisor=3))
        assert result.tobytes() == reduction(inputs, ReduceOp.SUM, Scale(divisor=3)).tobytes()


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("name", OWN_ORDER)
def test_sums_in_another_order_differ_by_one_rounding_a_hop(name, dtype, size):
    for elements in ELEMENTS:
        inputs = random_inputs(size, elements, dtype)
        result, _ = outcomes(name, inputs, scale=Scale(divisor=3))
        wide = [one.astype(np.float64) for one in inputs]
        # No partial sum is larger than the sum of magnitudes; each of P - 1 additions and the scale rounds once.
        bound = size * ROUNDING[dtype] * sum(np.abs(one) for one in wide) / 3 + 1e-7 * (dtype == "float16")
        assert np.all(np.abs(result.astype(np.float64) - sum(wide) / 3) <= 1.01 * bound)


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("dtype", ["int32", "float32", "float64", "float16", "bfloat16", "bool"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_integers_and_minimum_and_maximum_are_exact_whatever_the_order(name, dtype, size):
    ops = [ReduceOp.MIN, ReduceOp.MAX, *([ReduceOp.SUM, ReduceOp.PRODUCT] if dtype == "int32" else [])]
    for elements, op in itertools.product(ELEMENTS, ops):
        inputs = random_inputs(size, elements, dtype)
        result, _ = outcomes(name, inputs, op)
        assert result.tobytes() == reduction(inputs, op).tobytes()


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_scale_is_applied_once_to_the_whole_sum(name, size):
    # Truncated toward zero: any part of the sum that was scaled by itself, or twice, would show.
    inputs = [np.arange(rank, rank + 1000, dtype=np.int32) for rank in range(size)]
    result, _ = outcomes(name, inputs, scale=Scale(divisor=7))
    np.testing.assert_array_equal(result, reduction(inputs, ReduceOp.SUM, Scale(divisor=7)))


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("name", sorted({*ALGORITHMS} - {"ring"}))  # which sums in the order of a rotation
def test_of_two_zeros_that_compare_equal_the_last_rank_s_wins(name, size):
    inputs = [np.where(np.arange(100) // 3 % size == rank, -0.0, 0.0).astype(np.float32) for rank in range(size)]
    for op in (ReduceOp.MIN, ReduceOp.MAX):
        result, _ = outcomes(name, inputs, op)
        assert result.tobytes() == inputs[-1].tobytes()


@given(
    name=st.sampled_from(sorted(ALGORITHMS)),
    size=st.integers(2, 16),
    pattern=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=8),
    elements=st.integers(0, 2000),
    codec=st.sampled_from([NONE, FP16]),
    op=st.sampled_from([ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT]),
)
@settings(deadline=None, max_examples=150)
def test_any_values_reduce_exactly_as_integers_and_to_the_same_bits_as_floats(name, size, pattern, elements, codec, op):
    # Every bit pattern may come up: infinities, NaNs, subnormal numbers.
    words = [np.resize(np.roll(np.array(pattern, np.uint32), rank), elements) + np.uint32(rank) for rank in range(size)]
    integers, _ = outcomes(name, [one.view(np.int32) for one in words], op, codec=codec)
    np.testing.assert_array_equal(integers, reduction([one.view(np.int32) for one in words], op))
    floats = [one.view(np.float32) for one in words]
    first, _ = outcomes(name, floats, op, 0.5, codec)
    again, _ = outcomes(name, floats, op, 0.5, codec)
    assert first.tobytes() == again.tobytes()
    if name in RANK_ORDER:
        baseline, _ = outcomes("two_phase", floats, op, 0.5, codec)
        np.testing.assert_array_equal(first, baseline)


# -- codecs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", RANK_ORDER)
def test_fp16_payloads_are_summed_wide_and_the_result_is_rounded_once(name, dtype, size):
    for elements in ELEMENTS:
        inputs = random_inputs(size, elements, dtype)
        travelled = [one.astype(np.float16).astype(dtype) for one in inputs]
        expected = reduction(travelled, ReduceOp.SUM, Scale(divisor=size)).astype(np.float16).astype(dtype)
        result, _ = outcomes(name, inputs, scale=Scale(divisor=size), codec=FP16)
        assert result.tobytes() == expected.tobytes()


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("name", RANK_ORDER)
def test_an_average_in_rank_order_may_have_a_sum_beyond_fp16(name, size):
    # 6e4 is near fp16's largest value: a sum in fp16 would overflow before the average brings it back.
    inputs = [np.full(16 * size, 6e4, dtype=np.float32) for _ in range(size)]
    result, _ = outcomes(name, inputs, scale=Scale(divisor=size), codec=FP16)
    np.testing.assert_allclose(result, np.float32(np.float16(6e4)))


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("dtype", ["int32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_what_a_codec_leaves_alone_is_reduced_as_without_it(name, dtype, size):
    inputs = random_inputs(size, 1000, dtype)
    result, _ = outcomes(name, inputs, codec=FP16)
    assert result.tobytes() == outcomes(name, inputs)[0].tobytes()


# -- traffic ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", range(2, 17))
@pytest.mark.parametrize("name", ALGORITHMS)
def test_each_rank_sends_the_bytes_of_its_formula(name, size):
    # So many cache lines of payload that every algorithm's chunks are equal.
    elements = 3 * 16 * math.lcm(size, 16)
    inputs = random_inputs(size, elements)
    assert outcomes(name, inputs)[1] == formula(name, size, 4 * elements)
    assert outcomes(name, inputs, codec=FP16)[1] == formula(name, size, 2 * elements)


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_all_ranks_together_send_the_bytes_of_the_formula_whatever_the_chunks(name, size):
    for elements in [*ELEMENTS, 12345]:
        nbytes = 4 * elements
        total = size * nbytes * (size - 1) if name == "all_to_all" else 2 * nbytes * (size - 1)
        assert sum(outcomes(name, random_inputs(size, elements))[1]) == total


# -- how they behave --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_slow_sends_and_the_order_of_the_ranks_change_nothing(name, size):
    for codec in (NONE, FP16):
        inputs = random_inputs(size, 1000)
        expected, _ = outcomes(name, inputs, scale=Scale(0.5), codec=codec)

        def steps(group: Group, buffer, codec=codec):
            return ALGORITHMS[name](group, buffer, ReduceOp.SUM, Scale(0.5), codec, 6)

        for seed in range(3):
            result, tags = reduce_in_random_order(inputs, steps, seed)
            assert set().union(*tags) <= {6, 7}
            assert result.tobytes() == expected.tobytes()


@pytest.mark.parametrize("codec", [NONE, FP16], ids=["none", "fp16"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_scratch_memory_is_given_back(name, codec, monkeypatch):
    lent = []
    take, give_back = SCRATCH.take, SCRATCH.give_back

    def taken(nbytes):
        lent.append(take(nbytes))
        return lent[-1]

    def given_back(buffer):
        (index,) = [index for index, one in enumerate(lent) if one is buffer]
        del lent[index]
        give_back(buffer)

    monkeypatch.setattr(SCRATCH, "take", taken)
    monkeypatch.setattr(SCRATCH, "give_back", given_back)
    for elements in ELEMENTS:
        outcomes(name, random_inputs(7, elements), codec=codec)
        assert not lent


# -- the choice -------------------------------------------------------------------------------------------------------


def test_the_cheaper_of_two_is_chosen_and_both_costs_are_told():
    # 50 us, 1.25 GB/s, 0.1 ns a byte summed: 50 + 3 x 3.2 + 4 x 0.4 us against 100 + 1.5 x 3.2 + 0.4 us.
    assert choose_allreduce(4000, 4) == ("all_to_all", "4000 bytes x 4 ranks: all_to_all 61.2 us, two_phase 105.2 us")
    # 50 + 3 x 800 + 4 x 100 us against 100 + 1.5 x 800 + 100 us.
    name, reason = choose_allreduce(1_000_000, 4)
    assert name == "two_phase"
    assert reason == "1000000 bytes x 4 ranks: all_to_all 2850.0 us, two_phase 1400.0 us"


@pytest.mark.parametrize(
    ("nbytes", "ranks", "choice", "name"),
    [
        # 3 n beta - 1.5 n beta = alpha at n = 1000, where summing takes next to nothing.
        (999, 4, Choice("auto", 1500e-6, 1e-6), "all_to_all"),
        (1001, 4, Choice("auto", 1500e-6, 1e-6), "two_phase"),
        # Two ranks send as much either way, but with the second exchange each sums only half.
        (100_000, 2, Choice(), "all_to_all"),
        (1_000_000, 2, Choice(), "two_phase"),
    ],
)
def test_the_choice_turns_where_the_bytes_saved_cost_as_much_as_an_exchange(nbytes, ranks, choice, name):
    assert choose_allreduce(nbytes, ranks, choice)[0] == name


def test_an_algorithm_that_is_asked_for_is_taken_whatever_it_costs_if_it_is_known():
    for name in ALGORITHMS:
        assert choose_allreduce(1 << 30, 16, Choice(name)) == (name, "HVDKIT_ALLREDUCE")
    with pytest.raises(ValueError, match=r"expected one of auto, all_to_all, .*master_worker, got 'star'"):
        choose_allreduce(4, 2, Choice("star"))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_allreduce_takes_the_choice_of_the_group_or_the_one_it_is_given(name):
    size, elements = 5, 16 * math.lcm(5, 4)
    inputs = random_inputs(size, elements, "int32")
    expected = reduction(inputs, ReduceOp.SUM)
    for of_group, given_one in ((Choice(name), None), (Choice("two_phase"), Choice(name))):

        def steps(group: Group, buffer, of_group=of_group, given_one=given_one):
            group.choice = of_group
            return allreduce(group, buffer, ReduceOp.SUM, ONE, NONE, 0, given_one)

        result, sent = reduce_everywhere(inputs, steps)
        assert sent == formula(name, size, 4 * elements)
        np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("codec", [NONE, FP16], ids=["none", "fp16"])
def test_one_rank_alone_sends_nothing_but_encodes_and_scales(codec):
    buffer = np.array([1 / 3, 3.0], np.float32)
    run_everywhere(1, lambda group: allreduce(group, buffer, ReduceOp.SUM, Scale(0.5), codec, 0))
    third = np.float32(np.float16(1 / 3)) if codec.lossy else np.float32(1 / 3)
    np.testing.assert_array_equal(buffer, [third * np.float32(0.5), 1.5])
