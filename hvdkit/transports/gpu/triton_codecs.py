"""Kernels of Triton for the codecs that quantise: they read and write each byte once, where PyTorch makes many passes.

The arithmetic is that of ``device_codecs`` without Triton, in the same order, without fused operations, and with halves
rounded to even. The 1-bit codec's sums of magnitudes are in another order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# The approximate number of elements that a program encodes or decodes.
TILE = 4096
# Arguments that differ from bucket to bucket. Kernels are not compiled anew for them in the middle of training.
SIZES = ("valid", "blocks", "row_words")
# Adding and subtracting this number rounds to the nearest whole number, halves to even.
MAGIC = tl.constexpr(12582912.0)


@triton.jit
def _pack(numbers, BITS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr):
    """Pack whole numbers of ``BITS`` bits, [group, width], into 32-bit words, the first number in the lowest bits."""
    lane = tl.arange(0, WIDTH)
    shifted = numbers << ((lane * BITS) % 32)[None, :]
    return tl.sum(tl.reshape(shifted, (GROUP, WIDTH * BITS // 32, 32 // BITS)), 2)


@triton.jit
def _unpack(words, BITS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr):
    """Unpack words of 32 bits into whole numbers of ``BITS`` bits, [group, width]."""
    shifts = tl.arange(0, 32 // BITS) * BITS
    numbers = (words[:, :, None] >> shifts[None, None, :]) & ((1 << BITS) - 1)
    return tl.reshape(numbers, (GROUP, WIDTH))


@triton.jit(do_not_specialize=SIZES)
def _encode(
    values, kept, payloads, left, elements, valid, blocks, row_words,
    BITS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, KEEPS: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(1).to(tl.int64), tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    lane, word = tl.arange(0, WIDTH), tl.arange(0, WIDTH * BITS // 32)
    mask = (block[:, None] < blocks) & (lane[None, :] < BLOCK)
    at = row * elements + block[:, None] * BLOCK + lane[None, :]
    wanted = tl.load(values + at, mask, other=0.0)
    if KEEPS:
        before = tl.load(kept + at, mask, other=0.0)
        wanted += before
    if BITS == 1:
        count = valid - (row * elements + block * BLOCK)
        scale = tl.math.div_rn(tl.sum(tl.abs(wanted), 1), tl.minimum(tl.maximum(count, 1), BLOCK).to(tl.float32))
        numbers = (wanted >= 0).to(tl.int32)
        stands_for = tl.where(wanted >= 0, scale[:, None], -scale[:, None])
    else:
        most: tl.constexpr = (1 << (BITS - 1)) - 1
        is_broken = tl.max((wanted != wanted).to(tl.int32), 1) > 0  # tl.max may ignore NaN
        scale = tl.math.div_rn(tl.where(is_broken, float("nan"), tl.max(tl.abs(wanted), 1)), most * 1.0)
        inverse = tl.math.div_rn(1.0, tl.where(scale == 0, 1.0, scale))
        codes = (wanted * inverse[:, None] + MAGIC) - MAGIC
        codes = tl.minimum(tl.maximum(tl.where(codes == codes, codes, 0.0), -most * 1.0), most * 1.0)
        numbers = codes.to(tl.int32)
        numbers = numbers & 255 if BITS == 8 else numbers + 8
        stands_for = codes * scale[:, None]
    begin = payloads + row * row_words
    tl.store(begin.to(tl.pointer_type(tl.float32)) + block, scale, block < blocks)
    is_there = (block[:, None] < blocks) & (word[None, :] < BLOCK * BITS // 32)
    packed = begin + blocks + block[:, None] * (BLOCK * BITS // 32) + word[None, :]
    tl.store(packed, _pack(numbers, BITS, WIDTH, GROUP), is_there)
    if KEEPS:
        lost = wanted - stands_for
        tl.store(left + at, tl.where(lost - lost == 0, lost, before), mask)


@triton.jit(do_not_specialize=SIZES)
def _decode(
    payloads, values, elements, blocks, row_words,
    BITS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(1).to(tl.int64), tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    lane, word = tl.arange(0, WIDTH), tl.arange(0, WIDTH * BITS // 32)
    begin = payloads + row * row_words
    scale = tl.load(begin.to(tl.pointer_type(tl.float32)) + block, block < blocks, other=0.0)[:, None]
    is_there = (block[:, None] < blocks) & (word[None, :] < BLOCK * BITS // 32)
    words = tl.load(begin + blocks + block[:, None] * (BLOCK * BITS // 32) + word[None, :], is_there, other=0)
    numbers = _unpack(words, BITS, WIDTH, GROUP)
    if BITS == 1:
        decoded = tl.where(numbers == 1, scale, -scale)
    elif BITS == 8:
        decoded = ((numbers ^ 128) - 128).to(tl.float32) * scale
    else:
        decoded = (numbers - 8).to(tl.float32) * scale
    mask = (block[:, None] < blocks) & (lane[None, :] < BLOCK)
    tl.store(values + row * elements + block[:, None] * BLOCK + lane[None, :], decoded, mask)


class _Shape:
    """The grid of programs for rows of values, each of several blocks."""

    def __init__(self, values: Tensor, block: int) -> None:
        rows, elements = values.shape
        self.blocks = elements // block
        self.width = triton.next_power_of_2(block)
        self.group = max(1, TILE // self.width)
        self.grid = (triton.cdiv(self.blocks, self.group), rows)


def encode(
    values: Tensor, kept: Tensor | None, payloads: Tensor, left: Tensor | None, block: int, bits: int, valid: int
) -> None:
    """Write payloads of rows of float32 values plus the residual ``kept``, and the new residual into ``left``.

    ``payloads`` has rows of bytes, a multiple of 4: a float32 for each block, then ``bits`` for each element: 8 or 4 of
    a whole number, or 1 of a sign. The elements behind the first ``valid`` elements of all rows are zeros.
    """
    shape, words = _Shape(values, block), payloads.view(torch.int32)
    _encode[shape.grid](
        values, kept, words, left, values.shape[1], valid, shape.blocks, words.shape[1],
        BITS=bits, BLOCK=block, WIDTH=shape.width, GROUP=shape.group, KEEPS=kept is not None, enable_fp_fusion=False,
    )  # fmt: skip


def decode(payloads: Tensor, values: Tensor, block: int, bits: int) -> None:
    """Decode payloads into rows of float32 values."""
    shape, words = _Shape(values, block), payloads.view(torch.int32)
    _decode[shape.grid](
        words, values, values.shape[1], shape.blocks, words.shape[1],
        BITS=bits, BLOCK=block, WIDTH=shape.width, GROUP=shape.group, enable_fp_fusion=False,
    )  # fmt: skip
