"""Buffers for results: used again after the last reference is gone, and never before; few are kept."""

from __future__ import annotations

import gc

import torch

from hvdkit.api.framework import KEPT_RESULTS, STEP_BYTES, ResultBuffers
from hvdkit.torch.ops.framework import HUGE_BYTES, host_like


def test_a_buffer_is_used_again_only_after_the_last_reference_is_gone():
    buffers = ResultBuffers()
    first = buffers.take(3 * STEP_BYTES)
    address = first.ctypes.data
    view = torch.from_numpy(first)[5:].view(torch.uint8)
    del first
    gc.collect()
    assert buffers.take(3 * STEP_BYTES).ctypes.data != address, "a view of it is still there"
    del view
    gc.collect()
    assert buffers.take(3 * STEP_BYTES - 1).ctypes.data == address


def test_no_more_is_kept_than_two_of_the_largest_and_sizes_unused_longest_go_first():
    buffers = ResultBuffers()
    lent = [buffers.take(size * STEP_BYTES) for size in (1, 2, 3, 4, 4, 4)]
    address = lent[-1].ctypes.data
    while lent:
        del lent[0]
        gc.collect()
        assert buffers.kept() <= KEPT_RESULTS * 4 * STEP_BYTES
    assert buffers.take(4 * STEP_BYTES).ctypes.data == address


def test_tensors_of_any_type_and_shape_lie_on_it():
    for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.int64):
        like = torch.zeros(HUGE_BYTES // 8 + 3, 9, dtype=dtype)
        made = host_like(like)
        assert (made.shape, made.dtype) == (like.shape, like.dtype)
        made.copy_(torch.ones_like(like))
        assert bool((made == 1).all())
