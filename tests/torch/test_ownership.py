"""A gradient is its user's: the tensor that autograd made holds the result, and nobody writes into it again."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing
from torch import nn

from hvdkit.arena import ARENA
from hvdkit.torch.gradients.watch import is_half_summed
from tests.forking import in_child
from tests.on_ranks import on_ranks
from tests.torch.optimizer_support import expect
from tests.torch.ownership_support import (
    Passing,
    assert_born_in_arena,
    assert_equal_to,
    bits_on_all_ranks,
    close,
    gradients,
    is_reduced_early,
    is_served,
    joined_loss,
    sgd,
    step_with,
    wide_batch,
    wide_loss,
    wide_net,
)

pytestmark = [
    # Reduced beside the backward pass, and not after it, also where the ranks' threads have every core.
    on_ranks(2, HVDKIT_FUSION_THRESHOLD="65536"),
    # Reduced after the backward pass, on every machine: each rank computes on as many threads as there are cores.
    on_ranks(3, name="in turn", OMP_NUM_THREADS=str(max(2, os.cpu_count() or 1))),
    on_ranks((2, "torch"), name="no arena", HVDKIT_ARENA="0", HVDKIT_FUSION_THRESHOLD="65536"),
    on_ranks((2, "torch"), name="no memory", thorough=True, HVDKIT_NODE_MEMORY="0"),
    on_ranks((3, "torch"), name="two nodes", per_node=2),
]


def test_gradients_are_born_where_the_ranks_of_a_node_reach_them(hvd: Any) -> None:
    net = wide_net()
    optimizer = sgd(hvd, net)
    for step in range(3):
        optimizer.zero_grad()
        wide_loss(net, wide_batch(hvd.rank(), step)).backward()
        assert_born_in_arena(gradients(net))
        optimizer.step()
        assert_born_in_arena(gradients(net))
    bits_on_all_ranks(hvd, list(net.parameters()))


def test_gradients_kept_over_zero_grad_keep_their_values(hvd: Any) -> None:
    net, alone = wide_net(), wide_net()
    optimizer, plain = sgd(hvd, net), torch.optim.SGD(alone.parameters(), lr=0.05, momentum=0.9)
    everything = []
    for step in range(4):
        of_losses, plain_of_losses = [], []
        for power in (2, 3):  # gradient surgery: the second loss's are computed while the first one's are kept
            optimizer.zero_grad()
            wide_loss(net, wide_batch(hvd.rank(), step), power).backward()
            optimizer.synchronize()
            of_losses.append(gradients(net))
            plain.zero_grad()
            joined_loss(alone, hvd.size(), step, power).backward()
            plain_of_losses.append(gradients(alone))
        everything += [(kept, kept.clone()) for kept in of_losses[0] + of_losses[1]]
        optimizer.zero_grad()
        for parameter, *kept in zip(net.parameters(), *of_losses, strict=True):
            parameter.grad = kept[0] - 0.5 * kept[1]
        for parameter, *kept in zip(alone.parameters(), *plain_of_losses, strict=True):
            parameter.grad = kept[0] - 0.5 * kept[1]
        step_with(optimizer)
        plain.step()
        assert_equal_to(net, alone)
    assert all(torch.equal(kept, as_it_was) for kept, as_it_was in everything)


def test_a_model_that_is_moved_to_shared_memory_is_still_reduced(hvd: Any) -> None:
    net, alone = wide_net(), wide_net()
    optimizer, plain = sgd(hvd, net), torch.optim.SGD(alone.parameters(), lr=0.05, momentum=0.9)
    for step in range(6):
        if step == 2:
            net.share_memory()
            assert all(gradient.is_shared() for gradient in gradients(net))
        optimizer.zero_grad(set_to_none=step == 4)
        wide_loss(net, wide_batch(hvd.rank(), step)).backward()
        optimizer.step()
        plain.zero_grad()
        joined_loss(alone, hvd.size(), step).backward()
        plain.step()
        assert_equal_to(net, alone)
        assert gradients(net)[0].is_shared() == (step in (2, 3))
    bits_on_all_ranks(hvd, list(net.parameters()))


def test_gradients_that_went_through_a_queue_are_still_reduced(hvd: Any) -> None:
    strategies = torch.multiprocessing.get_all_sharing_strategies()
    for strategy in sorted(strategies):
        torch.multiprocessing.set_sharing_strategy(strategy)
        net, alone = wide_net(), wide_net()
        optimizer, plain = sgd(hvd, net), torch.optim.SGD(alone.parameters(), lr=0.05, momentum=0.9)
        queue = torch.multiprocessing.get_context("fork").Queue()
        for step in range(4):
            optimizer.zero_grad(set_to_none=False)
            wide_loss(net, wide_batch(hvd.rank(), step)).backward()
            optimizer.step()
            plain.zero_grad()
            joined_loss(alone, hvd.size(), step).backward()
            plain.step()
            assert_equal_to(net, alone)
            if step == 1:
                queue.put(gradients(net))
                received = queue.get(timeout=60)
                assert all(torch.equal(one, other) for one, other in zip(received, gradients(net), strict=True))
        # Whoever received them sees what becomes of them, as of any tensor in shared memory.
        assert all(torch.equal(one, other) for one, other in zip(received, gradients(net), strict=True))
        bits_on_all_ranks(hvd, list(net.parameters()))
        queue.close()
        queue.join_thread()


def test_what_a_forked_child_writes_never_reaches_its_parent(hvd: Any) -> None:
    torch.set_num_threads(1)  # OpenMP's threads do not come along into a child
    net, alone = wide_net(), wide_net()
    optimizer = sgd(hvd, net)
    for step in range(3):
        optimizer.zero_grad(set_to_none=False)
        wide_loss(net, wide_batch(hvd.rank(), step)).backward()
        optimizer.synchronize()
        assert step > 0 or is_served() == any(ARENA.contains(gradient.data_ptr()) for gradient in gradients(net))
        before = [gradient.clone() for gradient in gradients(net)]

        def zero_and_compute(before: list[torch.Tensor] = before, step: int = step) -> None:
            for own, parents in zip(gradients(net), before, strict=True):
                assert torch.equal(own, parents)
            net.zero_grad(set_to_none=False)
            assert all(not gradient.any() for gradient in gradients(net))
            wide_loss(net, wide_batch(99, step)).backward()
            alone.load_state_dict(net.state_dict())
            alone.zero_grad()
            wide_loss(alone, wide_batch(99, step)).backward()
            assert_equal_to(net, alone)

        def go_on(step: int = step) -> None:
            zero_and_compute(step=step)
            optimizer.zero_grad()
            wide_loss(net, wide_batch(99, step)).backward()  # gradients of the child's own, as often as it likes
            assert_equal_to(net, alone)

        for work in (zero_and_compute, go_on):
            in_child(work)
            for parents, as_it_was in zip(gradients(net), before, strict=True):
                assert torch.equal(parents, as_it_was)
        hvd.barrier()
    bits_on_all_ranks(hvd, gradients(net))


def test_a_child_that_is_forked_in_flight_leaves_the_step_alone(hvd: Any) -> None:
    torch.set_num_threads(1)
    net, alone = wide_net(), wide_net()
    optimizer = sgd(hvd, net)
    for step in range(3):
        optimizer.zero_grad()
        wide_loss(net, wide_batch(hvd.rank(), step)).backward()

        def work() -> None:
            for gradient in gradients(net):
                gradient.fill_(12345.0)

        in_child(work)
        optimizer.synchronize()
        alone.zero_grad()
        joined_loss(alone, hvd.size(), step).backward()
        assert_equal_to(net, alone)


def test_tensors_taken_before_synchronize_are_the_ones_that_are_reduced(hvd: Any) -> None:
    net, alone = wide_net(), wide_net()
    optimizer, plain = sgd(hvd, net), torch.optim.SGD(alone.parameters(), lr=0.05, momentum=0.9)
    for step in range(4):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        wide_loss(net, wide_batch(hvd.rank(), step)).backward()
        taken = gradients(net)
        addresses = [gradient.data_ptr() for gradient in taken]
        optimizer.synchronize()
        assert all(now is then for now, then in zip(gradients(net), taken, strict=True))
        assert [gradient.data_ptr() for gradient in taken] == addresses
        plain.zero_grad()
        joined_loss(alone, hvd.size(), step).backward()
        assert_equal_to(net, alone)
        step_with(optimizer)
        plain.step()
        assert_equal_to(net, alone)
        assert all(now is then for now, then in zip(gradients(net), taken, strict=True))


def test_unscaling_before_synchronize_is_noticed_in_every_step(hvd: Any) -> None:
    for steps_before in range(3):
        net = wide_net().float()
        optimizer = sgd(hvd, net)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(steps_before):
            optimizer.zero_grad()
            scaler.scale(wide_loss(net, wide_batch(hvd.rank(), step).float())).backward()
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        scaler.scale(wide_loss(net, wide_batch(hvd.rank()).float())).backward()
        with expect(AssertionError, "unscale_()", "HINT"):
            scaler.unscale_(optimizer)
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        alone = copy.deepcopy(net)
        alone.zero_grad()
        wide_loss(alone, torch.cat([wide_batch(rank) for rank in range(hvd.size())]).float()).backward()
        assert_equal_to(net, alone, relative=1e-5)


def test_gradients_cleared_by_hand_before_synchronize_are_noticed_in_every_step(hvd: Any) -> None:
    for steps_before in range(3):
        net = wide_net()
        optimizer = sgd(hvd, net)
        for step in range(steps_before):
            optimizer.zero_grad()
            wide_loss(net, wide_batch(hvd.rank(), step)).backward()
            optimizer.step()
        optimizer.zero_grad()
        wide_loss(net, wide_batch(hvd.rank())).backward()
        net.zero_grad()
        with expect(AssertionError, "0.weight", "2.bias", "HINT"):
            optimizer.step()


def test_changes_in_place_before_synchronize_are_noticed_in_every_step(hvd: Any) -> None:
    for steps_before in range(3):
        net = wide_net()
        optimizer = sgd(hvd, net)
        for step in range(steps_before):
            optimizer.zero_grad()
            wide_loss(net, wide_batch(hvd.rank(), step)).backward()
            optimizer.step()
        optimizer.zero_grad()
        wide_loss(net, wide_batch(hvd.rank())).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
        with expect(AssertionError, "0.weight", "2.bias", "HINT"):
            optimizer.step()


class TwoOfOneShape(nn.Module):
    """Two parameters whose gradients autograd makes as one tensor's views, as far as it likes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.p = nn.Parameter(torch.randn(128, 160))
        self.q = nn.Parameter(torch.randn(160, 128))


