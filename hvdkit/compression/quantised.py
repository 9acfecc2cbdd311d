"""A few bits for each value, and a scale for each block of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from hvdkit import kernels
from hvdkit.compression.checks import check_block, check_flag, check_seed
from hvdkit.compression.codec import Array, Bytes
from hvdkit.compression.memory import Memory
from hvdkit.compression.payload import PayloadCodec


def _split(payload: Bytes, blocks: int, codes: int) -> tuple[Array, Array]:
    """The scales and the codes of a payload. Raises ValueError if it has another length."""
    if payload.nbytes != 4 * blocks + codes:
        raise ValueError(f"expected {4 * blocks + codes} bytes, got {payload.nbytes}")
    return payload[: 4 * blocks].view(np.float32), payload[4 * blocks :]


@dataclass(frozen=True)
class _Quantised(PayloadCodec):
    """Values are multiples of a step, which is their block's largest magnitude / L; they are rounded to nearest even.

    With ``stochastic`` they are rounded up or down at random, so that the mean is right (Alistarh et al., 2017, "QSGD:
    communication-efficient SGD via gradient quantization and encoding"); each rank and each phase draws its own
    numbers, and the same run draws the same.
    """

    block: int = 256
    stochastic: bool = False
    seed: int = 0

    bits: ClassVar[int]

    def __post_init__(self) -> None:
        super().__post_init__()
        check_block(self.name, self.block, 16)
        check_flag(self.name, "stochastic", self.stochastic)
        check_seed(self.name, self.seed)

    def _counts(self, elements: int) -> tuple[int, int]:
        return -(-elements // self.block), -(-elements * self.bits // 8)

    def most_bytes(self, elements: int) -> int:
        """Four bytes for each block's scale, and the codes."""
        blocks, codes = self._counts(elements)
        return 4 * blocks + codes

    def encode_into(self, payload: Bytes, values: Array, memory: Memory) -> int:
        """The scales, then the codes."""
        scales, codes = _split(payload, *self._counts(values.size))
        words = self.seed + memory.turn * 0x85EBCA6B + memory.begin + memory.salt * 0xC2B2AE35
        seed = words % 2**32 if self.stochastic else None
        kernels.quantise_into(codes, scales, values, memory.residual, self.bits, self.block, seed)
        return payload.nbytes

    def decode_into(self, payload: Bytes, out: Array, scale: float, add: bool) -> None:
        """One pass."""
        scales, codes = _split(payload, *self._counts(out.size))
        kernels.dequantise_into(out, codes, scales, self.bits, self.block, scale, add)


@dataclass(frozen=True)
class Int8(_Quantised):
    """A quarter of float32's bytes: 8 bits for each value, L = 127."""

    name: ClassVar[str] = "int8"
    bits: ClassVar[int] = 8
    has_device_twin: ClassVar[bool] = True


@dataclass(frozen=True)
class Int4(_Quantised):
    """An eighth of float32's bytes: 4 bits for each value, L = 7."""

    name: ClassVar[str] = "int4"
    bits: ClassVar[int] = 4
    has_device_twin: ClassVar[bool] = True


@dataclass(frozen=True)
class OneBit(PayloadCodec):
    """A thirty-second of float32's bytes: each value's sign, times the mean magnitude of its block.

    Seide et al., 2014; with the scale of Karimireddy et al., 2019 (see PayloadCodec).
    """

    block: int = 1024

    name: ClassVar[str] = "onebit"
    has_device_twin: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_block(self.name, self.block, 512)

    def _counts(self, elements: int) -> tuple[int, int]:
        return -(-elements // self.block), -(-elements // 8)

    def most_bytes(self, elements: int) -> int:
        """Four bytes for each block's scale, and the signs."""
        blocks, packed = self._counts(elements)
        return 4 * blocks + packed

    def encode_into(self, payload: Bytes, values: Array, memory: Memory) -> int:
        """The scales, then the signs."""
        scales, packed = _split(payload, *self._counts(values.size))
        kernels.sign_into(packed, scales, values, memory.residual, self.block)
        return payload.nbytes

    def decode_into(self, payload: Bytes, out: Array, scale: float, add: bool) -> None:
        """One pass."""
        scales, packed = _split(payload, *self._counts(out.size))
        kernels.unsign_into(out, packed, scales, self.block, scale, add)
