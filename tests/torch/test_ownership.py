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
from tests.told import told
from tests.torch.optimizer_support import (
    Passing,
    assert_close,
    assert_reduces,
    assert_same_gradients,
    distributed_sgd,
    gradients,
    no_warnings,
    sgd,
    update,
)
from tests.torch.ownership_support import (
    assert_same_bits,
    is_reduced_early,
    is_served,
    same_tensors,
    same_values,
    wide,
    wide_loss,
    wide_net,
)

pytestmark = [
    # Reduced beside the backward pass, and not after it, also where the ranks' threads have every core.
    on_ranks(2, HVDKIT_FUSION_THRESHOLD="65536"),
    # Reduced after the backward pass, on every machine: each rank computes on as many threads as there are cores.
    on_ranks(3, name="in turn", OMP_NUM_THREADS=str(max(2, os.cpu_count() or 1))),
    on_ranks((2, "torch"), name="no arena", HVDKIT_ARENA="0", HVDKIT_FUSION_THRESHOLD="65536"),
    on_ranks((3, "torch"), name="two nodes", thorough=True, per_node=2),
]


def test_gradients_that_went_through_a_queue_are_still_reduced(hvd: Any) -> None:
    for strategy in sorted(torch.multiprocessing.get_all_sharing_strategies()):
        torch.multiprocessing.set_sharing_strategy(strategy)
        pair = wide(hvd)
        queue = torch.multiprocessing.get_context("fork").Queue()
        for step in range(4):
            pair.zero_grad(set_to_none=False)
            pair.backward(step)
            pair.step()
            pair.check()
            if step == 1:
                queue.put(gradients(pair.net))
                received = queue.get(timeout=60)
                assert same_values(received, gradients(pair.net))
        # Whoever received them sees what becomes of them, as of any tensor in shared memory.
        assert same_values(received, gradients(pair.net))
        queue.close()
        queue.join_thread()


def test_what_a_forked_child_writes_never_reaches_its_parent(hvd: Any) -> None:
    torch.set_num_threads(1)  # OpenMP's threads do not come along into a child
    net, child = wide_net(), 99
    optimizer = distributed_sgd(hvd, net)
    for step in range(3):
        optimizer.zero_grad(set_to_none=False)
        wide_loss(net, [hvd.rank()], step).backward()
        optimizer.synchronize()
        assert step > 0 or is_served() == any(ARENA.contains(gradient.data_ptr()) for gradient in gradients(net))
        before = [gradient.clone() for gradient in gradients(net)]

        def compute(step: int = step) -> None:
            wide_loss(net, [child], step).backward()
            alone = copy.deepcopy(net)
            wide_loss(alone, [child], step).backward()
            assert_same_gradients(net, alone, 1e-12)

        def zero_and_compute(before: list[torch.Tensor] = before, compute: Callable[[], None] = compute) -> None:
            assert same_values(gradients(net), before)
            net.zero_grad(set_to_none=False)
            assert all(not gradient.any() for gradient in gradients(net))
            compute()

        def go_on(first: Callable[[], None] = zero_and_compute, second: Callable[[], None] = compute) -> None:
            first()
            optimizer.zero_grad()
            second()  # gradients of the child's own, as often as it likes

        for work in (zero_and_compute, go_on):
            in_child(work)
            assert same_values(gradients(net), before)
        hvd.barrier()
    assert_same_bits(hvd, gradients(net))


def test_a_child_that_is_forked_in_flight_leaves_the_step_alone(hvd: Any) -> None:
    torch.set_num_threads(1)
    pair = wide(hvd)
    for step in range(3):
        pair.zero_grad()
        pair.backward(step)
        in_child(lambda: [gradient.fill_(12345.0) for gradient in gradients(pair.net)])
        pair.optimizer.synchronize()
        pair.check_gradients()


def test_unscaling_and_clipping_read_gradients_of_all_ranks_and_step_takes_them(hvd: Any) -> None:
    for op, factor in ((hvd.Average, 1), (hvd.Sum, hvd.size())):
        for clip in (nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_):
            net, alone = wide_net().float(), wide_net().float()
            optimizer = distributed_sgd(hvd, net, op=op)
            plain = sgd(alone, 0.05)
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            for step in range(4):
                for each in (optimizer, plain):
                    each.zero_grad()
                scaler.scale(wide_loss(net, [hvd.rank()], step)).backward()
                (wide_loss(alone, range(hvd.size()), step) * factor).backward()
                if step % 2 == 0 or hvd.rank() == 0:  # a rank may clip alone: not to change anything, but for the norm
                    scaler.unscale_(optimizer)
                    bound = 0.1 if step % 2 == 0 else float("inf")
                    norms = [clip(list(each.parameters()), bound) for each in (net, alone)]
                    if step % 2 == 0 and norms[0] is not None:
                        torch.testing.assert_close(*norms)
                with no_warnings():
                    scaler.step(optimizer)
                scaler.update()
                plain.step()
            torch.testing.assert_close(list(net.parameters()), list(alone.parameters()), rtol=1e-4, atol=1e-5)


