"""The gradients of the operations, which are Horovod's."""

from __future__ import annotations

import itertools

import torch

from tests.on_ranks import on_ranks
from tests.told import told
from tests.torch.data import all_values, mean, total

pytestmark = on_ranks(2, 3)


def _leaf(shape: tuple[int, ...], dtype: torch.dtype = torch.float64, fill: float = 1.0) -> torch.Tensor:
    return torch.full(shape, fill, dtype=dtype, requires_grad=True)


def test_gradient_of_allreduce_is_its_allreduce(hvd):
    for dtype, shape in itertools.product((torch.float32, torch.float64), ((), (5,), (2, 3))):
        weights = all_values(hvd.size(), shape, dtype)
        for op, expected in ((hvd.Sum, total(weights)), (hvd.Average, mean(weights))):
            leaf = _leaf(shape, dtype)
            hvd.allreduce(leaf, op=op).backward(weights[hvd.rank()])
            assert torch.allclose(leaf.grad, expected)
        leaf = _leaf(shape, dtype)
        hvd.allreduce(leaf, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.25).backward(weights[hvd.rank()])
        assert torch.allclose(leaf.grad, total(weights) * 0.5)


def test_gradient_of_allreduce_through_compression(hvd):
    leaf = _leaf((4,), torch.float32)
    hvd.allreduce(leaf, op=hvd.Sum, compression=hvd.Compression.fp16).sum().backward()
    assert leaf.grad.dtype == torch.float32
    assert torch.allclose(leaf.grad, torch.full((4,), float(hvd.size())))


def test_gradient_of_grouped_allreduce(hvd):
    shapes = [(3,), (2, 2), ()]
    weights = [all_values(hvd.size(), shape, torch.float64, seed=n) for n, shape in enumerate(shapes)]
    leaves = [_leaf(shape) for shape in shapes]
    outputs = hvd.grouped_allreduce(leaves, op=hvd.Sum)
    torch.autograd.backward(outputs[:2], [tensors[hvd.rank()] for tensors in weights[:2]])  # one is not used
    assert all(torch.allclose(leaf.grad, total(of)) for leaf, of in zip(leaves[:2], weights[:2], strict=True))
    assert leaves[2].grad.item() == 0


def test_gradient_of_allgather_is_this_ranks_part_of_the_average(hvd):
    size, rank = hvd.size(), hvd.rank()
    rows = [other + 1 for other in range(size)]
    for name in (None, "gathered"):
        leaf = _leaf((rows[rank], 2))
        weights = all_values(size, (sum(rows), 2), torch.float64)
        hvd.allgather(leaf, name=name).backward(weights[rank])
        assert torch.allclose(leaf.grad, mean(weights).split(rows)[rank])


def test_gradient_of_grouped_allgather(hvd):
    size, rank = hvd.size(), hvd.rank()
    leaves = [_leaf((rank + 1,)), _leaf((2, 3))]
    outputs = hvd.grouped_allgather(leaves)
    weights = [all_values(size, tuple(output.shape), torch.float64, seed=n) for n, output in enumerate(outputs)]
    torch.autograd.backward(outputs, [tensors[rank] for tensors in weights])
    assert torch.allclose(leaves[0].grad, mean(weights[0]).split([other + 1 for other in range(size)])[rank])
    assert torch.allclose(leaves[1].grad, mean(weights[1]).split(2)[rank])


def test_gradient_of_broadcast_goes_to_the_root(hvd):
    for root in range(hvd.size()):
        leaf = _leaf((3, 2))
        weights = all_values(hvd.size(), (3, 2), torch.float64)
        hvd.broadcast(leaf, root).backward(weights[hvd.rank()])
        expected = mean(weights) if hvd.rank() == root else torch.zeros(3, 2, dtype=torch.float64)
        assert torch.allclose(leaf.grad, expected)


def test_gradient_of_alltoall_comes_back_to_its_row(hvd):
    size, rank = hvd.size(), hvd.rank()
    splits = [other + 1 for other in range(size)]
    leaf = _leaf((sum(splits), 2))
    output, received = hvd.alltoall(leaf, splits=torch.tensor(splits))
    assert not received.requires_grad
    output.backward(torch.full_like(output, float(rank + 1)))
    expected = torch.cat([torch.full((n, 2), float(other + 1)) for other, n in enumerate(splits)]).double()
    assert torch.allclose(leaf.grad, expected)
    leaf = _leaf((size + 2, 3))
    output, _ = hvd.alltoall(leaf, splits=[1] * size)
    output.sum().backward()
    assert leaf.grad.tolist() == [[1.0] * 3] * size + [[0.0] * 3] * 2, "rows that stayed"
    leaf = _leaf((2 * size,))
    hvd.alltoall(leaf).backward(torch.full((2 * size,), float(rank), dtype=torch.float64))
    assert torch.allclose(leaf.grad, torch.arange(size).double().repeat_interleave(2))


def test_gradient_of_reducescatter_gathers_the_shares(hvd):
    size, rank = hvd.size(), hvd.rank()
    rows = [len(part) for part in torch.arange(7).tensor_split(size)]
    weight = torch.full((rows[rank], 2), float(rank + 1), dtype=torch.float64)
    gathered = torch.cat([torch.full((n, 2), float(other + 1)) for other, n in enumerate(rows)]).double()
    for op, factor in ((hvd.Average, 1), (hvd.Sum, size)):
        leaf = _leaf((7, 2))
        hvd.reducescatter(leaf, op=op).backward(weight)
        assert torch.allclose(leaf.grad, gathered * factor)
        leaf = _leaf((7, 2))
        output = hvd.reducescatter(leaf, op=op, prescale_factor=2.0, postscale_factor=3.0, name="scaled")
        output.backward(weight)
        assert torch.allclose(leaf.grad, gathered * factor * 6)
        assert torch.equal(weight, torch.full_like(weight, float(rank + 1)))


def test_allreduce_can_be_differentiated_twice(hvd):
    leaf = _leaf((3,), fill=2.0)
    (first,) = torch.autograd.grad((hvd.allreduce(leaf) ** 2).sum(), leaf, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), leaf)
    assert torch.allclose(first, torch.full((3,), 4.0, dtype=torch.float64))
    assert torch.allclose(second, torch.full((3,), 2.0, dtype=torch.float64))


def test_autograd_notices_that_a_saved_tensor_was_reduced_in_place(hvd):
    for tensor_of in (lambda saved: saved, lambda saved: saved.t()):
        saved = _leaf((2, 3)).exp()
        hvd.allreduce_(tensor_of(saved))
        with told(RuntimeError, "modified by an inplace operation"):
            saved.sum().backward()
