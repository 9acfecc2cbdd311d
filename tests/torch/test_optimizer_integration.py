"""With the rest of PyTorch: schedulers, closures, GradScaler, GANs, torch.compile, and ranks that run out of data."""

from __future__ import annotations

import inspect
import unittest.mock
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint

from tests.on_ranks import on_ranks
from tests.torch.optimizer_support import (
    assert_close,
    assert_identical,
    batch,
    expect,
    joined_batch,
    loss_of,
    make_net,
    no_warnings,
    train_step,
)
from tests.torch.test_optimizer import distributed_sgd

pytestmark = on_ranks(2, 3)

SCHEDULERS = {
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 2),
    "MultiStepLR": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [1, 3]),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
    "ExponentialLR": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9),
    "LinearLR": lr_scheduler.LinearLR,
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 5),
    "CosineAnnealingWarmRestarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2),
    "CyclicLR": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.001, 0.1, step_size_up=2),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10),
}


def test_schedulers_work_as_on_the_plain_optimizer(hvd: Any) -> None:
    for name, make in SCHEDULERS.items():
        net, alone = make_net(), make_net()
        optimizer = distributed_sgd(hvd, net)
        plain = hvd.unsynchronized(torch.optim.SGD(alone.parameters(), lr=0.05, momentum=0.9))
        scheduler, expected = make(optimizer), make(plain)
        with no_warnings():
            for _ in range(4):
                train_step(optimizer, net, batch(hvd.rank()))
                train_step(plain, alone, batch(0))
                scheduler.step()
                expected.step()
                ours, theirs = optimizer.param_groups[0], plain.param_groups[0]
                assert (ours["lr"], ours["momentum"]) == (theirs["lr"], theirs["momentum"]), name
        assert_identical(hvd, net)


def test_scheduler_made_before_wrapping(hvd: Any) -> None:
    net = make_net()
    sgd = torch.optim.SGD(net.parameters(), lr=0.05)
    scheduler = lr_scheduler.StepLR(sgd, 1)
    optimizer = hvd.DistributedOptimizer(sgd, named_parameters=net.named_parameters())
    with no_warnings():
        for step in range(2):
            train_step(optimizer, net, batch(hvd.rank(), step))
            scheduler.step()
    assert_close(torch.tensor(optimizer.param_groups[0]["lr"]), torch.tensor(0.0005))
    assert_identical(hvd, net)
    optimizer.load_state_dict(optimizer.state_dict())
    scheduler.step()
    assert_close(torch.tensor(optimizer.param_groups[0]["lr"]), torch.tensor(0.00005))


def test_reduce_lr_on_plateau(hvd: Any) -> None:
    net = make_net()
    optimizer = distributed_sgd(hvd, net)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for _ in range(3):
        train_step(optimizer, net, batch(hvd.rank()))
        scheduler.step(1.0)
    assert optimizer.param_groups[0]["lr"] < 0.05


def test_closure_of_sgd(hvd: Any) -> None:
    net, alone = make_net(), make_net()
    optimizer, plain = distributed_sgd(hvd, net), torch.optim.SGD(alone.parameters(), lr=0.05, momentum=0.9)
    for step in range(3):

        def closure(model: nn.Module, owner: Any, data: Any) -> torch.Tensor:
            owner.zero_grad()
            loss = loss_of(model, data)
            loss.backward()
            return loss

        mine, joined = batch(hvd.rank(), step), joined_batch(hvd.size(), step)
        with no_warnings():
            loss = optimizer.step(lambda mine=mine: closure(net, optimizer, mine))
        expected = plain.step(lambda joined=joined: closure(alone, plain, joined))
        assert_close(loss.detach(), expected.detach())
        for ours, theirs in zip(net.parameters(), alone.parameters(), strict=True):
            assert_close(ours.detach(), theirs.detach())
    assert_identical(hvd, net)


