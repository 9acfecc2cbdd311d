"""Codecs as communication hooks of DistributedDataParallel, on real ranks that torch.distributed connects.

hvd.init() is never called here. Run as a program, this is what a rank runs: ``python -m <this> MODULE FOLDER``.
"""

from __future__ import annotations

import copy
import gc
import io
import itertools
import math
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hvdkit.compression import CustomCodec
from tests.on_ranks import on_ranks
from tests.ranks import Skip
from tests.torch.optimizer_support import assert_close, digest, expect

pytestmark = [
    on_ranks((3, "torch"), runner=__name__),
    on_ranks((1, "torch"), (2, "torch"), thorough=True, runner=__name__),
]

SMALL_BUCKETS = 0.004  # MB: a bucket for each of the larger parameters
LATE_SECONDS = 5  # of a hook's time limit, in which ranks must meet all the same
SHAPES = {"first": (50, 60), "bias": (60,), "wide": (3, 700), "odd": (41, 25), "scale": (25,)}


@dataclass(frozen=True)
class Halves(CustomCodec):
    """Half of the values, the rest next time: a codec as a user writes it."""

    name: ClassVar[str] = "halves"
    largest_ratio: ClassVar[float] = 0.5

    first: int = 0

    def encode(self, values: np.ndarray) -> np.ndarray:
        return values[self.first :: 2]

    def decode(self, payload: np.ndarray, elements: int) -> np.ndarray:
        values = np.zeros(elements, dtype=np.float32)
        values[self.first :: 2] = payload.view(np.float32)
        return values


@dataclass(frozen=True)
class Failing(CustomCodec):
    """Fails on the last rank, after so many more calls."""

    name: ClassVar[str] = "failing"
    good_calls: ClassVar[float] = math.inf

    def encode(self, values: np.ndarray) -> np.ndarray:
        Failing.good_calls -= 1
        if Failing.good_calls < 0 and dist.get_rank() == dist.get_world_size() - 1:
            raise ZeroDivisionError("on purpose")
        return values

    def decode(self, payload: np.ndarray, elements: int) -> np.ndarray:
        return payload.view(np.float32)


def keeping(hvd: Any) -> dict[str, Any]:
    """Codecs whose residual is all that they have not sent."""
    compression = hvd.Compression
    return {
        "int8": compression.int8,
        "int8 stochastic": compression.int8(stochastic=True),
        "int4": compression.int4(compress="everywhere"),
        "onebit": compression.onebit,
        "topk": compression.topk(0.05),
        "randomk": compression.randomk(0.1),
        "threshold": compression.threshold(2.0),
        "powersgd": compression.powersgd(rank=2),
        "custom": Halves(first=1),
    }


def every_codec(hvd: Any) -> dict[str, Any]:
    """All of them."""
    return {
        **keeping(hvd),
        "dgc": hvd.Compression.dgc(0.05, momentum=0.5),
        "int8 without feedback": hvd.Compression.int8(feedback=False),
        "fp16": hvd.Compression.fp16,
        "bf16": hvd.Compression.bf16,
        "none": hvd.Compression.none,
    }


