"""A wrong argument is an error that names function, argument, what was expected and what came; nothing is written."""

import re

import numpy as np
import pytest

from hvdkit.kernels import BFLOAT16, ReduceOp, Scale
from tests.kernels.arrays import BACKENDS, native, needs_native
from tests.kernels.codecs import CODEC_BACKENDS

f4 = np.zeros(32, np.float32)
more = np.zeros(32, np.float32)
third = np.zeros(32, np.float32)
two, single = f4[:2].copy(), f4[:1].copy()
shared = np.zeros(64, np.float32)
halves, doubles = np.zeros(32, np.float16), np.zeros(32)
u1 = np.zeros(32, np.uint8)
u4 = np.arange(32, dtype=np.uint32)
read_only = np.zeros(32, np.float32)
read_only.flags.writeable = False
SUM = ReduceOp.SUM

MATRIX = {"matrix": f4, "left": np.zeros(8, np.float32), "right": np.zeros(16, np.float32), "rows": 4, "cols": 8}
RIGHT = {
    "reduce_into": {"destination": f4, "sources": [more], "op": SUM},
    "scale_into": {"destination": f4, "source": more, "factor": 2.0},
    "convert_into": {"destination": f4, "source": more},
    "quantise_into": {
        "codes": u1, "scales": two, "values": f4, "residual": more, "bits": 8, "block": 16, "seed": None,
    },
    "dequantise_into": {"out": f4, "codes": u1, "scales": two, "bits": 8, "block": 16},
    "sign_into": {"packed": u1[:4], "scales": single, "values": f4, "residual": more, "block": 512},
    "unsign_into": {"out": f4, "packed": u1[:4], "scales": single, "block": 512},
    "select_into": {"indices": u4, "picked": third, "values": f4, "residual": more, "threshold": 1.0},
    "scatter_add_into": {"out": f4, "indices": u4, "values": more},
    "sum_pairs_into": {"out": f4, "indices": [u4, u4], "values": [more, third]},
    "abs_sample_into": {"sample": two, "values": f4, "residual": more, "stride": 16, "seed": 1},
    "momentum_into": {"velocity": f4, "accumulated": more, "gradient": third, "momentum": 0.9},
    "project_into": MATRIX,
    "add_and_project_into": {**MATRIX, "gradient": more},
}  # fmt: skip
OF_CODECS = [name for name in RIGHT if name not in ("reduce_into", "scale_into", "convert_into") and "proj" not in name]

READ_ONLY = "expected a writable array, got a read-only one"
APART = "expected memory apart from that of"
NOT_PARTLY = "expected the destination's own memory or memory apart from it, got a partial overlap"
KNOWN = "expected a dtype that the kernels know, got"
OPS = "expected SUM, MIN, MAX or PRODUCT, got"
DIVISOR = "scale: expected a divisor from 1 to 16777216, got"
THRESHOLD = "threshold: expected a finite float32 that is not negative, got"

