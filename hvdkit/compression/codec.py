"""The parent of all codecs, with the questions that other modules ask of a codec, and casts.

Payloads of casts are plain arrays of numbers, which every algorithm can reduce.
"""

from __future__ import annotations

import dataclasses
import functools
from abc import ABC
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from hvdkit import kernels
from hvdkit.compression.state import RESIDUAL
from hvdkit.kernels import BFLOAT16, ReduceOp, Scale

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]


class Codec(ABC):
    """A way to encode gradients. Other modules ask a codec, and never test its class; the answers here are of casts."""

    name: ClassVar[str]
    lossy: ClassVar[bool]  # payloads lose something
    encodes: ClassVar[bool] = False  # it is a LossyCodec: sums of payloads have a way of their own, for floats only
    all_tensors: ClassVar[bool] = True  # it encodes small tensors too, unless the user says otherwise
    whole_tensors: ClassVar[bool] = False  # it must encode a tensor as a whole, not a part of it
    needs_state: ClassVar[bool] = False  # it is of no use where nothing is kept from step to step
    has_momentum: ClassVar[bool] = False  # it gives gradients the momentum, which the optimizer must not have

    @property
    def everywhere(self) -> bool:
        """True if ranks encode for the other ranks of their node too."""
        return False

    @property
    def keeps(self) -> tuple[str, ...]:
        """The kinds of arrays in the codec's state."""
        return ()

    @property
    def owes(self) -> Mapping[str, float]:
        """The factor of each kind of array with which it can be added to the next gradient in place of being kept."""
        return {RESIDUAL: 1.0}

    @property
    def on_device(self) -> bool:
        """True if gradients on a device are encoded there."""
        return True

    @property
    def warmup_steps(self) -> int:
        """The number of first steps in which it sends more than later."""
        return 0

    @property
    def summary(self) -> str:
        """The codec and its parameters, for ranks to compare and people to read."""
        if not dataclasses.is_dataclass(self):
            return self.name
        values = [(field.name, getattr(self, field.name)) for field in dataclasses.fields(self)]
        fields = [f"{name}={value.item() if isinstance(value, np.generic) else value!r}" for name, value in values]
        return f"{self.name}({', '.join(fields)})"

    def parameters_not_in_summary(self) -> list[str]:
        """Return attributes that are no fields of the dataclass, which ranks could not compare."""
        fields: set[str] = set()
        if dataclasses.is_dataclass(self):
            fields = {field.name for field in dataclasses.fields(self)}
        kinds = {name: getattr(type(self), name, None) for name in vars(self) if not name.startswith("_")}
        cached = {name for name, kind in kinds.items() if isinstance(kind, functools.cached_property)}
        return sorted(kinds.keys() - fields - cached)

    def wire_itemsize(self, dtype: np.dtype[Any]) -> int:
        """Return the bytes of an element of ``dtype`` on the wire, where numbers travel."""
        return dtype.itemsize


class Cast(Codec):
    """A codec whose payloads are arrays of one dtype, summed after decoding. This class sends the chunk, uncopied."""

    name = "none"
    lossy = False

    def encode(self, chunk: Array, room: Bytes | None = None) -> Array:
        """Return the flat payload of ``chunk``, in ``room``, of ``room_bytes(chunk)`` bytes, if given."""
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


def converted(values: Array, dtype: npt.DTypeLike) -> Array:
    """Return floats of one type as a new array of another."""
    result = np.empty(values.shape, dtype)
    kernels.convert_into(result, values)
    return result


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
            payloads = [converted(payload, out.dtype) for payload in payloads]
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
