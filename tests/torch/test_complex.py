"""Complex tensors and parameters: every operation and optimizer treats an element as a pair of real numbers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from hvdkit.errors import MismatchError
from tests.on_ranks import on_ranks
from tests.told import told
from tests.torch.data import equal
from tests.torch.operations import still_works
from tests.torch.optimizer_support import Comparison, Passing, update

pytestmark = [
    on_ranks(2, 3),
    on_ranks((2, "mpi"), name="no memory", HVDKIT_NODE_MEMORY="0"),
    on_ranks((3, "torch"), name="two nodes", per_node=2),
]

COMPLEX = (torch.complex64, torch.complex128)
SHAPES = ((), (7,), (4, 3), (0, 2), (40_001,), (300_001,))  # whole, by shares, and in several chunks and pieces


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank), dtype=dtype)


def all_values(hvd: Any, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    return [values(rank, shape, dtype) for rank in range(hvd.size())]


def total(hvd: Any, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The sum as two real operations give it."""
    parts = [torch.view_as_real(one) for one in all_values(hvd, shape, dtype)]
    mine = parts[hvd.rank()]
    return torch.view_as_complex(hvd.allreduce(mine, op=hvd.Sum))


def half(tensor: torch.Tensor, divisor: float) -> torch.Tensor:
    return torch.view_as_complex(torch.view_as_real(tensor) / divisor)


def test_sums_averages_and_scatters_are_those_of_real_and_imaginary_parts(hvd: Any) -> None:
    size, rank = hvd.size(), hvd.rank()
    for dtype, shape in itertools.product(COMPLEX, SHAPES):
        mine, own = values(rank, shape, dtype), values(rank, shape, dtype)
        summed = total(hvd, shape, dtype)
        exact = sum(all_values(hvd, shape, torch.complex128)) if dtype == torch.complex128 else summed
        assert torch.allclose(summed, exact, rtol=1e-12)
        mean = half(summed, size)
        for _ in range(4):  # the later ones come again under their name
            assert equal(hvd.allreduce(mine, op=hvd.Sum, name=f"again.{dtype}.{shape}"), summed), (dtype, shape)
        assert equal(hvd.allreduce(mine), mean), (dtype, shape)
        assert equal(hvd.synchronize(hvd.allreduce_async(mine)), mean)
        scaled = hvd.allreduce(mine, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5)
        assert equal(scaled, summed)
        in_place = mine.clone()
        assert hvd.allreduce_(in_place) is in_place
        assert equal(in_place, mean)
        ones = torch.ones(3)
        grouped = hvd.grouped_allreduce([mine, ones, mine.clone(), torch.view_as_real(mine)], op=hvd.Sum)
        assert all(map(equal, grouped, [summed, ones * size, summed, torch.view_as_real(summed)])), (dtype, shape)
        if shape:
            share = torch.tensor_split(summed, size)[rank]
            assert equal(hvd.reducescatter(mine, op=hvd.Sum), share), (dtype, shape)
            assert equal(hvd.reducescatter(mine), half(share, size))
            grouped = hvd.grouped_reducescatter([mine, torch.ones(size)], op=hvd.Sum)
            assert all(map(equal, grouped, [share, torch.full((1,), float(size))]))
        assert equal(mine, own)


