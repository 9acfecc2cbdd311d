"""Kernels keep subnormal numbers in a thread that flushes them, and leave the thread as it was."""

import numpy as np
import pytest
import torch

from hvdkit.kernels import ReduceOp, Scale
from tests.kernels.codecs import CODEC_BACKENDS

TINY, TWICE = np.float32(1e-40), np.float32(2e-40)  # nothing may be computed from them in here
PLACES = np.arange(512, dtype=np.uint32)
pytestmark = pytest.mark.parametrize("kernels", CODEC_BACKENDS)


@pytest.fixture(autouse=True)
def flushing():
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor flushes no subnormal numbers")
    yield
    torch.set_flush_denormal(False)


def flushes():
    return bool((np.full(64, TINY) * np.float32(0.5) == 0).all())


def tiny(count):
    return np.full(count, TINY)


def twice(count):
    return np.full(count, TWICE)


def with_numpy(kernels, out):
    with kernels.DefaultFloats():
        np.multiply(np.full(out.size, TWICE), np.float32(0.5), out=out)


# All elements of ``out``, which are zeros before, become TINY.
WORK = {
    "reduce": lambda kernels, out: kernels.reduce_into(out, [tiny(512)] * 2, ReduceOp.SUM, Scale(1.0, 2)),
    "reduce wide": lambda kernels, out: kernels.reduce_into(out, [tiny(512)] * 6, ReduceOp.SUM, Scale(1 / 3, 2)),
    "scale": lambda kernels, out: kernels.scale_into(out, twice(512), 0.5),
    "convert": lambda kernels, out: kernels.convert_into(out, np.full(512, 1e-40)),
    "dequantise": lambda kernels, out: kernels.dequantise_into(out, np.full(512, 1, np.uint8), tiny(32), 8, 16),
    "unsign": lambda kernels, out: kernels.unsign_into(out, np.full(64, 255, np.uint8), twice(1), 512, 0.5),
    "scatter": lambda kernels, out: kernels.scatter_add_into(out, PLACES, tiny(512)),
    "sum pairs": lambda kernels, out: kernels.sum_pairs_into(out, [PLACES], [twice(512)], 0.5),
    "reconstruct": lambda kernels, out: kernels.reconstruct_into(
        out, None, np.full(512, 1e-20, np.float32), np.full(1, 1e-20, np.float32), 512, 1
    ),
    "with numpy": with_numpy,
}


@pytest.mark.parametrize("work", WORK)
def test_subnormal_numbers_are_kept_and_the_thread_is_left_as_it_was(kernels, work):
    assert flushes()
    got = np.zeros(512, np.float32)
    WORK[work](kernels, got)
    assert flushes()
    torch.set_flush_denormal(False)
    np.testing.assert_allclose(got, tiny(512), rtol=1e-4)
