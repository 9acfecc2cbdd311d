"""A wrong argument of a codec kernel is named, as in test_arguments.py, and nothing is written."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tests.kernels.arrays import native, needs_native
from tests.kernels.codecs import CODEC_BACKENDS

f4 = np.zeros(32, np.float32)
more = np.zeros(32, np.float32)
third = np.zeros(32, np.float32)
two = np.zeros(2, np.float32)
one = np.zeros(1, np.float32)
u1 = np.zeros(32, np.uint8)
u4 = np.arange(32, dtype=np.uint32)
read_only = np.zeros(32, np.float32)
read_only.flags.writeable = False
shared = np.zeros(64, np.float32)

BLOCK_16 = "block: expected a multiple of 16 from 16 to 1073741824, got"
BLOCK_512 = "block: expected a multiple of 512 from 512 to 1073741824, got"
WORD = "expected an integer from 0 to 4294967295, got"
THRESHOLD = "threshold: expected a finite float32 that is not negative, got"

QUANTISE = {"codes": u1, "scales": two, "values": f4, "residual": more, "bits": 8, "block": 16, "seed": None}
DEQUANTISE = {"out": f4, "codes": u1, "scales": two, "bits": 8, "block": 16}
SIGN = {"packed": u1[:4], "scales": one, "values": f4, "residual": more, "block": 512}
UNSIGN = {"out": f4, "packed": u1[:4], "scales": one, "block": 512}
SELECT = {"indices": u4, "picked": third, "values": f4, "residual": more, "threshold": 1.0}
SCATTER = {"out": f4, "indices": u4, "values": more}
PAIRS = {"out": f4, "indices": [u4, u4], "values": [more, third]}
SAMPLE = {"sample": two, "values": f4, "residual": more, "stride": 16, "seed": 1}
MOMENTUM = {"velocity": f4, "accumulated": more, "gradient": third, "momentum": 0.9}

RIGHT = {
    "quantise_into": QUANTISE,
    "dequantise_into": DEQUANTISE,
    "sign_into": SIGN,
    "unsign_into": UNSIGN,
    "select_into": SELECT,
    "scatter_add_into": SCATTER,
    "sum_pairs_into": PAIRS,
    "abs_sample_into": SAMPLE,
    "momentum_into": MOMENTUM,
}

APART = "expected memory apart from that of"

WRONG = [
    ("quantise_into", {"codes": [1]}, TypeError, "codes: expected a numpy.ndarray, got list"),
    ("quantise_into", {"codes": u1.view(np.int8)}, TypeError, "codes: expected uint8, got int8"),
    ("quantise_into", {"codes": u1[:31]}, ValueError, "codes: expected 32 elements for 32 elements of 8 bits, got 31"),
    ("quantise_into", {"bits": 4}, ValueError, "codes: expected 16 elements for 32 elements of 4 bits, got 32"),
    ("quantise_into", {"bits": 5}, ValueError, "bits: expected 4 or 8, got 5"),
    ("quantise_into", {"bits": "8"}, TypeError, "bits: expected an integer, got str"),
    ("quantise_into", {"scales": np.zeros(2)}, TypeError, "scales: expected float32, got float64"),
    (
        "quantise_into",
        {"scales": one},
        ValueError,
        "scales: expected 2 elements for 32 elements in blocks of 16, got 1",
    ),
    ("quantise_into", {"values": None}, TypeError, "values: expected a numpy.ndarray, got NoneType"),
    ("quantise_into", {"values": f4.astype("f2")}, TypeError, "values: expected float32, got float16"),
    ("quantise_into", {"residual": more[:3]}, ValueError, "residual: expected 32 elements as in values, got 3"),
    ("quantise_into", {"residual": read_only}, ValueError, "residual: expected a writable array, got a read-only one"),
    ("quantise_into", {"residual": f4}, ValueError, f"residual: {APART} values, got an overlap"),
    ("quantise_into", {"scales": more[:2]}, ValueError, f"residual: {APART} scales, got an overlap"),
    ("quantise_into", {"block": 0}, ValueError, f"{BLOCK_16} 0"),
    ("quantise_into", {"block": 24}, ValueError, f"{BLOCK_16} 24"),
    ("quantise_into", {"block": -16}, ValueError, f"{BLOCK_16} -16"),
    ("quantise_into", {"block": 1 << 80}, ValueError, f"{BLOCK_16} {1 << 80}"),
    ("quantise_into", {"block": 16.0}, TypeError, "block: expected an integer, got float"),
    ("quantise_into", {"seed": -1}, ValueError, f"seed: {WORD} -1"),
    ("quantise_into", {"seed": 1 << 32}, ValueError, f"seed: {WORD} 4294967296"),
    ("quantise_into", {"seed": 0.5}, TypeError, "seed: expected an integer, got float"),
    ("dequantise_into", {"out": read_only}, ValueError, "out: expected a writable array, got a read-only one"),
    (
        "dequantise_into",
        {"bits": 4, "codes": u1[:15]},
        ValueError,
        "codes: expected 16 elements for 32 elements of 4 bits, got 15",
    ),
    (
        "dequantise_into",
        {"scales": one},
        ValueError,
        "scales: expected 2 elements for 32 elements in blocks of 16, got 1",
    ),
    ("dequantise_into", {"codes": f4.view(np.uint8)[:32]}, ValueError, f"out: {APART} codes, got an overlap"),
    ("dequantise_into", {"bits": 16}, ValueError, "bits: expected 4 or 8, got 16"),
    ("sign_into", {"packed": u1[:3]}, ValueError, "packed: expected 4 elements for 32 elements of 1 bit, got 3"),
    ("sign_into", {"block": 256}, ValueError, f"{BLOCK_512} 256"),
    ("sign_into", {"scales": two}, ValueError, "scales: expected 1 elements for 32 elements in blocks of 512, got 2"),
    ("sign_into", {"residual": f4}, ValueError, f"residual: {APART} values, got an overlap"),
    ("unsign_into", {"packed": u1}, ValueError, "packed: expected 4 elements for 32 elements of 1 bit, got 32"),
    ("unsign_into", {"scales": f4[:1]}, ValueError, f"out: {APART} scales, got an overlap"),
    ("unsign_into", {"block": 513}, ValueError, f"{BLOCK_512} 513"),
    (
        "select_into",
        {"values": None, "residual": None},
        ValueError,
        "values: expected an array here or as residual, got None",
    ),
    ("select_into", {"indices": u4.view(np.int32)}, TypeError, "indices: expected uint32, got int32"),
    ("select_into", {"picked": third[:5]}, ValueError, "picked: expected 32 elements as in indices, got 5"),
    ("select_into", {"residual": more[:5]}, ValueError, "residual: expected 32 elements as in values, got 5"),
    ("select_into", {"residual": read_only}, ValueError, "residual: expected a writable array, got a read-only one"),
    ("select_into", {"threshold": -1.0}, ValueError, f"{THRESHOLD} -1.0"),
    ("select_into", {"threshold": float("nan")}, ValueError, f"{THRESHOLD} nan"),
    ("select_into", {"threshold": 1e300}, ValueError, f"{THRESHOLD} 1e+300"),
    ("select_into", {"residual": f4}, ValueError, f"residual: {APART} values, got an overlap"),
    ("select_into", {"picked": u4.view(np.float32)}, ValueError, f"picked: {APART} indices, got an overlap"),
    ("scatter_add_into", {"values": two}, ValueError, "values: expected 32 elements as in indices, got 2"),
    ("scatter_add_into", {"indices": u4.view("i4")}, TypeError, "indices: expected uint32, got int32"),
    ("scatter_add_into", {"values": f4}, ValueError, f"out: {APART} values, got an overlap"),
    ("sum_pairs_into", {"values": [more]}, ValueError, "values: expected 2 arrays as in indices, got 1"),
    ("sum_pairs_into", {"values": [more, two]}, ValueError, "values[1]: expected 32 elements as in indices[1], got 2"),
    ("sum_pairs_into", {"values": [more, u4]}, TypeError, "values[1]: expected float32, got uint32"),
    ("sum_pairs_into", {"values": [more, f4]}, ValueError, f"out: {APART} values[1], got an overlap"),
    ("sum_pairs_into", {"indices": u4}, TypeError, "indices: expected a list or tuple of arrays, got ndarray"),
    ("sum_pairs_into", {"scale": "1"}, TypeError, "scale: expected a number or a Scale, got '1'"),
    (
        "abs_sample_into",
        {"values": None, "residual": None},
        ValueError,
        "values: expected an array here or as residual, got None",
    ),
    (
        "abs_sample_into",
        {"sample": one},
        ValueError,
        "sample: expected 2 elements for 32 elements with a stride of 16, got 1",
    ),
    ("abs_sample_into", {"stride": 0}, ValueError, "stride: expected an integer from 1 to 4294967295, got 0"),
    ("abs_sample_into", {"seed": None}, TypeError, "seed: expected an integer, got NoneType"),
    ("abs_sample_into", {"sample": more[:2]}, ValueError, f"sample: {APART} residual, got an overlap"),
    ("momentum_into", {"gradient": two}, ValueError, "gradient: expected 32 elements as in velocity, got 2"),
    ("momentum_into", {"accumulated": two}, ValueError, "accumulated: expected 32 elements as in velocity, got 2"),
    ("momentum_into", {"accumulated": f4}, ValueError, f"accumulated: {APART} velocity, got an overlap"),
    (
        "momentum_into",
        {"velocity": shared[:32], "gradient": shared[16:48]},
        ValueError,
        f"velocity: {APART} gradient, got an overlap",
    ),
    ("checksum", {"array": b"1234"}, TypeError, "array: expected a numpy.ndarray, got bytes"),
    ("checksum", {"array": f4[::2]}, ValueError, "array: expected a contiguous array, got a strided one"),
    ("checksum", {"array": np.array([None])}, TypeError, "array: expected a dtype without objects, got object"),
]


@needs_native
@pytest.mark.parametrize(("name", "changes", "error", "message"), WRONG)
def test_a_wrong_argument_is_named(name, changes, error, message):
    with pytest.raises(error, match=f"^{re.escape(f'{name}: {message}')}$"):
        getattr(native, name)(**{**RIGHT.get(name, {}), **changes})
    assert not any(array.any() for array in (f4, more, third, two, one, u1, shared))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("dequantise_into", {**DEQUANTISE, "codes": u1[:31]}),
        ("dequantise_into", {**DEQUANTISE, "scales": one}),
        ("unsign_into", {**UNSIGN, "packed": u1}),
        ("unsign_into", {**UNSIGN, "scales": two}),
        ("scatter_add_into", {**SCATTER, "values": one}),
        ("sum_pairs_into", {**PAIRS, "values": [more, one]}),
        ("sum_pairs_into", {**PAIRS, "values": [more]}),
    ],
)
@pytest.mark.parametrize("kernels", CODEC_BACKENDS)
def test_payloads_of_another_length_are_refused(kernels, name, arguments):
    with pytest.raises(ValueError, match=r"expected .* (elements|arrays)"):
        getattr(kernels, name)(**arguments)
    assert not f4.any()


@pytest.mark.parametrize("kernels", CODEC_BACKENDS)
@pytest.mark.parametrize("name", RIGHT)
def test_without_what_is_wrong_they_are_fine_with_read_only_inputs(kernels, name):
    arguments = {key: one.copy() if isinstance(one, np.ndarray) else one for key, one in RIGHT[name].items()}
    for key in {"values", "gradient"} & set(arguments):
        if isinstance(arguments[key], np.ndarray):
            arguments[key].flags.writeable = False
    getattr(kernels, name)(**arguments)


@pytest.mark.parametrize("kernels", CODEC_BACKENDS)
def test_empty_arrays_are_fine(kernels):
    none, codes, indices = f4[:0].copy(), u1[:0].copy(), u4[:0].copy()
    for bits in (8, 4):
        kernels.quantise_into(codes, none, none, none, bits, 16, 1)
        kernels.dequantise_into(none, codes, none, bits, 16)
    kernels.sign_into(codes, none, none, None, 512)
    kernels.unsign_into(none, codes, none, 512)
    assert kernels.select_into(indices, none, none, none, 0.0) == (0, 0)
    kernels.scatter_add_into(none, indices, none)
    kernels.sum_pairs_into(none, [indices], [none])
    kernels.abs_sample_into(none, none, None, 1, 0)
    assert kernels.momentum_into(none, none, none, 0.5) is True
