"""Copies of optimizers, and parameters that become other tensors, against plain PyTorch on the joined batch."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from tests.on_ranks import on_ranks
from tests.ranks import Skip
from tests.torch.optimizer_support import assert_close, assert_identical, batch, expect, joined_batch, loss_of, make_net

pytestmark = on_ranks(1, 2, 3, HVDKIT_VERIFY="1")

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, amsgrad=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(0.01)),
}


class Model(nn.Module):
    """A model that keeps its optimizer."""

    def __init__(self, hvd: Any | None, kind: str, seed: int = 1, **options: Any) -> None:
        super().__init__()
        self.net = make_net(seed).double()
        del self.net.spare  # of which every rank has a gradient of zeros, and one process has none
        plain = OPTIMIZERS[kind](self.net.parameters())
        if hvd is not None:
            self.optimizer = hvd.DistributedOptimizer(plain, self.net.named_parameters(), **options)
        else:
            self.optimizer = plain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


class Both:
    """The same done with a DistributedOptimizer on each rank's batch and a plain one on all ranks' batches."""

    def __init__(self, hvd: Any, kind: str, **options: Any) -> None:
        self.hvd = hvd
        self.ours, self.plain = Model(hvd, kind, **options), Model(None, kind)
        hvd.unsynchronized(self.plain.optimizer)

    def backward(self, step: int) -> None:
        for model, data in (
            (self.ours, batch(self.hvd.rank(), step)),
            (self.plain, joined_batch(self.hvd.size(), step)),
        ):
            loss_of(model, (data[0].double(), data[1].double())).backward()

    def end(self) -> None:
        for model in (self.ours, self.plain):
            model.optimizer.step()
            model.optimizer.zero_grad()

    def train(self, steps: int = 2) -> None:
        for step in range(steps):
            self.backward(step)
            self.end()

    def copied(self, how: Callable[[Any], Any]) -> Both:
        both = copy.copy(self)
        both.ours, both.plain = how(self.ours), how(self.plain)
        self.hvd.unsynchronized(both.plain.optimizer)
        return both

    def check(self) -> None:
        for ours, plain in zip(self.ours.parameters(), self.plain.parameters(), strict=True):
            assert_close(ours, plain)
        assert_identical(self.hvd, self.ours)


def saved_and_loaded(model: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def pair_deepcopied(model: Model) -> Model:
    copied = copy.copy(model)
    copied._modules = dict(model._modules)
    copied.net, copied.optimizer = copy.deepcopy((model.net, model.optimizer))
    return copied


def optimizer_copied(model: Model) -> Model:
    copied = copy.copy(model)
    copied.optimizer = copy.copy(model.optimizer)
    return copied


WAYS = [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), saved_and_loaded, pair_deepcopied]  # noqa: S301


def test_a_copy_trains_as_a_copy_of_the_plain_one(hvd: Any) -> None:
    for kind, way, steps in itertools.product(("momentum", "adam"), WAYS, (0, 2)):
        both = Both(hvd, kind)
        both.train(steps)
        copied = both.copied(way)
        both.train()
        copied.train(3)
        for one in (both, copied):
            one.train()
            one.check()
        assert not torch.equal(both.ours.net.conv.weight, copied.ours.net.conv.weight)


def test_a_copy_made_with_gradients_in_flight(hvd: Any) -> None:
    for way, steps in itertools.product(WAYS, (0, 2)):
        both = Both(hvd, "momentum")
        both.train(steps)
        both.backward(5)
        copied = both.copied(way)
        assert not copied.ours.optimizer._synchronizer.in_flight
        both.end()
        copied.train()
        both.train()
        both.check()
        copied.check()


def test_a_shallow_copy_and_the_original_take_turns(hvd: Any) -> None:
    for kind, steps in itertools.product(("sgd", "momentum", "adam"), (0, 2)):
        both = Both(hvd, kind)
        both.train(steps)
        copied = both.copied(optimizer_copied)
        assert copied.ours.optimizer.param_groups is both.ours.optimizer.param_groups
        assert copied.ours.optimizer.state is both.ours.optimizer.state
        for one in (copied, both, copied):
            one.train()
            one.check()
        both.backward(7)
        copied.end()  # steps on what was computed before
        copied.check()
        del both
        copied.train()
        copied.ours.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2, dtype=torch.float64))]})
        copied.train()
        copied.check()


def test_a_copy_of_the_optimizer_alone_leaves_the_model(hvd: Any) -> None:
    both = Both(hvd, "momentum")
    for way in (copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))):  # noqa: S301
        both.train()
        optimizer = both.ours.optimizer
        copied = way(optimizer)
        pairs = zip(copied.param_groups[0]["params"], optimizer.param_groups[0]["params"], strict=True)
        assert all(one is not other and torch.equal(one, other) for one, other in pairs)
        copied.step()
        both.train()
        both.check()


def test_a_scheduler_copied_along_moves_the_copys_rate(hvd: Any) -> None:
    net = make_net()
    plain = torch.optim.SGD(net.parameters(), lr=1.0)
    for made_of in (plain, None):
        optimizer = hvd.DistributedOptimizer(plain, net.named_parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(made_of or optimizer, step_size=1, gamma=0.5)
        copied, copied_scheduler = copy.deepcopy((optimizer, scheduler))
        before = optimizer.param_groups[0]["lr"]
        copied.step()
        copied_scheduler.step()
        assert copied.param_groups[0]["lr"] == before / 2
        assert optimizer.param_groups[0]["lr"] == before


def test_a_copy_goes_on_with_what_its_codec_kept(hvd: Any) -> None:
    for way in (copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))):  # noqa: S301
        net = make_net()
        codec = hvd.Compression.topk(0.1, compress="everywhere")
        sgd = torch.optim.SGD(net.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(sgd, net.named_parameters(), compression={"hidden.weight": codec})
        pairs = [(net, optimizer)]
        for step in range(6):
            if step == 3:
                pairs.append(way((net, optimizer)))
            for one, its in pairs:
                loss_of(one, batch(hvd.rank(), step)).backward()
                its.step()
                its.zero_grad()
        for ours, copied in zip(pairs[0][0].parameters(), pairs[1][0].parameters(), strict=True):
            assert torch.equal(ours, copied)


@contextmanager
def swapping() -> Iterator[None]:
    """In the block modules swap tensors when they are converted or loaded."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def swap_all(model: Model) -> None:
    for parameter in model.net.parameters():
        torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach() * 0.5))


