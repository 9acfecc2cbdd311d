"""Casts: payloads that are plain arrays of numbers, which every algorithm can reduce."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from hvdkit import kernels
from hvdkit.compression.codec import Array, Bytes, Codec
from hvdkit.kernels import BFLOAT16, ReduceOp, Scale


class Cast(Codec):
    """A codec whose payloads are arrays of one dtype, summed after decoding, in fp32 for half precision.

    This class sends the chunk itself, without a copy.
    """

    name = "none"
    lossy = False

    def encode(self, chunk: Array, room: Bytes | None = None) -> Array:
        """Return the flat payload of ``chunk``, whose length depends on that of the chunk only.

        It lies in ``room``, of ``room_bytes(chunk)`` bytes, if given.
        """
        return chunk

    def room_bytes(self, chunk: Array) -> int:
        """Return the bytes of the payload of ``chunk``; 0 if that is the chunk, or has memory of its own."""
        return 0

    def reduce_encoded(self, payloads: Sequence[Array], own: Array, chunk: Array, op: ReduceOp, scale: Scale) -> Array:
        """Return the payload of ``scale * (payloads[0] op payloads[1] op ...)``, in the memory of ``own``.

        ``own`` is the payload of ``chunk``, which may hold anything afterwards.
        """
        self.decode_reduce(payloads, chunk, op, scale)
        return self.encode(chunk)

    def decode_reduce(self, payloads: Sequence[Array], out: Array, op: ReduceOp, scale: Scale) -> None:
        """Compute ``out = scale * (payloads[0] op payloads[1] op ...)`` in this order."""
        kernels.reduce_into(out, list(payloads), op, scale)


class HalfCast(Cast):
    """A cast of float32 and float64 to 16 bits, summed in float32; other types travel as they are."""

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
        if chunk.dtype == np.float64:  # sums are in float64
            self.decode_reduce(payloads, chunk, op, scale)
            kernels.convert_into(own, chunk)
        else:
            kernels.reduce_into(own, list(payloads), op, scale)
        return own

    def decode_reduce(self, payloads: Sequence[Array], out: Array, op: ReduceOp, scale: Scale) -> None:
        if out.dtype == np.float64:
            wide = [np.empty(out.shape, dtype=np.float64) for _ in payloads]
            for values, payload in zip(wide, payloads, strict=True):
                kernels.convert_into(values, payload)
            payloads = wide
        super().decode_reduce(payloads, out, op, scale)


class Fp16Cast(HalfCast):
    """A cast to IEEE half precision: 11 bits; values beyond 65504 become infinite, as in Horovod's fp16."""

    name = "fp16"
    dtype = np.dtype(np.float16)


class Bf16Cast(HalfCast):
    """A cast to bfloat16: float32's range, 8 bits of precision."""

    name = "bf16"
    dtype = BFLOAT16


CASTS: dict[str, Cast] = {cast.name: cast for cast in (Cast(), Fp16Cast(), Bf16Cast())}
