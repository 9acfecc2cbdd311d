"""Where gradients lie: in the arena or elsewhere, with gaps, in one storage; each is reduced where it lies."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing
from torch import nn

from hvdkit.arena import ARENA
from tests.on_ranks import on_ranks
from tests.told import told
from tests.torch.optimizer_support import Comparison, assert_close, assert_identical, distributed_sgd, gradients, update
from tests.torch.ownership_support import (
    assert_born_in_arena,
    assert_same_bits,
    randn,
    same_tensors,
    same_values,
    wide,
    wide_loss,
    wide_net,
)

pytestmark = [
    on_ranks(2, HVDKIT_FUSION_THRESHOLD="65536"),
    on_ranks(3, name="in turn", OMP_NUM_THREADS=str(max(2, os.cpu_count() or 1))),
    on_ranks((2, "torch"), name="no memory", thorough=True, HVDKIT_NODE_MEMORY="0"),
    on_ranks((3, "torch"), name="two nodes", per_node=2),
]


def test_two_gradients_in_one_storage_are_both_right(hvd: Any) -> None:
    for op, factor in ((hvd.Average, 1.0), (hvd.Sum, float(hvd.size()))):
        # Autograd makes the gradients of both as one tensor's views, as far as it likes.
        net = nn.ParameterList([randn(3, 128, 160, dtype=torch.float32), randn(4, 160, 128, dtype=torch.float32)])
        optimizer = distributed_sgd(hvd, net, op=op)
        for step in range(4):
            numbers = [randn(10 * step + rank, 160 * 128, dtype=torch.float32) for rank in range(hvd.size())]
            optimizer.zero_grad(set_to_none=step < 3)
            ((net[0].view(-1) + net[1].view(-1)) * numbers[hvd.rank()]).sum().backward()
            optimizer.synchronize()
            wanted = torch.stack(numbers).mean(0) * factor
            for number, gradient in enumerate(gradients(net)):
                assert_close(gradient.view(-1), wanted, what=f"gradient {number}")
            assert_same_bits(hvd, gradients(net))
            net[0].grad.mul_(3)  # what is done with one gradient is not done with the other
            assert_close(net[1].grad.view(-1), wanted, what="the other gradient")
            net[0].grad.div_(3)


def test_one_tensor_as_the_gradient_of_two_parameters(hvd: Any) -> None:
    for op, factor in ((hvd.Average, 1.0), (hvd.Sum, float(hvd.size()))):
        for elements in (10, 40_000):
            net = nn.ParameterList([torch.zeros(elements), torch.zeros(elements), torch.zeros(elements)])
            optimizer = distributed_sgd(hvd, net, op=op)
            for step in range(3):
                optimizer.zero_grad()
                net[0].grad = torch.full((elements,), hvd.rank() + 1.0 + step)
                net[1].grad = net[0].grad
                net[2].grad = net[0].grad.detach()  # another tensor on the same bytes
                optimizer.synchronize()
                for gradient in gradients(net):
                    assert_close(gradient, torch.full((elements,), (hvd.size() + 1) / 2 + step) * factor)
                update(optimizer)


def test_a_flat_buffer_of_gradients_stays_one(hvd: Any) -> None:
    pair = wide(hvd)
    flat = torch.zeros(sum(parameter.numel() for parameter in pair.net.parameters()), dtype=torch.float64)
    begin = 0
    for parameter in pair.net.parameters():
        parameter.grad = flat[begin : begin + parameter.numel()].view_as(parameter)
        begin += parameter.numel()
    for step in range(4):
        pair.reduce(step, set_to_none=False)
        assert_close(flat, torch.cat([gradient.view(-1) for gradient in gradients(pair.alone)]), 1e-12)
        for gradient in (flat, *gradients(pair.alone)):
            gradient.mul_(0.5)
        pair.update()
    pair.check()


def test_views_with_gaps_between_their_elements_are_told_apart_from_overlaps(hvd: Any) -> None:
    rows, columns = 150, 130
    net = nn.ParameterList([torch.zeros(rows, columns) for _ in range(3)])
    optimizer = distributed_sgd(hvd, net)
    for step in range(3):
        both = torch.empty(rows, 2 * columns)
        net[0].grad, net[1].grad = both[:, ::2], both[:, 1::2]  # interleaved, but with no byte in common
        net[2].grad = both[rows // 2 :, :columns].repeat(2, 1)
        for index, parameter in enumerate(net):
            parameter.grad.fill_(hvd.rank() + 10.0 * index + step)
        taken = gradients(net)
        optimizer.synchronize()
        for index, gradient in enumerate(gradients(net)):
            assert_close(gradient, torch.full((rows, columns), (hvd.size() - 1) / 2 + 10 * index + step))
        assert gradients(net)[0] is taken[0]
        # The second lies within the bytes of the first, from its beginning to its end.
        wider = torch.zeros(rows, 2 * columns)
        net[0].grad, net[1].grad = wider[:, ::2], wider.view(-1)[rows * columns :][: rows * columns].view(rows, columns)
        net[0].grad.fill_(1.0 + hvd.rank())
        before = [net[0].grad.clone(), net[1].grad.clone()]
        optimizer.synchronize()
        for index in range(2):
            assert_close(net[index].grad, torch.stack(hvd.allgather_object(before[index])).mean(0))
        optimizer.zero_grad()


def elsewhere(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.clone()


def within_another(gradient: torch.Tensor) -> torch.Tensor:
    larger = torch.full((gradient.numel() + 5,), 7.0, dtype=gradient.dtype)
    return larger[3:-2].view_as(gradient).copy_(gradient)


def transposed(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.t().contiguous().t()


def set_by_hand(net: nn.Module, loss: torch.Tensor, way: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for parameter, gradient in zip(net.parameters(), torch.autograd.grad(loss, list(net.parameters())), strict=True):
        parameter.grad = (elsewhere if way is transposed and gradient.dim() == 1 else way)(gradient)


def test_places_may_differ_between_ranks(hvd: Any) -> None:
    """A gradient in the arena on some ranks, elsewhere on others: the same bits as where all lie elsewhere."""
    for way in (elsewhere, within_another, transposed):
        nets = [wide_net().float() for _ in range(3)]
        optimizers = [distributed_sgd(hvd, net) for net in nets]
        for step in range(4):
            by_hand = [False, hvd.rank() == step % hvd.size(), True]
            for net, optimizer, differs in zip(nets, optimizers, by_hand, strict=True):
                optimizer.zero_grad()
                loss = wide_loss(net, [hvd.rank()], step)
                if differs:
                    set_by_hand(net, loss, way)
                    assert not any(ARENA.contains(gradient.data_ptr()) for gradient in gradients(net))
                else:
                    loss.backward()
                    assert_born_in_arena(gradients(net))
                taken = gradients(net)
                optimizer.synchronize()
                assert same_tensors(gradients(net), taken)
            assert same_values(gradients(nets[0]), gradients(nets[2]))
            assert same_values(gradients(nets[1]), gradients(nets[2]))
            for optimizer in optimizers:
                update(optimizer)
        assert_same_bits(hvd, [parameter for net in nets for parameter in net.parameters()])


def test_a_graph_that_saved_a_gradient_is_an_error_once_it_is_reduced(hvd: Any) -> None:
    ways: list[Callable[[torch.Tensor], torch.Tensor] | None] = [None, lambda tensor: tensor, elsewhere, within_another]
    for way in ways:
        net = wide_net()
        optimizer = distributed_sgd(hvd, net)
        for step in range(3):
            optimizer.zero_grad()
            loss = wide_loss(net, [hvd.rank()], step)
            if way is None:
                loss.backward()
            else:
                set_by_hand(net, loss, way)
            graphs = [(torch.ones_like(tensor, requires_grad=True) * tensor).sum() for tensor in gradients(net)]
            optimizer.synchronize()
            for graph in graphs:
                with told(RuntimeError, "modified by an inplace operation"):
                    graph.backward()
            net.zero_grad()


def check_products(hvd: Any, net: nn.ParameterList, relative: dict[torch.dtype, float]) -> None:
    """Three steps, whose gradients are known numbers times the mean of the ranks' numbers."""
    optimizer = distributed_sgd(hvd, net)
    for step in range(3):
        optimizer.zero_grad()
        numbers = [randn(number, *one.shape).to(one.dtype) for number, one in enumerate(net)]
        factor = (hvd.rank() + 1) * (step + 1)
        sum((factor * one * each).sum().double() for one, each in zip(net, numbers, strict=True)).backward()
        assert_born_in_arena(gradients(net))
        optimizer.synchronize()
        for gradient, number in zip(gradients(net), numbers, strict=True):
            wanted = number.double() * (step + 1) * (hvd.size() + 1) / 2
            assert gradient.dtype is number.dtype
            assert_close(gradient.double(), wanted, relative[gradient.dtype], f"{gradient.numel()} {gradient.dtype}")
        assert_born_in_arena(gradients(net))
        update(optimizer)
    assert_identical(hvd, net)