def convert(model: Model) -> None:
    with swapping():
        model.net.float()
        model.net.double()


def load(model: Model) -> None:
    with swapping():
        model.net.load_state_dict(Model(None, "sgd", seed=5).net.state_dict())


def test_parameters_that_become_other_tensors_are_reduced(hvd: Any) -> None:
    for change, kind, steps in itertools.product((swap_all, convert, load), ("sgd", "momentum"), (0, 1, 3)):
        both = Both(hvd, kind)
        both.train(steps)
        for _ in range(2):
            for model in (both.ours, both.plain):
                change(model)
            both.train(3)
            both.check()
        if hvd.size() > 1:  # the hooks are there again
            both.backward(1)
            with expect(AssertionError, "optimizer.zero_grad() was called after loss.backward()"):
                both.ours.optimizer.zero_grad()
            both.end()
            both.check()


def test_tensors_swapped_with_gradients_in_flight_are_an_error(hvd: Any) -> None:
    if hvd.size() == 1:
        raise Skip("nothing is in flight")
    both = Both(hvd, "sgd")
    both.train()
    both.backward(1)
    swap_all(both.ours)
    with expect(AssertionError, "were changed after loss.backward()", "HINT"):
        both.ours.optimizer.step()


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


def state_dicts(model: Model) -> list[Any]:
    """What torch.distributed.checkpoint gives of an optimizer, and its own state afterwards."""
    net, optimizer = model.net, model.optimizer
    flat = StateDictOptions(flatten_optimizer_state_dict=True, cpu_offload=True)
    dicts = [get_optimizer_state_dict(net, optimizer), get_optimizer_state_dict(net, optimizer, options=flat)]
    dicts += get_state_dict(net, optimizer)
    set_optimizer_state_dict(net, optimizer, dicts[0])
    set_state_dict(net, optimizer, model_state_dict=net.state_dict(), optim_state_dict=dicts[0])
    return [*dicts, optimizer.state_dict()["state"], net.state_dict()]


def ways_to_reduce(hvd: Any) -> list[dict[str, Any]]:
    return [{}, {"backward_passes_per_step": 2}] + ([{"op": hvd.Adasum}] if hvd.size() in (1, 2, 4) else [])


def test_the_state_dicts_of_distributed_checkpoints_are_those_of_the_plain_optimizer(hvd: Any) -> None:
    for kind, options in itertools.product(OPTIMIZERS, ways_to_reduce(hvd)):
        both = Both(hvd, kind, **options)
        assert same(state_dicts(both.ours), state_dicts(both.plain)), (kind, options)
        if not options:
            both.train()
            ours, plain = both.copied(copy.deepcopy), both.copied(copy.deepcopy)
            ours.ours.optimizer.load_state_dict(both.plain.optimizer.state_dict())
            assert same(state_dicts(ours.ours)[0]["param_groups"], state_dicts(plain.plain)[0]["param_groups"])
            both.train()
            both.check()


def test_one_rank_alone_takes_a_state_dict_and_no_other_waits(hvd: Any) -> None:
    for options in ways_to_reduce(hvd)[::2]:
        for kind in OPTIMIZERS:
            both = Both(hvd, kind, **options)
            if kind == "sgd" and hvd.rank() == 0:  # which has no state, so each call makes it anew
                get_optimizer_state_dict(both.ours.net, both.ours.optimizer)
            for _ in range(2):
                if not options:
                    both.train()
                else:
                    both.backward(0)
                    both.ours.optimizer.step()
                    both.ours.optimizer.zero_grad()
                if hvd.rank() == hvd.size() - 1:
                    state_dicts(both.ours)
            assert_identical(hvd, both.ours)
            if not options:
                both.check()


def test_a_step_at_a_rate_of_zero_is_reduced_like_any_other(hvd: Any) -> None:
    if hvd.size() == 1:
        raise Skip("nothing is reduced")
    net = make_net()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.0, momentum=0.9))
    if hvd.rank() == 0:
        loss_of(net, batch(0)).backward()
    optimizer.step()  # to which the other ranks contribute zeros
    assert optimizer.state[net.out.weight]["momentum_buffer"].abs().max() > 0
    optimizer.zero_grad(set_to_none=False)
    if hvd.rank() == 0:
        loss_of(net, batch(0)).backward()
    optimizer.step(closure=None)
    assert_identical(hvd, net)
    sums = [float(state["momentum_buffer"].sum()) for state in optimizer.state.values()]
    assert all(others == sums for others in hvd.allgather_object(sums))
