"""Quantised codecs: a few bits for each value, and a scale for each block of values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from hvdkit import kernels
from hvdkit.compression.codec import Array, Bytes
from hvdkit.compression.lossy import LARGEST_SEED, PayloadCodec, check_flag, check_integer
from hvdkit.compression.state import CodecState


@dataclass(frozen=True)
class _Blocks(PayloadCodec):
    """A codec whose payloads have a float32 for each block of values, its scale, then ``bits`` bits for each value."""

    block: int = 256

    bits: ClassVar[int]
    multiple: ClassVar[int]  # of which a block's length must be a multiple

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer(self.name, "block", self.block, self.multiple, 1 << 20)
        if self.block % self.multiple:
            raise ValueError(f"Compression.{self.name}: block must be a multiple of {self.multiple}, got {self.block}")

    def _scale_bytes(self, elements: int) -> int:
        return 4 * -(-elements // self.block)

    def most_bytes(self, elements: int) -> int:
        return self._scale_bytes(elements) + -(-elements * self.bits // 8)

    def _split(self, payload: Bytes, elements: int) -> tuple[Array, Array]:
        """Return the scales and the codes of a payload. Raises ValueError if it has another length."""
        if payload.nbytes != self.most_bytes(elements):
            raise ValueError(f"expected {self.most_bytes(elements)} bytes, got {payload.nbytes}")
        codes = self._scale_bytes(elements)
        return payload[:codes].view(np.float32), payload[codes:]


@dataclass(frozen=True)
class _Quantised(_Blocks):
    """A codec of values as multiples of a step, which is their block's largest magnitude / L; see Int8."""

    stochastic: bool = False
    seed: int = 0

    multiple: ClassVar[int] = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flag(self.name, "stochastic", self.stochastic)
        check_integer(self.name, "seed", self.seed, 0, LARGEST_SEED)

    def encode_into(self, payload: Bytes, values: Array, state: CodecState) -> int:
        scales, codes = self._split(payload, values.size)
        words = self.seed + state.turn * 0x85EBCA6B + state.begin + state.salt * 0xC2B2AE35
        seed = words % 2**32 if self.stochastic else None
        kernels.quantise_into(codes, scales, values, state.residual, self.bits, self.block, seed)
        return payload.nbytes

    def decode_into(self, payload: Bytes, out: Array, scale: float, add: bool) -> None:
        scales, codes = self._split(payload, out.size)
        kernels.dequantise_into(out, codes, scales, self.bits, self.block, scale, add)


@dataclass(frozen=True)
class Int8(_Quantised):
    """A quarter of float32's bytes: 8 bits for each value, L = 127.

    Values are multiples of a step, which is their block's largest magnitude / L; they are rounded to nearest even.
    ``feedback``, ``compress`` and errors are those of Compression.

    Args:
        block: how many values have a scale in common, a multiple of 16.
        stochastic: round values up or down at random, so that the mean is right (Alistarh et al., 2017, "QSGD:
            communication-efficient SGD via gradient quantization and encoding"). Each rank and each phase draws its own
            numbers, and the same run draws the same.
        seed: of the random numbers, from 0 to 2**32 - 1.

    Examples:
        >>> codec = hvd.Compression.int8(block=512, stochastic=True)
        >>> optimizer = hvd.DistributedOptimizer(optimizer, compression=codec)
    """

    name: ClassVar[str] = "int8"
    bits: ClassVar[int] = 8
    has_device_twin: ClassVar[bool] = True


@dataclass(frozen=True)
class Int4(_Quantised):
    """An eighth of float32's bytes: 4 bits for each value, L = 7. Arguments and errors are those of Compression.int8.

    Examples:
        >>> optimizer = hvd.DistributedOptimizer(optimizer, compression=hvd.Compression.int4)
    """

    name: ClassVar[str] = "int4"
    bits: ClassVar[int] = 4
    has_device_twin: ClassVar[bool] = True


@dataclass(frozen=True)
class OneBit(_Blocks):
    """A thirty-second of float32's bytes: each value's sign, times the mean magnitude of its block.

    Seide et al., 2014; with the scale of Karimireddy et al., 2019 (see LossyCodec). ``feedback``, ``compress`` and
    errors are those of Compression.

    Args:
        block: how many values have a scale in common, a multiple of 512.

    Examples:
        >>> optimizer = hvd.DistributedOptimizer(optimizer, compression=hvd.Compression.onebit(block=2048))
    """

    block: int = 1024

    name: ClassVar[str] = "onebit"
    bits: ClassVar[int] = 1
    multiple: ClassVar[int] = 512
    has_device_twin: ClassVar[bool] = True

    def encode_into(self, payload: Bytes, values: Array, state: CodecState) -> int:
        scales, packed = self._split(payload, values.size)
        kernels.sign_into(packed, scales, values, state.residual, self.block)
        return payload.nbytes

    def decode_into(self, payload: Bytes, out: Array, scale: float, add: bool) -> None:
        scales, packed = self._split(payload, out.size)
        kernels.unsign_into(out, packed, scales, self.block, scale, add)