def test_two_gradients_in_one_storage_are_both_right(hvd: Any) -> None:
    for op, factor in ((hvd.Average, 1.0), (hvd.Sum, float(hvd.size()))):
        net = TwoOfOneShape()
        optimizer = sgd(hvd, net, op=op)
        for step in range(4):
            numbers = [
                torch.randn(160 * 128, generator=torch.Generator().manual_seed(10 * step + rank))
                for rank in range(hvd.size())
            ]
            optimizer.zero_grad(set_to_none=step < 3)
            ((net.p.view(-1) + net.q.view(-1)) * numbers[hvd.rank()]).sum().backward()
            optimizer.synchronize()
            wanted = torch.stack(numbers).mean(0) * factor
            close(net.p.grad.view(-1), wanted, "p", 1e-6)
            close(net.q.grad.view(-1), wanted, "q", 1e-6)
            bits_on_all_ranks(hvd, gradients(net))
            net.p.grad.mul_(3)  # what is done with one gradient is not done with the other
            close(net.q.grad.view(-1), wanted, "q", 1e-6)
            net.p.grad.div_(3)


def test_one_tensor_as_the_gradient_of_two_parameters(hvd: Any) -> None:
    for op, factor in ((hvd.Average, 1.0), (hvd.Sum, float(hvd.size()))):
        for elements in (10, 40_000):
            net = nn.ParameterList([torch.zeros(elements), torch.zeros(elements), torch.zeros(elements)])
            optimizer = sgd(hvd, net, op=op)
            for step in range(3):
                optimizer.zero_grad()
                net[0].grad = torch.full((elements,), hvd.rank() + 1.0 + step)
                net[1].grad = net[0].grad
                net[2].grad = net[0].grad.detach()  # another tensor on the same bytes
                optimizer.synchronize()
                wanted = torch.full((elements,), (hvd.size() + 1) / 2 + step) * factor
                for index, gradient in enumerate(gradients(net)):
                    close(gradient, wanted, f"the gradient of parameter {index}", 1e-6)
                step_with(optimizer)


