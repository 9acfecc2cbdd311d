"""Hooks of DistributedDataParallel on ranks that differ, fail, come late or run out of data."""

from __future__ import annotations

import gc
import math
import threading
import time
import weakref
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hvdkit.compression import CustomCodec
from tests.on_ranks import on_ranks
from tests.ranks import Skip
from tests.told import told
from tests.torch import ddp_hook_support as ddp
from tests.torch.codec_support import EverySecond
from tests.torch.data import same
from tests.torch.optimizer_support import assert_close, digest

pytestmark = [
    on_ranks((3, "torch"), runner=ddp.__name__),
    on_ranks((1, "torch"), (2, "torch"), thorough=True, runner=ddp.__name__),
]


LATE_SECONDS = 5  # of a hook's time limit, in which ranks must meet all the same


@dataclass(frozen=True)
class Failing(CustomCodec):
    """Fails on the last rank, after so many more calls."""

    name: ClassVar[str] = "failing"
    good_calls: ClassVar[float] = math.inf

    def encode(self, values: np.ndarray) -> np.ndarray:
        Failing.good_calls -= 1
        if Failing.good_calls < 0 and ddp.is_last():
            raise ZeroDivisionError("on purpose")
        return values

    def decode(self, payload: np.ndarray, elements: int) -> np.ndarray:
        return payload.view(np.float32)


def test_ranks_with_other_codecs(hvd: Any) -> None:
    ddp.for_several_ranks()
    odd = ddp.is_last()
    compression = hvd.Compression
    for ours, theirs in (
        (compression.topk(0.05), compression.topk(0.1)),
        (compression.int8, compression.int4),
        (compression.none, compression.fp16),
        (compression.none, compression.int8(feedback=False)),
        (EverySecond(first=0), EverySecond(first=1)),
    ):
        with told(hvd.HorovodInternalError, "Mismatched compressions", "sent", "HINT"):
            ddp.constant(hvd, theirs if odd else ours)
        # The same where the hook is not registered by its own method: at the first bucket.
        model = DistributedDataParallel(ddp.net_of(0))
        model.register_comm_hook(hvd.ddp_hook(theirs if odd else ours), hvd.DDPHook.reduce)
        with told(hvd.HorovodInternalError, "Mismatched compressions", "sent", "HINT"):
            model().backward()


def test_ranks_with_other_buckets(hvd: Any) -> None:
    """Which DDP does not compare; ranks agree on parameters."""
    odd = ddp.is_last()
    for codec in (hvd.Compression.none, hvd.Compression.topk(0.05)):
        # With this DDP keeps the buckets that it has first.
        options = {"find_unused_parameters": True, "bucket_cap_mb": 25 if odd else ddp.SMALL_BUCKETS}
        job = ddp.constant(hvd, codec, **options).steps(3)
        ddp.assert_nothing_lost(job, ddp.times(3, ddp.means()))
        ddp.assert_identical(job.net)


def test_ranks_with_other_types(hvd: Any) -> None:
    """Which DDP does not compare either."""
    ddp.for_several_ranks()
    odd = ddp.is_last()
    dtype = torch.float64 if odd else torch.float32
    job = ddp.constant(hvd, hvd.Compression.int8, dtype, init_sync=False)
    with told(RuntimeError, "Mismatched parameters", "'first' float32[50, 60]", "'first' float64", "HINT"):
        job.step()
    with told(RuntimeError, "an earlier step failed"):
        job.step()


def test_a_codec_that_fails_on_one_rank(hvd: Any) -> None:
    ddp.for_several_ranks()
    job = ddp.constant(hvd, Failing(feedback=False), find_unused_parameters=True)
    job.step()
    Failing.good_calls = 1
    dist.barrier()  # or a rank that is still in this step fails in it, and DDP is out of step with the other ranks'
    with told(RuntimeError, "with codec failing(", f"on rank {dist.get_rank()}", "on purpose"):
        job.step()
    begin = "ddp_hook: state_dict: the codec's state is in the middle of a step that failed: "
    hint = "\nHINT: call state_dict() after each step, and continue from the last one that it returned."
    text = f"{begin}on purpose{hint}"
    try:
        assert job.hook.state_dict()["turn"] > 0
    except hvd.HorovodInternalError as error:  # on this rank, some of the step was encoded
        text = str(error)
    assert text.startswith(begin), text
    assert "on purpose" in text, text
    assert text.endswith(hint), text
    dist.barrier()  # the model's own process group is as it was


def test_a_rank_that_does_not_come(hvd: Any) -> None:
    ddp.for_several_ranks()
    model = DistributedDataParallel(ddp.net_of(0))
    if dist.get_rank() > 0:
        hook = hvd.ddp_hook(hvd.Compression.int8, timeout=timedelta(seconds=1))
        # Of several, one may have come later than the other waited for it.
        started = f"ddp_hook: rank {dist.get_rank()}: "
        purpose = (
            "to use a ddp_hook.\n"
            "HINT: all ranks of the model's process group must use one; make several hooks in the same order on all "
            "ranks."
        )
        with told(hvd.HorovodInternalError, started, "waited 1 s for ranks [0", purpose):
            hook.register(model)
    dist.barrier()
    if dist.get_rank() == 0:  # so that all ranks have opened as many hooks
        with told(hvd.HorovodInternalError, ""):
            hvd.ddp_hook(hvd.Compression.int8, timeout=timedelta(seconds=1)).register(model)
    dist.barrier()


