"""Streams of one process on a real GPU: what is launched waits for its inputs, and keeps the memory that it uses."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hvdkit.kernels import ONE, ReduceOp, Scale
from hvdkit.transports.gpu import streams
from hvdkit.transports.gpu.device import DeviceCollectives
from hvdkit.transports.gpu.nccl import nccl_available, open_nccl
from hvdkit.transports.gpu.streams import HostCopies, Locked

pytestmark = pytest.mark.skipif(not nccl_available(), reason="needs a GPU")

LATE_CYCLES = 100_000_000  # about 50 ms
ELEMENTS = 1 << 20


def finish(transfer) -> None:
    transfer.wait()
    assert transfer.done()


@pytest.fixture
def alone() -> Iterator[DeviceCollectives]:
    collectives = open_nccl(dist.HashStore(), 0, 1, "cuda:0", 60.0)
    assert collectives is not None
    yield collectives
    collectives.close()


@pytest.fixture
def block() -> np.ndarray:
    return np.zeros(4 * ELEMENTS, dtype=np.uint8)


@pytest.fixture
def copies(block: np.ndarray) -> Iterator[HostCopies]:
    device = torch.device("cuda:0")
    opened = HostCopies(device, streams.CudaStream(), Locked(block, device))
    yield opened
    opened.close()


def changed_launch(monkeypatch, after=True, tensors=True, late=False) -> None:
    """Remove safeguards of launches: the marks ``after`` which they run, or the record of ``tensors`` on the stream."""
    real = streams.CudaStream.launch

    def launch(self, device, given_after, given_tensors, work):
        def late_work(wait):
            torch.cuda._sleep(LATE_CYCLES)
            work(wait)

        kept = (given_after if after else []), (given_tensors if tensors else [])
        return real(self, device, *kept, late_work if late else work)

    monkeypatch.setattr(streams.CudaStream, "launch", launch)


def sums_of_late_work(alone) -> list[float]:
    buffer, side, sums = alone.allocate(ELEMENTS, "float32"), torch.cuda.Stream(), []
    for factor in range(1, 4):
        with torch.cuda.stream(side):
            torch.cuda._sleep(LATE_CYCLES)
            buffer.fill_(factor)
            mark = alone.mark()
        transfer = alone.allreduce([buffer], ReduceOp.SUM, 1.0, Scale(3.0), "none", [mark])
        finish(transfer)
        torch.cuda.synchronize()
        sums.append(buffer[0].item())
    return sums


def test_a_collective_waits_for_the_work_that_makes_its_input(alone, monkeypatch):
    with monkeypatch.context() as patched:
        changed_launch(patched, after=False)
        assert sums_of_late_work(alone) != [3.0, 6.0, 9.0], "the probe does not find a mark that is missing"
    assert sums_of_late_work(alone) == [3.0, 6.0, 9.0]


def is_overwritten(alone) -> bool:
    """True if a collective that is no longer referenced, as after a failure, writes into memory that was reused."""
    buffer = alone.allocate(ELEMENTS, "float32")
    # A kernel is loaded when it is first launched, which may wait for those that run.
    finish(alone.allreduce([buffer], ReduceOp.SUM, 1.0, Scale(3.0), "none", [alone.mark()]))
    torch.full((ELEMENTS,), -7.0, device="cuda").eq(-7.0).all().item()
    torch.cuda.synchronize()
    transfer = alone.allreduce([buffer], ReduceOp.SUM, 1.0, Scale(3.0), "none", [alone.mark()])
    del buffer, transfer
    others = [torch.full((ELEMENTS,), -7.0, device="cuda") for _ in range(4)]
    torch.cuda.synchronize()
    return not all(other.eq(-7.0).all() for other in others)


def test_memory_in_use_is_not_given_to_others_though_nobody_holds_it(alone, monkeypatch):
    with monkeypatch.context() as patched:
        changed_launch(patched, tensors=False, late=True)
        assert is_overwritten(alone), "the probe does not find memory that no stream is recorded for"
    changed_launch(monkeypatch, late=True)
    assert not is_overwritten(alone)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "int64"])
def test_every_type_is_reduced_moved_and_gathered(alone, dtype):
    buffer = alone.allocate(1001, dtype)
    buffer[...] = 3
    finish(alone.allreduce([buffer], ReduceOp.SUM, 1.0, ONE, "fp16", [alone.mark()]))
    finish(alone.broadcast([buffer], 0, [alone.mark()]))
    (gathered,), transfer = alone.allgather([buffer], [[1001]], [alone.mark()])
    finish(transfer)
    assert gathered.eq(3).all()


def test_the_options_for_nccl_do_not_stay_in_the_environment(alone):
    assert not [name for name in os.environ if name.startswith("TORCH_NCCL_")]


def test_nobody_waits_for_copies_of_locked_memory(block, copies):
    host, tensor = block.view(np.float32), torch.ones(ELEMENTS, device="cuda")
    assert copies._locked.is_locked
    assert torch.from_numpy(host).is_pinned()
    torch.cuda._sleep(LATE_CYCLES)
    tensor.fill_(5.0)
    arrives = copies.to_host([(host, tensor)], [copies.mark()])
    assert not arrives.done()
    finish(arrives)
    assert (host == 5.0).all()
    host[...] = 6.0
    finish(copies.to_device([(host, tensor)]))
    assert tensor.eq(6.0).all()


def copied_behind_late_work(block, copies) -> float:
    host, tensor = block.view(np.float32), torch.ones(ELEMENTS, device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(LATE_CYCLES)
    tensor.fill_(5.0)
    finish(copies.to_host([(host, tensor)], [copies.mark()]))
    torch.cuda.synchronize()
    return float(host[0])


def test_copies_wait_for_the_work_that_makes_a_gradient(block, copies, monkeypatch):
    with monkeypatch.context() as patched:
        changed_launch(patched, after=False)
        assert copied_behind_late_work(block, copies) == 1.0, "the probe does not find a mark that is missing"
    assert copied_behind_late_work(block, copies) == 5.0


def test_a_captured_stream_is_refused(copies):
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(ValueError, match="CUDA graph"), torch.cuda.graph(graph):
        copies.mark()


def test_memory_is_unlocked_when_copies_are_closed(block, copies):
    host = torch.from_numpy(block)
    assert host.is_pinned()
    copies.close()
    assert not host.is_pinned()