class Constant(nn.Module):
    """Its gradients do not depend on its weights, so that all steps' gradients are known."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))
            setattr(self, f"{name}_gradient", torch.randn(shape, generator=generator))

    def used(self) -> list[str]:
        return list(SHAPES)

    def forward(self) -> torch.Tensor:
        pairs = [(getattr(self, name), getattr(self, f"{name}_gradient")) for name in self.used()]
        return sum((parameter * gradient.to(parameter)).sum() for parameter, gradient in pairs)


class Job:
    """A model, its optimizer and its hook."""

    def __init__(self, module: nn.Module, hook: Any, rate: float = 1.0, **options: Any) -> None:
        options = {"bucket_cap_mb": SMALL_BUCKETS, **options}
        self.net, self.hook = module, hook
        self.model = DistributedDataParallel(module, **options)
        if hook is not None:
            hook.register(self.model)
        self.optimizer = torch.optim.SGD(module.parameters(), lr=rate)

    def step(self, *inputs: Any, loss: Callable[[Any], torch.Tensor] = lambda out: out) -> float:
        self.optimizer.zero_grad()
        value = loss(self.model(*inputs))
        value.backward()
        self.optimizer.step()
        return value.item()

    def steps(self, count: int) -> Job:
        for _ in range(count):
            self.step()
        return self


def constant(hvd: Any, codec: Any, dtype: torch.dtype = torch.float32, **options: Any) -> Job:
    """A job whose ranks have gradients of their own."""
    return Job(Constant(dist.get_rank()).to(dtype), hvd.ddp_hook(codec), **options)


def for_several_ranks() -> None:
    if dist.get_world_size() == 1:
        raise Skip("needs two ranks")


def gathered(value: Any) -> list[Any]:
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def assert_identical(net: nn.Module) -> None:
    """All ranks hold the same bits."""
    digests = gathered(digest(net.to(torch.float32)))
    assert len(set(digests)) == 1, digests


def mean_gradients() -> dict[str, torch.Tensor]:
    size = dist.get_world_size()
    nets = [Constant(rank) for rank in range(size)]
    return {name: sum(getattr(net, f"{name}_gradient") for net in nets) / size for name in SHAPES}


def kept(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """By name: what a state_dict keeps back of the average of each parameter, of those of which anything is."""
    found: dict[str, torch.Tensor] = {}
    for saved in state["kept"]:
        kept = saved["kept"].values()
        for (name, shape), like, arrays in zip(SHAPES.items(), state["shapes"], kept, strict=True):
            assert list(shape) == like
            if "residual" in arrays:
                found[name] = found.get(name, 0.0) + arrays["residual"].view(shape) / dist.get_world_size()
    return found


def owed(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What all ranks together keep back of the average, by name."""
    return total(gathered(kept(state)))


def total(several: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    names = [name for name in SHAPES if any(name in one for one in several)]
    return {name: sum(one.get(name, torch.zeros(SHAPES[name])) for one in several) for name in names}


def assert_nothing_lost(job: Job, expected: dict[str, torch.Tensor], tolerance: float = 1e-4) -> None:
    """What was applied and what is owed are what came in."""
    back = owed(job.hook.state_dict())
    for name in SHAPES:
        applied = -getattr(job.net, name).detach().float()
        assert_close(applied + back.get(name, torch.zeros(())), expected[name], tolerance)


def times(count: float, gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: count * gradient for name, gradient in gradients.items()}


def test_nothing_is_lost_when_buckets_are_laid_out_anew(hvd: Any) -> None:
    for name, codec in keeping(hvd).items():
        job = constant(hvd, codec)
        for step in range(1, 6):
            job.step()
            assert_identical(job.net)
            assert_nothing_lost(job, times(step, mean_gradients()))
        encoded = {"first", "wide", "odd"} if dist.get_world_size() > 1 else set()
        assert set(owed(job.hook.state_dict())) == encoded, f"{name}: biases are not encoded"


def test_all_codecs_train(hvd: Any) -> None:
    def module() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(20, 80), nn.Tanh(), nn.Linear(80, 40), nn.Tanh(), nn.Linear(40, 30))

    generator = torch.Generator().manual_seed(dist.get_rank())
    inputs = torch.randn(64, 20, generator=generator)
    targets = torch.tanh(inputs[:, :1] * torch.linspace(-1, 1, 30))
    for name, codec in {**every_codec(hvd), "threshold": hvd.Compression.threshold(1e-3)}.items():
        job = Job(module(), hvd.ddp_hook(codec), rate=2.0, bucket_cap_mb=0.01)
        losses = [job.step(inputs, loss=lambda out: nn.functional.mse_loss(out, targets)) for _ in range(30)]
        assert_identical(job.net)
        first, last = (sum(gathered(loss)) for loss in (losses[0], losses[-1]))
        assert last < 0.5 * first, (name, losses)


