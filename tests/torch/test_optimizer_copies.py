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
from tests.told import told
from tests.torch.data import same
from tests.torch.optimizer_support import (
    Comparison,
    assert_identical,
    assert_same_weights,
    batch,
    distributed_sgd,
    loss_of,
    make_double,
    make_net,
    train_step,
)

pytestmark = on_ranks(2, 3, HVDKIT_VERIFY="1")

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, amsgrad=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(0.01)),
}


class Model(nn.Module):
    """A model that keeps its optimizer, which the comparison gives it."""

    def __init__(self, seed: int = 1) -> None:
        super().__init__()
        self.net = make_double(seed)
        del self.net.spare  # of which every rank has a gradient of zeros, and one process has none

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


class Both(Comparison):
    """A comparison of models that own their optimizers."""

    def __init__(self, hvd: Any, kind: str, **options: Any) -> None:
        super().__init__(hvd, Model, lambda model: OPTIMIZERS[kind](model.net.parameters()), **options)
        self.net.optimizer, self.alone.optimizer = self.optimizer, self.plain

    def train(self, steps: int = 3, first: int = 0, **options: Any) -> None:
        super().train(steps, first, **options)
        self.zero_grad()

    def end(self) -> None:
        self.step()
        self.zero_grad()

    def copied(self, way: Callable[[Any], Any]) -> Both:
        both = copy.copy(self)
        both.net, both.alone = way(self.net), way(self.alone)
        both.optimizer, both.plain = both.net.optimizer, self.hvd.unsynchronized(both.alone.optimizer)
        return both


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
        both = Both(hvd, kind, groups=2 if kind == "adam" else None)
        both.train(steps)
        copied = both.copied(way)
        both.train()
        copied.train(4)
        both.train()
        copied.train()
        assert not torch.equal(both.net.net.conv.weight, copied.net.net.conv.weight)


def test_a_copy_made_with_gradients_in_flight(hvd: Any) -> None:
    for way, steps in itertools.product(WAYS, (0, 2)):
        both = Both(hvd, "momentum")
        both.train(steps)
        both.backward(5)
        copied = both.copied(way)
        both.end()
        copied.train()
        both.train()


def test_a_shallow_copy_and_the_original_take_turns(hvd: Any) -> None:
    for kind, steps in itertools.product(("sgd", "momentum", "adam"), (0, 2)):
        both = Both(hvd, kind)
        both.train(steps)
        copied = both.copied(optimizer_copied)
        assert copied.optimizer.param_groups is both.optimizer.param_groups
        assert copied.optimizer.state is both.optimizer.state
        for pair in (copied, both, copied):
            pair.train()
        both.backward(7)
        copied.end()  # steps on what was computed before
        copied.check()
        del both
        copied.train()
        copied.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2, dtype=torch.float64))]})
        copied.train()


def test_a_copy_of_the_optimizer_alone_leaves_the_model(hvd: Any) -> None:
    both = Both(hvd, "momentum")
    for way in (copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))):  # noqa: S301
        both.train()
        optimizer = both.optimizer
        copied = way(optimizer)
        pairs = zip(copied.param_groups[0]["params"], optimizer.param_groups[0]["params"], strict=True)
        assert all(parameter is not other and torch.equal(parameter, other) for parameter, other in pairs)
        copied.step()
        both.train()


def test_a_copy_goes_on_with_what_its_codec_kept(hvd: Any) -> None:
    codec = hvd.Compression.topk(0.1, compress="everywhere")
    for way in (copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))):  # noqa: S301
        net = make_net()
        pairs = [(net, distributed_sgd(hvd, net, compression={"hidden.weight": codec}))]
        for step in range(6):
            if step == 3:
                pairs.append(way(pairs[0]))
            for model, optimizer in pairs:
                train_step(optimizer, model, batch(hvd.rank(), step))
        assert_same_weights(pairs[0][0], pairs[1][0], 0.0)


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
        model.net.load_state_dict(Model(seed=5).net.state_dict())


def test_parameters_that_become_other_tensors_are_reduced(hvd: Any) -> None:
    for change, kind, steps in itertools.product((swap_all, convert, load), ("sgd", "momentum"), (0, 1, 3)):
        both = Both(hvd, kind)
        both.train(steps)
        for _ in range(2):
            for model in (both.net, both.alone):
                change(model)
            both.train()
        # The hooks are there again.
        both.backward(1)
        with told(AssertionError, "optimizer.zero_grad() was called after loss.backward()"):
            both.optimizer.zero_grad()
        both.end()
        both.check()


def test_tensors_swapped_with_gradients_in_flight_are_an_error(hvd: Any) -> None:
    both = Both(hvd, "sgd")
    both.train()
    both.backward(1)
    swap_all(both.net)
    with told(AssertionError, "were changed after loss.backward()", "HINT"):
        both.optimizer.step()


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
    return [{}, {"backward_passes_per_step": 2}] + ([{"op": hvd.Adasum}] if hvd.size() != 3 else [])


def test_the_state_dicts_of_distributed_checkpoints_are_those_of_the_plain_optimizer(hvd: Any) -> None:
    for kind, options in itertools.product(OPTIMIZERS, ways_to_reduce(hvd)):
        both = Both(hvd, kind, **options)
        assert same(state_dicts(both.net), state_dicts(both.alone)), (kind, options)
        if not options:
            both.train()
            trained, plain = both.copied(copy.deepcopy), both.copied(copy.deepcopy)
            trained.optimizer.load_state_dict(both.plain.state_dict())
            assert same(state_dicts(trained.net)[0]["param_groups"], state_dicts(plain.alone)[0]["param_groups"])
            both.train()


def test_one_rank_alone_takes_a_state_dict_and_no_other_waits(hvd: Any) -> None:
    for options, kind in itertools.product(ways_to_reduce(hvd)[::2], OPTIMIZERS):
        both = Both(hvd, kind, **options)
        if kind == "sgd" and hvd.rank() == 0:  # which has no state, so each call makes it anew
            get_optimizer_state_dict(both.net.net, both.optimizer)
        for step in range(2):
            if options:
                train_step(both.optimizer, both.net, batch(hvd.rank(), step))
            else:
                both.train()
            if hvd.rank() == hvd.size() - 1:
                state_dicts(both.net)
        assert_identical(hvd, both.net)
        if not options:
            both.check()


def test_a_step_at_a_rate_of_zero_is_reduced_like_any_other(hvd: Any) -> None:
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