def test_gradients_of_a_step_that_was_given_up_are_not_stepped_on(hvd: Any) -> None:
    net, alone = wide_net(), wide_net()
    optimizer, plain = sgd(hvd, net), torch.optim.SGD(alone.parameters(), lr=0.05, momentum=0.9)

    def clip() -> None:
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)

    for step in range(3):
        optimizer.zero_grad()
        wide_loss(net, wide_batch(hvd.rank(), 9)).backward()
        own = [gradient.clone() for gradient in gradients(net)]
        if step > 0:  # the first step's gradients do not travel before it is completed
            travels = is_reduced_early(optimizer)
            optimizer.load_state_dict(optimizer.state_dict())
            for change in (None, clip, lambda: wide_loss(net, wide_batch(hvd.rank(), 8)).backward()):
                if change is not None:
                    change()
                if travels:
                    with expect(ValueError, "that was given up", "zero_grad", "HINT"):
                        optimizer.step()
                elif change is None:  # nothing was summed yet: they are this rank's, and may be used
                    assert all(map(torch.equal, gradients(net), own))
                    assert not any(map(is_half_summed, gradients(net)))
                else:
                    optimizer.load_state_dict(optimizer.state_dict())
            optimizer.zero_grad(set_to_none=step == 1)
            wide_loss(net, wide_batch(hvd.rank(), step)).backward()
        optimizer.step()
        plain.zero_grad()
        joined_loss(alone, hvd.size(), step if step > 0 else 9).backward()
        plain.step()
        assert_equal_to(net, alone)
    bits_on_all_ranks(hvd, list(net.parameters()))


