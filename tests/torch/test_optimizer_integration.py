"""With the rest of PyTorch: schedulers, closures, GradScaler, GANs, torch.compile, and ranks that run out of data."""

from __future__ import annotations

import functools
import inspect
import unittest.mock
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint

from tests.on_ranks import on_ranks
from tests.told import told
from tests.torch.optimizer_support import (
    Comparison,
    Passing,
    assert_close,
    assert_identical,
    batch,
    distributed_sgd,
    loss_of,
    loss_on,
    make_double,
    make_net,
    no_warnings,
    sgd,
    train_step,
    wrapped_net,
)

pytestmark = on_ranks(2, 3)

SCHEDULERS = {
    lr_scheduler.StepLR: {"step_size": 2},
    lr_scheduler.MultiStepLR: {"milestones": [1, 3]},
    lr_scheduler.LambdaLR: {"lr_lambda": lambda epoch: 0.9**epoch},
    lr_scheduler.ExponentialLR: {"gamma": 0.9},
    lr_scheduler.LinearLR: {},
    lr_scheduler.CosineAnnealingLR: {"T_max": 5},
    lr_scheduler.CosineAnnealingWarmRestarts: {"T_0": 2},
    lr_scheduler.CyclicLR: {"base_lr": 0.001, "max_lr": 0.1, "step_size_up": 2},
    lr_scheduler.OneCycleLR: {"max_lr": 0.1, "total_steps": 10},
}


def test_schedulers_work_as_on_the_plain_optimizer(hvd: Any) -> None:
    for kind, options in SCHEDULERS.items():
        pair = Comparison(hvd)
        schedulers = [kind(pair.optimizer, **options), kind(pair.plain, **options)]
        with no_warnings():
            for step in range(4):
                pair.train(1, first=step)
                for scheduler in schedulers:
                    scheduler.step()
                group, expected = pair.optimizer.param_groups[0], pair.plain.param_groups[0]
                assert (group["lr"], group["momentum"]) == (expected["lr"], expected["momentum"]), kind


def test_a_scheduler_made_before_wrapping_and_one_that_follows_a_loss(hvd: Any) -> None:
    net = make_net()
    plain = sgd(net)
    scheduler = lr_scheduler.StepLR(plain, 1)
    optimizer = hvd.DistributedOptimizer(plain, named_parameters=net.named_parameters())
    with no_warnings():
        for step in range(2):
            train_step(optimizer, net, batch(hvd.rank(), step))
            scheduler.step()
    assert_close(torch.tensor(optimizer.param_groups[0]["lr"]), torch.tensor(0.0005))
    optimizer.load_state_dict(optimizer.state_dict())
    scheduler.step()
    assert_close(torch.tensor(optimizer.param_groups[0]["lr"]), torch.tensor(0.00005))
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for _ in range(3):
        train_step(optimizer, net, batch(hvd.rank()))
        plateau.step(1.0)
    assert optimizer.param_groups[0]["lr"] < 0.00005
    assert_identical(hvd, net)


def closure_of(pair: Comparison, side: int, step: int, calls: list[int], clears: bool = True) -> Any:
    """Return the closure of one side of a comparison, which notes its calls in ``calls``."""
    net, optimizer, ranks = pair.sides[side]

    def closure() -> torch.Tensor:
        calls.append(side)
        if clears:
            optimizer.zero_grad()
        loss = loss_on(net, ranks, step)
        loss.backward()
        return loss

    return closure


def test_closures_are_called_equally_often_on_the_joined_batch(hvd: Any) -> None:
    def lbfgs(search: str | None) -> Any:
        return lambda net: torch.optim.LBFGS(net.parameters(), max_iter=6, line_search_fn=search)

    for plain in (sgd, lbfgs(None), lbfgs("strong_wolfe")):
        pair, calls = Comparison(hvd, make_double, plain), list[int]()
        for step in range(3):
            with no_warnings():
                loss = pair.optimizer.step(closure=closure_of(pair, 0, step, calls))
            assert_close(loss.detach(), pair.plain.step(closure_of(pair, 1, step, calls)).detach(), 1e-5)
        pair.check()
        assert calls.count(0) == calls.count(1) >= (3 if plain is sgd else 7)