def test_clipping_inside_of_a_closure_is_of_the_gradient_of_all_ranks(hvd: Any) -> None:
    net, alone = wide_net(), wide_net()
    optimizer, plain = distributed_sgd(hvd, net, op=hvd.Sum), sgd(alone, 0.05)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = wide_loss(net, [hvd.rank()])
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        return loss

    for _ in range(3):
        optimizer.step(closure)
        plain.zero_grad()
        (hvd.size() * wide_loss(alone, range(hvd.size()))).backward()
        nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
        plain.step()
    torch.testing.assert_close(list(net.parameters()), list(alone.parameters()))


# What is done to a model, or to its first gradient, between backward() and synchronize().
IN_FLIGHT: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "cleared": lambda net, first: net.zero_grad(),
    "scaled": lambda net, first: [gradient.mul_(1e-3) for gradient in gradients(net)],
    "replaced": lambda net, first: setattr(net[0].weight, "grad", torch.ones_like(first)),
    "shared": lambda net, first: first.share_memory_(),
    "set": lambda net, first: first.set_(torch.zeros_like(first)),
    "made smaller": lambda net, first: first.set_(torch.zeros(3, dtype=first.dtype)),
    "exchanged": lambda net, first: setattr(first, "data", torch.zeros_like(first)),
}


def test_gradients_that_change_in_flight_are_an_error_in_every_step(hvd: Any) -> None:
    for name, change in IN_FLIGHT.items():
        for steps_before in range(3):
            net = wide_net()
            optimizer = distributed_sgd(hvd, net)
            if steps_before:
                assert_reduces(hvd, optimizer, net, steps_before, 1e-12, wide_loss)
            optimizer.zero_grad()
            wide_loss(net, [hvd.rank()]).backward()
            first = gradients(net)[0]
            change(net, first)
            churn = [torch.full_like(first, 3.0) for _ in range(4)]  # may get the memory that was given back
            with told(AssertionError, "0.weight", *["2.bias"] * (name in ("cleared", "scaled")), "HINT"):
                optimizer.synchronize()
            # The step is given up, and the next one is right.
            optimizer.load_state_dict(optimizer.state_dict())
            assert_reduces(hvd, optimizer, net, 1, 1e-12, wide_loss)
            assert all(bool((tensor == 3.0).all()) for tensor in churn), name


def test_gradients_of_a_step_that_was_given_up_are_not_stepped_on(hvd: Any) -> None:
    pair = wide(hvd)
    net, optimizer = pair.net, pair.optimizer
    changes: list[Callable[[], Any]] = [
        lambda: None,
        lambda: nn.utils.clip_grad_norm_(net.parameters(), 0.1),
        lambda: wide_loss(net, [hvd.rank()], 8).backward(),
    ]
    for step in range(3):
        pair.zero_grad()
        wide_loss(net, [hvd.rank()], 9).backward()
        before = [gradient.clone() for gradient in gradients(net)]
        if step > 0:  # the first step's gradients do not travel before it is completed
            travels = is_reduced_early(optimizer)
            optimizer.load_state_dict(optimizer.state_dict())
            for number, change in enumerate(changes):
                change()
                if travels:
                    with told(
                        ValueError,
                        "The gradient of '0.weight' was left by a step that failed or was given up: some of its "
                        "elements may be summed over ranks already, others are not.",
                        "HINT: call optimizer.zero_grad() and run the forward and backward pass again.",
                    ):
                        optimizer.step()
                elif number == 0:  # nothing was summed yet: they are this rank's, and may be used
                    assert same_values(gradients(net), before)
                    assert not any(map(is_half_summed, gradients(net)))
                else:
                    optimizer.load_state_dict(optimizer.state_dict())
            optimizer.zero_grad(set_to_none=step == 1)
            wide_loss(net, [hvd.rank()], step).backward()
        wide_loss(pair.alone, range(hvd.size()), step if step > 0 else 9).backward()
        pair.step()
        pair.check()


