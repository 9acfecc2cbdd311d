"""Optimizers that nobody wrapped: which of them warn, and which do not since their gradients were reduced."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector

from hvdkit.api.gradients.guard import is_settled
from tests.on_ranks import on_ranks
from tests.told import told
from tests.torch.optimizer_support import (
    batch,
    loss_of,
    make_net,
    no_warnings,
    process_group,
    sgd,
    train,
    train_step,
    wrapped_net,
)

pytestmark = on_ranks(2, 3)

ELEMENTS = 30 + 392 + 18  # of the parameters that have gradients
ALONE = (
    "The optimizer SGD updated 6 parameters (first: of shape (3, 1, 3, 3)) with gradients of rank {rank} alone: the "
    "{size} ranks train different models.\n"
    "HINT: wrap it, optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters()), and "
    "call step() of the returned optimizer. A loop of your own may reduce gradients by hvd.allreduce, or the model may "
    "be in a DistributedDataParallel. If ranks train apart on purpose, or another library reduces gradients, call "
    "hvd.unsynchronized(optimizer)."
)
BYPASSED = (
    "The optimizer SGD updated 8 parameters (first: of shape (3, 1, 3, 3)) on rank {rank} while a DistributedOptimizer "
    "was still reducing their gradients: the {size} ranks train different models.\n"
    "HINT: call step() of the optimizer that hvd.DistributedOptimizer() returned, optimizer = "
    "hvd.DistributedOptimizer(optimizer, ...), not step() of the optimizer that was passed to it; or call "
    "synchronize() of the returned optimizer first."
)


def unwrapped() -> tuple[nn.Module, torch.optim.SGD]:
    net = make_net()
    return net, sgd(net)


@contextmanager
def warned(hvd: Any, *texts: str) -> Iterator[None]:
    """The block gives these warnings and no others."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    wanted = [text.format(rank=hvd.rank(), size=hvd.size()) for text in texts]
    ours = [one for one in caught if "torch.jit" not in str(one.message)]  # which PyTorch's compiler uses
    found = [str(one.message) for one in ours]
    assert found == wanted, found
    assert all(Path(one.filename).parent == Path(__file__).parent for one in ours), "it points to the user's step()"


def test_an_optimizer_that_nobody_wrapped_warns_once(hvd: Any) -> None:
    hvd.broadcast_parameters(make_net().state_dict(), 0)  # reduces nothing
    for named in (False, True):  # each of them
        net = make_net()
        optimizer = torch.optim.SGD(net.named_parameters(), lr=0.1) if named else sgd(net)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        with warned(hvd):
            optimizer.step()  # of which nothing has a gradient
        with warned(hvd, ALONE.replace("(first: of", "(first: 'conv.weight', of") if named else ALONE):
            train(hvd, optimizer, net, 2)
            scheduler.step()


def test_what_was_reduced_long_before_a_step_does_not_count(hvd: Any) -> None:
    hvd.allreduce(torch.ones(4 * ELEMENTS))  # as a mean of the data
    net, optimizer = unwrapped()
    with warned(hvd, ALONE):
        for step in range(3):
            train_step(optimizer, net, batch(hvd.rank(), step))
            hvd.allreduce(torch.ones(3))  # as a metric


def test_a_wrapped_optimizer_does_not_warn(hvd: Any) -> None:
    for options in ({}, {"backward_passes_per_step": 2}, {"op": hvd.Adasum}):
        if options.get("op") is not None and hvd.size() & (hvd.size() - 1):
            continue  # Adasum needs a power of two
        net, wrapped = wrapped_net(hvd, **options)
        with no_warnings():
            train(hvd, wrapped, net)
            wrapped.synchronize()


