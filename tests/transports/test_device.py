"""Collectives of a device on real ranks, with the CPU as the device, and pure decisions about NCCL."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hvdkit.errors import PeerLostError
from hvdkit.transports import gpu
from hvdkit.transports.gpu import device_codecs, streams
from hvdkit.transports.gpu.nccl import exchange, shared_gpus, within
from tests.on_ranks import RankedCases
from tests.told import told

RUNNER = "tests.transports.pretend_device"
CASES = RankedCases("tests.transports.launched", "tests.transports.device_cases", runner=RUNNER)


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.thorough), 3])
@pytest.mark.parametrize("case", CASES.names)
def test_device(case, ranks):
    CASES.check(case, ranks, "torch")


def test_ranks_that_share_a_gpu_are_found():
    assert shared_gpus(["a", "b", "c"]) == []
    assert shared_gpus(["a", "b", "a", "b"]) == [[0, 2], [1, 3]]


def test_a_rank_that_does_not_come_is_named():
    fact = "waited 0.05 s (HVDKIT_START_TIMEOUT_SECONDS) for the GPUs of ranks [1] of the 2 that take part."
    with told(PeerLostError, f"{fact}\nHINT: see what these ranks printed."):
        exchange(dist.HashStore(), 0, 2, "gpu", 0.05)


def test_connecting_has_a_time_limit_and_tells_what_failed():
    import threading

    with pytest.raises(PeerLostError, match="NCCL_DEBUG"):
        within(0.05, threading.Event().wait, "NCCL to connect")
    with pytest.raises(PeerLostError, match="no such device"):
        within(5, lambda: (_ for _ in ()).throw(RuntimeError("no such device")), "NCCL to connect")
    assert within(5, lambda: 3, "three") == 3


def test_a_stream_that_a_graph_captures_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    fact = (
        "a CUDA graph cannot capture an operation of hvdkit, since threads of the host take part in it: each replay "
        "would use gradients of this rank alone."
    )
    hint = (
        "HINT: capture the model with torch.cuda.make_graphed_callables or torch.compile(mode='reduce-overhead'), and "
        "keep operations, backward() and optimizer.step() outside of your own graphs."
    )
    with told(ValueError, f"{fact}\n{hint}"):
        streams.cuda_mark(torch.device("cuda"))


def test_kernels_that_cannot_be_compiled_are_told(monkeypatch, caplog):
    kernels = SimpleNamespace(decode=MagicMock(side_effect=RuntimeError("no C compiler")))
    monkeypatch.setattr(gpu, "triton_kernels", kernels, raising=False)
    assert device_codecs._triton.__wrapped__(torch.device("cpu")) is None
    assert caplog.messages == [
        "codecs encode on the GPU with PyTorch's operations, which takes several times as long as with Triton's "
        "kernels, because the kernels cannot be compiled here: RuntimeError: no C compiler.\n"
        "HINT: install a C compiler and Python's headers (Debian: gcc, python3-dev)."
    ]


def test_memory_that_cannot_be_locked_is_told(monkeypatch, caplog):
    monkeypatch.setattr(streams, "torch", MagicMock())
    cuda = streams.torch.cuda.cudart.return_value
    cuda.cudaHostRegister.return_value, cuda.cudaGetErrorString.return_value = 2, "out of memory"
    assert not streams.Locked(np.zeros(64, np.uint8), torch.device("cuda")).is_locked
    assert caplog.messages == [
        "the 64 bytes of host memory in which gradients of GPUs are summed could not be page-locked, which makes "
        "copies slower: out of memory"
    ]