def test_none_is_plain_ddp(hvd: Any) -> None:
    plain, ours = Job(Constant(dist.get_rank()), None), constant(hvd, hvd.Compression.none)
    for _ in range(3):
        plain.step()
        ours.step()
    for expected, got in zip(plain.net.parameters(), ours.net.parameters(), strict=True):
        assert_close(got.detach(), expected.detach(), 1e-6)


def test_what_is_not_encoded_is_exact(hvd: Any) -> None:
    plain, ours = Job(Constant(dist.get_rank()), None).steps(3), constant(hvd, hvd.Compression.onebit).steps(3)
    for name in ("bias", "scale"):
        assert_close(getattr(ours.net, name).detach(), getattr(plain.net, name).detach(), 1e-6)


def test_less_is_sent(hvd: Any) -> None:
    for_several_ranks()
    sent = {name: constant(hvd, codec).steps(4).hook.bytes_sent for name, codec in every_codec(hvd).items()}
    # Of what two phases send of all gradients. Where the wire's latency says so, what is not encoded, and a cast,
    # goes from all to all, which on three ranks is half as much again.
    least = min(sent["none"], 2 * sent["fp16"])
    limits = {"none": 1.51, "fp16": 0.76, "bf16": 0.76, "custom": 0.9, "threshold": 0.9}
    for name, bytes_sent in sent.items():
        assert bytes_sent < limits.get(name, 0.65) * least, (name, sent)


def test_other_types(hvd: Any) -> None:
    for dtype, tolerance in ((torch.float64, 1e-4), (torch.float16, 0.02), (torch.bfloat16, 0.1)):
        for name in ("none", "bf16", "int8", "topk", "powersgd", "custom"):
            job = constant(hvd, every_codec(hvd)[name], dtype).steps(3)
            rounded = max(tolerance, 0.05) if name == "bf16" else tolerance
            assert_nothing_lost(job, times(3, mean_gradients()), rounded)
            assert_identical(job.net)


def test_types_side_by_side(hvd: Any) -> None:
    net = Constant(dist.get_rank())
    net.wide = nn.Parameter(net.wide.detach().double())
    job = Job(net, hvd.ddp_hook(hvd.Compression.int8)).steps(3)
    assert_nothing_lost(job, times(3, mean_gradients()))


def test_what_is_not_finite_reaches_all_ranks_and_is_not_kept(hvd: Any) -> None:
    for name, codec in every_codec(hvd).items():
        job = constant(hvd, codec).steps(2)
        for odd in (float("nan"), float("inf")):
            gradient = job.net.first_gradient.clone()
            if dist.get_rank() == dist.get_world_size() - 1:
                job.net.first_gradient[20, 7] = odd
            job.optimizer.zero_grad()
            job.model().backward()
            job.net.first_gradient.copy_(gradient)
            assert not torch.isfinite(job.net.first.grad).all(), name
            assert all(torch.isfinite(array).all() for array in kept(job.hook.state_dict()).values()), name
        job.optimizer.zero_grad()
        job.model().backward()
        assert all(torch.isfinite(parameter.grad).all() for parameter in job.net.parameters()), name


def test_resumed_with_the_same_bits(hvd: Any) -> None:
    for (name, codec), steps in itertools.product(every_codec(hvd).items(), (1, 3)):
        job = constant(hvd, codec).steps(steps)
        file = io.BytesIO()
        torch.save({"net": job.net.state_dict(), "hook": job.hook.state_dict()}, file)
        job.steps(3)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        for states in (saved["hook"], gathered(saved["hook"])):
            hook = hvd.ddp_hook(codec)
            hook.load_state_dict(states)
            before = hook.state_dict()
            net = Constant(dist.get_rank())
            net.load_state_dict(saved["net"])
            resumed = Job(net, hook)
            assert same(before, saved["hook"]), name
            assert same(hook.state_dict(), saved["hook"]), name
            resumed.steps(3)
            for ours, theirs in zip(resumed.net.parameters(), job.net.parameters(), strict=True):
                assert torch.equal(ours, theirs), name
            assert same(hook.state_dict(), job.hook.state_dict()), name


