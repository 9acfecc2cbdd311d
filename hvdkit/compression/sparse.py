"""The largest values, with their indices: top-k, and all above a threshold.

A payload is a mode, a count, that many indices (uint32, ascending) and values; or, where that is no longer than half of
the values, all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from hvdkit import kernels
from hvdkit.compression.codec import Array, Bytes
from hvdkit.compression.lossy import LARGEST_SEED, PayloadCodec, check_integer, check_number, check_ratio, put
from hvdkit.compression.state import CodecState
from hvdkit.kernels import Scale

_HEAD = 8  # bytes: the mode and the count
_PAIRS, _ALL = 0x50414952, 0x414C4C20
# Limits of the ratio of selected to wanted values; beyond them, another threshold is tried.
FEWEST, MOST = 0.8, 1.25
USUAL = 1.1
RETRIES = 2
SAMPLED_ABOVE = 400  # values of a sample above the threshold, for the number of selected values to be right to 5%
SMALLEST_SAMPLE = 1 << 14
# The power with which a carried threshold follows the number of selected values: small, since a step that sends too
# many values leaves a smaller residual, so that the next step selects fewer.
FOLLOW = 0.03
SAMPLED_STEPS = 8  # after a carried threshold has failed: a sample costs a tenth of a pass
THRESHOLD, DISTRUST = "threshold", "distrust"
# The ratio of the first epoch of a warm-up: Lin et al. send 25%, 6.25%, 1.5625%, 0.4% and then 0.1%.
FIRST_RATIO = 0.25
_LARGEST = float(np.finfo(np.float32).max)


def write_pairs(payload: Bytes, count: int, capacity: int) -> int:
    """Complete a payload whose indices and values were written with room for ``capacity``; return its bytes."""
    payload[:_HEAD].view(np.uint32)[...] = _PAIRS, count
    target, source = _HEAD + 4 * count, _HEAD + 4 * capacity
    payload[target : target + 4 * count] = payload[source : source + 4 * count]
    return _HEAD + 8 * count


def write_all(payload: Bytes, values: Array, residual: Array | None) -> int:
    """Write a payload of all values; return its bytes."""
    payload[:_HEAD].view(np.uint32)[...] = _ALL, 0
    everything = payload[_HEAD : _HEAD + 4 * values.size].view(np.float32)
    if residual is None:
        everything[...] = values
    else:
        with np.errstate(all="ignore"):
            np.add(values, residual, out=everything)
        residual[np.isfinite(everything)] = 0.0
    return _HEAD + everything.nbytes


def room_for_pairs(payload: Bytes, capacity: int) -> tuple[Array, Array]:
    """Return the memory of indices and values with room for ``capacity`` of each."""
    middle, end = _HEAD + 4 * capacity, _HEAD + 8 * capacity
    return payload[_HEAD:middle].view(np.uint32), payload[middle:end].view(np.float32)


def pairs_in(payload: Bytes, elements: int) -> tuple[Array, Array] | None:
    """Return the indices and values of a payload of ``elements`` elements; None if it has all values.

    Raises ValueError for a payload that no encoder wrote.
    """
    if payload.nbytes < _HEAD:
        raise ValueError(f"expected at least {_HEAD} bytes, got {payload.nbytes}")
    mode, count = (int(number) for number in payload[:_HEAD].view(np.uint32))
    nbytes = payload.nbytes - _HEAD
    if mode == _ALL and nbytes != 4 * elements:
        raise ValueError(f"expected {4 * elements} bytes of values, got {nbytes}")
    if mode != _ALL and (mode != _PAIRS or nbytes != 8 * count):
        raise ValueError(f"expected {count} pairs of 8 bytes, got {nbytes} bytes of mode {mode:#x}")
    return None if mode == _ALL else room_for_pairs(payload, count)


def emit_odd(indices: Array, picked: Array, values: Array, residual: Array | None, emitted: int) -> bool:
    """True if a value that is not finite had no room; it then takes the place of the last emitted value."""
    last = int(indices[emitted - 1])
    odd = np.flatnonzero(~np.isfinite(values[last + 1 :]))
    if not odd.size:
        return False
    if residual is not None and np.isfinite(picked[emitted - 1]):
        residual[last] = picked[emitted - 1]
    index = last + 1 + int(odd[0])
    indices[emitted - 1], picked[emitted - 1] = index, values[index]
    return True


def estimate(values: Array | None, residual: Array | None, count: int, seed: int) -> float:
    """Return a threshold below about ``count`` magnitudes, from a sample with a random index in each stratum."""
    array = values if values is not None else residual
    assert array is not None
    wanted = max(SMALLEST_SAMPLE, SAMPLED_ABOVE * array.size // count)
    stride = max(1, array.size // wanted)
    sample = np.empty(-(-array.size // stride), dtype=np.float32)
    kernels.abs_sample_into(sample, values, residual, stride, seed)
    above = min(sample.size, max(1, round(count * sample.size / array.size)))
    lowest = np.partition(sample, sample.size - above)[sample.size - above]
    return min(_LARGEST, float(np.nextafter(lowest, np.float32(0))))  # the lowest itself shall lie above it


@dataclass(frozen=True)
class _Sparse(PayloadCodec):
    fixed: ClassVar[bool] = False
    sparse: ClassVar[bool] = True

    def most_bytes(self, elements: int) -> int:
        return _HEAD + 4 * elements  # all values, or as many pairs as fit

    def decode_into(self, payload: Bytes, out: Array, scale: float, add: bool) -> None:
        pairs = pairs_in(payload, out.size)
        if pairs is None:
            put(out, payload[_HEAD:].view(np.float32), scale, add)
        elif add:
            kernels.scatter_add_into(out, *pairs, scale)
        else:
            kernels.sum_pairs_into(out, pairs[:1], pairs[1:], scale)

    def decode_sum_into(self, payloads: Sequence[Bytes], out: Array, scale: Scale) -> bool:
        try:
            pairs = [pairs_in(payload, out.size) for payload in payloads]
            if None in pairs:
                return False
            indices, values = zip(*(pair for pair in pairs if pair is not None), strict=True)
            kernels.sum_pairs_into(out, indices, values, scale)
        except ValueError:  # decoding one by one tells which rank sent it
            return False
        return True


@dataclass(frozen=True)
class TopK(_Sparse):
    """The ``ratio`` of the values with the largest magnitudes, within 0.8 and 1.25 of that many.

    They lie above a threshold (Aji and Heafield, 2017, "Sparse communication for distributed gradient descent"), which
    is carried over from step to step, and taken from a sample of the values when it selects too few or too many.
    Warm-up (Lin et al., 2018): in the first ``warmup_epochs`` times ``steps_per_epoch`` steps, more is sent: 25% in the
    first epoch, then a constant factor less in each until ``ratio``. ``feedback``, ``compress`` and errors are those of
    Compression.

    Args:
        ratio: the part of the values that is sent, above 0 and at most 1.
        seed: of the samples, from 0 to 2**32 - 1.
        warmup_epochs: the number of epochs in which more is sent.
        steps_per_epoch: the number of the optimizer's steps in an epoch.

    Examples:
        >>> codec = hvd.Compression.topk(ratio=0.01, warmup_epochs=4, steps_per_epoch=100)
        >>> optimizer = hvd.DistributedOptimizer(optimizer, compression=codec)
    """

    ratio: float = 0.01
    seed: int = 0
    warmup_epochs: int = field(default=0, kw_only=True)
    steps_per_epoch: int = field(default=1, kw_only=True)

    name: ClassVar[str] = "topk"
    has_device_twin: ClassVar[bool] = True

    @property
    def warmup_steps(self) -> int:
        return self.warmup_epochs * self.steps_per_epoch if self.ratio < FIRST_RATIO else 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ratio(self.name, self.ratio)
        check_integer(self.name, "seed", self.seed, 0, LARGEST_SEED)
        check_integer(self.name, "warmup_epochs", self.warmup_epochs, 0, 10**6)
        check_integer(self.name, "steps_per_epoch", self.steps_per_epoch, 1, 10**9)

    def ratio_at(self, state: CodecState | None) -> float:
        """Return the part of the values that is sent at a state's turn; without a state, after the warm-up."""
        if state is None or state.turn >= self.warmup_steps:
            return self.ratio
        epoch = state.turn // self.steps_per_epoch
        return float(FIRST_RATIO * (self.ratio / FIRST_RATIO) ** (epoch / self.warmup_epochs))

    def _wanted(self, elements: int, state: CodecState | None) -> int:
        return min(elements, max(1, round(elements * self.ratio_at(state))))

    def sent_bytes(self, elements: int, state: CodecState | None = None) -> int:
        return min(_HEAD + 8 * self._wanted(elements, state), self.most_bytes(elements))

    def usual_bytes(self, elements: int) -> int:
        # After the warm-up, there are seldom more pairs than a tenth above the wanted number.
        return min(_HEAD + 8 * int(USUAL * self._wanted(elements, None)), self.most_bytes(elements))

    def encode_into(self, payload: Bytes, values: Array, state: CodecState) -> int:
        """Write pairs in one pass where the carried threshold fits; each retry takes a sample and another pass."""
        residual, wanted = state.residual, self._wanted(values.size, state)
        capacity = max(1, int(MOST * wanted))
        if 2 * capacity >= values.size:
            return write_all(payload, values, residual)
        unselected: Array | None = values  # None where the residual has them
        indices, picked = room_for_pairs(payload, capacity)
        recalled, distrust = state.recall(THRESHOLD), state.recall(DISTRUST) or 0.0
        carried = recalled is not None and distrust == 0.0
        for attempt in range(1 + RETRIES):
            if recalled is not None and carried and attempt == 0:
                threshold = recalled
            else:
                seed = (self.seed + 31 * state.turn + 7 * attempt + state.begin) % 2**32
                threshold = estimate(unselected, residual, wanted, seed)
            emitted, above = kernels.select_into(indices, picked, unselected, residual, threshold)
            if above > emitted and unselected is not None and emit_odd(indices, picked, values, residual, emitted):
                break
            fits = FEWEST * wanted <= above <= MOST * wanted or (threshold == 0.0 and above <= capacity)
            if fits or attempt == RETRIES or not np.isfinite(picked[:emitted]).all():
                break
            if residual is not None:  # it has all values now but the emitted ones
                residual[indices[:emitted]] = picked[:emitted]
                unselected = None
        state.keep(DISTRUST, SAMPLED_STEPS if carried and attempt else max(0.0, distrust - 1.0))
        if threshold > 0.0 and above:
            state.keep(THRESHOLD, min(_LARGEST, threshold * (above / wanted) ** FOLLOW))
        return write_pairs(payload, emitted, capacity)


