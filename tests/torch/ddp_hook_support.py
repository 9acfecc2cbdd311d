"""Jobs of a DistributedDataParallel with a hook, on ranks that torch.distributed connects; hvd.init() is never called.

Run as a program, this is what a rank runs: ``python -m <this> MODULE FOLDER``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.ranks import Skip
from tests.torch.codec_support import Constant, keeping_codecs, mean_gradients
from tests.torch.optimizer_support import assert_close, digest

SMALL_BUCKETS = 0.004  # MB: a bucket for each of the larger parameters
SHAPES = {"first": (50, 60), "bias": (60,), "wide": (3, 700), "odd": (41, 25), "scale": (25,)}


def net_of(seed: int | None = None) -> Constant:
    """Return a model with gradients of a seed, which is the rank unless given."""
    return Constant(SHAPES, dist.get_rank() if seed is None else seed)


def means() -> dict[str, torch.Tensor]:
    """Return the average of all ranks' gradients, by name."""
    return mean_gradients(SHAPES, dist.get_world_size())


def times(count: float, gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: count * gradient for name, gradient in gradients.items()}


def keeping(hvd: Any) -> dict[str, Any]:
    """Return codecs whose residual is all that they have not sent."""
    return {**keeping_codecs(hvd.Compression), "int4": hvd.Compression.int4(compress="everywhere")}


def every_codec(hvd: Any) -> dict[str, Any]:
    return {
        **keeping(hvd),
        "dgc": hvd.Compression.dgc(0.05, momentum=0.5),
        "int8 without feedback": hvd.Compression.int8(feedback=False),
        "fp16": hvd.Compression.fp16,
        "bf16": hvd.Compression.bf16,
        "none": hvd.Compression.none,
    }


def same_weights(net: nn.Module, other: nn.Module) -> bool:
    return all(map(torch.equal, net.parameters(), other.parameters()))


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


def resumed(hvd: Any, codec: Any, states: Any) -> Job:
    """Return a job whose hook goes on with states that were saved."""
    hook = hvd.ddp_hook(codec)
    hook.load_state_dict(states)
    return Job(net_of(), hook)


def constant(hvd: Any, codec: Any, dtype: torch.dtype = torch.float32, **options: Any) -> Job:
    """Return a job whose ranks have gradients of their own."""
    return Job(net_of().to(dtype), hvd.ddp_hook(codec), **options)


def gathered(value: Any) -> list[Any]:
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def assert_identical(net: nn.Module) -> None:
    """Check that all ranks hold the same bits."""
    digests = gathered(digest(net.to(torch.float32)))
    assert len(set(digests)) == 1, digests


def kept(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return what a state_dict keeps back of the average of each parameter of which anything is kept, by name."""
    found: dict[str, torch.Tensor] = {}
    for saved in state["kept"]:
        kept = saved["kept"].values()
        for (name, shape), like, arrays in zip(SHAPES.items(), state["shapes"], kept, strict=True):
            assert list(shape) == like
            if "residual" in arrays:
                found[name] = found.get(name, 0.0) + arrays["residual"].view(shape) / dist.get_world_size()
    return found


def total(several: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the sum of what several ranks keep, by name."""
    names = [name for name in SHAPES if any(name in one for one in several)]
    return {name: sum(one.get(name, torch.zeros(SHAPES[name])) for one in several) for name in names}


def owed(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return what all ranks together keep back of the average, by name."""
    return total(gathered(kept(state)))


def means_and(steps: int, before: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what some steps hand on of the average, with what was owed before them."""
    return {name: steps * mean + before.get(name, torch.zeros(())) for name, mean in means().items()}


def assert_nothing_lost(job: Job, expected: dict[str, torch.Tensor], tolerance: float = 1e-4) -> None:
    """Check that what was applied and what is owed are what came in."""
    back = owed(job.hook.state_dict())
    for name in SHAPES:
        applied = -getattr(job.net, name).detach().float()
        assert_close(applied + back.get(name, torch.zeros(())), expected[name], tolerance)


def is_last() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


def for_several_ranks() -> None:
    """Skip a test on a rank alone."""
    if dist.get_world_size() == 1:
        raise Skip("needs two ranks")


def main(module: str, folder: str) -> None:
    import hvdkit.torch as hvd
    from tests.ranks import leave, run_cases

    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    run_cases(module, Path(folder, f"{dist.get_rank()}.json"), hvd)
    dist.destroy_process_group()
    leave()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
