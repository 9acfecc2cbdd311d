"""Encoding and decoding of lossy codecs' payloads on a device, by torch's operations or Triton's kernels; scaling.

Triton's kernels take one pass to encode with the residual and one to decode; top-k's selection takes two. torch's
operations take about ten and dozens: they are the fallback, and the oracle in tests. A payload means the same as on the
host, but top-k's has exactly as many values as are wanted. Ranks know the sizes of payloads in advance.
"""

from __future__ import annotations

import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hvdkit import kernels
from hvdkit.compression import DGC, Codec, Int4, Int8, OneBit, TopK
from hvdkit.errors import in_words
from hvdkit.kernels import BFLOAT16, ONE, Scale

logger = logging.getLogger("hvdkit")

# Payloads; their values, or None where nobody needs them; and the new residual, if there is a residual.
Encoded = tuple[Tensor, Tensor | None, Tensor | None]

TRITON_DEVICES = {"cuda"}  # whose tensors Triton's kernels take
# A program holds a block of so many elements in registers; a kernel for larger blocks compiles for minutes.
LARGEST_TRITON_BLOCK = 8192
_CHUNK = 1 << 22  # elements of halves that are converted to a wider type at a time, to limit memory
NO_TRITON = (
    "codecs encode on the GPU with PyTorch's operations, which takes several times as long as with Triton's kernels, "
    "because the kernels cannot be compiled here: %s.\n"
    "HINT: install a C compiler and Python's headers (Debian: gcc, python3-dev)."
)


def rescale_(flat: Tensor, scale: Scale) -> Tensor:
    """Multiply a flat contiguous tensor of a floating type by ``scale`` in place, with the bits of the host's kernels.

    On the CPU these kernels compute, since PyTorch's threads may flush subnormals. Returns the tensor.
    """
    if scale == ONE:
        return flat
    if flat.device.type == "cpu":
        values = flat.detach()
        is_bfloat16 = flat.dtype == torch.bfloat16
        array = values.view(torch.int16).numpy().view(BFLOAT16) if is_bfloat16 else values.numpy()
        kernels.scale_into(array, array, scale)
    elif flat.dtype not in (torch.float32, torch.float64):
        for part in torch.split(flat, _CHUNK):
            part.copy_(rescale_(part.to(torch.float32), scale))
    elif scale.factor == 1.0:
        # By a tensor of the device: PyTorch divides by a number of the host by multiplying with a rounded reciprocal.
        flat.div_(torch.full((), scale.divisor, dtype=flat.dtype, device=flat.device))
    else:
        flat.mul_(scale.number)  # which PyTorch rounds to the type of the tensor
    return flat


@functools.cache
def _triton(device: torch.device) -> Any:
    """Return the module of Triton's kernels; None if Triton is not installed, or cannot compile for a device."""
    try:
        from hvdkit.transports.gpu import triton_kernels
    except ImportError:
        return None
    try:
        payload = torch.zeros((1, 20), dtype=torch.uint8, device=device)
        triton_kernels.decode(payload, torch.empty((1, 16), device=device), 16, 8)
    except Exception as error:  # Triton, the compiler and the driver raise exceptions of different classes
        logger.warning(NO_TRITON, in_words(error))
        return None
    return triton_kernels


def _triton_for(tensor: Tensor) -> Any:
    """Return the module of Triton's kernels for a tensor; None if torch's operations are to be used."""
    return _triton(tensor.device) if tensor.device.type in TRITON_DEVICES else None