@dataclass(frozen=True)
class Threshold(_Sparse):
    """The values whose magnitude is above ``threshold``; all, where that is more than half of them.

    ``feedback``, ``compress`` and errors are those of Compression.

    Args:
        threshold: in the unit of the gradients, 0 or more.

    Examples:
        >>> optimizer = hvd.DistributedOptimizer(optimizer, compression=hvd.Compression.threshold(1e-4))
    """

    threshold: float = 1e-3

    name: ClassVar[str] = "threshold"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= check_number(self.name, "threshold", self.threshold) <= _LARGEST:
            raise ValueError(f"Compression.threshold: threshold must be 0 or more, and finite, got {self.threshold}")

    def encode_into(self, payload: Bytes, values: Array, state: CodecState) -> int:
        residual = state.residual
        capacity = values.size // 2
        indices, picked = room_for_pairs(payload, capacity)
        emitted, above = kernels.select_into(indices, picked, values, residual, self.threshold)
        if above == emitted:
            return write_pairs(payload, emitted, capacity)
        if residual is not None:  # the emitted values go back, and all values are sent
            finite = np.isfinite(picked[:emitted])
            residual[indices[:emitted][finite]] = picked[:emitted][finite]
            finite = np.isfinite(values)
            values = np.where(finite, residual, values)
            residual[finite] = 0.0
        return write_all(payload, values, None)
