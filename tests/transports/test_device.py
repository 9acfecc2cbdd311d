"""Collectives of a device on real ranks, with the CPU as the device, and pure decisions about NCCL."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from hvdkit.errors import PeerLostError
from hvdkit.transports.gpu.nccl import exchange, shared_gpus, within
from tests.on_ranks import RankedCases

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
    with pytest.raises(PeerLostError, match=r"ranks \[1\]"):
        exchange(dist.HashStore(), 0, 2, "gpu", 0.05)


def test_connecting_has_a_time_limit_and_tells_what_failed():
    import threading

    with pytest.raises(PeerLostError, match="NCCL_DEBUG"):
        within(0.05, threading.Event().wait, "NCCL to connect")
    with pytest.raises(PeerLostError, match="no such device"):
        within(5, lambda: (_ for _ in ()).throw(RuntimeError("no such device")), "NCCL to connect")
    assert within(5, lambda: 3, "three") == 3
