"""Allreduce of payloads: bits, traffic, what is kept, and what arrives damaged."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdkit.collectives.compressed import allreduce_encoded
from hvdkit.collectives.group import Group
from hvdkit.compression import CodecState, Int8, OneBit, PayloadCodec, RandomK, TopK, frames
from hvdkit.compression.codec import Array, Bytes
from hvdkit.errors import PayloadError
from hvdkit.kernels import ONE, ReduceOp, Scale
from hvdkit.transports.base import Transfer
from tests.collectives.stepping import BufferStepsOf, reduce_everywhere, reduce_in_random_order, run
from tests.compression.codecs import CODECS, encoded, memory_for
from tests.network import MemoryTransport, Wires
from tests.told import told

SIZES = [2, 3, 4, 7]
ELEMENTS = [0, 1, 5, 17, 300, 2049]


def gradients(size: int, elements: int, seed: int = 0) -> list[Array]:
    generator = np.random.default_rng(seed)
    return [generator.standard_normal(elements).astype(np.float32) for _ in range(size)]


def steps_of(codec: PayloadCodec, memories: list[CodecState], scale: Scale = ONE) -> BufferStepsOf:
    return lambda group, buffer: allreduce_encoded(group, buffer, ReduceOp.SUM, scale, codec, 0, memories[group.rank])


def reduced(
    codec: PayloadCodec, inputs: list[Array], memories: list[CodecState], scale: Scale = ONE
) -> tuple[Array, list[int]]:
    """The result, of which all ranks have the same bits, and what each rank sent."""
    return reduce_everywhere(inputs, steps_of(codec, memories, scale))


def kept_in(memories: list[CodecState]) -> Array:
    """What all ranks keep together."""
    return sum(memory.arrays["residual"].astype(np.float64) for memory in memories)


def total_of(inputs: list[Array]) -> Array:
    return sum(one.astype(np.float64) for one in inputs)


def memories_for(codec: PayloadCodec, size: int, elements: int, seed: int | None = None) -> list[CodecState]:
    return [memory_for(codec, elements, None if seed is None else seed + rank) for rank in range(size)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", [name for name in CODECS if name != "dgc"])
def test_what_was_handed_on_plus_what_ranks_keep_is_what_came_in(name, size):
    codec = CODECS[name]
    for elements in ELEMENTS:
        memories = memories_for(codec, size, elements)
        for step in range(3):
            inputs = gradients(size, elements, step)
            came_in = total_of(inputs) + kept_in(memories)
            result, _ = reduced(codec, inputs, memories)
            np.testing.assert_allclose(result + kept_in(memories), came_in, rtol=0, atol=3e-6 * size)


@pytest.mark.parametrize("size", SIZES)
def test_dense_payloads_send_the_bytes_of_two_phases(size):
    elements = 1024 * size
    for codec in (Int8(), OneBit()):
        _, sent = reduced(codec, gradients(size, elements), memories_for(codec, size, elements))
        chunk = frames.HEADER_BYTES + codec.most_bytes(elements // size)
        assert sent == [2 * (size - 1) * chunk] * size


def test_sparse_payloads_go_the_way_that_sends_less():
    codec = TopK(0.01)
    assert codec.way(100_000, 2)[0] == "gather"
    assert codec.way(100_000, 3)[0] == "two_phase"
    assert Int8().way(100_000, 16)[0] == "two_phase"
    for size in SIZES:
        elements = 16_000 * size
        _, sent = reduced(codec, gradients(size, elements), memories_for(codec, size, elements))
        pairs = 1.25 * 0.01 * elements
        overhead = 2 * (size - 1) * (frames.HEADER_BYTES + 16)
        formula = {2: (size - 1) * 8 * pairs}.get(size, 2 * (size - 1) / size * 8 * pairs)
        assert max(sent) <= formula + overhead


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_other_floating_types_are_converted_there_and_back(dtype, size):
    inputs = gradients(size, 300)
    codec = Int8()
    narrow = [one.astype(dtype) for one in inputs]
    expected, _ = reduced(codec, [one.astype(np.float32) for one in narrow], memories_for(codec, size, 300))
    result, _ = reduced(codec, narrow, memories_for(codec, size, 300))
    np.testing.assert_array_equal(result, expected.astype(dtype))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_what_is_not_finite_on_one_rank_is_not_finite_on_all_and_forgotten_after_it(codec, size):
    memories = memories_for(codec, size, 3000, seed=1)
    for odd in (np.nan, np.inf):
        inputs = gradients(size, 3000)
        inputs[size - 1][1234] = odd
        with np.errstate(all="ignore"):
            result, _ = reduced(codec, inputs, memories)
        assert not np.isfinite(result).all()
        assert all(np.isfinite(array).all() for memory in memories for array in memory.arrays.values())
        assert np.isfinite(reduced(codec, gradients(size, 3000, 1), memories)[0]).all()


@pytest.mark.parametrize("size", [2, 3])
def test_the_tally_counts_what_travelled(size):
    codec = TopK(0.01)
    memories = memories_for(codec, size, 48_000)
    _, sent = reduced(codec, gradients(size, 48_000), memories)
    for memory, nbytes in zip(memories, sent, strict=True):
        assert memory.tally.bytes_before == 2 * 4 * 48_000 * (size - 1) // size
        assert memory.tally.bytes_after == nbytes
        assert memory.tally.encode_seconds > 0 < memory.tally.decode_seconds


@pytest.mark.parametrize("size", [2, 3, 7])  # which gather and two_phase
@pytest.mark.parametrize("seed", range(5))
def test_a_payload_longer_than_usual_takes_a_trip_more(size, seed):
    codec = TopK(0.01, warmup_epochs=1, steps_per_epoch=1)  # at first 25 %
    memories, inputs = memories_for(codec, size, 3000), gradients(size, 3000, seed)
    trips = []
    for _ in range(3):
        came_in = total_of(inputs) + kept_in(memories)
        result, tags = reduce_in_random_order(inputs, steps_of(codec, memories), seed)
        trips.append(1 in tags[0])
        np.testing.assert_allclose(result + kept_in(memories), came_in, rtol=0, atol=3e-6 * size)
    assert trips[0]
    assert not all(trips)


class DamagingTransport(MemoryTransport):
    """Changes the bytes of one message that it sends."""

    damage: Callable[[int, Bytes], None] = staticmethod(lambda number, message: None)

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.sent = 0

    def isend(self, buffer: Bytes, peer: int, tag: int) -> Transfer:
        self.sent += 1
        message = buffer.copy()
        self.damage(self.sent - 1, message)
        return super().isend(message, peer, tag)


def damaged(codec: PayloadCodec, damage: Callable[[int, Bytes], None]) -> PayloadError | None:
    """What is raised where one of two ranks does that to each message that it sends."""
    inputs, memories = gradients(2, 700), memories_for(codec, 2, 700)
    wires, members = Wires(6), [2, 5]  # of six ranks, whose places in the group are others
    transports = [DamagingTransport(2, 6, wires), MemoryTransport(5, 6, wires)]
    transports[0].damage = damage  # type: ignore[attr-defined]
    groups = [Group(transport, members) for transport in transports]
    steps = steps_of(codec, memories)
    try:
        run(groups, lambda group: steps(group, inputs[group.rank]))
    except PayloadError as error:
        return error
    return None


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(["int8", "int4", "onebit", "topk", "randomk", "threshold"]),
    st.integers(0, 3),
    st.integers(0, 10**6),
    st.integers(0, 7),
)
def test_a_flipped_bit_is_an_error_that_names_the_sender(name, which, at, bit):
    flipped = []

    def flip(number: int, message: Bytes) -> None:
        if number == which:
            with suppress(PayloadError):  # of the rest of a frame, which has no header
                message = message[: frames.nbytes_of(message, 2)]  # what fills it up is read by nobody
            flipped.append(message.nbytes)
            message[at % message.nbytes] ^= 1 << bit

    failure = damaged(CODECS[name], flip)
    assert (failure is not None) == bool(flipped)
    if failure is not None:
        assert failure.rank == 2
        assert "payload of rank 2 is damaged" in str(failure)


@pytest.mark.parametrize("name", ["topk", "threshold"])
def test_no_memory_is_taken_for_more_than_a_payload_can_have(name):
    codec = CODECS[name]
    most = codec.most_bytes(700)

    def forge(_: int, message: Bytes) -> None:
        frame = np.zeros(frames.HEADER_BYTES + most + 8, np.uint8)
        frames.seal(frame, most + 8, 700, frames.identity(codec.summary))
        message[: frames.HEADER_BYTES] = frame[: frames.HEADER_BYTES]

    failure = damaged(codec, forge)
    least, longest = frames.HEADER_BYTES, frames.HEADER_BYTES + most
    assert f"by its header it has {longest + 8} bytes, but only {least} to {longest} are possible" in str(failure)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 300))
def test_unsealing_anything_is_the_payload_or_an_error(noise, keep):
    codec = RandomK(0.1)
    identity = frames.identity(codec.summary)
    payload = encoded(codec, gradients(1, 700)[0], memory_for(codec, 700))
    sealed = np.append(np.zeros(frames.HEADER_BYTES, np.uint8), payload)
    frames.seal(sealed, payload.nbytes, 700, identity)
    assert frames.nbytes_of(np.append(sealed, np.zeros(9, np.uint8)), 3) == sealed.nbytes
    assert frames.unseal(sealed, 700, identity, 3).tobytes() == payload.tobytes()
    damaged = np.concatenate([sealed[:keep], np.frombuffer(noise, dtype=np.uint8)])
    if damaged.tobytes() != sealed.tobytes():
        with pytest.raises(PayloadError, match="payload of rank 3 is damaged"):
            frames.unseal(damaged, 700, identity, 3)
    for elements, other, fact in (
        (701, identity, "it has 700 elements, but 701 are expected"),
        (700, identity ^ 1, "it was encoded by another codec, or with other parameters"),
    ):
        with told(PayloadError, "payload of rank 3 is damaged", fact):
            frames.unseal(sealed, elements, other, 3)


@pytest.mark.parametrize("name", [name for name in CODECS if name != "dgc"])
def test_an_average_is_the_sum_divided_and_rounded_once(name):
    codec, inputs = CODECS[name], gradients(3, 600)
    total, _ = reduced(codec, inputs, memories_for(codec, 3, 600))
    average, _ = reduced(codec, inputs, memories_for(codec, 3, 600), scale=Scale(divisor=3))
    np.testing.assert_array_equal(average, total / np.float32(3))