def test_a_parameter_that_is_frozen_after_backward_is_reduced_all_the_same(hvd: Any) -> None:
    """As in the loop of a GAN, which freezes one network while the other learns."""
    pair = wide(hvd)
    for step in range(4):
        pair.zero_grad()
        pair.backward(step)
        frozen = list(pair.net.parameters())[step % 2 :: 2]
        for parameter in frozen:
            parameter.requires_grad_(False)
        pair.step()
        for parameter in frozen:
            parameter.requires_grad_(True)
        pair.check()


def test_gradients_that_go_by_name_are_the_tensors_that_are_reduced_too(hvd: Any) -> None:
    net = nn.ParameterList([torch.ones(3, 4), torch.ones(40_000)])
    optimizer = distributed_sgd(hvd, net, op=hvd.Sum, compression=Passing)
    wanted = hvd.size() * (hvd.size() + 1) / 2
    for step in range(3):
        optimizer.zero_grad()
        sum(((hvd.rank() + 1) * (step + 1) * one).sum() for one in net).backward()
        taken, versions = gradients(net), [gradient._version for gradient in gradients(net)]
        optimizer.synchronize()
        assert same_tensors(gradients(net), taken)
        # A graph that saved the gradient must not take the result for it.
        assert all(tensor._version > version for tensor, version in zip(taken, versions, strict=True))
        update(optimizer)
        assert all(torch.equal(gradient, torch.full_like(gradient, wanted * (step + 1))) for gradient in taken)
    # One tensor is the gradient of two parameters, another has some of its bytes: each gets its own result.
    several = nn.ParameterList([torch.ones(6) for _ in range(3)])
    optimizer = distributed_sgd(hvd, several, op=hvd.Sum, compression=Passing)
    both = torch.arange(9.0) * (hvd.rank() + 1)
    several[0].grad, several[1].grad, several[2].grad = both[:6], both[:6], both[3:]
    optimizer.synchronize()
    for index, first in enumerate((0, 0, 3)):
        assert torch.equal(several[index].grad, torch.arange(first, first + 6.0) * wanted), index


CHANGED_IN_FLIGHT = """\
Gradients were changed after loss.backward() but before optimizer.step() or optimizer.synchronize(). This is \
prohibited as it can cause a race condition: they may still be in the middle of a sum over ranks.
HINT: call optimizer.synchronize() before gradients are clipped, unscaled or cleared, and then \
'with optimizer.skip_synchronize(): optimizer.step()'.
Changed: 1"""


def test_a_gradient_in_flight_that_becomes_another_parameters_too(hvd: Any) -> None:
    """Its own value is gone where it is being reduced already: that is an error. Else both get the result."""
    views: list[Callable[[torch.Tensor], torch.Tensor]] = [lambda tensor: tensor, lambda tensor: tensor.detach()]
    for view in views:
        net = nn.ParameterList([torch.ones(40_000), torch.ones(40_000)])
        optimizer = distributed_sgd(hvd, net, op=hvd.Sum)
        for _ in range(2):  # from the second step on gradients are in flight while backward() runs
            optimizer.zero_grad()
            sum((one * (hvd.rank() + 1)).sum() for one in net).backward()
            optimizer.synchronize()
        optimizer.zero_grad()
        (net[0] * (hvd.rank() + 1)).sum().backward()
        net[1].grad = view(net[0].grad)
        if is_reduced_early(optimizer):
            with told(AssertionError, CHANGED_IN_FLIGHT):
                optimizer.synchronize()
            optimizer.load_state_dict(optimizer.state_dict())
        else:
            optimizer.synchronize()
            for gradient in gradients(net):
                assert_close(gradient, torch.full((40_000,), hvd.size() * (hvd.size() + 1) / 2))


def test_accumulation_in_place_and_replaced(hvd: Any) -> None:
    """Ranks whose passes add to a gradient in place, and ranks where each pass makes a new one."""
    pair = wide(hvd, backward_passes_per_step=3)
    for step in range(4):
        pair.zero_grad(set_to_none=(step + hvd.rank()) % 2 == 0)
        for part in range(3):
            pair.backward(10 * step + part)
            if part == 1 and hvd.rank() == 0:
                for parameter in pair.net.parameters():
                    parameter.grad = parameter.grad + 0.0
        taken = gradients(pair.net)
        pair.optimizer.synchronize()
        assert same_tensors(gradients(pair.net), taken)
        pair.check_gradients()