class Coder(ABC):
    """An encoder of rows of float32 values, each row into bytes of its own: [rows, elements] to [rows, bytes]."""

    step = 1  # the number of elements of a row is a multiple of this
    sends_all = False  # a payload would be as large as the values, so the values are summed as they are

    @abstractmethod
    def encode(self, wanted: Tensor, valid: int, phase: int) -> Tensor:
        """Return payloads. The elements behind the first ``valid`` elements are zeros. ``phase`` is 0 or 1."""

    @abstractmethod
    def decode(self, payloads: Tensor, elements: int) -> Tensor:
        """Return the values of ``elements`` elements in each row."""

    def add_to(self, flat: Tensor, payload: Tensor) -> None:
        """Add the values of one row's payload to ``flat``."""
        flat.add_(self.decode(payload[None], flat.numel())[0])

    def encode_rest(self, rows: Tensor, kept: Tensor | None, valid: int, phase: int) -> Encoded:
        """Encode rows plus their residual ``kept``; see ``encode``."""
        wanted = rows if kept is None else rows + kept
        payloads = self.encode(wanted, valid, phase)
        sent = self.decode(payloads, rows.shape[1])
        return payloads, sent, None if kept is None else lacks(wanted, sent, kept)


def lacks(wanted: Tensor, sent: Tensor, kept: Tensor) -> Tensor:
    """Return ``wanted`` less ``sent``; the residual before, ``kept``, where the difference is not finite."""
    lost = wanted - sent
    return torch.where(torch.isfinite(lost), lost, kept)


class Blocks(Coder):
    """A coder of blocks of elements: a payload is a scale for each block of a row, and ``bits`` for each element."""

    bits: int
    rounds = True  # to the nearest number, as Triton's kernels do

    def _triton_for(self, tensor: Tensor) -> Any:
        return _triton_for(tensor) if self.step <= LARGEST_TRITON_BLOCK else None

    def encode_rest(self, rows: Tensor, kept: Tensor | None, valid: int, phase: int) -> Encoded:
        if not self.rounds or (triton := self._triton_for(rows)) is None:
            return super().encode_rest(rows, kept, valid, phase)
        nbytes = rows.shape[1] // self.step * (4 + self.step * self.bits // 8)
        payloads = rows.new_empty((len(rows), nbytes), dtype=torch.uint8)
        before = None if kept is None else kept.contiguous()
        left = None if kept is None else torch.empty_like(rows)
        triton.encode(rows.contiguous(), before, payloads, left, self.step, self.bits, valid)
        return payloads, None, left

    def decode(self, payloads: Tensor, elements: int) -> Tensor:
        if (triton := self._triton_for(payloads)) is None:
            return self.decoded(payloads, elements)
        values = payloads.new_empty((len(payloads), elements), dtype=torch.float32)
        triton.decode(payloads.contiguous(), values, self.step, self.bits)
        return values

    @abstractmethod
    def decoded(self, payloads: Tensor, elements: int) -> Tensor:
        """Return the same as ``decode``, by torch's operations."""


class Quantised(Blocks):
    """A coder of whole numbers of 8 or 4 bits."""

    def __init__(self, codec: Int8 | Int4, turn: int, rank: int) -> None:
        self._codec, self.bits, self.step = codec, codec.bits, codec.block
        self._largest = 127 if codec.bits == 8 else 7
        self.rounds = not codec.stochastic
        self._words = codec.seed + turn * 0x85EBCA6B + 2 * rank * 0xC2B2AE35

    def encode(self, wanted: Tensor, valid: int, phase: int) -> Tensor:
        blocks = wanted.view(len(wanted), -1, self._codec.block)
        # By a tensor of the device: PyTorch divides by a number of the host by multiplying with a rounded reciprocal.
        scales = blocks.abs().amax(dim=2) / torch.full((), float(self._largest), device=wanted.device)
        # Multiplied, as on the host: divided values near the middle of two codes would get another code.
        multiples = blocks * (1.0 / torch.where(scales == 0, 1.0, scales))[:, :, None]
        if self._codec.stochastic:
            generator = torch.Generator(wanted.device)
            generator.manual_seed((self._words + phase * 0xC2B2AE35) % 2**63)
            drawn = torch.rand(multiples.shape, generator=generator, dtype=torch.float32, device=wanted.device)
            multiples = torch.floor(multiples + drawn)
        else:
            multiples = torch.round(multiples)
        codes = torch.nan_to_num(multiples).clamp(-self._largest, self._largest).to(torch.int8).view(len(wanted), -1)
        if self.bits == 4:
            nibbles = (codes + 8).view(torch.uint8)
            codes = nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)
        return torch.cat([scales.view(torch.uint8), codes.view(torch.uint8)], dim=1)

    def decoded(self, payloads: Tensor, elements: int) -> Tensor:
        blocks = elements // self._codec.block
        scales = payloads[:, : 4 * blocks].contiguous().view(torch.float32)
        codes = payloads[:, 4 * blocks :]
        if self.bits == 4:
            codes = torch.stack([codes & 15, codes >> 4], dim=2).view(len(payloads), -1).view(torch.int8) - 8
        else:
            codes = codes.contiguous().view(torch.int8)
        values = codes.to(torch.float32).view(len(payloads), blocks, -1) * scales[:, :, None]
        return values.view(len(payloads), elements)