def test_a_mean_over_tokens_without_padding_needs_the_weight_of_the_page_on_questions(hvd: Any) -> None:
    def loss_on_tokens(net: nn.Module, ranks: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.cat([batch(rank)[0] for rank in ranks]).double()
        # Rank r has 2 r samples of padding: rank 2 has nothing else.
        target = torch.cat([torch.tensor([-1] * 2 * rank + [1] * (4 - 2 * rank)) for rank in ranks])
        return nn.functional.cross_entropy(net(inputs), target, ignore_index=-1, reduction="sum"), (target != -1).sum()

    pair = Comparison(hvd, make_double)
    loss, tokens = loss_on_tokens(pair.sides[0][0], [hvd.rank()])
    loss = loss * hvd.size() / hvd.allreduce(tokens, op=hvd.Sum, name="tokens")
    loss.backward()
    pair.optimizer.step()
    loss, tokens = loss_on_tokens(pair.sides[1][0], range(hvd.size()))
    (loss / tokens).backward()
    pair.plain.step()
    pair.check()


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimisation (Foret et al., ICLR 2021): it steps uphill, clears, and has the closure compute."""

    def __init__(self, parameters: Any, rho: float = 0.05) -> None:
        super().__init__(parameters, {"rho": rho})
        self.base = torch.optim.SGD(self.param_groups, lr=0.05, momentum=0.9)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        held = [(one, group["rho"]) for group in self.param_groups for one in group["params"] if one.grad is not None]
        norm = torch.stack([one.grad.norm() for one, _ in held]).norm()
        climbs = [one.grad * (rho / norm) for one, rho in held]
        torch._foreach_add_([one for one, _ in held], climbs)
        self.zero_grad()
        with torch.enable_grad():
            result = closure()
        torch._foreach_sub_([one for one, _ in held], climbs)
        self.base.step()
        return result


def test_an_optimizer_that_clears_and_computes_in_its_step(hvd: Any) -> None:
    pair = Comparison(hvd, make_double, lambda net: SAM(net.parameters()), relative=1e-12)
    for step in range(4):
        pair.zero_grad()
        pair.backward(step)
        loss = pair.optimizer.step(closure_of(pair, 0, step, [], clears=False))
        expected = pair.plain.step(closure_of(pair, 1, step, [], clears=False))
        assert_close(loss, expected.detach(), 1e-12)
        pair.check()


def test_an_optimizer_that_computes_without_a_closure_is_an_error(hvd: Any) -> None:
    net = make_net()

    class Computing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            loss_of(net, batch(hvd.rank())).backward()
            return super().step(closure)

    optimizer = hvd.DistributedOptimizer(Computing(net.parameters(), lr=0.05), net.named_parameters())
    with told(AssertionError, "inside its own step()", "HINT: ", "optimizer.step(closure)"):
        optimizer.step()


def test_what_a_closure_returns_is_handed_through(hvd: Any) -> None:
    net, optimizer = wrapped_net(hvd)

    def stepped(returned: Any) -> Any:
        def closure() -> Any:
            optimizer.zero_grad()
            loss_of(net, batch(hvd.rank())).backward()
            return returned

        return optimizer.step(closure)

    for returned in (None, "text", {"loss": 1.0}, (1.0, 2.0), [], True, 1j, torch.ones(3), torch.tensor(True)):
        assert stepped(returned) is returned
    assert stepped(None if hvd.rank() == 0 else 1.0) == (None if hvd.rank() == 0 else (hvd.size() - 1) / hvd.size())
    mean = sum(1 / 3 + rank for rank in range(hvd.size())) / hvd.size()
    for returned in (1 / 3 + hvd.rank(), torch.tensor(1 / 3 + hvd.rank(), dtype=torch.float64)):
        assert abs(float(stepped(returned)) - mean) < 1e-15  # which float32 would round
    single = stepped(torch.tensor([1 / 3 + hvd.rank()]))
    assert single.dtype is torch.float32
    assert single.shape == (1,)
    assert abs(single.item() - mean) < 1e-6
    assert stepped(hvd.rank()) == (hvd.size() - 1) / 2
    assert stepped(torch.tensor(hvd.rank())).item() == (hvd.size() - 1) / 2
    assert_identical(hvd, net)


def test_reading_attributes_changes_nothing(hvd: Any) -> None:
    weight = nn.Parameter(torch.zeros(1))
    for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.LBFGS):
        optimizer = hvd.DistributedOptimizer(kind([weight], lr=0.0), [("weight", weight)])
        for step in range(3):
            optimizer.zero_grad()
            (weight * (hvd.rank() + 1)).sum().backward()
            if hvd.rank() == step % hvd.size():  # while gradients are in flight, on one rank alone
                inspect.getmembers(optimizer)
                assert not hasattr(optimizer, "_step_supports_amp_scaling")
                unittest.mock.create_autospec(optimizer)
                repr(optimizer)
            optimizer.synchronize()
            assert weight.grad.item() == (hvd.size() + 1) / 2
            if hvd.rank() == 0:
                inspect.getmembers(optimizer)
            with no_warnings(), optimizer.skip_synchronize():
                optimizer.step(None if kind is not torch.optim.LBFGS else lambda: weight.sum())
            if hvd.rank() == 0:
                inspect.getmembers(optimizer)


def test_grad_scaler_step_needs_no_synchronize(hvd: Any) -> None:
    for fused in (False, True):
        pair = Comparison(hvd, plain=lambda net, fused=fused: torch.optim.SGD(net.parameters(), lr=0.05, fused=fused))
        scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(2)]
        for step in range(4):
            pair.zero_grad()
            for scaler, (net, optimizer, ranks) in zip(scalers, pair.sides, strict=True):
                # One rank's gradients overflow in the second step: then no rank steps, and all lower their scale.
                poisoned = step == 1 and hvd.size() - 1 in ranks
                with no_warnings():
                    scaler.scale(loss_on(net, ranks, step) * (float("inf") if poisoned else 1.0)).backward()
                    scaler.step(optimizer)
                    scaler.update()
                assert scaler.get_scale() == (1024.0 if step == 0 else 512.0)
        pair.check()


def test_gans(hvd: Any) -> None:
    for freezes in (True, False):
        torch.manual_seed(5)
        generator, discriminator = nn.Linear(3, 4), nn.Linear(4, 1)
        optimizer_g, optimizer_d = (distributed_sgd(hvd, net) for net in (generator, discriminator))
        noise = torch.randn(6, 3, generator=torch.Generator().manual_seed(hvd.rank()))
        for _ in range(4):
            discriminator.requires_grad_(not freezes)
            optimizer_g.zero_grad()
            discriminator(generator(noise)).mean().backward()
            optimizer_g.step()
            discriminator.requires_grad_(True)
            if not freezes:  # the generator's pass has reached the discriminator
                with told(AssertionError, "optimizer.zero_grad() was called", "GAN"):
                    optimizer_d.zero_grad()
                optimizer_d.synchronize()
            optimizer_d.zero_grad()
            (discriminator(torch.ones(6, 4)) - discriminator(generator(noise).detach())).mean().backward()
            optimizer_d.step()
        assert_identical(hvd, generator)
        assert_identical(hvd, discriminator)


def test_compiled_step(hvd: Any) -> None:
    torch._dynamo.reset()
    pair = Comparison(hvd)
    compiled = torch.compile(pair.optimizer.step, backend="eager")
    for step in range(3):
        pair.zero_grad()
        pair.backward(step, use_spare=True)
        compiled()
        pair.plain.step()
    pair.check()


class Twice(nn.Module):
    """A block that is used twice, inside and outside of checkpoints, and a layer of which it has the weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)
        self.block = nn.Sequential(nn.Linear(4, 200), nn.Tanh(), nn.Linear(200, 4))

    def forward(self, x: torch.Tensor, way: str, keeps: Any) -> torch.Tensor:
        x = self.first(x)
        match way:
            case "twice":
                x = keeps(self.block, keeps(self.block, x))
            case "inside, then outside":
                x = self.block(keeps(self.block, x))
            case "outside, then inside":
                x = keeps(self.block, self.block(x))
            case "inside of another":
                x = keeps(lambda y: keeps(self.block, y) + self.block(y), keeps(self.block, x))
            case "tied":
                x = keeps(lambda y: self.first(self.block(y)), x)
        return self.last(x).pow(2).mean()


