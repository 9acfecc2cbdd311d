"""What bytes stand for a flat buffer on the wire, and how several such payloads become one sum."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdkit import kernels
from hvdkit.kernels import ReduceOp

Array = npt.NDArray[Any]


class Codec(ABC):
    """Encodes chunks of a fusion buffer; sums happen after decoding, in fp32 for half precision."""

    name: str
    lossy: bool

    @abstractmethod
    def encode(self, chunk: Array) -> Array:
        """The flat payload of ``chunk``: of the same length on every rank for chunks of the same length."""

    @abstractmethod
    def decode_reduce(self, payloads: Sequence[Array], out: Array, op: ReduceOp, scale: float) -> None:
        """``out = scale * (payloads[0] op payloads[1] op ...)`` in this order."""


class NoneCodec(Codec):
    """The chunk itself travels, without a copy."""

    name = "none"
    lossy = False

    def encode(self, chunk: Array) -> Array:
        return chunk

    def decode_reduce(self, payloads: Sequence[Array], out: Array, op: ReduceOp, scale: float) -> None:
        kernels.reduce_into(out, list(payloads), op, scale)


class Fp16Codec(Codec):
    """float32 travels as IEEE half precision and is summed in fp32; other types travel as they are.

    Values beyond 65504 become infinite, as in Horovod's fp16 compression.
    """

    name = "fp16"
    lossy = True

    def encode(self, chunk: Array) -> Array:
        if chunk.dtype not in (np.float32, np.float64):
            return chunk
        payload = np.empty(chunk.shape, dtype=np.float16)
        kernels.convert_into(payload, chunk)
        return payload

    def decode_reduce(self, payloads: Sequence[Array], out: Array, op: ReduceOp, scale: float) -> None:
        if out.dtype != np.float64:
            kernels.reduce_into(out, list(payloads), op, scale)
            return
        wide = []
        for payload in payloads:
            wide.append(np.empty(out.shape, dtype=np.float64))
            kernels.convert_into(wide[-1], payload)
        kernels.reduce_into(out, wide, op, scale)


CODECS: dict[str, Codec] = {codec.name: codec for codec in (NoneCodec(), Fp16Codec())}
