"""Gradients of another dtype or layout than their parameters, and of parameters that no rank has used yet."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.on_ranks import on_ranks
from tests.ranks import Skip
from tests.torch.optimizer_support import assert_close, assert_identical, expect

pytestmark = [
    on_ranks(2, 3),
    on_ranks(2, name="no memory", HVDKIT_NODE_MEMORY="0"),
]


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


class Doubled:
    """A compression of Horovod's kind that changes nothing but the dtype on the way."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        return tensor.double(), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return tensor.to(dtype)


def test_gradients_wider_than_their_parameters_are_not_rounded(hvd: Any) -> None:
    if not hasattr(torch.Tensor, "grad_dtype"):
        raise Skip("this PyTorch has no grad_dtype")
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for wider in (torch.float32, torch.float64, None):
            check_wider_gradients(hvd, dtype, wider)
    for options in ({"groups": 1}, {"backward_passes_per_step": 2}, {"compression": Doubled}):
        check_wider_gradients(hvd, torch.bfloat16, torch.float32, **options)


def test_dtypes_that_are_open_are_the_widest_of_all_ranks(hvd: Any) -> None:
    if not hasattr(torch.Tensor, "grad_dtype"):
        raise Skip("this PyTorch has no grad_dtype")
    for options in ({}, {"compression": Doubled}):
        weight = nn.Parameter(torch.zeros(100))
        weight.grad_dtype = None
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.0), [("weight", weight)], **options)
        weight.grad = torch.full((100,), 1.001, dtype=torch.bfloat16 if hvd.rank() == 0 else torch.float32)
        optimizer.synchronize()
        wanted = (torch.tensor(1.001).bfloat16().float() + (hvd.size() - 1) * 1.001) / hvd.size()
        assert_close(weight.grad.float(), wanted.expand(100), 4e-3 if hvd.rank() == 0 else 1e-6)


def test_a_gradient_dtype_may_change_between_steps(hvd: Any) -> None:
    if not hasattr(torch.Tensor, "grad_dtype"):
        raise Skip("this PyTorch has no grad_dtype")
    parameter = nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.0), named_parameters=[("weight", parameter)])
    for step, dtype in enumerate((torch.bfloat16, torch.float32, torch.float32, torch.bfloat16)):
        optimizer.zero_grad()
        parameter.grad_dtype = dtype
        Scaled.apply(parameter, torch.full((1000,), 1.0 + hvd.rank() / 512, dtype=torch.float64)).backward()
        optimizer.synchronize()
        own = [torch.tensor(1.0 + rank / 512).to(dtype).double() for rank in range(hvd.size())]
        assert parameter.grad.dtype is dtype
        assert_close(parameter.grad, (sum(own) / hvd.size()).to(dtype).expand(1000), 1e-7), step
    # Where the dtype is left open, a gradient that is wider than what was agreed on is refused, not rounded.
    parameter.grad_dtype = None
    optimizer.zero_grad()
    parameter.grad = torch.ones(1000, dtype=torch.bfloat16)
    optimizer.step()
    parameter.grad = torch.ones(1000, dtype=torch.float32)
    with expect(ValueError, "'weight'", "torch.float32", "torch.bfloat16", "HINT: ", "grad_dtype"):
        optimizer.step()


def sparse_adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SparseAdam(list(model.parameters()), lr=0.1)


def test_an_embedding_for_sparse_adam_may_be_used_by_any_rank_in_any_step(hvd: Any) -> None:
    patterns = {
        "one rank at first": lambda step: {0} if step == 0 else set(range(hvd.size())),
        "nobody at first": lambda step: set() if step < 2 else {hvd.size() - 1},
        "one rank always": lambda step: {hvd.size() - 1},
        "in turn": lambda step: {step % hvd.size()},
    }
    for users_in in patterns.values():
        for as_dense in (False, True):
            for synchronizes in (False, True):
                torch.manual_seed(0)
                model, alone = (nn.Embedding(10, 3, sparse=True).double() for _ in range(2))
                alone.load_state_dict(model.state_dict())
                plain = sparse_adam(alone)
                optimizer = hvd.DistributedOptimizer(
                    sparse_adam(model), model.named_parameters(), sparse_as_dense=as_dense
                )
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
                        with optimizer.skip_synchronize():
                            optimizer.step()
                    else:
                        optimizer.step()
                    plain.step()
                    assert_close(model.weight.detach(), alone.weight.detach(), 1e-12)
                assert_identical(hvd, model)
