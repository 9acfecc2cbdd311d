"""Kernels of Triton for lossy codecs, which read and write each byte once or twice, where PyTorch makes many passes.

The codecs that quantise: the arithmetic is that of ``device_codecs`` without Triton, in the same order, without fused
operations, and with halves rounded to even. The 1-bit codec's sums of magnitudes are in another order.

The selection of about the largest values: ``_estimate`` finds the threshold of a sample. ``_survey`` adds the residual
to the gradient and counts, in each tile, the values above each of 16 thresholds around that of the sample. ``_place``
chooses the lowest threshold that no more values exceed than are wanted, and computes each tile's position in the
payload. ``_take`` moves the values above the threshold into the payload, and fills it up, in the order of elements,
with values above the next lower threshold. Positions depend on counts alone, so the same run gives the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 4096  # elements that a program encodes, decodes or surveys, about
SAMPLE = 16384
CHUNK = 1024  # tiles whose positions one program computes at a time
CANDIDATES = tl.constexpr(16)  # thresholds around that of the sample
# The distance of two thresholds, relative to that of the sample: about a tenth fewer values exceed the higher one.
STEP = tl.constexpr(0.015)
# Adding and subtracting this number rounds to the nearest whole number, halves to even.
MAGIC = tl.constexpr(12582912.0)
# Arguments that differ from bucket to bucket. Kernels are not compiled anew for them in the middle of training.
BLOCK_SIZES, TILE_SIZES = ("valid", "blocks", "row_words"), ("stride", "wanted", "tiles")


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


@triton.jit(do_not_specialize=BLOCK_SIZES)
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


@triton.jit(do_not_specialize=BLOCK_SIZES)
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


def _shape(values: Tensor, block: int) -> tuple[int, tuple[int, int], dict[str, Any]]:
    """Return the blocks of a row of values, the grid of programs, and their constant arguments."""
    blocks, width = values.shape[1] // block, triton.next_power_of_2(block)
    group = max(1, TILE // width)
    constants = {"BLOCK": block, "WIDTH": width, "GROUP": group, "enable_fp_fusion": False}
    return blocks, (triton.cdiv(blocks, group), len(values)), constants


def encode(
    values: Tensor, kept: Tensor | None, payloads: Tensor, left: Tensor | None, block: int, bits: int, valid: int
) -> None:
    """Write payloads of rows of float32 values plus the residual ``kept``, and the new residual into ``left``.

    ``payloads``, rows of bytes, a multiple of 4, have a float32 for each block, then ``bits`` for each element. The
    elements behind the first ``valid`` elements of all rows are zeros.
    """
    (blocks, grid, constants), words = _shape(values, block), payloads.view(torch.int32)
    arguments = (values, kept, words, left, values.shape[1], valid, blocks, words.shape[1])
    _encode[grid](*arguments, BITS=bits, KEEPS=kept is not None, **constants)


def decode(payloads: Tensor, values: Tensor, block: int, bits: int) -> None:
    """Decode payloads into rows of float32 values."""
    (blocks, grid, constants), words = _shape(values, block), payloads.view(torch.int32)
    _decode[grid](words, values, values.shape[1], blocks, words.shape[1], BITS=bits, **constants)


@triton.jit
def _magnitudes(numbers):
    """Return absolute values, with NaN as infinity, so that it counts among the largest."""
    return tl.where(numbers == numbers, tl.abs(numbers), float("inf"))


@triton.jit(do_not_specialize=TILE_SIZES)
def _estimate(
    values, kept, thresholds, elements, stride, wanted, SAMPLE: tl.constexpr, KEEPS: tl.constexpr
):  # fmt: skip
    row, place = tl.program_id(0).to(tl.int64), tl.arange(0, SAMPLE) * stride
    mask = place < elements
    numbers = tl.load(values + row * elements + place, mask, other=0.0)
    if KEEPS:
        numbers += tl.load(kept + row * elements + place, mask, other=0.0)
    bits = _magnitudes(numbers).to(tl.int32, bitcast=True)  # in the order of the numbers
    # At least as many as wanted reach ``low``; fewer reach ``high``.
    low, high = tl.full((), 1, tl.int32), tl.full((), 0x7F800001, tl.int32)
    while high - low > 1:
        middle = low + (high - low) // 2
        if tl.sum((mask & (bits >= middle)).to(tl.int32)) >= wanted:
            low = middle
        else:
            high = middle
    number = tl.arange(0, CANDIDATES)
    about = low.to(tl.float32, bitcast=True)
    tl.store(thresholds + row * CANDIDATES + number, about * (1.0 + (number - CANDIDATES // 2) * STEP))


@triton.jit(do_not_specialize=TILE_SIZES)
def _survey(
    values, kept, left, thresholds, counts, broken, elements, tiles, TILE: tl.constexpr, KEEPS: tl.constexpr
):  # fmt: skip
    row, tile = tl.program_id(1).to(tl.int64), tl.program_id(0)
    place = tile * TILE + tl.arange(0, TILE)
    mask = place < elements
    at = row * elements + place
    numbers = tl.load(values + at, mask, other=0.0)
    if KEEPS:
        before = tl.load(kept + at, mask, other=0.0)
        numbers += before
        is_finite = numbers - numbers == 0
        tl.store(broken + row * tiles + tile, tl.max((is_finite == 0).to(tl.int32), 0))
        numbers = tl.where(is_finite, numbers, before)
        tl.store(left + at, numbers, mask)
    size = _magnitudes(numbers)
    threshold = thresholds + row * CANDIDATES
    for number in tl.static_range(0, CANDIDATES, 2):
        # Two counts in one number: neither is more than a tile.
        first = (mask & (size >= tl.load(threshold + number))).to(tl.int32)
        second = (mask & (size >= tl.load(threshold + number + 1))).to(tl.int32)
        both = tl.sum(first + (second << 16), 0)
        begin = counts + (row * CANDIDATES + number) * tiles + tile
        tl.store(begin, both & 0xFFFF)
        tl.store(begin + tiles, both >> 16)


@triton.jit(do_not_specialize=TILE_SIZES)
def _place(
    counts, broken, chosen, starts, payloads, tiles, wanted, CHUNK: tl.constexpr, KEEPS: tl.constexpr
):  # fmt: skip
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, CHUNK)
    candidate = tl.arange(0, CANDIDATES)
    begin = counts + row * CANDIDATES * tiles
    totals = tl.zeros((CANDIDATES,), tl.int32)
    is_broken = 0
    first = 0
    while first < tiles:  # Triton's interpreter cannot make a range of ``tiles``
        mask = first + lane < tiles
        chunk = tl.load(begin + candidate[:, None] * tiles + first + lane[None, :], mask[None, :], other=0)
        totals += tl.sum(chunk, 1)
        if KEEPS:
            is_broken |= tl.max(tl.load(broken + row * tiles + first + lane, mask, other=0), 0)
        first += CHUNK
    # If the sample was not typical, too many values may exceed even the highest threshold: the first values are taken.
    high = tl.minimum(tl.sum((totals > wanted).to(tl.int32), 0), CANDIDATES - 1)
    low = tl.maximum(high - 1, 0)
    tl.store(chosen + row * 2, high)
    tl.store(chosen + row * 2 + 1, is_broken)
    if is_broken:
        tl.store(payloads + row * 2 * wanted, 0x7FC00000)  # NaN
    end_high = 0
    end_low = tl.sum(tl.where(candidate == high, totals, 0), 0)
    first = 0
    while first < tiles:
        mask = first + lane < tiles
        of_high = tl.load(begin + high * tiles + first + lane, mask, other=0)
        of_low = tl.load(begin + low * tiles + first + lane, mask, other=0) - of_high
        place = starts + row * 2 * tiles + first + lane
        tl.store(place, end_high + tl.cumsum(of_high, 0) - of_high, mask)
        tl.store(place + tiles, end_low + tl.cumsum(of_low, 0) - of_low, mask)
        end_high += tl.sum(of_high, 0)
        end_low += tl.sum(of_low, 0)
        first += CHUNK


@triton.jit(do_not_specialize=TILE_SIZES)
def _take(
    rows, left, thresholds, chosen, starts, payloads, elements, tiles, wanted, TILE: tl.constexpr, KEEPS: tl.constexpr
):  # fmt: skip
    row, tile = tl.program_id(1).to(tl.int64), tl.program_id(0)
    place = tile * TILE + tl.arange(0, TILE)
    mask = place < elements
    at = row * elements + place
    numbers = tl.load(rows + at, mask, other=0.0)
    size = _magnitudes(numbers)
    threshold = thresholds + row * CANDIDATES
    number, is_broken = tl.load(chosen + row * 2), tl.load(chosen + row * 2 + 1)
    is_high = mask & (size >= tl.load(threshold + number))
    is_low = mask & (size >= tl.load(threshold + tl.maximum(number - 1, 0))) & (is_high == 0)
    before = tl.cumsum(is_high.to(tl.int32) + (is_low.to(tl.int32) << 16), 0)
    start = starts + row * 2 * tiles + tile
    to = tl.where(is_high, tl.load(start) + (before & 0xFFFF), tl.load(start + tiles) + (before >> 16)) - 1
    is_taken = (is_high | is_low) & (to < wanted)
    is_written = is_taken & ((to > 0) | (is_broken == 0))  # the payload's first value is NaN if a value is not finite
    begin = payloads + row * 2 * wanted
    tl.store(begin + to, numbers.to(tl.int32, bitcast=True), is_written)
    tl.store(begin + wanted + to, place, is_written)
    if KEEPS:
        tl.store(left + at, tl.zeros((TILE,), tl.float32), is_written)


def take_largest(rows: Tensor, kept: Tensor | None, wanted: int) -> tuple[Tensor, Tensor | None]:
    """Take about the ``wanted`` largest values of each row of float32 values plus its residual ``kept``.

    Returns payloads, in each row ``wanted`` values and as many int32 indices in bytes, with zeros at index 0 where
    fewer values were taken, and the new residual, if there is a residual. If a sum of value and residual is not finite,
    NaN is among the values taken, and the residual there stays.
    """
    count, elements = rows.shape
    tiles, keeps = triton.cdiv(elements, TILE), kept is not None
    integers: dict[str, Any] = {"dtype": torch.int32, "device": rows.device}
    thresholds = torch.empty((count, CANDIDATES.value), dtype=torch.float32, device=rows.device)
    chosen = torch.empty((count, 2), **integers)
    counts = torch.empty((count, CANDIDATES.value, tiles), **integers)
    starts = torch.empty((count, 2, tiles), **integers)
    broken = torch.empty((count, tiles), **integers) if keeps else None
    payloads = torch.zeros((count, 2 * wanted), **integers)
    left = torch.empty_like(rows) if keeps else None
    stride = triton.cdiv(elements, SAMPLE)
    of_sample = max(1, round(wanted / stride))
    options: dict[str, Any] = {"KEEPS": keeps, "enable_fp_fusion": False}
    _estimate[count,](rows, kept, thresholds, elements, stride, of_sample, SAMPLE=SAMPLE, num_warps=16, **options)
    _survey[tiles, count](rows, kept, left, thresholds, counts, broken, elements, tiles, TILE=TILE, **options)
    _place[count,](counts, broken, chosen, starts, payloads, tiles, wanted, CHUNK=CHUNK, num_warps=8, **options)
    source = rows if left is None else left
    _take[tiles, count](
        source, left, thresholds, chosen, starts, payloads, elements, tiles, wanted, TILE=TILE, **options
    )
    return payloads.view(torch.uint8), left