def same(one: Any, other: Any) -> bool:
    """Whether two states have the same structure, numbers and bits."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


def test_loaded_between_two_steps(hvd: Any) -> None:
    for name, codec in every_codec(hvd).items():
        job = constant(hvd, codec).steps(3)
        weights, state = copy.deepcopy(job.net.state_dict()), job.hook.state_dict()
        job.steps(2)
        after = copy.deepcopy(list(job.net.parameters()))
        job.net.load_state_dict(weights)
        job.hook.load_state_dict(state)
        job.steps(2)
        assert all(map(torch.equal, job.net.parameters(), after)), name


def as_of(state: dict[str, Any], rank: int, size: int) -> dict[str, Any]:
    """A state as if rank ``rank`` of ``size`` had saved it, of a sum of which as much is applied as of this job's."""
    of = {"rank": rank, "size": size}
    return {**state, **of, "kept": [{**one, **of, "place": f"{rank} of {size}"} for one in state["kept"]]}


def test_states_of_more_and_fewer_ranks_are_summed(hvd: Any) -> None:
    for codec in (hvd.Compression.topk(0.05), hvd.Compression.powersgd(rank=2)):
        everyones = gathered(constant(hvd, codec).steps(3).hook.state_dict())
        for count in (1, dist.get_world_size() + 1, 2 * dist.get_world_size() + 1):
            states = [as_of(everyones[n % len(everyones)], n, count) for n in range(count)]
            before = total([kept(state) for state in states])
            again = hvd.ddp_hook(codec)
            again.load_state_dict(list(reversed(states)))
            for loaded in (list(reversed(states)), again.state_dict(), gathered(again.state_dict())):
                hook = hvd.ddp_hook(codec)
                hook.load_state_dict(loaded)
                job = Job(Constant(dist.get_rank()), hook)
                back = owed(hook.state_dict())
                assert back.keys() == before.keys()
                for name in back:
                    assert_close(back[name], before[name], 1e-5)
                job.steps(3)
                zero = torch.zeros(())
                came = {name: 3 * mean + before.get(name, zero) for name, mean in mean_gradients().items()}
                assert_nothing_lost(job, came)
                assert_identical(job.net)


def test_the_state_of_one_rank_is_taken_once(hvd: Any) -> None:
    codec = hvd.Compression.topk(0.05)
    state = gathered(constant(hvd, codec).steps(3).hook.state_dict())[0]
    hook = hvd.ddp_hook(codec)
    hook.load_state_dict(state)
    job = Job(Constant(dist.get_rank()), hook)
    assert same(owed(hook.state_dict()), kept(state))
    assert_identical(job.steps(2).net)


def test_another_codec_takes_over_what_was_kept(hvd: Any) -> None:
    for_several_ranks()
    state = constant(hvd, hvd.Compression.topk(0.01)).steps(3).hook.state_dict()
    before = owed(state)
    zero = torch.zeros(())
    came = {name: 2 * mean + before.get(name, zero) for name, mean in mean_gradients().items()}
    for codec in (hvd.Compression.int8, hvd.Compression.none):
        hook = hvd.ddp_hook(codec)
        hook.load_state_dict(state)
        assert_nothing_lost(Job(Constant(dist.get_rank()), hook).steps(2), came)


def test_the_state_of_another_model(hvd: Any) -> None:
    state = constant(hvd, hvd.Compression.int8).steps(3).hook.state_dict()
    state["shapes"] = [shape[::-1] for shape in state["shapes"]]
    hook = hvd.ddp_hook(hvd.Compression.int8)
    hook.load_state_dict(state)
    job = Job(Constant(dist.get_rank()), hook)
    with expect(RuntimeError, "ValueError", "the state_dict is of another model", "60 x 50", "50 x 60"):
        job.step()


