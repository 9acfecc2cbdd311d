"""NCCL on real GPUs: one of them for streams, two for ranks. Skipped where there are none."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from hvdkit.kernels import ONE, ReduceOp, Scale
from hvdkit.transports.gpu.nccl import nccl_available, open_nccl
from tests.ranks import RankedCases

needs_cuda = pytest.mark.skipif(not nccl_available(), reason="no CUDA device")
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="no CUDA device for each of 2 ranks")
CASES = RankedCases("tests.transports.nccl_cases", preload=())  # CUDA does not live through a fork


def finish(transfer) -> None:
    transfer.wait()
    assert transfer.done()


@pytest.fixture
def alone():
    collectives = open_nccl(dist.HashStore(), 0, 1, "cuda:0", 60.0)
    assert collectives is not None
    yield collectives
    collectives.close()


@needs_cuda
def test_a_collective_waits_for_the_work_that_makes_its_input(alone):
    buffer = alone.allocate(1 << 20, "float32")
    side = torch.cuda.Stream()
    for factor in range(1, 4):
        with torch.cuda.stream(side):
            torch.cuda._sleep(50_000_000)
            buffer.fill_(factor)
            mark = alone.mark()
        transfer = alone.allreduce([buffer], ReduceOp.SUM, 1.0, Scale(3.0), "none", [mark])
        assert not transfer.done()
        finish(transfer)
        assert buffer.eq(3.0 * factor).all()


@needs_cuda
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "int64"])
def test_every_type_is_reduced_moved_and_gathered(alone, dtype):
    buffer = alone.allocate(1001, dtype)
    buffer[...] = 3
    finish(alone.allreduce([buffer], ReduceOp.SUM, 1.0, ONE, "fp16", [alone.mark()]))
    finish(alone.broadcast([buffer], 0, [alone.mark()]))
    (gathered,), transfer = alone.allgather([buffer], [[1001]], [alone.mark()])
    finish(transfer)
    assert gathered.eq(3).all()


@needs_cuda
def test_the_options_for_nccl_do_not_stay_in_the_environment(alone):
    import os

    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in os.environ


@needs_cuda
@needs_two
@pytest.mark.parametrize("case", CASES.names)
def test_nccl(case):
    CASES.check(case, 2, "torch")