def test_closure_of_lbfgs_is_called_equally_often(hvd: Any) -> None:
    def train(model: nn.Module, optimizer: Any, data: Any) -> tuple[list[float], int]:
        calls = 0

        def closure() -> torch.Tensor:
            nonlocal calls
            calls += 1
            optimizer.zero_grad()
            loss = loss_of(model, data)
            loss.backward()
            return loss

        return [optimizer.step(closure=closure).item() for _ in range(3)], calls

    for search in (None, "strong_wolfe"):
        net, alone = make_net().double(), make_net().double()
        lbfgs = torch.optim.LBFGS(net.parameters(), max_iter=6, line_search_fn=search)
        optimizer = hvd.DistributedOptimizer(lbfgs, named_parameters=net.named_parameters())
        plain = torch.optim.LBFGS(alone.parameters(), max_iter=6, line_search_fn=search)
        inputs, targets = batch(hvd.rank())
        losses, calls = train(net, optimizer, (inputs.double(), targets.double()))
        inputs, targets = joined_batch(hvd.size())
        expected, expected_calls = train(alone, plain, (inputs.double(), targets.double()))
        assert calls == expected_calls > 6
        assert_close(torch.tensor(losses), torch.tensor(expected), 1e-5)
        assert_identical(hvd, net)


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
    net, alone = make_net().double(), make_net().double()
    optimizer = hvd.DistributedOptimizer(SAM(net.parameters()), named_parameters=net.named_parameters())
    plain = SAM(alone.parameters())
    for step in range(4):

        def closure(model: nn.Module, data: Any) -> torch.Tensor:
            loss = loss_of(model, tuple(one.double() for one in data))
            loss.backward()
            return loss

        own, joined = batch(hvd.rank(), step), joined_batch(hvd.size(), step)
        optimizer.zero_grad()
        plain.zero_grad()
        closure(net, own)
        closure(alone, joined)
        loss = optimizer.step(lambda own=own: closure(net, own))
        expected = plain.step(lambda joined=joined: closure(alone, joined))
        assert_close(loss, expected.detach(), 1e-12)
        for ours, theirs in zip(net.parameters(), alone.parameters(), strict=True):
            assert_close(ours.detach(), theirs.detach(), 1e-12)
    assert_identical(hvd, net)


def test_an_optimizer_that_computes_without_a_closure_is_an_error(hvd: Any) -> None:
    net = make_net()

    class Computing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            loss_of(net, batch(hvd.rank())).backward()
            return super().step(closure)

    optimizer = hvd.DistributedOptimizer(Computing(net.parameters(), lr=0.05), net.named_parameters())
    with expect(AssertionError, "inside its own step()", "HINT: ", "optimizer.step(closure)"):
        optimizer.step()


def test_what_a_closure_returns_is_handed_through(hvd: Any) -> None:
    net = make_net()
    optimizer = distributed_sgd(hvd, net)

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


def scaled_step(scaler: Any, optimizer: Any, net: nn.Module, data: Any, poison: bool = False) -> None:
    optimizer.zero_grad()
    loss = loss_of(net, data) * (float("inf") if poison else 1.0)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


def test_grad_scaler_step_needs_no_synchronize(hvd: Any) -> None:
    for fused in (False, True):
        net, alone = make_net(), make_net()
        sgd = torch.optim.SGD(net.parameters(), lr=0.05, fused=fused)
        optimizer = hvd.DistributedOptimizer(sgd, named_parameters=net.named_parameters())
        plain = torch.optim.SGD(alone.parameters(), lr=0.05, fused=fused)
        scaler, expected = (torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(2))
        for step in range(4):
            # One rank's gradients overflow in the second step: then no rank steps, and all lower their scale.
            poison = step == 1
            with no_warnings():
                scaled_step(scaler, optimizer, net, batch(hvd.rank(), step), poison and hvd.rank() == hvd.size() - 1)
            scaled_step(expected, plain, alone, joined_batch(hvd.size(), step), poison)
            assert scaler.get_scale() == expected.get_scale() == (1024.0 if step == 0 else 512.0)
        for ours, theirs in zip(net.parameters(), alone.parameters(), strict=True):
            assert_close(ours.detach(), theirs.detach())
        assert_identical(hvd, net)