WRONG = [
    ("reduce_into", {"destination": 1.0}, "destination: expected a numpy.ndarray, got float"),
    ("reduce_into", {"destination": []}, "destination: expected at least one array, got none"),
    ("reduce_into", {"destination": [f4, read_only]}, f"destination[1]: {READ_ONLY}"),
    (
        "reduce_into",
        {"destination": [shared[:32], shared[2:34]]},
        f"destination[1]: {APART} destination[0], got an overlap",
    ),
    ("reduce_into", {"sources": f4}, "sources: expected a list or tuple of arrays, got ndarray"),
    ("reduce_into", {"sources": []}, "sources: expected at least one array, got none"),
    ("reduce_into", {"sources": [f4.astype(">f4")]}, f"sources[0]: {KNOWN} >f4"),
    ("reduce_into", {"sources": [f4.astype("c8")]}, f"sources[0]: {KNOWN} complex64"),
    ("reduce_into", {"sources": [f4.reshape(4, 8)]}, "sources[0]: expected a flat array, got 2 dimensions"),
    ("reduce_into", {"destination": shared[::2]}, "destination: expected a contiguous array, got a strided one"),
    ("reduce_into", {"sources": [f4[:3]]}, "sources[0]: expected 32 elements as in destination, got 3"),
    ("reduce_into", {"sources": [f4, doubles]}, "sources[1]: expected float32 as in sources[0], got float64"),
    (
        "reduce_into",
        {"destination": doubles, "sources": [f4.astype(BFLOAT16)]},
        "destination: expected bfloat16 or float32 for sources of bfloat16, got float64",
    ),
    ("reduce_into", {"destination": shared[1:33], "sources": [shared[:32]]}, f"sources[0]: {NOT_PARTLY}"),
    ("reduce_into", {"op": ReduceOp.AVERAGE}, f"op: {OPS} <ReduceOp.AVERAGE: 0>"),
    ("reduce_into", {"op": 1 << 80}, f"op: {OPS} {1 << 80}"),
    ("reduce_into", {"scale": "2"}, "scale: expected a number or a Scale, got '2'"),
    ("reduce_into", {"scale": Scale(1.0, 1 << 80)}, f"{DIVISOR} {1 << 80}"),
    ("reduce_into", {"scale": Scale(1.0, 0)}, f"{DIVISOR} 0"),
    ("scale_into", {"source": f4[1:]}, "source: expected 32 elements as in destination, got 31"),
    ("scale_into", {"destination": u1 > 0, "source": u1 > 0}, "factor: expected 1.0 for bool arrays, got 2.0"),
    ("convert_into", {"source": u4}, "source: expected float16, bfloat16, float32 or float64, got uint32"),
    ("convert_into", {"destination": shared[:32], "source": shared[:16].view("f2")}, f"source: {NOT_PARTLY}"),
    ("quantise_into", {"codes": [1]}, "codes: expected a numpy.ndarray, got list"),
    ("quantise_into", {"codes": u1.view(np.int8)}, "codes: expected uint8, got int8"),
    ("quantise_into", {"bits": 4}, "codes: expected 16 elements for 32 elements of 4 bits, got 32"),
    ("quantise_into", {"bits": 5}, "bits: expected 4 or 8, got 5"),
    ("quantise_into", {"scales": single}, "scales: expected 2 elements for 32 elements in blocks of 16, got 1"),
    ("quantise_into", {"residual": more[:3]}, "residual: expected 32 elements as in values, got 3"),
    ("quantise_into", {"residual": read_only}, f"residual: {READ_ONLY}"),
    ("quantise_into", {"residual": f4}, f"residual: {APART} values, got an overlap"),
    ("quantise_into", {"block": 24}, "block: expected a multiple of 16 from 16 to 1073741824, got 24"),
    ("quantise_into", {"seed": -1}, "seed: expected an integer from 0 to 4294967295, got -1"),
    ("dequantise_into", {"out": read_only}, f"out: {READ_ONLY}"),
    ("dequantise_into", {"codes": f4.view(np.uint8)[:32]}, f"out: {APART} codes, got an overlap"),
    ("sign_into", {"packed": u1[:3]}, "packed: expected 4 elements for 32 elements of 1 bit, got 3"),
    ("unsign_into", {"block": 513}, "block: expected a multiple of 512 from 512 to 1073741824, got 513"),
    ("select_into", {"values": None, "residual": None}, "values: expected an array here or as residual, got None"),
    ("select_into", {"picked": third[:5]}, "picked: expected 32 elements as in indices, got 5"),
    ("select_into", {"threshold": float("nan")}, f"{THRESHOLD} nan"),
    ("select_into", {"threshold": 1e300}, f"{THRESHOLD} 1e+300"),
    ("scatter_add_into", {"values": two}, "values: expected 32 elements as in indices, got 2"),
    ("scatter_add_into", {"indices": u4.view("i4")}, "indices: expected uint32, got int32"),
    ("sum_pairs_into", {"values": [more]}, "values: expected 2 arrays as in indices, got 1"),
    ("sum_pairs_into", {"values": [more, two]}, "values[1]: expected 32 elements as in indices[1], got 2"),
    ("abs_sample_into", {"sample": single}, "sample: expected 2 elements for 32 elements with a stride of 16, got 1"),
    ("abs_sample_into", {"stride": 0}, "stride: expected an integer from 1 to 4294967295, got 0"),
    ("momentum_into", {"gradient": two}, "gradient: expected 32 elements as in velocity, got 2"),
    ("momentum_into", {"accumulated": f4}, f"accumulated: {APART} velocity, got an overlap"),
    ("checksum", {"array": f4[::2]}, "array: expected a contiguous array, got a strided one"),
    ("project_into", {"rows": 0}, "rows: expected an integer from 1 to 4294967295, got 0"),
    ("project_into", {"matrix": f4[:31]}, "matrix: expected 32 elements in 4 rows of 8, got 31"),
    ("project_into", {"right": third[:15]}, "right: expected 16 elements for 2 vectors, got 15"),
    ("add_and_project_into", {"gradient": f4}, f"matrix: {APART} gradient, got an overlap"),
]


@needs_native
@pytest.mark.parametrize(("name", "changes", "message"), WRONG)
def test_a_wrong_argument_is_named(name, changes, message):
    with pytest.raises((ValueError, TypeError), match=f"^{re.escape(f'{name}: {message}')}$"):
        getattr(native, name)(**{**RIGHT.get(name, {}), **changes})
    assert not any(array.any() for array in (f4, more, third, two, single, u1, shared, doubles))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("dequantise_into", {"codes": u1[:31]}),
        ("dequantise_into", {"scales": single}),
        ("unsign_into", {"packed": u1}),
        ("unsign_into", {"scales": two}),
        ("scatter_add_into", {"values": single}),
        ("sum_pairs_into", {"values": [more, single]}),
        ("sum_pairs_into", {"values": [more]}),
    ],
)
@pytest.mark.parametrize("kernels", CODEC_BACKENDS)
def test_payloads_of_another_length_are_refused(kernels, name, changes):
    with pytest.raises(ValueError, match=r"expected .* (elements|arrays)"):
        getattr(kernels, name)(**{**RIGHT[name], **changes})
    assert not f4.any()


@pytest.mark.parametrize("kernels", CODEC_BACKENDS)
@pytest.mark.parametrize("name", OF_CODECS)
def test_inputs_may_be_read_only(kernels, name):
    arguments = {key: value.copy() if isinstance(value, np.ndarray) else value for key, value in RIGHT[name].items()}
    for key in {"values", "gradient"} & set(arguments):
        if isinstance(arguments[key], np.ndarray):
            arguments[key].flags.writeable = False
    getattr(kernels, name)(**arguments)


@pytest.mark.parametrize("kernels", BACKENDS)
def test_empty_arrays_and_read_only_sources_are_reduced(kernels):
    empty = np.zeros(0, np.float32)
    kernels.reduce_into(empty, (empty, empty), SUM, 0.5)
    into = np.ones(32, np.float32)
    kernels.reduce_into(into, [read_only, into], SUM)
    assert into.tolist() == [1.0] * 32
