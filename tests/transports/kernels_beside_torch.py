"""Kernels of Triton beside PyTorch's operations: ``python -m`` this, on a GPU; or with ``cpu`` without one.

On the CPU Triton's interpreter runs what is compiled for GPUs elsewhere, if TRITON_INTERPRET=1 is set before Triton is
imported.
"""

from __future__ import annotations

import itertools
import os
import sys

import torch

from hvdkit.compression import Int4, Int8, OneBit, TopK
from hvdkit.transports.gpu import device_codecs

DEVICE = torch.device(sys.argv[1] if len(sys.argv) > 1 else "cuda")
CODECS = {
    "int8": Int8(block=32),
    "int8, blocks of no power of two": Int8(block=48),
    "int4": Int4(block=32),
    "int4, blocks of no power of two": Int4(block=48),
    "onebit": OneBit(block=512),
    "onebit, long blocks": OneBit(block=1536),
}
ODD = (0.0, float("nan"), float("inf"), -float("inf"), 1e-45, -1e38)


def values(rows: int, elements: int, seed: int) -> torch.Tensor:
    drawn = torch.randn(rows, elements, generator=torch.Generator().manual_seed(seed))
    if seed % 3 == 1:  # some blocks with values that are no usual numbers, and others without
        for number, value in enumerate(ODD):
            drawn.view(-1)[(number * 7919) % drawn.numel()] = value
    if seed % 3 == 2:  # many in the middle of two codes
        drawn = torch.randint(-254, 255, drawn.shape, generator=torch.Generator().manual_seed(seed)) / 2.0
    return drawn.to(DEVICE)


def both(codec, rows: torch.Tensor, kept: torch.Tensor | None, valid: int) -> list[list[torch.Tensor]]:
    """Payloads, their values and what is kept: of PyTorch's operations, and of kernels."""
    found = []
    for devices in (set(), {DEVICE.type}):
        device_codecs.TRITON_DEVICES.clear()
        device_codecs.TRITON_DEVICES.update(devices)
        coder = device_codecs.CODERS[type(codec)](codec, 3, 1)
        payloads, _, left = coder.encode_rest(rows.clone(), None if kept is None else kept.clone(), valid, 0)
        found.append([payloads, coder.decode(payloads, rows.shape[1])] + ([] if left is None else [left]))
    return found


def compare(name: str, seed: int, rows: int, blocks: int, keeps: bool) -> None:
    codec = CODECS[name]
    given = values(rows, blocks * codec.block, seed)
    kept = values(rows, blocks * codec.block, seed + 100).nan_to_num(0.0, 0.0, 0.0) if keeps else None
    valid = given.numel() - seed % codec.block
    given.view(-1)[valid:] = 0.0
    if kept is not None:
        kept.view(-1)[valid:] = 0.0
    plain, kernels = both(codec, given, kept, valid)
    assert device_codecs._triton(DEVICE) is not None
    for what, one, other in zip(("payloads", "values", "what is kept"), plain, kernels, strict=False):
        case = f"{name}, seed {seed}, {rows} rows of {blocks} blocks, {keeps=}: {what}"
        if "onebit" not in name:
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)) or (
                what != "payloads" and torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))
            ), case
        elif what == "payloads":
            assert torch.equal(one[:, 4 * blocks :], other[:, 4 * blocks :]), case
        else:  # the magnitudes of a block are summed in another order
            torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-4, equal_nan=True, msg=case)


def taken(codec, rows: torch.Tensor, kept: torch.Tensor | None):
    """What kernels of top-k send of rows, and what they keep."""
    device_codecs.TRITON_DEVICES.update({DEVICE.type})
    coder = device_codecs.CODERS[TopK](codec, 0, 0)
    payloads, _, left = coder.encode_rest(rows.clone(), None if kept is None else kept.clone(), rows.numel(), 0)
    again, _, _ = coder.encode_rest(rows.clone(), None if kept is None else kept.clone(), rows.numel(), 0)
    assert torch.equal(payloads, again), "the same gradients give other bits"
    return coder.decode(payloads, rows.shape[1]), left


def compare_largest(elements: int, ratio: float, seed: int, rows: int, keeps: bool) -> None:
    case = f"top-k, {rows} rows of {elements}, {ratio=}, {seed=}, {keeps=}"
    given = torch.randn(rows, elements, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    if seed % 4 == 1:
        given = given**5  # long tails
    elif seed % 4 == 2:
        given = torch.where(given > 2.0, given, 0.0)  # fewer than are wanted, or about as many
    elif seed % 4 == 3:
        given = torch.sign(given)  # all alike
    drawn = torch.randn(given.shape, generator=torch.Generator().manual_seed(seed + 9)).to(DEVICE)
    kept = drawn * 0.1 if keeps else None
    wanted = given if kept is None else given + kept
    sent, left = taken(TopK(ratio=ratio), given, kept)
    count = max(1, round(elements * ratio))
    for row, out in zip(wanted, sent, strict=True):
        places = out.nonzero().view(-1)
        assert torch.equal(out[places], row[places]), f"{case}: what is sent is not what there is"
        enough = min(count, int((row != 0).sum()))
        assert len(places) <= count, f"{case}: {len(places)} are too many for {count}"
        assert len(places) >= 0.85 * enough, f"{case}: {len(places)} of {enough}"
        if len(places) and elements > 10_000 and seed % 4 < 2:
            best = row.abs().sort(descending=True).values[:count].sum()
            assert out.abs().sum() >= 0.97 * best * len(places) / count, f"{case}: others are larger"
    if left is not None:
        assert torch.equal(sent + left, wanted), f"{case}: something is lost"


def tell_of_what_is_not_finite() -> None:
    for value, keeps in itertools.product(ODD[1:4], (False, True)):
        given = torch.randn(1, 6000, generator=torch.Generator().manual_seed(1)).to(DEVICE)
        kept = torch.full_like(given, 0.5) if keeps else None
        given[0, 4321] = value
        sent, left = taken(TopK(ratio=0.01), given, kept)
        assert not torch.isfinite(sent).all(), (value, keeps)
        if left is not None:
            assert torch.isfinite(left).all()
            assert left[0, 4321] == 0.5
    sent, left = taken(TopK(ratio=0.01), *torch.tensor([[float("nan")] * 500, [0.0] * 500], device=DEVICE)[:, None])
    assert torch.isnan(sent).any()
    assert left.eq(0).all()


def main() -> None:
    if DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        print("nothing is run: on the CPU TRITON_INTERPRET=1 is needed")
        return
    if DEVICE.type == "cuda":
        compare_largest(25_000_000, 0.01, 0, 1, True)
    for elements, ratio, seed, rows, keeps in itertools.product(
        (1, 700, 30_000), (0.01, 0.1), range(4), (1, 3), (False, True)
    ):
        compare_largest(elements, ratio, seed, rows, keeps)
    tell_of_what_is_not_finite()
    for name, seed, (rows, blocks), keeps in itertools.product(
        CODECS, range(6), ((1, 1), (1, 7), (3, 5)), (False, True)
    ):
        compare(name, seed, rows, blocks, keeps)
    print("kernels and operations give the same")


if __name__ == "__main__":
    main()
