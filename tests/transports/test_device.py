"""Collectives of a device on real ranks, with the CPU as the device, and pure decisions about NCCL."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from hvdkit.errors import PeerLostError
from hvdkit.transports.gpu.nccl import exchange, shared_gpus, within
from tests.ranks import RankedCases

RUNNER = "tests.transports.pretend_device"
CASES = RankedCases("tests.transports.launched", "tests.transports.device_cases", runner=RUNNER)
OPERATIONS = RankedCases("tests.torch.ops_cases", runner=RUNNER)
OPTIMIZER = RankedCases("tests.torch.optimizer_cases", runner=RUNNER)
COMPRESSION = RankedCases("tests.torch.compression_cases", runner=RUNNER)
SHARED = {"runner": RUNNER, "TESTS_SHARED_DEVICE": "1"}
COPIED_OPTIMIZER = RankedCases("tests.torch.optimizer_cases", **SHARED)
COPIED_COMPRESSION = RankedCases("tests.torch.compression_cases", **SHARED)


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.thorough), 3])
@pytest.mark.parametrize("case", CASES.names)
def test_device(case, ranks):
    CASES.check(case, ranks, "torch")


@pytest.mark.parametrize("case", OPERATIONS.names)
def test_operations_give_the_same_on_a_device(case):
    OPERATIONS.check(case, 3, "torch")


@pytest.mark.parametrize("case", OPTIMIZER.names)
def test_optimizers_do_the_same_on_a_device(case):
    OPTIMIZER.check(case, 2, "torch")


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.thorough), 3])
@pytest.mark.parametrize("case", COMPRESSION.names)
def test_nothing_is_lost_that_is_encoded_on_a_device(case, ranks):
    COMPRESSION.check(case, ranks, "torch")


@pytest.mark.parametrize("case", COPIED_OPTIMIZER.names)
def test_optimizers_do_the_same_where_ranks_share_a_device(case):
    COPIED_OPTIMIZER.check(case, 2, "torch")


@pytest.mark.parametrize("case", COPIED_COMPRESSION.names)
def test_nothing_is_lost_of_what_is_copied_from_a_device(case):
    COPIED_COMPRESSION.check(case, 3, "torch")


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