class Lookahead(torch.optim.Optimizer):
    """Made of another optimizer, as such are."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, {})

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


def test_one_that_is_made_of_others_does_not_warn_where_it_is_wrapped(hvd: Any) -> None:
    for op in [hvd.Average] if hvd.size() & (hvd.size() - 1) else [hvd.Average, hvd.Adasum]:
        net = make_net()
        wrapped = hvd.DistributedOptimizer(Lookahead(sgd(net)), net.named_parameters(), op=op)
        with no_warnings():
            train(hvd, wrapped, net)
    net, wrapped = wrapped_net(hvd)
    with no_warnings():
        train(hvd, Lookahead(wrapped), net)


def test_who_steps_the_optimizer_that_was_wrapped_is_told(hvd: Any) -> None:
    net, plain = unwrapped()
    wrapped = hvd.DistributedOptimizer(plain, net.named_parameters())
    with no_warnings():  # it may be stepped where the gradients are reduced
        train_step(wrapped, net, batch(hvd.rank()))
        loss_of(net, batch(hvd.rank())).backward()
        wrapped.synchronize()
        plain.step()
    with warned(hvd, BYPASSED):
        loss_of(net, batch(hvd.rank())).backward()
        plain.step()
    wrapped.load_state_dict(wrapped.state_dict())  # the step is forgotten


def put_back(gradients: list[torch.Tensor], flat: torch.Tensor) -> None:
    for gradient, part in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def in_place(hvd: Any, gradients: list[torch.Tensor]) -> None:
    handles = [hvd.allreduce_async_(gradient.data, name=f"by hand {i}") for i, gradient in enumerate(gradients)]
    for handle in handles:
        hvd.synchronize(handle)


def scattered(hvd: Any, gradients: list[torch.Tensor]) -> None:
    flat = parameters_to_vector(gradients)
    rows = torch.nn.functional.pad(flat, (0, -len(flat) % hvd.size()))
    put_back(gradients, hvd.allgather(hvd.reducescatter(rows))[: len(flat)])


def sparse(hvd: Any, gradients: list[torch.Tensor]) -> None:
    for i, gradient in enumerate(gradients):
        gradient.copy_(hvd.sparse_allreduce_async(gradient.to_sparse(), f"sparse {i}", hvd.Average)().to_dense())


def used_gradients(net: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in net.parameters() if parameter.grad is not None]


WAYS: list[Callable[[Any, list[torch.Tensor]], Any]] = [
    lambda hvd, gradients: [gradient.copy_(hvd.allreduce(gradient)) for gradient in gradients],
    in_place,
    lambda hvd, gradients: put_back(gradients, hvd.allreduce(parameters_to_vector(gradients))),
    lambda hvd, gradients: hvd.grouped_allreduce_(gradients),
    scattered,
    sparse,
]


def test_gradients_that_a_loop_reduces_are_no_reason(hvd: Any) -> None:
    for reduce in WAYS:
        net, optimizer = unwrapped()
        with no_warnings():
            for step in range(3):
                optimizer.zero_grad()
                loss_of(net, batch(hvd.rank(), step)).backward()
                reduce(hvd, used_gradients(net))
                optimizer.step()


def test_several_optimizers_may_step_on_what_was_reduced_together(hvd: Any) -> None:
    net = make_net()
    parts = [net.conv.parameters(), net.hidden.parameters(), net.out.parameters()]
    optimizers = [torch.optim.SGD(part, lr=0.1) for part in parts]
    with no_warnings():
        for step in range(3):
            net.zero_grad()
            loss_of(net, batch(hvd.rank(), step)).backward()
            in_place(hvd, used_gradients(net))
            for optimizer in optimizers:
                optimizer.step()
    assert all(map(is_settled, optimizers))


def test_who_trains_apart_on_purpose_says_so(hvd: Any) -> None:
    net, optimizer = unwrapped()
    assert hvd.unsynchronized(optimizer) is optimizer
    outer = Lookahead(sgd(net))
    hvd.unsynchronized(outer)
    with no_warnings():
        train_step(optimizer, net, batch(hvd.rank()))
        train_step(outer, net, batch(hvd.rank()))
    for wrong in (net, None, torch.optim.SGD):
        with told(TypeError, "unsynchronized: optimizer must be an optimizer of PyTorch or Keras, got"):
            hvd.unsynchronized(wrong)


def test_compiled_steps_warn_too(hvd: Any) -> None:
    net, optimizer = unwrapped()

    @torch.compile(backend="eager")
    def step() -> None:
        optimizer.step()

    with warned(hvd, ALONE):
        for number in range(3):
            net.zero_grad()
            loss_of(net, batch(hvd.rank(), number)).backward()
            step()


def test_models_that_pytorch_makes_parallel_are_no_reason(hvd: Any) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    def train_in_parallel() -> None:
        nets = [make_net(), make_net()]
        for net in nets:
            del net.spare  # DistributedDataParallel wants that all are used
        for model in [DistributedDataParallel(nets[0]), fully_shard(nets[1])]:
            optimizer = sgd(model)
            with no_warnings():
                train(hvd, optimizer, model, 2)

    for backend in ("gloo", "hvdkit"):
        with process_group(hvd, backend):
            train_in_parallel()


def test_gradients_that_a_group_of_torch_distributed_reduces_are_no_reason(hvd: Any) -> None:
    net, optimizer = unwrapped()
    with process_group(hvd), no_warnings():
        for step in range(3):
            optimizer.zero_grad()
            loss_of(net, batch(hvd.rank(), step)).backward()
            for gradient in used_gradients(net):
                dist.all_reduce(gradient)
            optimizer.step()
    with warned(hvd, ALONE):  # once there is no group that could reduce them
        train(hvd, optimizer, net, 2)


def test_after_the_job_nothing_is_said(hvd: Any) -> None:
    hvd.shutdown()
    net = make_net()
    with no_warnings():
        train_step(sgd(net), net, batch(0))
    hvd.init()
