"""Random-k: values at random indices, which all ranks draw alike, so that no index needs to be sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from hvdkit.compression.codec import Array, Bytes
from hvdkit.compression.lossy import LARGEST_SEED, PayloadCodec, check_integer, check_ratio
from hvdkit.compression.state import CodecState


@dataclass(frozen=True)
class RandomK(PayloadCodec):
    """A random value out of each 1 / ``ratio`` values, at an index that changes from step to step.

    Stich et al., 2018, "Sparsified SGD with memory", with an index in each stratum. Values are sent as they are,
    not multiplied by 1 / ``ratio``. A value that gathered for 1 / ``ratio`` steps is sent at once, so that small ratios
    want small learning rates. ``feedback``, ``compress`` and errors are those of Compression.

    Args:
        ratio: the part of the values that is sent, above 0 and at most 1.
        seed: of the indices, from 0 to 2**32 - 1; the same on all ranks.

    Examples:
        >>> optimizer = hvd.DistributedOptimizer(optimizer, compression=hvd.Compression.randomk(0.1))
    """

    ratio: float = 0.1
    seed: int = 0

    name: ClassVar[str] = "randomk"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ratio(self.name, self.ratio)
        check_integer(self.name, "seed", self.seed, 0, LARGEST_SEED)

    def _count(self, elements: int) -> int:
        return min(elements, max(1, round(elements * self.ratio)))

    def _starts(self, elements: int) -> Array:
        """Return the begins of the strata, and the end of the last."""
        count = self._count(elements)
        return np.asarray(np.arange(count + 1, dtype=np.int64) * elements // max(1, count))

    def _indices(self, elements: int, turn: int, begin: int) -> Array:
        starts = self._starts(elements)
        generator = np.random.Generator(np.random.Philox(key=self.seed, counter=[turn, begin, 0, 0]))
        drawn = generator.random(starts.size - 1)
        return np.asarray(starts[:-1] + (drawn * np.diff(starts)).astype(np.int64))

    def most_bytes(self, elements: int) -> int:
        return 16 + 4 * self._count(elements)  # the turn and the begin, from which indices are drawn, and the values

    def encode_into(self, payload: Bytes, values: Array, state: CodecState) -> int:
        """Write the values at this turn's indices; NaN for a stratum in which a value, sent or not, is not finite."""
        payload[:16].view(np.int64)[...] = state.turn, state.begin
        indices = self._indices(values.size, state.turn, state.begin)
        picked, residual = payload[16:].view(np.float32), state.residual
        with np.errstate(all="ignore"):
            total = values if residual is None else values + residual
        odd = ~np.isfinite(total)
        any_odd = bool(odd.any())
        picked[...] = total[indices]
        before = None if residual is None else residual[indices]
        if residual is not None:
            np.copyto(residual, total, where=~odd if any_odd else True)
            residual[indices] = 0.0
        if any_odd:
            strata = np.searchsorted(self._starts(values.size), np.flatnonzero(odd), side="right") - 1
            picked[strata] = np.nan
            if residual is not None and before is not None:
                residual[indices[strata]] = before[strata]
        return payload.nbytes

    def decode_into(self, payload: Bytes, out: Array, scale: float, add: bool) -> None:
        if payload.nbytes != self.most_bytes(out.size):
            raise ValueError(f"expected {self.most_bytes(out.size)} bytes, got {payload.nbytes}")
        turn, begin = (int(number) for number in payload[:16].view(np.int64))
        if turn < 0 or begin < 0:
            raise ValueError(f"expected a turn and a place, got {turn} and {begin}")
        indices = self._indices(out.size, turn, begin)
        with np.errstate(all="ignore"):
            scaled = payload[16:].view(np.float32) * np.float32(scale)
            if add:
                out[indices] += scaled
            else:
                out[...] = 0.0
                out[indices] = scaled