def test_a_backward_pass_inside_of_another_where_there_was_none_is_an_error(hvd: Any) -> None:
    net, rows = Twice().double(), torch.ones(5, 4, dtype=torch.float64)
    optimizer = distributed_sgd(hvd, net, compression=Passing)
    for _ in range(3):
        optimizer.zero_grad()
        net(rows, "inside, then outside", lambda function, *inputs: function(*inputs)).backward()
        optimizer.step()
    optimizer.zero_grad()
    with told(
        AssertionError,
        "The gradient of '",
        "block.2.bias' was complete and handed over to be reduced, but then a nested backward pass (one inside of the "
        "backward pass) added to it.",
        "HINT: the model calls torch.utils.checkpoint with use_reentrant=True where it did not before; pass "
        "use_reentrant=False.",
    ):
        net(rows, "inside, then outside", functools.partial(checkpoint, use_reentrant=True)).backward()


def test_reentrant_checkpoints_around_what_is_used_twice(hvd: Any) -> None:
    def plainly(function: Any, *inputs: torch.Tensor) -> Any:
        return function(*inputs)

    def loss(net: nn.Module, ranks: list[int], step: int, way: str) -> torch.Tensor:
        rows = [torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * step + rank)) for rank in ranks]
        keeps = functools.partial(checkpoint, use_reentrant=True) if len(ranks) == 1 else plainly
        return net(torch.cat(rows).double(), way, keeps)

    ways = ("twice", "inside, then outside", "outside, then inside", "inside of another", "tied")
    for way, options in [*((way, {}) for way in ways), ("twice", {"groups": 2}), ("twice", {"compression": Passing})]:
        Comparison(hvd, lambda: Twice().double(), loss=loss, relative=1e-10, **options).train(4, way=way)
