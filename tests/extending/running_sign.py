"""A codec of one's own that keeps a state, in one file: signs, times a mean magnitude that follows the steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from hvdkit.compression import CodecState, PayloadCodec
from hvdkit.compression.codec import Array, Bytes

MAGNITUDE = "magnitude"


@dataclass(frozen=True)
class RunningSign(PayloadCodec):
    """``keep`` of the old magnitude in each step, and the rest of the new one."""

    keep: float = 0.5

    name: ClassVar[str] = "running_sign"

    def most_bytes(self, elements: int) -> int:
        """The magnitude, and a bit for each element."""
        return 4 + -(-elements // 8)

    def encode_into(self, payload: Bytes, values: Array, memory: CodecState) -> int:
        """The signs of values plus residual; the residual keeps what they lack."""
        wanted = values if memory.residual is None else values + memory.residual
        now, before = float(np.abs(wanted).mean()), memory.recall(MAGNITUDE)
        magnitude = np.float32(now if before is None else self.keep * before + (1.0 - self.keep) * now)
        memory.keep(MAGNITUDE, float(magnitude))
        payload[:4].view(np.float32)[0] = magnitude
        payload[4:] = np.packbits(wanted >= 0)
        if memory.residual is not None:
            memory.residual[...] = wanted - np.where(wanted >= 0, magnitude, -magnitude)
        return payload.nbytes

    def decode_into(self, payload: Bytes, out: Array, scale: float, add: bool) -> None:
        """Signs times the magnitude."""
        magnitude = payload[:4].view(np.float32)[0] * np.float32(scale)
        signs = np.unpackbits(payload[4:], count=out.size).astype(bool)
        decoded = np.where(signs, magnitude, -magnitude)
        out[...] = out + decoded if add else decoded