def lazy_views(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Views whose values are the conjugates or the negatives of what their memory holds."""
    views = [tensor.conj(), tensor.conj().imag, tensor.t().conj(), tensor.conj()[::2], torch._neg_view(tensor.real)]
    assert all(view.is_conj() or view.is_neg() for view in views)
    return views


def test_views_that_are_conjugate_or_negative_hold_their_values(hvd: Any) -> None:
    size, rank = hvd.size(), hvd.rank()
    for dtype in COMPLEX:
        everyones = [lazy_views(one) for one in all_values(hvd, (4, 6), dtype)]
        for number in range(len(everyones[0])):
            plain = [views[number].clone().resolve_conj().resolve_neg().contiguous() for views in everyones]
            summed = hvd.allreduce(plain[rank], op=hvd.Sum)
            assert torch.allclose(summed, sum(plain))
            view = everyones[rank][number]
            assert equal(hvd.allreduce(view, op=hvd.Sum), summed), number
            assert equal(hvd.synchronize(hvd.allreduce_async(view, op=hvd.Sum)), summed), number
            assert equal(hvd.reducescatter(view, op=hvd.Sum), torch.tensor_split(summed, size)[rank]), number
            assert equal(hvd.allgather(view), torch.cat(plain)), number
            splits = [1, 1] + [0] * (size - 2)
            rows = torch.stack([one[rank] for one in plain]) if rank < 2 else plain[0][:0]
            assert equal(hvd.alltoall(view, splits=splits)[0], rows), number
            assert equal(hvd.broadcast(view, size - 1), plain[-1]), number
            for operation, expected in (
                (lambda one: hvd.allreduce_(one, op=hvd.Sum), summed),
                (lambda one: hvd.broadcast_(one, size - 1), plain[-1]),
                (lambda one: hvd.broadcast_parameters({"one": one}, size - 1), plain[-1]),
            ):
                target = lazy_views(values(rank, (4, 6), dtype))[number]
                operation(target)
                assert equal(target, expected), number


def test_gradients_of_operations_follow_pytorchs_convention(hvd: Any) -> None:
    for dtype in COMPLEX:
        check_gradients(hvd, dtype)


def check_gradients(hvd: Any, dtype: torch.dtype) -> None:
    size, rank = hvd.size(), hvd.rank()
    shape, rows = (2 * size, 3), (2 * size * size, 3)
    leaves = [one.requires_grad_() for one in all_values(hvd, shape, dtype)]
    weights = [values(100 + one, shape, dtype) for one in range(size)]
    wide = [values(200 + one, rows, dtype) for one in range(size)]
    everyone = range(size)

    def weighted(x: torch.Tensor) -> torch.Tensor:
        return sum((x * weight).imag.sum() for weight in weights)

    # This rank's result, and the gradient of its leaf as Horovod has it: of all losses together, or their mean.
    losses: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
        "sum": (lambda x: hvd.allreduce(x * x, op=hvd.Sum) * weights[rank], lambda x: weighted(x * x)),
        "average": (
            lambda x: hvd.allreduce(x.conj() * x * x, op=hvd.Average) * weights[rank],
            lambda x: weighted(x.conj() * x * x) / size,
        ),
        "scaled": (
            lambda x: hvd.allreduce(x.conj(), op=hvd.Sum, prescale_factor=2.0) * weights[rank],
            lambda x: weighted(2 * x.conj()),
        ),
        "fp16": (
            lambda x: hvd.allreduce(x.conj(), op=hvd.Sum, compression=hvd.Compression.fp16) * weights[rank],
            lambda x: weighted(x.conj()),
        ),
        "allgather": (
            lambda x: hvd.allgather(x.conj()) * wide[rank],
            lambda x: sum((x.conj() * one.chunk(size)[rank]).imag.sum() for one in wide) / size,
        ),
        "broadcast": (
            lambda x: hvd.broadcast(x.conj(), size - 1) * weights[rank],
            lambda x: weighted(x.conj()) / size * (rank == size - 1),
        ),
        "alltoall": (
            lambda x: hvd.alltoall(x * x) * weights[rank],
            lambda x: sum(((x * x).chunk(size)[n] * weights[n].chunk(size)[rank]).imag.sum() for n in everyone),
        ),
        "reducescatter": (
            lambda x: hvd.reducescatter(x * x, op=hvd.Sum) * weights[rank][:2],
            lambda x: size * sum(((x * x).chunk(size)[n] * weights[n][:2]).imag.sum() for n in everyone),
        ),
    }
    for name, (loss, of_all) in losses.items():
        mine, alone = (leaves[rank].detach().clone().requires_grad_() for _ in range(2))
        loss(mine).imag.sum().backward()
        of_all(alone).backward()
        tolerance = 2e-2 if name == "fp16" else 1e-5
        assert torch.allclose(mine.grad, alone.grad, rtol=tolerance, atol=tolerance), (name, dtype)


class Net(nn.Module):
    """Complex and real parameters, large, small, and in another order in memory."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        real = dtype.to_real()
        self.first = nn.Parameter(values(1, (40, 30), dtype))
        self.bias = nn.Parameter(values(2, (30,), dtype))
        self.second = nn.Parameter(values(3, (30, 7), real))
        self.large = nn.Parameter(values(4, (200, 300), dtype))
        self.last = nn.Parameter(values(5, (4, 3, 5, 5), dtype).to(memory_format=torch.channels_last))
        self.scalar = nn.Parameter(values(6, (), dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x @ self.first + self.bias
        of_large = (self.large.conj() * x.mean()).sum().real * 1e-2
        others = (self.last * self.last.conj()).real.sum() + (self.scalar * x.mean()).imag
        return (hidden.conj() * hidden).real @ self.second + of_large + others


def loss_on(net: nn.Module, ranks: list[int], step: int) -> torch.Tensor:
    dtype = net.first.dtype
    return sum(net(values(100 + 10 * step + rank, (6, 40), dtype)).pow(2).mean() for rank in ranks) / len(ranks)


def check_training(hvd: Any, dtype: torch.dtype, tolerance: float = 1e-6, passes: int = 1, **options: Any) -> None:
    """Train on all ranks, each gradient compared with that of one process on the joined batch."""
    pair = Comparison(
        hvd,
        lambda: Net(dtype),
        lambda net: torch.optim.SGD(net.parameters(), lr=1e-7, momentum=0.9),
        loss_on,
        tolerance,
        backward_passes_per_step=passes,
        **options,
    )
    with torch.no_grad():
        pair.net.first += hvd.rank()
    hvd.broadcast_parameters(pair.net.state_dict(), 0)
    for step in range(3):
        pair.reduce(step, passes=passes)
        pair.update()
    hvd.broadcast_optimizer_state(pair.optimizer, 0)
    momentum = pair.optimizer.state[pair.net.first]["momentum_buffer"]
    assert equal(momentum, hvd.broadcast(momentum, 0))


def test_an_optimizer_trains_like_one_process(hvd: Any) -> None:
    for dtype in COMPLEX:
        for options in ({}, {"groups": 2}, {"gradient_predivide_factor": 2.0}):
            check_training(hvd, dtype, **options)
    check_training(hvd, torch.complex64, passes=3)


def test_an_optimizer_encodes_pairs_of_real_numbers(hvd: Any) -> None:
    compression, where = hvd.Compression, {"compress": "everywhere"}
    for codec, tolerance in (
        (Passing, 1e-6),
        (compression.fp16, 1e-2),
        ({"first": compression.int8(**where)}, 0.1),
        (compression.topk(1.0, **where), 1e-6),
        ({"first": compression.powersgd(2, **where)}, float("inf")),
    ):
        check_training(hvd, torch.complex64, tolerance, compression=codec)


def test_a_gradient_that_is_a_conjugate_view_or_a_negative_one_is_reduced(hvd: Any) -> None:
    for elements in (50, 50_000):
        weights = [nn.Parameter(torch.zeros(elements, dtype=torch.complex64)), nn.Parameter(torch.zeros(elements))]
        names = [("complex", weights[0]), ("real", weights[1])]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(weights, lr=1.0), names)
        for _ in range(3):
            of_rank = partial(values, hvd.rank(), (elements,), torch.complex64)
            # As backward passes leave them: each alone in its storage.
            views = of_rank().conj().detach(), of_rank().conj().imag.detach()
            for weight, view in zip(weights, views, strict=True):  # not on all ranks
                weight.grad = view.resolve_conj().resolve_neg().clone() if hvd.rank() % 2 else view
            del view, views
            assert weights[0].grad.is_conj() == weights[1].grad.is_neg() == (hvd.rank() % 2 == 0)
            optimizer.synchronize()
            mean = half(total(hvd, (elements,), torch.complex64), hvd.size()).conj()
            assert equal(weights[0].grad, mean)
            assert equal(weights[1].grad, mean.imag.clone())
            update(optimizer)


def test_sparse_tensors_are_summed_and_averaged(hvd: Any) -> None:
    indices = torch.tensor([[0, 2, 3 + hvd.rank()]])
    for dtype in COMPLEX:
        sparse = torch.sparse_coo_tensor(indices, values(hvd.rank(), (3,), dtype).conj(), (9,), check_invariants=True)
        summed = hvd.sparse_allreduce_async(sparse, name="sum", op=hvd.Sum)().to_dense()
        average = hvd.sparse_allreduce_async(sparse, name="average", op=hvd.Average)().to_dense()
        assert equal(summed, hvd.allreduce(sparse.to_dense(), op=hvd.Sum))
        assert equal(average, half(summed, hvd.size()))


def test_reductions_without_a_meaning_are_refused(hvd: Any) -> None:
    tensor = torch.ones(4, dtype=torch.complex64)
    for op, name in ((hvd.Min, "Min"), (hvd.Max, "Max"), (hvd.Product, "Product"), (hvd.Adasum, "Adasum")):
        fact = f"op=hvd.{name} is not defined for complex numbers, got a tensor of type complex64"
        hint = "use hvd.Average or hvd.Sum, or reduce real and imaginary parts separately."
        for operation in (hvd.allreduce, hvd.allreduce_, hvd.allreduce_async):
            with told(ValueError, f": {fact}\nHINT: {hint}"):
                operation(tensor, op=op)
        with told(ValueError, fact):
            hvd.grouped_allreduce([torch.ones(2), tensor], op=op)
    with told(ValueError, "complex32", "HINT: use tensor.to(torch.complex64)"):
        hvd.allreduce(tensor.to(torch.complex32))
    still_works(hvd)


def test_complex_and_real_tensors_are_told_apart(hvd: Any) -> None:
    mine = torch.ones(4, dtype=torch.complex64) if hvd.rank() == 0 else torch.ones(4, 2)
    for operation in (hvd.allreduce, hvd.reducescatter, hvd.allgather, hvd.alltoall):
        with told(MismatchError, "data types", "complex64", "float32"):
            operation(mine[:0] if operation is hvd.alltoall else mine, name=f"apart.{operation.__name__}")
    weight = nn.Parameter(mine)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("weight", weight)])
    weight.grad = torch.ones_like(weight)
    with told(MismatchError, "weight"):
        optimizer.step()
    still_works(hvd)


def test_a_rank_that_has_joined_gives_zeros(hvd: Any) -> None:
    if hvd.rank() == 0:
        results = [hvd.allreduce(torch.full((3,), 1 + 2j), op=hvd.Sum, name=f"joined.{step}") for step in range(3)]
        assert all(equal(one, torch.full((3,), 1 + 2j)) for one in results)
    hvd.join()