class Signs(Blocks):
    """A coder of signs, for the 1-bit codec."""

    bits = 1

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

    def decoded(self, payloads: Tensor, elements: int) -> Tensor:
        blocks = elements // self.step
        scales = payloads[:, : 4 * blocks].contiguous().view(torch.float32)
        bits = (payloads[:, 4 * blocks :, None] >> _shifts(payloads.device)) & 1
        signs = bits.to(torch.float32).view(len(payloads), blocks, -1) * 2 - 1
        return (signs * scales[:, :, None]).view(len(payloads), elements)


def _shifts(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)


class Largest(Coder):
    """A coder of a fixed number of each row's values, padded to that number, so that ranks know a payload's size.

    Triton's kernels take the values above a threshold, and then the first values that are at most 1.5 % below it.
    """

    def __init__(self, codec: TopK, turn: int, rank: int) -> None:
        self._ratio = codec.ratio  # no codec with a warm-up encodes on devices
        self.sends_all = 2 * codec.ratio >= 1
        self._masks = isinstance(codec, DGC)  # its velocity is cleared where values were sent

    def _count(self, elements: int) -> int:
        return min(elements, max(1, round(elements * self._ratio)))

    def encode(self, wanted: Tensor, valid: int, phase: int) -> Tensor:
        # torch.topk takes NaN for the largest value.
        indices = torch.topk(wanted.abs(), self._count(wanted.shape[1]), dim=1, sorted=False).indices
        values = torch.gather(wanted, 1, indices)
        return torch.cat([values.view(torch.uint8), indices.to(torch.int32).view(torch.uint8)], dim=1)

    def encode_rest(self, rows: Tensor, kept: Tensor | None, valid: int, phase: int) -> Encoded:
        if (triton := _triton_for(rows)) is None:
            return super().encode_rest(rows, kept, valid, phase)
        before = None if kept is None else kept.contiguous()
        payloads, left = triton.take_largest(rows.contiguous(), before, self._count(rows.shape[1]))
        return payloads, self.decode(payloads, rows.shape[1]) if self._masks else None, left

    def add_to(self, flat: Tensor, payload: Tensor) -> None:
        indices, values = self.pairs(payload[None], flat.numel())
        flat.scatter_add_(0, indices[0], values[0])

    def pairs(self, payloads: Tensor, elements: int) -> tuple[Tensor, Tensor]:
        """Return the indices and values of payloads, both [rows, count]."""
        count = self._count(elements)
        values = payloads[:, : 4 * count].contiguous().view(torch.float32)
        return payloads[:, 4 * count :].contiguous().view(torch.int32).long(), values

    def decode(self, payloads: Tensor, elements: int) -> Tensor:
        indices, values = self.pairs(payloads, elements)
        # Added, not set: a payload is padded with zeros at the first element, which may have a value too.
        return values.new_zeros((len(payloads), elements)).scatter_add_(1, indices, values)


# The coders of codecs that have a twin on devices, made of a codec, a turn and a rank.
CODERS: dict[type[Codec], Callable[[Any, int, int], Coder]] = {
    Int8: Quantised,
    Int4: Quantised,
    OneBit: Signs,
    TopK: Largest,
    DGC: Largest,
}
