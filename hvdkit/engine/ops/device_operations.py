"""Tensors that named operations leave on their device, for the device's collectives, if there are any."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

from hvdkit.collectives.group import Array
from hvdkit.engine.ops import Submission
from hvdkit.engine.ops.requests import ReduceRequest, Signature
from hvdkit.kernels import ReduceOp
from hvdkit.transports.base import DeviceCollectives

# What the device's collectives reduce.
_FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})
_INTEGERS = frozenset({"uint8", "int8", "int32", "int64"})


@dataclass(frozen=True)
class DeviceArray:
    """A contiguous tensor of a device. The tensor and the mark behind which it holds its values are opaque here."""

    tensor: Any
    shape: tuple[int, ...]
    dtype: str  # by its name in numpy
    device: str  # "cuda:0"
    mark: Any
    to_host: Callable[[], Array]  # waits for the values and copies them


def reduces_directly(request: ReduceRequest, dtypes: Iterable[str]) -> bool:
    """Whether an allreduce of tensors of these dtypes can be done by the device's collectives.

    Adasum cannot, nor can scaled integers, whose averages are exact and cut off, nor what is encoded.
    """
    scaled = request.op == ReduceOp.AVERAGE or request.prescale != 1.0 or request.postscale != 1.0
    known = _FLOATS if scaled else _FLOATS | _INTEGERS
    return request.op != ReduceOp.ADASUM and known.issuperset(dtypes) and request.codec.name == "none"


def zeros_on_device(collectives: DeviceCollectives, signature: Signature) -> list[DeviceArray]:
    """What a rank that has joined contributes."""
    zeros = []
    for shape, dtype in zip(signature["shape"], signature["dtype"], strict=True):
        tensor = collectives.allocate(prod(shape), dtype)
        zeros.append(DeviceArray(tensor, tuple(shape), dtype, "", collectives.mark(), lambda: None))  # type: ignore[arg-type,return-value]
    return zeros


def staged(submission: Submission) -> Submission:
    """The submission with its tensors copied to host memory, since its ranks have no collectives of the device."""
    submission.arrays = [array.to_host() if isinstance(array, DeviceArray) else array for array in submission.arrays]
    return submission
