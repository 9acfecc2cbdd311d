"""Kinds of gradients, and the ways that they take: wider, sparse, compressed, predivided, grouped, in a process set."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

from tests.on_ranks import on_ranks
from tests.ranks import Skip
from tests.told import told
from tests.torch.optimizer_support import (
    Comparison,
    assert_close,
    assert_identical,
    assert_reduces,
    distributed_sgd,
    loss_on,
    make_net,
    update,
)

pytestmark = [
    on_ranks(2, 3, HOROVOD_DYNAMIC_PROCESS_SETS="1"),
    on_ranks((3, "torch"), name="two nodes", per_node=2, HOROVOD_DYNAMIC_PROCESS_SETS="1"),
]


class Halved:
    """A user's own compression class: sends half of every value as float16, and counts."""

    compressed = 0

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        Halved.compressed += 1
        return (tensor / 2).to(torch.float16), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return tensor.to(dtype) * 2


class Widened:
    """A compression of Horovod's kind that changes nothing but the dtype on the way."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        return tensor.double(), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return tensor.to(dtype)


def test_options_leave_the_gradients(hvd: Any) -> None:
    def some_groups(net: nn.Module) -> list[Any]:
        return [list(net.out.parameters()), [net.conv.weight, net.hidden.bias]]

    ways: list[tuple[Callable[[nn.Module], dict[str, Any]], float]] = [
        (lambda net: {"compression": hvd.Compression.fp16}, 2e-3),
        (lambda net: {"compression": Halved}, 4e-3),
        (lambda net: {"compression": Halved, "groups": [list(net.hidden.parameters())]}, 4e-3),
        (lambda net: {"gradient_predivide_factor": 0.5}, 1e-6),
        (lambda net: {"gradient_predivide_factor": 4.0}, 1e-6),
        (lambda net: {"groups": 1}, 1e-6),
        (lambda net: {"groups": 3}, 1e-6),
        (lambda net: {"groups": 100}, 1e-6),
        (lambda net: {"groups": some_groups(net)}, 1e-6),
    ]
    for options, relative in ways:
        net = make_net().double()
        optimizer = distributed_sgd(hvd, net, **options(net))
        assert_reduces(hvd, optimizer, net, 3, relative)
        assert net.out.weight.grad.dtype == torch.float64


def test_custom_compressor_is_used_once_for_each_gradient(hvd: Any) -> None:
    net = make_net()
    Halved.compressed = 0
    assert_reduces(hvd, distributed_sgd(hvd, net, compression=Halved), net, 3, 4e-3)
    assert Halved.compressed == 3 * len(list(net.parameters()))


def test_num_groups_is_the_deprecated_name_of_groups(hvd: Any) -> None:
    net = make_net()
    with pytest.warns(DeprecationWarning, match="`num_groups` has been replaced by `groups`") as caught:
        optimizer = distributed_sgd(hvd, net, num_groups=3)
    assert caught[0].filename.endswith("optimizer_support.py")  # where DistributedOptimizer was called
    assert_reduces(hvd, optimizer, net)
    groups = optimizer._synchronizer._agreement.planned.lane.plan.groups
    assert sorted(map(sorted, groups)) == [[0, 1, 2], [3, 4, 5], [6, 7]]  # of eight parameters


def test_process_set_reduces_among_its_ranks(hvd: Any) -> None:
    if hvd.size() < 3:
        raise Skip("needs three ranks")
    process_set = hvd.add_process_set([0, 2])
    ranks = [0, 2] if process_set.included() else [1]

    def loss(net: nn.Module, asked: Iterable[int], step: int) -> torch.Tensor:
        return loss_on(net, asked if list(asked) == [hvd.rank()] else ranks, step, use_spare=True)

    for options, relative in (({}, 1e-6), ({"compression": Halved}, 4e-3)):
        pair = Comparison(hvd, loss=loss, relative=relative, process_set=process_set, **options)
        for step in range(2):
            pair.reduce(step)
    hvd.remove_process_set(process_set)


class Scaled(torch.autograd.Function):
    """The product with a vector whose gradient has the vector's precision, whatever that of the parameter is."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(vector)
        return (parameter.double() * vector).sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return ctx.saved_tensors[0] * gradient, None