def test_a_parameter_that_is_frozen_after_backward_is_reduced_all_the_same(hvd: Any) -> None:
    """As in the loop of a GAN, which freezes one network while the other learns."""
    net, alone = wide_net(), wide_net()
    optimizer, plain = sgd(hvd, net), torch.optim.SGD(alone.parameters(), lr=0.05, momentum=0.9)
    for step in range(4):
        optimizer.zero_grad()
        wide_loss(net, wide_batch(hvd.rank(), step)).backward()
        frozen = list(net.parameters())[step % 2 :: 2]
        for parameter in frozen:
            parameter.requires_grad_(False)
        optimizer.step()
        for parameter in frozen:
            parameter.requires_grad_(True)
        plain.zero_grad()
        joined_loss(alone, hvd.size(), step).backward()
        plain.step()
        assert_equal_to(net, alone)
    bits_on_all_ranks(hvd, list(net.parameters()))


def test_gradients_that_go_by_name_are_the_tensors_that_are_reduced_too(hvd: Any) -> None:
    net = nn.ParameterList([torch.ones(3, 4), torch.ones(40_000)])
    optimizer = sgd(hvd, net, op=hvd.Sum, compression=Passing)
    wanted = hvd.size() * (hvd.size() + 1) / 2
    for step in range(3):
        optimizer.zero_grad()
        sum(((hvd.rank() + 1) * (step + 1) * one).sum() for one in net).backward()
        taken, versions = gradients(net), [gradient._version for gradient in gradients(net)]
        optimizer.synchronize()
        assert all(now is then for now, then in zip(gradients(net), taken, strict=True))
        # A graph that saved the gradient must not take the result for it.
        assert all(one._version > version for one, version in zip(taken, versions, strict=True))
        step_with(optimizer)
        assert all(torch.equal(gradient, torch.full_like(gradient, wanted * (step + 1))) for gradient in taken)
    # One tensor is the gradient of two parameters, another has some of its bytes: each gets its own result.
    several = nn.ParameterList([torch.ones(6) for _ in range(3)])
    optimizer = sgd(hvd, several, op=hvd.Sum, compression=Passing)
    both = torch.arange(9.0) * (hvd.rank() + 1)
    several[0].grad, several[1].grad, several[2].grad = both[:6], both[:6], both[3:]
    optimizer.synchronize()
    for index, first in enumerate((0, 0, 3)):
        assert torch.equal(several[index].grad, torch.arange(first, first + 6.0) * wanted), index


def test_a_gradient_in_flight_that_becomes_another_parameters_too(hvd: Any) -> None:
    """Its own value is gone where it is being reduced already: that is an error. Else both get the result."""
    views: list[Callable[[torch.Tensor], torch.Tensor]] = [lambda one: one, lambda one: one.detach()]
    for view in views:
        net = nn.ParameterList([torch.ones(40_000), torch.ones(40_000)])
        optimizer = sgd(hvd, net, op=hvd.Sum)
        for _ in range(2):  # from the second step on gradients are in flight while backward() runs
            optimizer.zero_grad()
            sum((one * (hvd.rank() + 1)).sum() for one in net).backward()
            optimizer.synchronize()
        optimizer.zero_grad()
        (net[0] * (hvd.rank() + 1)).sum().backward()
        net[1].grad = view(net[0].grad)
        if is_reduced_early(optimizer):
            with expect(AssertionError, "gradients of 1 ", "HINT"):
                optimizer.synchronize()
            optimizer.load_state_dict(optimizer.state_dict())
        else:
            optimizer.synchronize()
            for gradient in gradients(net):
                close(gradient, torch.full((40_000,), hvd.size() * (hvd.size() + 1) / 2), "both", 1e-6)


