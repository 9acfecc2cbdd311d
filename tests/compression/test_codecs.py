"""Each codec by itself: what was sent plus what is kept is what came in, whatever the values are."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdkit.compression import DGC, CodecState, Int8, RandomK, TopK
from hvdkit.compression.sparse import FEWEST, MOST
from tests.compression.codecs import CODECS, LENGTHS, WITHOUT_FEEDBACK, decoded, encoded, memory_for

PATTERNS = {
    "normal": lambda generator, n: generator.standard_normal(n),
    "zeros": lambda generator, n: np.zeros(n),
    "equal": lambda generator, n: np.full(n, 0.3),
    "tiny": lambda generator, n: generator.standard_normal(n) * 1e-42,
    "huge": lambda generator, n: generator.standard_normal(n) * 1e34,
    "heavy tails": lambda generator, n: generator.standard_cauchy(n),
    "one among zeros": lambda generator, n: np.where(np.arange(n) == n // 2, 5.0, 0.0),
}


def values_of(pattern: str, elements: int, seed: int = 0) -> np.ndarray:
    return PATTERNS[pattern](np.random.default_rng(seed), elements).astype(np.float32)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_what_was_sent_plus_what_is_kept_is_what_came_in(codec, pattern):
    for elements in LENGTHS:
        memory = memory_for(codec, elements)
        for step in range(3):
            values = values_of(pattern, elements, step)
            before = memory.arrays["residual"].astype(np.float64)
            payload = encoded(codec, values, memory)
            sent, kept = decoded(codec, payload, elements).astype(np.float64), memory.arrays["residual"]
            came_in = values.astype(np.float64) + before
            # One rounding of the sum that came in, and one of what is left over.
            tolerance = 2e-7 * (np.abs(values) + np.abs(before) + np.abs(sent) + np.abs(kept)) + 1e-44
            assert np.all(np.abs(sent + kept - came_in) <= tolerance)


@pytest.mark.parametrize("codec", WITHOUT_FEEDBACK.values(), ids=WITHOUT_FEEDBACK)
def test_without_feedback_nothing_is_kept(codec):
    assert codec.keeps == ()
    values = values_of("normal", 5000)
    memory = memory_for(codec, values.size)
    first = encoded(codec, values, memory)
    assert encoded(codec, values, memory).tobytes() == first.tobytes()


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_adding_adds_and_scaling_scales(codec):
    for elements in LENGTHS:
        values = values_of("normal", elements)
        payload = encoded(codec, values, memory_for(codec, elements))
        once = decoded(codec, payload, elements)
        twice = once.copy()
        codec.decode_into(payload, twice, 1.0, True)
        np.testing.assert_array_equal(twice, once + once)
        scaled = np.empty_like(once)
        codec.decode_into(payload, scaled, 0.25, False)
        np.testing.assert_array_equal(scaled, once * np.float32(0.25))


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("index", [0, 1, 2500, 4999, slice(None)])
@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_what_is_not_finite_arrives_and_poisons_nothing(codec, index, odd):
    values = values_of("normal", 5000)
    memory = memory_for(codec, values.size, seed=1)
    values[index] = odd
    codec.prepare(values, memory, 2)
    payload = encoded(codec, values, memory)
    assert not np.isfinite(decoded(codec, payload, values.size)).all()
    for array in memory.arrays.values():
        assert np.isfinite(array).all()
    after = encoded(codec, values_of("normal", 5000, 2), memory)
    assert np.isfinite(decoded(codec, after, values.size)).all()


@pytest.mark.parametrize("pattern", ["normal", "heavy tails"])
@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.1, 0.3])
def test_top_k_selects_about_the_number_asked_for(ratio, pattern):
    codec = TopK(ratio)
    elements = 300_000
    memory = memory_for(codec, elements)
    for step in range(10):
        # Values grow and cluster from step to step, so that the threshold of the last step must be left.
        values = values_of(pattern, elements, step) * (1 + step)
        values[: elements // 10] *= 10 if step % 3 == 0 else 1
        wanted = values + memory.arrays["residual"]
        payload = encoded(codec, values, memory)
        count = np.count_nonzero(decoded(codec, payload, elements))
        assert FEWEST * ratio * elements <= count <= MOST * ratio * elements
        smallest = np.abs(decoded(codec, payload, elements)[decoded(codec, payload, elements) != 0]).min()
        assert np.count_nonzero(np.abs(wanted) > smallest) <= count


def test_top_k_of_equal_values_sends_each_in_its_turn():
    codec = TopK(0.01)
    memory = memory_for(codec, 10_000)
    sent = np.zeros(10_000, dtype=bool)
    for _ in range(200):
        payload = encoded(codec, np.ones(10_000, dtype=np.float32), memory)
        sent |= decoded(codec, payload, 10_000) != 0
    assert sent.all()


def test_random_k_comes_to_each_place_and_all_ranks_draw_alike():
    codec = RandomK(0.1, seed=5)
    seen = np.zeros(1000, dtype=bool)
    memory, other = memory_for(codec, 1000), memory_for(codec, 1000)
    for turn in range(200):
        memory.turn = other.turn = turn
        ours = decoded(codec, encoded(codec, np.ones(1000, np.float32), memory), 1000)
        theirs = decoded(codec, encoded(codec, np.full(1000, 2, np.float32), other), 1000)
        np.testing.assert_array_equal(ours != 0, theirs != 0)
        assert np.count_nonzero(ours) == 100
        seen |= ours != 0
    assert seen.all()


def test_stochastic_rounding_draws_other_numbers_on_each_rank_and_in_each_phase():
    codec, values = Int8(stochastic=True, feedback=False), values_of("normal", 4096)

    def payload(salt: int, turn: int) -> bytes:
        memory = CodecState(4096)
        memory.salt, memory.turn = salt, turn
        return encoded(codec, values, memory).tobytes()

    assert len({payload(salt, turn) for salt in range(4) for turn in range(3)}) == 12
    assert payload(1, 2) == payload(1, 2), "another run draws the same"


def test_random_k_still_owes_what_it_could_not_send_beside_a_value_that_is_not_finite():
    codec = RandomK(0.1)
    memory = memory_for(codec, 100, seed=1)
    owed = memory.arrays["residual"].copy()
    values = np.zeros(100, np.float32)
    values[37] = np.inf
    result = decoded(codec, encoded(codec, values, memory), 100)
    sent = np.flatnonzero(result)
    assert np.isnan(result[sent[3]])
    others = np.delete(sent, 3)
    np.testing.assert_array_equal(result[others], owed[others])
    owed[others] = 0.0
    np.testing.assert_array_equal(memory.arrays["residual"], owed)


def test_dgc_is_momentum_that_waits_until_it_is_sent():
    """Against the algorithm of Lin et al., 2018, written down plainly."""
    codec = DGC(0.02, momentum=0.9, clip=1.5)
    elements = 2000
    memory = memory_for(codec, elements)
    velocity, waiting = np.zeros(elements, np.float32), np.zeros(elements, np.float32)
    for step in range(20):
        gradient = values_of("normal", elements, step)
        clipped = gradient * np.float32(min(1.0, 1.5 / 4**0.5 / np.linalg.norm(gradient)))
        velocity = np.float32(0.9) * velocity + clipped
        waiting = waiting + velocity
        values = gradient.copy()
        codec.prepare(values, memory, 4)
        sent = decoded(codec, encoded(codec, values, memory), elements)
        mask = sent != 0
        np.testing.assert_allclose(sent[mask], waiting[mask], rtol=1e-5)
        velocity[mask] = 0
        waiting[mask] = 0
        np.testing.assert_allclose(memory.arrays["velocity"], velocity, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", [DGC, TopK])
def test_more_is_sent_in_a_warm_up(kind):
    codec = kind(0.001, warmup_epochs=4, steps_per_epoch=10)
    assert codec.warmup_steps == 40
    memory = CodecState(1, codec.keeps)
    ratios = []
    for turn in range(0, 60, 10):
        memory.turn = turn
        ratios.append(codec.ratio_at(memory))
    np.testing.assert_allclose(ratios, [0.25, 0.0628717, 0.0158114, 0.00397635, 0.001, 0.001], rtol=1e-5)
    # Never less than what comes after it.
    codec = kind(0.5, warmup_epochs=4, steps_per_epoch=10)
    assert (codec.ratio_at(CodecState(1)), codec.warmup_steps) == (0.5, 0)


def test_a_warm_up_selects_as_many_as_it_says():
    codec = TopK(0.01, warmup_epochs=3, steps_per_epoch=2)
    memory, elements = memory_for(codec, 40_000), 40_000
    for turn in range(8):
        memory.turn = turn
        sent = np.count_nonzero(decoded(codec, encoded(codec, values_of("normal", elements, turn), memory), elements))
        assert 0.8 <= sent / (elements * codec.ratio_at(memory)) <= 1.25


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(CODECS)), st.sampled_from([1, 17, 300, 1025]), st.binary(max_size=64), st.data())
def test_decoding_anything_is_right_or_an_error(name, elements, noise, data):
    codec = CODECS[name]
    payload = encoded(codec, values_of("normal", elements), memory_for(codec, elements)).copy()
    change = data.draw(st.sampled_from(["overwrite", "cut", "lengthen", "replace"]))
    if change == "overwrite" and payload.size:
        at = data.draw(st.integers(0, payload.size - 1))
        piece = np.frombuffer(noise[: payload.size - at], dtype=np.uint8)
        payload[at : at + piece.size] = piece
    elif change == "cut":
        payload = payload[: data.draw(st.integers(0, payload.size))]
    elif change == "lengthen":
        payload = np.concatenate([payload, np.frombuffer(noise, dtype=np.uint8)])
    else:
        payload = np.frombuffer(noise, dtype=np.uint8).copy()
    guarded = np.full(elements + 64, 3.25, dtype=np.float32)
    out = guarded[32 : 32 + elements]
    with np.errstate(all="ignore"), suppress(ValueError):
        codec.decode_into(payload, out, 1.0, False)
    assert np.all(guarded[:32] == 3.25)
    assert np.all(guarded[32 + elements :] == 3.25)