def test_a_rank_that_is_late_beyond_the_time_limit(hvd: Any) -> None:
    ddp.for_several_ranks()
    hook = hvd.ddp_hook(hvd.Compression.int8, timeout=timedelta(seconds=LATE_SECONDS))
    job = ddp.Job(ddp.net_of(), hook).steps(2)
    rank = dist.get_rank()
    if rank == 0:
        dist.barrier()  # when the others have given up
    text = "has left the job" if rank == 0 else f"waited {LATE_SECONDS} s in operation"
    with told(RuntimeError, text, f"on rank {rank} with codec int8("):
        job.step()
    if rank > 0:
        dist.barrier()
    dist.barrier()


def test_registered_as_state_and_hook(hvd: Any) -> None:
    codec = hvd.Compression.topk(0.05)
    hook, job = hvd.ddp_hook(codec), ddp.Job(ddp.net_of(), None)
    job.model.register_comm_hook(hook, hvd.DDPHook.reduce)
    job.steps(4)
    expected = ddp.constant(hvd, codec).steps(4)
    assert ddp.same_weights(job.net, expected.net)
    assert same(hook.state_dict(), expected.hook.state_dict())


def test_a_part_of_the_ranks(hvd: Any) -> None:
    if dist.get_world_size() < 3:
        raise Skip("needs three ranks")
    ranks = [1, 2]
    part = dist.new_group(ranks)
    if dist.get_rank() in ranks:
        job = ddp.constant(hvd, hvd.Compression.int8, process_group=part).steps(3)
        assert job.hook.state_dict()["size"] == 2
        model = DistributedDataParallel(ddp.net_of(0), process_group=part)
        fact = "ddp_hook: register: the model is on ranks [1, 2], but process_group has ranks [0, 1, 2]"
        with told(ValueError, fact, "HINT: leave process_group out; then the hook uses the model's."):
            hvd.ddp_hook(hvd.Compression.int8, dist.group.WORLD).register(model)
        # A group of the same ranks may take the place of the model's.
        again = dist.new_group(ranks, use_local_synchronization=True)
        hvd.ddp_hook(hvd.Compression.int8, again).register(model)
        model().backward()
        mean = sum(ddp.net_of(rank).wide_gradient for rank in ranks) / 2
        assert_close(-job.net.wide.detach(), 3 * mean, 0.02)
    dist.barrier()


def test_beside_collectives_of_the_process_group(hvd: Any) -> None:
    """Which the script starts in the middle of a backward pass, on the process group that the model has."""
    job = ddp.constant(hvd, hvd.Compression.topk(0.05))
    sums = []

    def during(gradient: torch.Tensor) -> None:
        total = torch.full((1000,), float(dist.get_rank()))
        dist.all_reduce(total)
        sums.append(total[0].item())

    for parameter in job.net.parameters():
        parameter.register_hook(during)
    job.steps(3)
    ddp.assert_nothing_lost(job, ddp.times(3, ddp.means()))
    assert set(sums) == {sum(range(dist.get_world_size()))}
    assert len(sums) == 3 * len(ddp.SHAPES)


def test_many_buckets_on_ranks_of_different_pace(hvd: Any) -> None:
    """The same bits as without delays: nothing of one bucket is taken for another's."""
    inputs = torch.randn(4, 40, generator=torch.Generator().manual_seed(dist.get_rank()))
    pace = torch.Generator().manual_seed(dist.get_rank())
    for name in ("none", "int8", "topk", "threshold", "powersgd"):
        codec = ddp.every_codec(hvd)[name]
        ended = []
        for longest in (0.0, 0.004):

            def dawdle(gradient: torch.Tensor, longest: float = longest) -> None:
                time.sleep(longest * torch.rand((), generator=pace).item())

            torch.manual_seed(0)
            job = ddp.Job(nn.Sequential(*(nn.Linear(40, 40) for _ in range(8))), hvd.ddp_hook(codec), rate=0.01)
            for parameter in job.net.parameters():
                parameter.register_hook(dawdle)
            for _ in range(4):
                job.step(inputs, loss=torch.sum)
            ddp.assert_identical(job.net)
            ended.append(digest(job.net))
        assert ended[0] == ended[1], name


def test_ranks_that_run_out_of_data_join(hvd: Any) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for name in ("none", "topk", "powersgd"):
        job = ddp.constant(hvd, ddp.every_codec(hvd)[name])
        with job.model.join():
            job.steps(2 + rank)
        ddp.assert_identical(job.net)
        came = {
            what: sum((2 + one) * getattr(ddp.net_of(one), f"{what}_gradient") for one in range(size)) / size
            for what in ddp.SHAPES
        }
        ddp.assert_nothing_lost(job, came)


def test_one_hook_for_two_models(hvd: Any) -> None:
    job = ddp.constant(hvd, hvd.Compression.int8).steps(2)
    other = DistributedDataParallel(ddp.net_of(0))
    hint = "HINT: make a hook for each model."
    with told(ValueError, "ddp_hook: register: this hook has a model already", hint):
        job.hook.register(other)
    other.register_comm_hook(job.hook, hvd.DDPHook.reduce)
    with told(ValueError, "ddp_hook: this hook belongs to another model", hint):
        other().backward()
    with told(RuntimeError, ""):
        hvd.ddp_hook(hvd.Compression.int8).register(job.model)


def test_the_connections_end_with_the_hook(hvd: Any) -> None:
    before = set(threading.enumerate())
    job = ddp.constant(hvd, hvd.Compression.int8).steps(2)
    started = [thread for thread in threading.enumerate() if thread not in before and thread.name == "hvdkit-engine"]
    gone = weakref.ref(job.hook)
    del job
    # A thread may still be on its way out of the last bucket's reduction, which knows the hook.
    deadline = time.monotonic() + 10
    while gone() is not None and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    collected = gone() is None
    for thread in started:
        thread.join(10)
    dist.barrier()  # first of all, so that no rank waits for one that fails
    assert collected
    assert [thread.is_alive() for thread in started] == [False] * (dist.get_world_size() > 1)