def test_grad_scaler_with_clipping(hvd: Any) -> None:
    net = make_net()
    optimizer = distributed_sgd(hvd, net)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(loss_of(net, batch(hvd.rank(), step))).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.01)
        with no_warnings(), optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
    assert_identical(hvd, net)


def gan(hvd: Any) -> tuple[nn.Module, nn.Module, Any, Any]:
    torch.manual_seed(5)
    generator, discriminator = nn.Linear(3, 4), nn.Linear(4, 1)
    optimizers = [
        hvd.DistributedOptimizer(torch.optim.Adam(net.parameters()), named_parameters=net.named_parameters())
        for net in (generator, discriminator)
    ]
    return generator, discriminator, *optimizers


def test_gan_with_discriminator_frozen(hvd: Any) -> None:
    generator, discriminator, optimizer_g, optimizer_d = gan(hvd)
    noise = torch.randn(6, 3, generator=torch.Generator().manual_seed(hvd.rank()))
    for _ in range(4):
        discriminator.requires_grad_(True)
        optimizer_d.zero_grad()
        (discriminator(torch.ones(6, 4)) - discriminator(generator(noise).detach())).mean().backward()
        optimizer_d.step()
        discriminator.requires_grad_(False)
        optimizer_g.zero_grad()
        discriminator(generator(noise)).mean().backward()
        optimizer_g.step()
    assert_identical(hvd, generator)
    assert_identical(hvd, discriminator)


def test_gan_whose_generator_reaches_the_discriminator(hvd: Any) -> None:
    generator, discriminator, optimizer_g, optimizer_d = gan(hvd)
    noise = torch.randn(6, 3, generator=torch.Generator().manual_seed(hvd.rank()))
    for _ in range(3):
        optimizer_g.zero_grad()
        discriminator(generator(noise)).mean().backward()
        optimizer_g.step()
        if hvd.size() > 1:
            with expect(AssertionError, "optimizer.zero_grad() was called", "GAN"):
                optimizer_d.zero_grad()
        optimizer_d.synchronize()
        optimizer_d.zero_grad()
        (discriminator(torch.ones(6, 4)) - discriminator(generator(noise).detach())).mean().backward()
        optimizer_d.step()
    assert_identical(hvd, generator)
    assert_identical(hvd, discriminator)


def test_compiled_model(hvd: Any) -> None:
    for backend in ("eager", "aot_eager"):
        torch._dynamo.reset()
        net, alone = make_net(), make_net()
        compiled = torch.compile(net, backend=backend)
        optimizer = distributed_sgd(hvd, net)
        plain = hvd.unsynchronized(torch.optim.SGD(alone.parameters(), lr=0.05, momentum=0.9))
        for step in range(3):
            train_step(optimizer, compiled, batch(hvd.rank(), step))
            train_step(plain, alone, joined_batch(hvd.size(), step))
        for (name, ours), theirs in zip(net.named_parameters(), alone.parameters(), strict=True):
            if not name.startswith("spare"):
                assert_close(ours.detach(), theirs.detach())
        assert_identical(hvd, net)


def test_compiled_step(hvd: Any) -> None:
    torch._dynamo.reset()
    net, alone = make_net(), make_net()
    optimizer, plain = distributed_sgd(hvd, net), torch.optim.SGD(alone.parameters(), lr=0.05, momentum=0.9)
    compiled = torch.compile(optimizer.step, backend="eager")
    for step in range(3):
        optimizer.zero_grad()
        loss_of(net, batch(hvd.rank(), step), use_spare=True).backward()
        compiled()
        train_step(plain, alone, joined_batch(hvd.size(), step), use_spare=True)
    for ours, theirs in zip(net.parameters(), alone.parameters(), strict=True):
        assert_close(ours.detach(), theirs.detach())
    assert_identical(hvd, net)


