"""Casts: payloads that are plain arrays of numbers, which every algorithm can reduce."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from hvdkit import kernels
from hvdkit.compression.codec import Array, Bytes, Codec
from hvdkit.kernels import BFLOAT16, ReduceOp, Scale


class Cast(Codec):
    """Encodes chunks as arrays of one dtype; sums happen after decoding, in fp32 for half precision.

    This one sends the chunk itself, without a copy.
    """

    name = "none"
    lossy = False

    def encode(self, chunk: Array, room: Bytes | None = None) -> Array:
        """The flat payload of ``chunk``: of the same length on every rank for chunks of the same length.

        In ``room``, of ``room_bytes(chunk)`` bytes, if given.
        """
        return chunk

    def room_bytes(self, chunk: Array) -> int:
        """What the payload of ``chunk`` takes besides it; 0: it is the chunk, or has memory of its own."""
        return 0

    def reduce_encoded(self, payloads: Sequence[Array], own: Array, chunk: Array, op: ReduceOp, scale: Scale) -> Array:
        """The payload of ``scale * (payloads[0] op payloads[1] op ...)``, in the place of ``own``, that of ``chunk``.

        ``chunk`` may hold anything afterwards.
        """
        self.decode_reduce(payloads, chunk, op, scale)
        return self.encode(chunk)

    def decode_reduce(self, payloads: Sequence[Array], out: Array, op: ReduceOp, scale: Scale) -> None:
        """``out = scale * (payloads[0] op payloads[1] op ...)`` in this order."""
        kernels.reduce_into(out, list(payloads), op, scale)


class HalfCast(Cast):
    """float32 and float64 travel as 16 bits and are summed in float32; other types travel as they are."""

    lossy = True
    dtype: ClassVar[np.dtype[Any]]

    def wire_itemsize(self, dtype: np.dtype[Any]) -> int:
        return self.dtype.itemsize if dtype in (np.float32, np.float64) else dtype.itemsize

    def encode(self, chunk: Array, room: Bytes | None = None) -> Array:
        nbytes = self.room_bytes(chunk)
        if not nbytes:
            return chunk
        payload = np.empty(chunk.size, self.dtype) if room is None else room[:nbytes].view(self.dtype)
        kernels.convert_into(payload, chunk)
        return payload

    def room_bytes(self, chunk: Array) -> int:
        return chunk.size * self.dtype.itemsize if chunk.dtype in (np.float32, np.float64) else 0

    def reduce_encoded(self, payloads: Sequence[Array], own: Array, chunk: Array, op: ReduceOp, scale: Scale) -> Array:
        if chunk.dtype == np.float64:  # which is what they are summed in
            self.decode_reduce(payloads, chunk, op, scale)
            kernels.convert_into(own, chunk)
        else:
            kernels.reduce_into(own, list(payloads), op, scale)
        return own

    def decode_reduce(self, payloads: Sequence[Array], out: Array, op: ReduceOp, scale: Scale) -> None:
        if out.dtype == np.float64:
            wide = [np.empty(out.shape, dtype=np.float64) for _ in payloads]
            for one, payload in zip(wide, payloads, strict=True):
                kernels.convert_into(one, payload)
            payloads = wide
        super().decode_reduce(payloads, out, op, scale)


class Fp16Cast(HalfCast):
    """As IEEE half precision: 11 bits of precision; values beyond 65504 become infinite, as in Horovod's fp16."""

    name = "fp16"
    dtype = np.dtype(np.float16)


class Bf16Cast(HalfCast):
    """As bfloat16: float32's range, 8 bits of precision."""

    name = "bf16"
    dtype = BFLOAT16


CASTS: dict[str, Cast] = {cast.name: cast for cast in (Cast(), Fp16Cast(), Bf16Cast())}
