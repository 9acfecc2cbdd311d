"""Optimizers that differ between ranks in one thing: every rank is told which, and the job goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.on_ranks import on_ranks
from tests.torch.operations import still_works
from tests.torch.optimizer_support import assert_close, expect

pytestmark = on_ranks(3)

ROWS = 6


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).to(dtype)


def step(hvd: Any, optimizer: Any, net: nn.Module) -> None:
    inputs = torch.full((ROWS, 3), hvd.rank() + 1.0, dtype=next(net.parameters()).dtype)
    net(inputs).sum().backward()
    optimizer.synchronize()


def clash(hvd: Any, make: Callable[[bool], tuple[nn.Module, dict[str, Any]]], *texts: str) -> None:
    """``make(odd)`` gives the last rank another model or other options. All ranks raise, and then train together."""
    odd = hvd.rank() == hvd.size() - 1
    net, options = make(odd)
    names = options.pop("names", net.named_parameters())
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), names, **options)
    others = ", ".join(map(str, range(hvd.size() - 1)))
    with expect(hvd.HorovodInternalError, "SGD", f"rank {hvd.size() - 1} ", f"rank {others.split(',')[0]}", *texts):
        step(hvd, optimizer, net)
    still_works(hvd)
    net = model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())
    for _ in range(2):
        optimizer.zero_grad()
        step(hvd, optimizer, net)
        assert_close(net[1].bias.grad, torch.full((2,), float(ROWS)))


def test_dtype(hvd: Any) -> None:
    clash(hvd, lambda odd: (model(torch.float64 if odd else torch.float32), {}), "'0.weight'", "float32", "float64")


def test_name(hvd: Any) -> None:
    def make(odd: bool) -> tuple[nn.Module, dict[str, Any]]:
        net = model()
        return net, {"names": [(f"{'odd.' if odd else ''}{name}", p) for name, p in net.named_parameters()]}

    clash(hvd, make, "'odd.0.weight'", "'0.weight'")


def test_op(hvd: Any) -> None:
    clash(hvd, lambda odd: (model(), {"op": hvd.Max if odd else hvd.Sum}), "reduce operations", "MAX", "SUM")


def test_codec(hvd: Any) -> None:
    codecs = {True: hvd.Compression.fp16, False: hvd.Compression.none}
    clash(hvd, lambda odd: (model(), {"compression": codecs[odd]}), "compressions", "fp16", "none")


def test_gradient_predivide_factor(hvd: Any) -> None:
    clash(hvd, lambda odd: (model(), {"gradient_predivide_factor": 4.0 if odd else 2.0}), "factors", "0.25", "0.5")


def test_groups(hvd: Any) -> None:
    clash(hvd, lambda odd: (model(), {"groups": 1 if odd else 2}), "groups", "[0, 1, 2, 3]", "[0, 1]")


def test_number_of_parameters(hvd: Any) -> None:
    def make(odd: bool) -> tuple[nn.Module, dict[str, Any]]:
        net = model()
        if odd:
            net[0].requires_grad_(False)
        return net, {}

    clash(hvd, make, "parameter number 0", "'0.weight'", "'1.weight'", "HINT")