def vector_of(rank: int, step: int, elements: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(elements, generator=generator, dtype=torch.float64)


def needs_grad_dtype() -> None:
    if not hasattr(torch.Tensor, "grad_dtype"):
        raise Skip("this PyTorch has no grad_dtype")


def check_wider_gradients(hvd: Any, dtype: torch.dtype, wider: torch.dtype | None, **options: Any) -> None:
    """Four steps, in three of which a rank has no gradient of one parameter; all against sums in float64."""
    passes, kept = options.get("backward_passes_per_step", 1), wider or torch.float64
    for elements in (3, 40_000):  # small gradients are copied, large ones are reduced where they lie
        used, rare = (nn.Parameter(torch.zeros(elements, dtype=dtype)) for _ in range(2))
        used.grad_dtype = rare.grad_dtype = wider
        names = [("used", used), ("rare", rare)]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([used, rare], lr=0.0), named_parameters=names, **options)
        for step in range(4):
            idle = step if step < 3 else None
            optimizer.zero_grad()
            for _ in range(passes):
                Scaled.apply(used, vector_of(hvd.rank(), step, elements)).backward()
                if hvd.rank() != idle:
                    Scaled.apply(rare, vector_of(hvd.rank(), step, elements)).backward()
            optimizer.synchronize()
            for parameter, ranks in ((used, range(hvd.size())), (rare, set(range(hvd.size())) - {idle})):
                wanted = sum(vector_of(rank, step, elements).to(kept).double() for rank in ranks) * passes / hvd.size()
                assert parameter.grad.dtype is kept
                assert_close(parameter.grad.double(), wanted, 1e-14 if kept is torch.float64 else 3e-7)


def test_gradients_wider_than_their_parameters_are_not_rounded(hvd: Any) -> None:
    needs_grad_dtype()
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for wider in (torch.float32, torch.float64, None):
            check_wider_gradients(hvd, dtype, wider)
    for options in ({"groups": 1}, {"backward_passes_per_step": 2}, {"compression": Widened}):
        check_wider_gradients(hvd, torch.bfloat16, torch.float32, **options)


def test_dtypes_that_are_open_are_the_widest_of_all_ranks(hvd: Any) -> None:
    needs_grad_dtype()
    for options in ({}, {"compression": Widened}):
        weight = nn.Parameter(torch.zeros(100))
        weight.grad_dtype = None
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.0), [("weight", weight)], **options)
        weight.grad = torch.full((100,), 1.001, dtype=torch.bfloat16 if hvd.rank() == 0 else torch.float32)
        optimizer.synchronize()
        wanted = (torch.tensor(1.001).bfloat16().float() + (hvd.size() - 1) * 1.001) / hvd.size()
        assert_close(weight.grad.float(), wanted.expand(100), 4e-3 if hvd.rank() == 0 else 1e-6)


def test_a_gradient_dtype_may_change_between_steps(hvd: Any) -> None:
    needs_grad_dtype()
    parameter = nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.0), named_parameters=[("weight", parameter)])
    for dtype in (torch.bfloat16, torch.float32, torch.float32, torch.bfloat16):
        optimizer.zero_grad()
        parameter.grad_dtype = dtype
        Scaled.apply(parameter, torch.full((1000,), 1.0 + hvd.rank() / 512, dtype=torch.float64)).backward()
        optimizer.synchronize()
        rounded = [torch.tensor(1.0 + rank / 512).to(dtype).double() for rank in range(hvd.size())]
        assert parameter.grad.dtype is dtype
        assert_close(parameter.grad, (sum(rounded) / hvd.size()).to(dtype).expand(1000), 1e-7)
    # Where the dtype is left open, a gradient that is wider than what was agreed on is refused, not rounded.
    parameter.grad_dtype = None
    optimizer.zero_grad()
    parameter.grad = torch.ones(1000, dtype=torch.bfloat16)
    optimizer.step()
    parameter.grad = torch.ones(1000, dtype=torch.float32)
    with told(
        ValueError,
        "The gradient of 'weight' is torch.float32 in this step, but all ranks have agreed to reduce it as "
        "torch.bfloat16, which would round it.",
        "HINT: the parameter's grad_dtype is None, which leaves the dtype open: set grad_dtype to torch.float32 on all "
        "ranks.",
    ):
        optimizer.step()


