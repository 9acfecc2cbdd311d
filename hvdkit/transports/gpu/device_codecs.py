"""Payloads of lossy codecs by torch's own operations: what stands for tensors of a device, and back.

A payload stands for what it stands for on the host, but top-k's has exactly as many values as are wanted. All have a
size that ranks know beforehand.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hvdkit.compression import DGC, Codec, Int4, Int8, Memory, OneBit, TopK


class Coder(ABC):
    """Payloads of rows of float32 values, each row in bytes of its own: [rows, elements] to [rows, bytes] and back."""

    step = 1  # rows have a multiple of so many elements
    sends_all = False  # whether as much as all values would be sent, so that these are summed as they are

    @abstractmethod
    def encode(self, wanted: Tensor, valid: int, phase: int) -> Tensor:
        """``valid``: how many elements are there; what follows them in the last rows is zeros. ``phase``: 0 or 1."""

    @abstractmethod
    def decode(self, payloads: Tensor, elements: int) -> Tensor:
        """The values of ``elements`` elements in each row."""


class Quantised(Coder):
    def __init__(self, codec: Int8 | Int4, turn: int, rank: int) -> None:
        self._codec, self._bits, self._largest = codec, codec.bits, 127 if codec.bits == 8 else 7
        self.step = codec.block
        self._words = codec.seed + turn * 0x85EBCA6B + 2 * rank * 0xC2B2AE35

    def encode(self, wanted: Tensor, valid: int, phase: int) -> Tensor:
        blocks = wanted.view(len(wanted), -1, self._codec.block)
        scales = blocks.abs().amax(dim=2) / self._largest
        # Not divided: as on the host, or what is near the middle of two codes would get another one.
        multiples = blocks * (1.0 / torch.where(scales == 0, 1.0, scales))[:, :, None]
        if self._codec.stochastic:
            generator = torch.Generator(wanted.device)
            generator.manual_seed((self._words + phase * 0xC2B2AE35) % 2**63)
            drawn = torch.rand(multiples.shape, generator=generator, dtype=torch.float32, device=wanted.device)
            multiples = torch.floor(multiples + drawn)
        else:
            multiples = torch.round(multiples)
        codes = torch.nan_to_num(multiples).clamp(-self._largest, self._largest).to(torch.int8).view(len(wanted), -1)
        if self._bits == 4:
            nibbles = (codes + 8).view(torch.uint8)
            codes = nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)
        return torch.cat([scales.view(torch.uint8), codes.view(torch.uint8)], dim=1)

    def decode(self, payloads: Tensor, elements: int) -> Tensor:
        blocks = elements // self._codec.block
        scales = payloads[:, : 4 * blocks].contiguous().view(torch.float32)
        codes = payloads[:, 4 * blocks :]
        if self._bits == 4:
            codes = torch.stack([codes & 15, codes >> 4], dim=2).view(len(payloads), -1).view(torch.int8) - 8
        else:
            codes = codes.contiguous().view(torch.int8)
        values = codes.to(torch.float32).view(len(payloads), blocks, -1) * scales[:, :, None]
        return values.view(len(payloads), elements)


class Signs(Coder):
    def __init__(self, codec: OneBit, turn: int, rank: int) -> None:
        self.step = codec.block

    def encode(self, wanted: Tensor, valid: int, phase: int) -> Tensor:
        blocks = wanted.view(len(wanted), -1, self.step)
        begins = torch.arange(wanted.numel() // self.step, device=wanted.device) * self.step
        counts = (valid - begins).clamp(1, self.step).view(blocks.shape[:2])
        scales = blocks.abs().sum(dim=2) / counts
        bits = (wanted >= 0).view(len(wanted), -1, 8).to(torch.uint8)
        packed = (bits << _shifts(wanted.device)).sum(dim=2, dtype=torch.uint8)
        return torch.cat([scales.view(torch.uint8), packed], dim=1)

    def decode(self, payloads: Tensor, elements: int) -> Tensor:
        blocks = elements // self.step
        scales = payloads[:, : 4 * blocks].contiguous().view(torch.float32)
        bits = (payloads[:, 4 * blocks :, None] >> _shifts(payloads.device)) & 1
        signs = bits.to(torch.float32).view(len(payloads), blocks, -1) * 2 - 1
        return (signs * scales[:, :, None]).view(len(payloads), elements)


def _shifts(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)


class Largest(Coder):
    """Exactly as many as are wanted of each row, so that all ranks know the size of a payload."""

    def __init__(self, codec: TopK, turn: int, rank: int) -> None:
        memory = Memory(0)
        memory.turn = turn
        self._ratio = codec.ratio_at(memory)
        self.sends_all = 2 * codec.ratio >= 1

    def _count(self, elements: int) -> int:
        return min(elements, max(1, round(elements * self._ratio)))

    def encode(self, wanted: Tensor, valid: int, phase: int) -> Tensor:
        # NaN is the largest of all.
        indices = torch.topk(wanted.abs(), self._count(wanted.shape[1]), dim=1, sorted=False).indices
        values = torch.gather(wanted, 1, indices)
        return torch.cat([values.view(torch.uint8), indices.to(torch.int32).view(torch.uint8)], dim=1)

    def pairs(self, payloads: Tensor, elements: int) -> tuple[Tensor, Tensor]:
        """Indices and values, both [rows, count]."""
        count = self._count(elements)
        values = payloads[:, : 4 * count].contiguous().view(torch.float32)
        return payloads[:, 4 * count :].contiguous().view(torch.int32).long(), values

    def decode(self, payloads: Tensor, elements: int) -> Tensor:
        indices, values = self.pairs(payloads, elements)
        return values.new_zeros((len(payloads), elements)).scatter_(1, indices, values)


# What encodes payloads of a codec that has a twin here, at a turn of a rank.
CODERS: dict[type[Codec], Callable[[Any, int, int], Coder]] = {
    Int8: Quantised,
    Int4: Quantised,
    OneBit: Signs,
    TopK: Largest,
    DGC: Largest,
}