def test_a_state_on_some_ranks_only(hvd: Any) -> None:
    for_several_ranks()
    state = constant(hvd, hvd.Compression.int8).steps(3).hook.state_dict()
    hook = hvd.ddp_hook(hvd.Compression.int8)
    if dist.get_rank() == 0:
        hook.load_state_dict(state)
    job = Job(Constant(dist.get_rank()), hook)
    with expect(RuntimeError, "Mismatched numbers of earlier steps", "rank 0 sent 3", "sent 0", "HINT"):
        job.step()


def test_a_state_on_some_ranks_only_between_two_steps(hvd: Any) -> None:
    for_several_ranks()
    job = constant(hvd, hvd.Compression.int8).steps(3)
    began = time.monotonic()
    if dist.get_rank() == 0:
        job.hook.load_state_dict(job.hook.state_dict())
    with expect(RuntimeError, "ddp_hook", "HINT"):
        job.step()
    assert time.monotonic() - began < 30, "that is half of the hook's time limit"


def test_ranks_with_other_codecs(hvd: Any) -> None:
    for_several_ranks()
    odd = dist.get_rank() == dist.get_world_size() - 1
    compression = hvd.Compression
    for ours, theirs in (
        (compression.topk(0.05), compression.topk(0.1)),
        (compression.int8, compression.int4),
        (compression.none, compression.fp16),
        (compression.none, compression.int8(feedback=False)),
        (Halves(first=0), Halves(first=1)),
    ):
        with expect(hvd.HorovodInternalError, "Mismatched compressions", "sent", "HINT"):
            constant(hvd, theirs if odd else ours)
        # The same where the hook is not registered by its own method: at the first bucket.
        model = DistributedDataParallel(Constant())
        model.register_comm_hook(hvd.ddp_hook(theirs if odd else ours), hvd.DDPHook.reduce)
        with expect(hvd.HorovodInternalError, "Mismatched compressions", "sent", "HINT"):
            model().backward()


def test_ranks_with_other_buckets(hvd: Any) -> None:
    """Which DDP does not compare; ranks agree on parameters."""
    odd = dist.get_rank() == dist.get_world_size() - 1
    for codec in (hvd.Compression.none, hvd.Compression.topk(0.05)):
        # With this DDP keeps the buckets that it has first.
        options = {"find_unused_parameters": True, "bucket_cap_mb": 25 if odd else SMALL_BUCKETS}
        job = constant(hvd, codec, **options).steps(3)
        assert_nothing_lost(job, times(3, mean_gradients()))
        assert_identical(job.net)


def test_ranks_with_other_types(hvd: Any) -> None:
    """Which DDP does not compare either."""
    for_several_ranks()
    odd = dist.get_rank() == dist.get_world_size() - 1
    dtype = torch.float64 if odd else torch.float32
    job = constant(hvd, hvd.Compression.int8, dtype, init_sync=False)
    with expect(RuntimeError, "Mismatched parameters", "'first' float32[50, 60]", "'first' float64", "HINT"):
        job.step()
    with expect(RuntimeError, "an earlier step failed"):
        job.step()


def test_a_codec_that_fails_on_one_rank(hvd: Any) -> None:
    for_several_ranks()
    job = constant(hvd, Failing(feedback=False), find_unused_parameters=True)
    job.step()
    Failing.good_calls = 1
    dist.barrier()  # or a rank that is still in this step fails in it, and DDP is out of step with the other ranks'
    with expect(RuntimeError, "with codec failing(", f"on rank {dist.get_rank()}", "on purpose"):
        job.step()
    told = "ddp_hook: state_dict on purpose"
    try:
        assert job.hook.state_dict()["turn"] > 0
    except hvd.HorovodInternalError as error:  # on this rank, some of the step was encoded
        told = str(error)
    assert "ddp_hook: state_dict" in told, told
    assert "on purpose" in told, told
    dist.barrier()  # the model's own process group is as it was