class Bag(nn.Module):
    """A sparse embedding in front of a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(20, 4, sparse=True)
        self.out = nn.Linear(4, 1)
        self.double()

    def forward(self, indices: torch.Tensor, sparse: bool = True) -> torch.Tensor:
        features = self.embedding(indices) if sparse else torch.ones(len(indices), 4, dtype=torch.float64)
        return self.out(features).mean()


def bag_loss(net: nn.Module, ranks: Iterable[int], step: int, users: tuple[int, ...]) -> torch.Tensor:
    """Return the mean of the ranks' losses, of which only ``users`` look something up."""
    losses = [net(torch.tensor([rank, (rank + step) % 20, 5]), rank in users) for rank in ranks]
    return sum(losses) / len(losses)


def test_sparse_gradients(hvd: Any) -> None:
    for users in (tuple(range(hvd.size())), (hvd.size() - 1,)):
        for as_dense in (False, True):
            model = Bag()
            optimizer = distributed_sgd(hvd, model, sparse_as_dense=as_dense)
            assert_reduces(hvd, optimizer, model, 3, loss=bag_loss, users=users)
            assert model.embedding.weight.grad.is_sparse, "optimizers such as SparseAdam take sparse gradients only"


def test_sparse_gradient_seen_late_is_reduced(hvd: Any) -> None:
    model = Bag()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    assert_reduces(hvd, optimizer, model, 1, loss=bag_loss, users=())
    assert_reduces(hvd, optimizer, model, 2, loss=bag_loss, users=tuple(range(hvd.size())))


def sparse_adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SparseAdam(list(model.parameters()), lr=0.1)


def test_an_embedding_for_sparse_adam_may_be_used_by_any_rank_in_any_step(hvd: Any) -> None:
    patterns: list[Callable[[int], set[int]]] = [
        lambda step: {0} if step == 0 else set(range(hvd.size())),
        lambda step: set() if step < 2 else {hvd.size() - 1},
        lambda step: {hvd.size() - 1},
        lambda step: {step % hvd.size()},
    ]
    variants = [(users, as_dense, waits) for users in patterns for as_dense in (False, True) for waits in (False, True)]
    for users_in, as_dense, synchronizes in variants:
        torch.manual_seed(0)
        model, alone = (nn.Embedding(10, 3, sparse=True).double() for _ in range(2))
        alone.load_state_dict(model.state_dict())
        plain = hvd.unsynchronized(sparse_adam(alone))
        optimizer = hvd.DistributedOptimizer(sparse_adam(model), model.named_parameters(), sparse_as_dense=as_dense)
        hvd.broadcast_parameters(model.state_dict(), 0)
        for step in range(5):
            optimizer.zero_grad()
            plain.zero_grad()
            for rank in users_in(step):
                (alone(torch.tensor([rank, 3, step])).pow(2).sum() / hvd.size()).backward()
            if hvd.rank() in users_in(step):
                model(torch.tensor([hvd.rank(), 3, step])).pow(2).sum().backward()
            if synchronizes:  # to clip, for example
                optimizer.synchronize()
                update(optimizer)
            else:
                optimizer.step()
            plain.step()
            assert_close(model.weight.detach(), alone.weight.detach(), 1e-12)
        assert_identical(hvd, model)
