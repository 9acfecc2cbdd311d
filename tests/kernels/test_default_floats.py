"""Kernels keep subnormal numbers in a thread that flushes them, and leave the thread as it was."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hvdkit.kernels import ReduceOp, Scale, numpy_codecs, numpy_kernels, numpy_sparse
from tests.kernels.arrays import native, needs_native

TINY, TWICE = np.float32(1e-40), np.float32(2e-40)  # nothing may be computed from them in here


class Numpy:
    """The twins, in one place as in the native module."""

    def __getattr__(self, name):
        modules = (numpy_kernels, numpy_codecs, numpy_sparse)
        return next(getattr(module, name) for module in modules if hasattr(module, name))


pytestmark = pytest.mark.parametrize(
    "kernels", [pytest.param(Numpy(), id="numpy"), pytest.param(native, id="native", marks=needs_native)]
)


@pytest.fixture(autouse=True)
def flushing():
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor flushes no subnormal numbers")
    yield
    torch.set_flush_denormal(False)


def flushes():
    return bool((np.full(64, TINY) * np.float32(0.5) == 0).all())


def reduce(kernels, out):
    kernels.reduce_into(out, [np.full(out.size, TINY), np.full(out.size, TINY)], ReduceOp.SUM, Scale(1.0, 2))


def reduce_wide(kernels, out):
    kernels.reduce_into(out, [np.full(out.size, TINY)] * 6, ReduceOp.SUM, Scale(1 / 3, 2))


def scale(kernels, out):
    kernels.scale_into(out, np.full(out.size, TWICE), 0.5)


def convert(kernels, out):
    kernels.convert_into(out, np.full(out.size, 1e-40))


def dequantise(kernels, out):
    codes = np.full(out.size, 1, np.uint8)
    kernels.dequantise_into(out, codes, np.full(out.size // 16, TINY), 8, 16)


def unsign(kernels, out):
    kernels.unsign_into(out, np.full(out.size // 8, 255, np.uint8), np.full(out.size // 512, TWICE), 512, 0.5)


def scatter(kernels, out):
    out[:] = 0
    kernels.scatter_add_into(out, np.arange(out.size, dtype=np.uint32), np.full(out.size, TINY))


def sum_pairs(kernels, out):
    kernels.sum_pairs_into(out, [np.arange(out.size, dtype=np.uint32)], [np.full(out.size, TWICE)], 0.5)


def reconstruct(kernels, out):
    left, right = np.full(out.size, 1e-20, np.float32), np.full(1, 1e-20, np.float32)
    kernels.reconstruct_into(out, None, left, right, out.size, 1)


def with_numpy(kernels, out):
    with kernels.DefaultFloats():
        np.multiply(np.full(out.size, TWICE), np.float32(0.5), out=out)


@pytest.mark.parametrize(
    "work", [reduce, reduce_wide, scale, convert, dequantise, unsign, scatter, sum_pairs, reconstruct, with_numpy]
)
def test_subnormal_numbers_are_kept_and_the_thread_is_left_as_it_was(kernels, work):
    assert flushes()
    got = np.empty(512, np.float32)
    work(kernels, got)
    assert flushes()
    torch.set_flush_denormal(False)
    np.testing.assert_allclose(got, np.full(512, TINY), rtol=1e-4)