RELATIVE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def test_sizes_around_the_smallest_that_is_served_and_types_side_by_side(hvd: Any) -> None:
    sizes = [1, 8192 - 1, 8192, 8192 + 1, 16384 - 1, 16384, 16384 + 1, 16384 + 1023, 1 << 17]
    check_products(hvd, nn.ParameterList([torch.zeros(elements) for elements in sizes]), RELATIVE)
    check_products(hvd, nn.ParameterList([torch.ones(200, 200, dtype=dtype) for dtype in RELATIVE]), RELATIVE)
    for dtype in RELATIVE:
        check_products(hvd, nn.ParameterList([torch.ones(300, 200, dtype=dtype), torch.ones(7, dtype=dtype)]), RELATIVE)


def test_expanded_gradients(hvd: Any) -> None:
    for elements in (10, 40_000):
        net = nn.ParameterList([torch.ones(elements), torch.ones(elements)])
        optimizer = distributed_sgd(hvd, net)
        for step in range(4):
            optimizer.zero_grad()
            (net[0].sum() * (hvd.rank() + 1)).backward()
            expanded = torch.tensor(hvd.rank() + 1.0).expand(elements)
            net[1].grad = expanded if step % 2 == 0 or hvd.rank() == 0 else expanded.clone()
            optimizer.synchronize()
            for gradient in gradients(net):
                assert_close(gradient, torch.full((elements,), (hvd.size() + 1) / 2))
            update(optimizer)


class WithPositions(nn.Module):
    """At batch 1, the gradient of ``positions`` is a view of what the backward pass still reads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.positions = nn.Parameter(torch.randn(160, 128, dtype=torch.float64))
        self.inner = nn.Linear(128, 128, dtype=torch.float64)
        self.outer = nn.Linear(128, 128, dtype=torch.float64)

    def forward(self, inputs: torch.Tensor, hook: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        hidden = torch.tanh(self.inner(inputs))
        hidden.register_hook(hook)
        return self.outer(torch.tanh(hidden + self.positions.view(1, 160, 128)))  # type: ignore[no-any-return]


def test_positional_embedding_with_a_batch_of_one(hvd: Any) -> None:
    def wait(gradient: torch.Tensor) -> torch.Tensor:
        hvd.barrier()  # what can be reduced by now has the time to be
        return gradient

    def loss(net: nn.Module, ranks: list[int], step: int) -> torch.Tensor:
        inputs = torch.cat([randn(10 * step + rank, 1, 160, 128) for rank in ranks])
        return net(inputs, wait).square().mean()

    Comparison(hvd, WithPositions, loss=loss, relative=1e-12).train(5)