def test_lazy_module(hvd: Any) -> None:
    torch.manual_seed(4)
    net = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))
    optimizer = distributed_sgd(hvd, net)
    for step in range(4):
        optimizer.zero_grad()
        net(torch.full((2, 3), hvd.rank() - 1.0)).square().sum().backward()
        optimizer.step()
        if step == 0:  # the first forward pass made the weights, differently on each rank
            hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    assert_identical(hvd, net)


def test_checkpointed_layers(hvd: Any) -> None:
    net, alone = make_net(), make_net()
    optimizer = distributed_sgd(hvd, net)
    loss_of(alone, joined_batch(hvd.size())).backward()
    for _ in range(2):
        optimizer.zero_grad()
        inputs, targets = batch(hvd.rank())
        output = checkpoint(net, inputs, use_reentrant=False)
        nn.functional.mse_loss(output, targets).backward()
        optimizer.synchronize()
        assert_close(net.conv.weight.grad, alone.conv.weight.grad)


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


def reentrant(function: Any, *inputs: torch.Tensor) -> Any:
    return checkpoint(function, *inputs, use_reentrant=True)


def rows_of(rank: int, step: int) -> torch.Tensor:
    return torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))


def test_reentrant_checkpoints_around_what_is_used_twice(hvd: Any) -> None:
    ways = ("twice", "inside, then outside", "outside, then inside", "inside of another", "tied")
    for way, options in [*((way, {}) for way in ways), ("twice", {"groups": 2}), ("twice", {"compression": Halves})]:
        net, alone = Twice().double(), Twice().double()
        optimizer = distributed_sgd(hvd, net, **options)
        plain = torch.optim.SGD(alone.parameters(), lr=0.05, momentum=0.9)
        for step in range(4):
            optimizer.zero_grad()
            net(rows_of(hvd.rank(), step), way, reentrant).backward()
            optimizer.step()
            plain.zero_grad()
            joined = torch.cat([rows_of(rank, step) for rank in range(hvd.size())])
            alone(joined, way, lambda function, *inputs: function(*inputs)).backward()
            plain.step()
            for ours, theirs in zip(net.parameters(), alone.parameters(), strict=True):
                assert_close(ours.detach(), theirs.detach(), 1e-10)
        assert_identical(hvd, net)


class Halves:
    """A compression of Horovod's kind, whose gradients go by name: all values, times two and back."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, None]:
        return tensor * 2, None

    @staticmethod
    def decompress(tensor: torch.Tensor, context: None) -> torch.Tensor:
        return tensor / 2


def test_ranks_that_run_out_of_data_join(hvd: Any) -> None:
    for codec in (hvd.Compression.none, hvd.Compression.fp16):
        net = make_net()
        optimizer = distributed_sgd(hvd, net, compression=codec)
        for step in range(2 + hvd.rank()):
            train_step(optimizer, net, batch(hvd.rank(), step))
        assert hvd.join() in range(hvd.size())
        hvd.broadcast_parameters(net.state_dict(), root_rank=hvd.size() - 1)
        assert_identical(hvd, net)


def test_forward_that_fails_on_one_rank(hvd: Any) -> None:
    net = make_net()
    optimizer = distributed_sgd(hvd, net)
    train_step(optimizer, net, batch(hvd.rank()))
    saved = optimizer.state_dict()
    for step in range(3):
        if hvd.rank() == 0 and step == 1:
            with expect(RuntimeError, "shape"):
                net(torch.ones(1, 1, 5, 5))
            optimizer.load_state_dict(saved)
        train_step(optimizer, net, batch(hvd.rank(), step))
    assert_identical(hvd, net)