def test_a_rank_that_does_not_come(hvd: Any) -> None:
    for_several_ranks()
    model = DistributedDataParallel(Constant())
    if dist.get_rank() > 0:
        hook = hvd.ddp_hook(hvd.Compression.int8, timeout=timedelta(seconds=1))
        # Of several, one may have come later than the other waited for it.
        started = f"ddp_hook: rank {dist.get_rank()}: "
        with expect(hvd.HorovodInternalError, started, "waited 1 s for ranks [0", "to use a ddp_hook", "HINT"):
            hook.register(model)
    dist.barrier()
    if dist.get_rank() == 0:  # so that all ranks have opened as many hooks
        with expect(hvd.HorovodInternalError, ""):
            hvd.ddp_hook(hvd.Compression.int8, timeout=timedelta(seconds=1)).register(model)
    dist.barrier()


def test_a_rank_that_is_late_beyond_the_time_limit(hvd: Any) -> None:
    for_several_ranks()
    hook = hvd.ddp_hook(hvd.Compression.int8, timeout=timedelta(seconds=LATE_SECONDS))
    job = Job(Constant(dist.get_rank()), hook).steps(2)
    if dist.get_rank() == 0:
        dist.barrier()  # when the others have given up
        told = "has left the job"
    else:
        told = f"stalled on rank {dist.get_rank()}"
    with expect(RuntimeError, told, f"on rank {dist.get_rank()} with codec int8("):
        job.step()
    if dist.get_rank() > 0:
        dist.barrier()
    dist.barrier()