def test_a_flat_buffer_of_gradients_stays_one(hvd: Any) -> None:
    net, alone = wide_net(), wide_net()
    optimizer, plain = sgd(hvd, net), torch.optim.SGD(alone.parameters(), lr=0.05, momentum=0.9)
    flat = torch.zeros(sum(parameter.numel() for parameter in net.parameters()), dtype=torch.float64)
    begin = 0
    for parameter in net.parameters():
        parameter.grad = flat[begin : begin + parameter.numel()].view_as(parameter)
        begin += parameter.numel()
    for step in range(4):
        optimizer.zero_grad(set_to_none=False)
        wide_loss(net, wide_batch(hvd.rank(), step)).backward()
        optimizer.synchronize()
        plain.zero_grad()
        joined_loss(alone, hvd.size(), step).backward()
        close(flat, torch.cat([gradient.view(-1) for gradient in gradients(alone)]), "the flat buffer")
        assert_equal_to(net, alone)
        flat.mul_(0.5)
        step_with(optimizer)
        for gradient in gradients(alone):
            gradient.mul_(0.5)
        plain.step()
    assert_equal_to(net, alone)
    bits_on_all_ranks(hvd, list(net.parameters()))


def test_views_with_gaps_between_their_elements_are_told_apart_from_overlaps(hvd: Any) -> None:
    rows, columns = 150, 130
    net = nn.ParameterList([torch.zeros(rows, columns) for _ in range(3)])
    optimizer = sgd(hvd, net)
    for step in range(3):
        both = torch.empty(rows, 2 * columns)
        net[0].grad, net[1].grad = both[:, ::2], both[:, 1::2]  # interleaved, but with no byte in common
        net[2].grad = both[rows // 2 :, :columns].repeat(2, 1)
        for index, parameter in enumerate(net):
            parameter.grad.fill_(hvd.rank() + 10.0 * index + step)
        taken = gradients(net)
        optimizer.synchronize()
        for index, gradient in enumerate(gradients(net)):
            close(gradient, torch.full((rows, columns), (hvd.size() - 1) / 2 + 10 * index + step), str(index), 1e-6)
        assert gradients(net)[0] is taken[0]
        # The second lies within the bytes of the first, from its beginning to its end.
        wide = torch.zeros(rows, 2 * columns)
        net[0].grad, net[1].grad = wide[:, ::2], wide.view(-1)[rows * columns : 2 * rows * columns].view(rows, columns)
        net[0].grad.fill_(1.0 + hvd.rank())
        mine = [net[0].grad.clone(), net[1].grad.clone()]
        optimizer.synchronize()
        for index in range(2):
            everyones = hvd.allgather_object(mine[index])
            close(net[index].grad, torch.stack(everyones).mean(0), f"overlapping {index}", 1e-6)
        optimizer.zero_grad()


def elsewhere(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.clone()


def within_another(gradient: torch.Tensor) -> torch.Tensor:
    larger = torch.full((gradient.numel() + 5,), 7.0, dtype=gradient.dtype)
    return larger[3:-2].view_as(gradient).copy_(gradient)


def transposed(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.t().contiguous().t()


def test_places_may_differ_between_ranks(hvd: Any) -> None:
    """A gradient in the arena on some ranks, elsewhere on others: the same bits as where all lie elsewhere."""
    for way in (elsewhere, within_another, transposed):
        nets = [wide_net().float() for _ in range(3)]
        optimizers = [sgd(hvd, net) for net in nets]
        for step in range(4):
            by_hand = [False, hvd.rank() == step % hvd.size(), True]
            for net, optimizer, differs in zip(nets, optimizers, by_hand, strict=True):
                optimizer.zero_grad()
                loss = wide_loss(net, wide_batch(hvd.rank(), step).float())
                if differs:
                    made = torch.autograd.grad(loss, list(net.parameters()))
                    for parameter, gradient in zip(net.parameters(), made, strict=True):
                        parameter.grad = (way if gradient.dim() == 2 else elsewhere)(gradient)
                        assert not ARENA.contains(parameter.grad.data_ptr())
                else:
                    loss.backward()
                    assert_born_in_arena(gradients(net))
                taken = gradients(net)
                optimizer.synchronize()
                assert all(now is then for now, then in zip(gradients(net), taken, strict=True))
            for ours, mixed, staged in zip(*(gradients(net) for net in nets), strict=True):
                assert torch.equal(ours, staged)
                assert torch.equal(mixed, staged)
            for optimizer in optimizers:
                step_with(optimizer)
        bits_on_all_ranks(hvd, [parameter for net in nets for parameter in net.parameters()])


def test_some_ranks_have_no_gradient(hvd: Any) -> None:
    net = wide_net()
    optimizer = sgd(hvd, net)
    for step in range(4):
        optimizer.zero_grad()
        if hvd.rank() == step % hvd.size():
            wide_loss(net, wide_batch(hvd.rank(), step)).backward()
        optimizer.synchronize()
        alone = copy.deepcopy(net)
        alone.zero_grad()
        wide_loss(alone, wide_batch(step % hvd.size(), step)).backward()
        for ours, theirs in zip(gradients(net), gradients(alone), strict=True):
            close(ours, theirs / hvd.size())
        step_with(optimizer)
    bits_on_all_ranks(hvd, list(net.parameters()))


def test_accumulation_in_place_and_replaced(hvd: Any) -> None:
    """Ranks whose passes add to a gradient in place, and ranks where each pass makes a new one."""
    net, alone = wide_net(), wide_net()
    optimizer, plain = sgd(hvd, net, backward_passes_per_step=3), torch.optim.SGD(alone.parameters(), lr=0.05)
    for step in range(4):
        optimizer.zero_grad(set_to_none=(step + hvd.rank()) % 2 == 0)
        plain.zero_grad()
        for part in range(3):
            wide_loss(net, wide_batch(hvd.rank(), 10 * step + part)).backward()
            if part == 1 and hvd.rank() == 0:
                for parameter in net.parameters():
                    parameter.grad = parameter.grad + 0.0
            joined_loss(alone, hvd.size(), 10 * step + part).backward()
        taken = gradients(net)
        optimizer.synchronize()
        assert all(now is then for now, then in zip(gradients(net), taken, strict=True))
        assert_equal_to(net, alone)


def test_a_graph_that_saved_a_gradient_is_an_error_once_it_is_reduced(hvd: Any) -> None:
    places: list[Callable[[torch.Tensor], torch.Tensor]] = [lambda gradient: gradient, elsewhere, within_another]
    for way in places:
        net = wide_net()
        optimizer = sgd(hvd, net)
        for step in range(3):
            optimizer.zero_grad()
            loss = wide_loss(net, wide_batch(hvd.rank(), step))
            for parameter, gradient in zip(net.parameters(), torch.autograd.grad(loss, net.parameters()), strict=True):
                parameter.grad = way(gradient)
            weights = [torch.ones_like(gradient, requires_grad=True) for gradient in gradients(net)]
            graphs = [(one * other).sum() for one, other in zip(weights, gradients(net), strict=True)]
            versions = [gradient._version for gradient in gradients(net)]
            optimizer.synchronize()
            for graph, gradient, version in zip(graphs, gradients(net), versions, strict=True):
                assert gradient._version > version
                with expect(RuntimeError, "modified by an inplace operation"):
                    graph.backward()
            net.zero_grad()
    net = wide_net()
    optimizer = sgd(hvd, net)
    for step in range(3):
        optimizer.zero_grad()
        wide_loss(net, wide_batch(hvd.rank(), step)).backward()
        graphs = [(torch.ones_like(one, requires_grad=True) * one).sum() for one in gradients(net)]
        optimizer.synchronize()
        for graph in graphs:
            with expect(RuntimeError, "modified by an inplace operation"):
                graph.backward()


def moved_in_flight(hvd: Any, move: Callable[[torch.Tensor], Any]) -> None:
    for steps_before in range(3):
        net = wide_net()
        optimizer = sgd(hvd, net)
        for step in range(steps_before):
            optimizer.zero_grad()
            wide_loss(net, wide_batch(hvd.rank(), step)).backward()
            optimizer.step()
        optimizer.zero_grad()
        wide_loss(net, wide_batch(hvd.rank())).backward()
        moved = gradients(net)[0]
        move(moved)
        churn = [torch.full_like(moved, 3.0) for _ in range(4)]  # may get the memory that was given back
        with expect(AssertionError, "0.weight", "HINT"):
            optimizer.synchronize()
        assert all(bool((one == 3.0).all()) for one in churn)
        # The step is given up, and the next one is right.
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.zero_grad()
        wide_loss(net, wide_batch(hvd.rank(), 5)).backward()
        optimizer.synchronize()
        alone = copy.deepcopy(net)
        alone.zero_grad()
        joined_loss(alone, hvd.size(), 5).backward()
        assert_equal_to(net, alone)
        assert all(bool((one == 3.0).all()) for one in churn)


def test_a_gradient_that_is_shared_in_flight_is_an_error(hvd: Any) -> None:
    moved_in_flight(hvd, lambda gradient: gradient.share_memory_())


def test_a_gradient_that_is_set_in_flight_is_an_error(hvd: Any) -> None:
    moved_in_flight(hvd, lambda gradient: gradient.set_(torch.zeros_like(gradient)))


def test_a_gradient_that_is_made_smaller_in_flight_is_an_error(hvd: Any) -> None:
    moved_in_flight(hvd, lambda gradient: gradient.set_(torch.zeros(3, dtype=gradient.dtype)))


def test_a_gradient_whose_data_is_exchanged_in_flight_is_an_error(hvd: Any) -> None:
    moved_in_flight(hvd, lambda gradient: setattr(gradient, "data", torch.zeros_like(gradient)))


def test_a_gradient_may_be_set_and_shared_after_synchronize(hvd: Any) -> None:
    net, alone = wide_net(), wide_net()
    optimizer, plain = sgd(hvd, net), torch.optim.SGD(alone.parameters(), lr=0.05, momentum=0.9)
    for step in range(6):
        optimizer.zero_grad(set_to_none=False)
        wide_loss(net, wide_batch(hvd.rank(), step)).backward()
        optimizer.synchronize()
        plain.zero_grad()
        joined_loss(alone, hvd.size(), step).backward()
        assert_equal_to(net, alone)
        first, *_, last = gradients(net)
        if step % 3 == 0:
            first.share_memory_()
            last.share_memory_()
        elif step % 3 == 1:
            first.set_(first.clone())
            last.data = last.data.clone()
        else:
            first.set_((torch.cat([torch.zeros_like(first), first]))[first.shape[0] :])
            last.data.mul_(1.0)
        step_with(optimizer)
        plain.step()
    assert_equal_to(net, alone)
    bits_on_all_ranks(hvd, list(net.parameters()))


def test_sizes_around_the_smallest_that_is_served(hvd: Any) -> None:
    page_and_more = [1, 8192 - 1, 8192, 8192 + 1, 16384 - 1, 16384, 16384 + 1, 16384 + 1023, 1 << 17]
    net = nn.ParameterList([torch.zeros(elements) for elements in page_and_more])
    optimizer = sgd(hvd, net)
    for step in range(3):
        optimizer.zero_grad()
        numbers = [torch.randn(1 << 17, generator=torch.Generator().manual_seed(r)) for r in range(hvd.size())]
        sum((one * numbers[hvd.rank()][: one.numel()]).sum() * (step + 1) for one in net).backward()
        optimizer.synchronize()
        for gradient in gradients(net):
            wanted = torch.stack([one[: gradient.numel()] for one in numbers]).mean(0) * (step + 1)
            close(gradient, wanted, f"{gradient.numel()} elements", 1e-6)
        assert_born_in_arena(gradients(net))
        step_with(optimizer)


def test_dtypes(hvd: Any) -> None:
    for dtype, relative in (
        (torch.float64, 1e-12),
        (torch.float32, 1e-6),
        (torch.bfloat16, 2e-2),
        (torch.float16, 2e-3),
    ):
        net = nn.ParameterList([torch.ones(300, 200, dtype=dtype), torch.ones(7, dtype=dtype)])
        optimizer = sgd(hvd, net)
        for _ in range(3):
            optimizer.zero_grad()
            sum(((hvd.rank() + 1) * one * one).sum() for one in net).backward()
            assert_born_in_arena(gradients(net))
            optimizer.synchronize()
            for parameter, gradient in zip(net, gradients(net), strict=True):
                assert gradient.dtype is dtype
                close(gradient.double(), (parameter.detach() * (hvd.size() + 1)).double(), str(dtype), relative)
            step_with(optimizer)
        bits_on_all_ranks(hvd, list(net.parameters()))


def test_a_model_of_several_dtypes(hvd: Any) -> None:
    dtypes = torch.float64, torch.bfloat16, torch.float32, torch.float16
    net = nn.ParameterList([torch.ones(200, 200, dtype=dtype) for dtype in dtypes])
    optimizer = sgd(hvd, net)
    for _ in range(3):
        optimizer.zero_grad()
        sum(((hvd.rank() + 1) * one).sum().double() for one in net).backward()
        optimizer.synchronize()
        for gradient in gradients(net):
            close(gradient.double(), torch.full((200, 200), (hvd.size() + 1) / 2).double(), str(gradient.dtype), 1e-3)
        step_with(optimizer)


def test_channels_last(hvd: Any) -> None:
    torch.manual_seed(2)
    net = nn.Sequential(nn.Conv2d(32, 64, 3, padding=1), nn.Tanh(), nn.Conv2d(64, 32, 3)).double()
    alone = copy.deepcopy(net)
    net = net.to(memory_format=torch.channels_last)
    optimizer, plain = sgd(hvd, net), torch.optim.SGD(alone.parameters(), lr=0.05, momentum=0.9)
    inputs = [
        torch.randn(2, 32, 5, 5, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
        for rank in range(hvd.size())
    ]
    for step in range(4):
        optimizer.zero_grad(set_to_none=step < 2)
        net(inputs[hvd.rank()]).square().mean().backward()
        assert gradients(net)[0].stride() == net[0].weight.stride()
        taken = gradients(net)
        optimizer.step()
        assert all(now is then for now, then in zip(gradients(net), taken, strict=True))
        plain.zero_grad()
        alone(torch.cat(inputs)).square().mean().backward()
        plain.step()
        assert_equal_to(net, alone, relative=1e-11)
    assert_born_in_arena([net[0].weight.grad, net[2].weight.grad])


def test_expanded_gradients(hvd: Any) -> None:
    for elements in (10, 40_000):
        net = nn.ParameterList([torch.ones(elements), torch.ones(elements)])
        optimizer = sgd(hvd, net)
        for step in range(4):
            optimizer.zero_grad()
            (net[0].sum() * (hvd.rank() + 1)).backward()
            if step % 2 == 0 or hvd.rank() == 0:
                net[1].grad = torch.tensor(hvd.rank() + 1.0).expand(elements)
            else:
                net[1].grad = torch.full((elements,), hvd.rank() + 1.0)
            optimizer.synchronize()
            for gradient in gradients(net):
                close(gradient, torch.full((elements,), (hvd.size() + 1) / 2), "expanded", 1e-6)
            step_with(optimizer)


class WithPositions(nn.Module):
    """At batch 1, the gradient of ``positions`` is a view of what the backward pass still reads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.positions = nn.Parameter(torch.randn(160, 128, dtype=torch.float64))
        self.inner = nn.Linear(128, 128, dtype=torch.float64)
        self.outer = nn.Linear(128, 128, dtype=torch.float64)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.inner(inputs))
        return self.outer(torch.tanh(hidden + self.positions.view(1, 160, 128)))  # type: ignore[no-any-return]


def test_positional_embedding_with_a_batch_of_one(hvd: Any) -> None:
    net, alone = WithPositions(), WithPositions()
    optimizer, plain = sgd(hvd, net), torch.optim.SGD(alone.parameters(), lr=0.05, momentum=0.9)
    for step in range(5):
        inputs = [
            torch.randn(1, 160, 128, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)
            for rank in range(hvd.size())
        ]
        optimizer.zero_grad()

        def wait(gradient: torch.Tensor) -> torch.Tensor:
            hvd.barrier()  # what can be reduced by now has the time to be
            return gradient

        hidden = torch.tanh(net.inner(inputs[hvd.rank()]))
        hidden.register_hook(wait)
        net.outer(torch.tanh(hidden + net.positions.view(1, 160, 128))).square().mean().backward()
        optimizer.step()
        plain.zero_grad()
        alone(torch.cat(inputs)).square().mean().backward()
        plain.step()
        assert_equal_to(net, alone)
    bits_on_all_ranks(hvd, list(net.parameters()))


def test_results_that_others_reduce_later_are_not_written_into(hvd: Any) -> None:
    """A reduced gradient is private at once: a slow rank's pass does not write into it any more."""
    net = wide_net()
    optimizer = sgd(hvd, net)
    for step in range(6):
        optimizer.zero_grad()
        wide_loss(net, wide_batch(hvd.rank(), step)).backward()
        optimizer.synchronize()
        if hvd.rank() == step % hvd.size():
            kept = [gradient.clone() for gradient in gradients(net)]
            for gradient in gradients(net):
                gradient.fill_(-1.0)
            hvd.barrier()
            for gradient, result in zip(gradients(net), kept, strict=True):
                assert bool((gradient == -1.0).all())
                gradient.copy_(result)
        else:
            hvd.barrier()
        step_with(optimizer)
    bits_on_all_ranks(hvd, list(net.parameters()))
