"""Communication hooks of DistributedDataParallel on the backend hvdkit: in light groups of its session."""

from __future__ import annotations

import gc
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hvdkit.compression import CustomCodec
from tests.on_ranks import on_ranks
from tests.ranks import Skip
from tests.told import told
from tests.torch import ddp_hook_support as ddp
from tests.torch.distributed import ranks
from tests.torch.optimizer_support import assert_close

pytestmark = [on_ranks((1, "torch"), (3, "torch"), runner=ranks.RUNNER)]


@dataclass(frozen=True)
class Failing(CustomCodec):
    """Fails on the last rank."""

    name: ClassVar[str] = "failing"

    def encode(self, values: np.ndarray) -> np.ndarray:
        if ddp.is_last():
            raise ZeroDivisionError("on purpose")
        return values

    def decode(self, payload: np.ndarray, elements: int) -> np.ndarray:
        return payload.view(np.float32)


def engines() -> int:
    return sum(thread.name == "hvdkit-engine" for thread in threading.enumerate())


def test_every_codec_in_the_session_of_the_backend(hvd: Any) -> None:
    before = engines()
    for name, codec in ddp.every_codec(hvd).items():
        job = ddp.constant(hvd, codec).steps(3)
        ddp.assert_identical(job.net)
        if name in ddp.keeping(hvd):
            ddp.assert_nothing_lost(job, ddp.times(3, ddp.means()))
        assert (job.hook.bytes_sent > 0) == (dist.get_world_size() > 1), name
    assert engines() == before


def test_parameters_that_are_not_used(hvd: Any) -> None:
    """The first buckets of a step may be averaged before the last are handed over."""
    net = ddp.net_of()
    used = iter([["first", "bias", "odd", "scale"], *[list(ddp.SHAPES)] * 3])
    net.used = lambda: next(used)
    job = ddp.Job(net, hvd.ddp_hook(hvd.Compression.none), find_unused_parameters=True).steps(4)
    assert_close(-job.net.first.detach(), 4 * ddp.means()["first"])
    assert_close(-job.net.wide.detach(), 3 * ddp.means()["wide"])


def test_a_part_of_the_ranks(hvd: Any) -> None:
    if dist.get_world_size() < 3:
        raise Skip("needs three ranks")
    members = [1, 2]
    part = dist.new_group(members)
    if dist.get_rank() in members:
        job = ddp.constant(hvd, hvd.Compression.none, process_group=part).steps(2)
        mean = sum(ddp.net_of(rank).wide_gradient for rank in members) / 2
        assert_close(-job.net.wide.detach(), 2 * mean)
        del job
        dist.destroy_process_group(part)
    dist.barrier()


def test_ranks_with_other_codecs_can_go_on_without_the_hook(hvd: Any) -> None:
    ddp.for_several_ranks()
    compression = hvd.Compression
    with told(hvd.HorovodInternalError, "Mismatched compressions", "sent", "HINT"):
        ddp.constant(hvd, compression.int4 if ddp.is_last() else compression.int8)
    plain, job = ddp.Job(ddp.net_of(), None).steps(2), ddp.constant(hvd, compression.none).steps(2)
    assert_close(job.net.first.detach(), plain.net.first.detach())


def test_a_rank_that_does_not_come(hvd: Any) -> None:
    ddp.for_several_ranks()
    model = DistributedDataParallel(ddp.net_of(0))
    if not ddp.is_last():
        hook = hvd.ddp_hook(hvd.Compression.int8, timeout=timedelta(seconds=1))
        with told(hvd.HorovodInternalError, f"ddp_hook: rank {dist.get_rank()}: ", "waited 1 s", "ranks [2]", "HINT"):
            hook.register(model)
    dist.barrier()
    if ddp.is_last():  # so that all ranks have made as many hooks
        with told(hvd.HorovodInternalError, "waited 1 s"):
            hvd.ddp_hook(hvd.Compression.int8, timeout=timedelta(seconds=1)).register(model)
    dist.barrier()


def test_an_error_on_one_rank_reaches_the_others_and_no_other_group(hvd: Any) -> None:
    ddp.for_several_ranks()
    began = time.monotonic()
    job = ddp.constant(hvd, Failing(feedback=False))
    with told(RuntimeError, "ddp_hook on rank", "on purpose", f"rank {dist.get_world_size() - 1}"):
        job.step()
    job = ddp.constant(hvd, hvd.Compression.none).steps(1)
    if ddp.is_last():
        job.hook.load_state_dict({**job.hook.state_dict(), "shapes": [[3]]})
    fact, was = "the state_dict is of another model: parameter 0 is of shape [", "] here, but was of shape [3] there."
    with told(RuntimeError, "ddp_hook on rank", fact, was):
        job.step()
    assert time.monotonic() - began < 30, "that is half of the group's timeout"
    dist.barrier()


def test_callbacks_of_a_future_may_communicate(hvd: Any) -> None:
    def hook(state: Any, bucket: Any) -> Any:
        def doubled(done: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            largest = torch.tensor(2.0)
            dist.all_reduce(largest, dist.ReduceOp.MAX)
            return done.value() * largest

        return state.reduce(bucket).then(doubled)

    hook.__annotations__.clear()  # DDP compares them with its classes
    job = ddp.Job(ddp.net_of(), None)
    job.model.register_comm_hook(hvd.ddp_hook(hvd.Compression.none), hook)
    job.steps(2)
    assert_close(-job.net.first.detach(), 4 * ddp.means()["first"])


def test_the_group_ends_with_the_hook(hvd: Any) -> None:
    groups = dist.group.WORLD.session.engine.ordered
    ended(groups, 1)
    job = ddp.constant(hvd, hvd.Compression.int8).steps(2)
    assert len(groups) == 2
    del job
    ended(groups, 1)
    dist.barrier()


def ended(groups: Any, count: int) -> None:
    """Wait until as many groups are left."""
    deadline = time.monotonic() + 20
    while len(groups) > count and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert len(groups) == count, list(groups)