def test_registered_as_state_and_hook(hvd: Any) -> None:
    codec = hvd.Compression.topk(0.05)
    hook = hvd.ddp_hook(codec)
    net = Constant(dist.get_rank())
    model = DistributedDataParallel(net, bucket_cap_mb=SMALL_BUCKETS)
    model.register_comm_hook(hook, hvd.DDPHook.reduce)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    for _ in range(4):
        optimizer.zero_grad()
        model().backward()
        optimizer.step()
    expected = constant(hvd, codec).steps(4)
    for ours, theirs in zip(net.parameters(), expected.net.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert same(hook.state_dict(), expected.hook.state_dict())


def test_a_part_of_the_ranks(hvd: Any) -> None:
    if dist.get_world_size() < 3:
        raise Skip("needs three ranks")
    ranks = [1, 2]
    part = dist.new_group(ranks)
    if dist.get_rank() in ranks:
        job = constant(hvd, hvd.Compression.int8, process_group=part).steps(3)
        assert job.hook.state_dict()["size"] == 2
        model = DistributedDataParallel(Constant(), process_group=part)
        with expect(ValueError, "the model is on ranks [1, 2], but process_group has ranks [0, 1, 2]", "HINT"):
            hvd.ddp_hook(hvd.Compression.int8, dist.group.WORLD).register(model)
        again = dist.new_group(
            ranks, use_local_synchronization=True
        )  # the same ranks, so it may take the model's place
        hvd.ddp_hook(hvd.Compression.int8, again).register(model)
        model().backward()
        mean = sum(Constant(rank).wide_gradient for rank in ranks) / 2
        assert_close(-job.net.wide.detach(), 3 * mean, 0.02)
    dist.barrier()


def test_two_models_at_once(hvd: Any) -> None:
    one, other = constant(hvd, hvd.Compression.topk(0.05)), constant(hvd, hvd.Compression.int8)
    for _ in range(3):
        one.optimizer.zero_grad()
        other.optimizer.zero_grad()
        (one.model() + other.model()).backward()
        one.optimizer.step()
        other.optimizer.step()
    for job in (one, other):
        assert_nothing_lost(job, times(3, mean_gradients()))
    assert not hvd.is_initialized()


def test_beside_collectives_of_the_process_group(hvd: Any) -> None:
    """Which the script starts in the middle of a backward pass, on the process group that the model has."""
    job = constant(hvd, hvd.Compression.topk(0.05))
    sums = []

    def during(gradient: torch.Tensor) -> None:
        total = torch.full((1000,), float(dist.get_rank()))
        dist.all_reduce(total)
        sums.append(total[0].item())

    for parameter in job.net.parameters():
        parameter.register_hook(during)
    job.steps(3)
    assert_nothing_lost(job, times(3, mean_gradients()))
    assert set(sums) == {sum(range(dist.get_world_size()))}
    assert len(sums) == 3 * len(SHAPES)


def test_many_buckets_on_ranks_of_different_pace(hvd: Any) -> None:
    """The same bits as without delays: nothing of one bucket is taken for another's."""
    inputs = torch.randn(4, 40, generator=torch.Generator().manual_seed(dist.get_rank()))
    pace = torch.Generator().manual_seed(dist.get_rank())
    for name, codec in every_codec(hvd).items():
        ended = []
        for longest in (0.0, 0.004):

            def dawdle(gradient: torch.Tensor, longest: float = longest) -> None:
                time.sleep(longest * torch.rand((), generator=pace).item())

            torch.manual_seed(0)
            job = Job(nn.Sequential(*(nn.Linear(40, 40) for _ in range(8))), hvd.ddp_hook(codec), rate=0.01)
            for parameter in job.net.parameters():
                parameter.register_hook(dawdle)
            for _ in range(4):
                job.step(inputs, loss=torch.sum)
            assert_identical(job.net)
            ended.append(digest(job.net))
        assert ended[0] == ended[1], name


def test_accumulated_gradients(hvd: Any) -> None:
    job = constant(hvd, hvd.Compression.topk(0.05), gradient_as_bucket_view=True)
    for _ in range(3):
        job.optimizer.zero_grad()
        with job.model.no_sync():
            job.model().backward()
        job.model().backward()
        job.optimizer.step()
    assert_nothing_lost(job, times(6, mean_gradients()))


def test_ranks_that_run_out_of_data_join(hvd: Any) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for name in ("none", "topk", "powersgd"):
        job = constant(hvd, every_codec(hvd)[name])
        with job.model.join():
            job.steps(2 + rank)
        assert_identical(job.net)
        came = {
            what: sum((2 + one) * getattr(Constant(one), f"{what}_gradient") for one in range(size)) / size
            for what in SHAPES
        }
        assert_nothing_lost(job, came)


class Sometimes(Constant):
    """Uses one parameter in every other step only, and has one that it never uses."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.never = nn.Parameter(torch.zeros(40, 40))
        self.calls = 0

    def used(self) -> list[str]:
        self.calls += 1
        return [name for name in SHAPES if name != "wide" or self.calls % 2]


def test_parameters_that_are_not_used(hvd: Any) -> None:
    hook = hvd.ddp_hook(hvd.Compression.int8)
    job = Job(Sometimes(dist.get_rank()), hook, find_unused_parameters=True)
    job.steps(4)
    assert_close(-job.net.first.detach(), 4 * mean_gradients()["first"], 0.02)
    assert_close(-job.net.wide.detach(), 2 * mean_gradients()["wide"], 0.02)
    assert not job.net.never.any()


def test_frozen_and_shared_parameters(hvd: Any) -> None:
    net = Constant(dist.get_rank())
    net.wide.requires_grad_(False)
    net.again = net.first
    hook = hvd.ddp_hook(hvd.Compression.int8)
    Job(net, hook).steps(3)
    assert not net.wide.any()
    assert_close(-net.first.detach(), 3 * mean_gradients()["first"], 0.02)
    assert hook.state_dict()["shapes"] == [list(shape) for name, shape in SHAPES.items() if name != "wide"]


def test_matrices_in_the_order_of_memory(hvd: Any) -> None:
    """Gradients lie in buckets as parameters lie in memory."""
    net = Constant(dist.get_rank())
    net.first = nn.Parameter(torch.zeros(60, 50).t())
    job = Job(net, hvd.ddp_hook(hvd.Compression.powersgd(rank=2)))
    for step in range(1, 4):
        job.step()
        state = job.hook.state_dict()
        assert state["shapes"][0] == [60, 50]
        assert_identical(job.net)
        residual = next(iter(state["kept"][0]["kept"].values())).get("residual", torch.zeros(3000)).view(60, 50).t()
        owes = sum(gathered(residual.contiguous())) / dist.get_world_size()
        assert_close(owes - net.first.detach(), step * mean_gradients()["first"], 1e-4)


def test_one_hook_for_two_models(hvd: Any) -> None:
    job = constant(hvd, hvd.Compression.int8).steps(2)
    other = DistributedDataParallel(Constant())
    with expect(ValueError, "this hook has a model already", "HINT"):
        job.hook.register(other)
    other.register_comm_hook(job.hook, hvd.DDPHook.reduce)
    with expect(ValueError, "this hook belongs to another model", "HINT"):
        other().backward()
    with expect(RuntimeError, ""):
        hvd.ddp_hook(hvd.Compression.int8).register(job.model)
    with expect(TypeError, "expected a DistributedDataParallel, got Constant", "HINT"):
        hvd.ddp_hook(hvd.Compression.int8).register(Constant())


def test_the_thread_ends_with_the_hook(hvd: Any) -> None:
    before = set(threading.enumerate())
    job = constant(hvd, hvd.Compression.int8).steps(2)
    started = [thread for thread in threading.enumerate() if thread not in before and "ddp-hook" in thread.name]
    gone = weakref.ref(job.hook)
    del job
    # The thread may still be on its way out of the last bucket's reduction, which knows the hook.
    deadline = time.monotonic() + 10
    while gone() is not None and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    collected = gone() is None
    for thread in started:
        thread.join(10)
    dist.barrier()  # first of all, so that no rank waits for one that fails
    assert collected
    assert [thread.is_alive() for thread in started] == [False]


def test_complex_parameters(hvd: Any) -> None:
    net = nn.Module()
    net.weight = nn.Parameter(torch.zeros(40, 50, dtype=torch.complex64))
    generator = torch.Generator().manual_seed(dist.get_rank())
    gradient = torch.randn(40, 50, 2, generator=generator)
    net.forward = lambda: (torch.view_as_real(net.weight) * gradient).sum()
    hook = hvd.ddp_hook(hvd.Compression.int8)
    job = Job(net, hook).steps(4)
    assert hook.state_dict()["shapes"] == [[40, 50, 2]]
    assert_close(
        -torch.view_as_real(job.net.weight.detach()), 4 * sum(gathered(gradient)) / dist.get_world_size(), 0.02
    )


def test_tensors_on_cuda(hvd: Any) -> None:
    if not torch.cuda.is_available():
        raise Skip("needs a GPU")
    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
    for name, codec in every_codec(hvd).items():
        on_host = constant(hvd, codec).steps(4)
        net = Constant(dist.get_rank()).to(device)
        job = Job(net, hvd.ddp_hook(codec)).steps(4)
        for ours, theirs in zip(net.parameters(), on_host.net.parameters(), strict=True):
            assert torch.equal(ours.cpu(), theirs), name
        assert same(job.hook.state_dict(), on_host.hook.state_dict()), name


def test_a_model_on_nccl(hvd: Any) -> None:
    if torch.cuda.device_count() < dist.get_world_size():
        raise Skip("needs a GPU for each rank")
    device = torch.device("cuda", dist.get_rank())
    torch.cuda.set_device(device)
    part = dist.new_group(backend="nccl")
    for name, codec in every_codec(hvd).items():
        on_host = constant(hvd, codec).steps(4)
        net = Constant(dist.get_rank()).to(device)
        Job(net, hvd.ddp_hook(codec), process_group=part).steps(4)
        for ours, theirs in zip(net.parameters(), on_host.net.parameters(), strict=True):
            assert torch.equal(ours.cpu(), theirs), name


def main(module: str, folder: str) -> None:
    """What a rank runs."""
    import hvdkit.torch as hvd
    from tests.ranks import leave, run_cases

    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    run_cases(module, Path(folder, f"{dist.get_rank()}.json"), hvd)
    dist.destroy_process_group()
    leave()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
