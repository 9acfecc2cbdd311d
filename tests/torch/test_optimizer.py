"""What every training loop relies on: the right gradients, and the same bits everywhere."""

from __future__ import annotations

from typing import Any

import numpy as np
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
    assert_same_gradients,
    batch,
    digest,
    distributed_sgd,
    gradients,
    loss_of,
    loss_on,
    make_double,
    make_net,
    sgd,
    train,
    train_step,
    update,
    wrapped_net,
)

pytestmark = [
    on_ranks(1, 2, 3, 4, every_size=True),
    on_ranks((2, "mpi"), name="small buckets", HOROVOD_FUSION_THRESHOLD="64"),
    on_ranks((3, "torch"), name="two nodes", per_node=2),
    on_ranks((4, "mpi"), name="two nodes, small buckets", per_node=2, HOROVOD_FUSION_THRESHOLD="64"),
    # Algorithms that each sum in an order of their own.
    on_ranks((3, "mpi"), name="ring", HVDKIT_NODE_MEMORY="0", HVDKIT_ALLREDUCE="ring"),
    on_ranks((3, "torch"), name="butterfly", HVDKIT_NODE_MEMORY="0", HVDKIT_ALLREDUCE="butterfly"),
    on_ranks((2, "torch"), name="device", runner="tests.transports.pretend_device"),
    on_ranks((2, "torch"), name="shared device", runner="tests.transports.pretend_device", TESTS_SHARED_DEVICE="1"),
]


def test_gradient_equals_one_process_on_the_joined_batch(hvd: Any) -> None:
    pair = Comparison(hvd, make_double, relative=1e-12)
    for step in range(4):
        pair.train(1, first=step)
        pair.check_gradients()


def test_parameters_are_bit_identical_on_ranks_and_in_runs(hvd: Any) -> None:
    digests = []
    for _ in range(2):
        net, optimizer = wrapped_net(hvd)
        train(hvd, optimizer, net, 50)
        assert_identical(hvd, net)
        digests.append(digest(net))
    assert digests[0] == digests[1]


def test_sum_min_max_product_reduce_gradients(hvd: Any) -> None:
    reductions = {
        hvd.Average: lambda g: g.mean(0),
        hvd.Sum: lambda g: g.sum(0),
        hvd.Min: lambda g: g.amin(0),
        hvd.Max: lambda g: g.amax(0),
        hvd.Product: lambda g: g.prod(0),
    }
    alone = [make_net() for _ in range(hvd.size())]
    for rank, net in enumerate(alone):
        loss_of(net, batch(rank), use_spare=True).backward()
    for op, reduce in reductions.items():
        net, optimizer = wrapped_net(hvd, op=op)
        for _ in range(2):  # the second step comes through the hooks
            optimizer.zero_grad()
            loss_of(net, batch(hvd.rank()), use_spare=True).backward()
            optimizer.synchronize()
            for gradient, *of_ranks in zip(gradients(net), *map(gradients, alone), strict=True):
                assert_close(gradient, reduce(torch.stack(of_ranks)))


def test_parameters_of_any_type_and_size(hvd: Any) -> None:
    types = ((torch.float64, 1e-12), (torch.float32, 1e-6), (torch.float16, 2e-3), (torch.bfloat16, 2e-2))
    for dtype, relative in types:
        net = nn.ParameterList([torch.ones(shape, dtype=dtype) for shape in ((7,), (), (0, 3))])
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0))
        for _ in range(3):
            optimizer.zero_grad()
            sum((one * (hvd.rank() + 1)).sum() for one in net).backward()
            optimizer.synchronize()
            for parameter in net:
                assert (parameter.grad.dtype, parameter.grad.shape) == (dtype, parameter.shape)
                assert_close(parameter.grad, torch.full_like(parameter, (hvd.size() + 1) / 2), relative)
            update(optimizer)


def test_a_reduced_gradient_is_private_to_its_rank(hvd: Any) -> None:
    values = nn.Parameter(torch.zeros(5000))  # some pages of memory
    numbers = torch.arange(5000.0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([values], lr=1.0))
    for _ in range(4):
        optimizer.zero_grad()
        ((values * numbers).sum() * (hvd.rank() + 1)).backward()
        optimizer.synchronize()
        assert_close(values.grad, numbers * (hvd.size() + 1) / 2)
        average = values.grad.clone()
        hvd.barrier()
        if hvd.rank() == 0:
            values.grad.mul_(7)
        hvd.barrier()
        assert torch.equal(values.grad, average * 7 if hvd.rank() == 0 else average)
        values.grad.copy_(average)  # or ranks would step apart, which is an error
        update(optimizer)


def test_memory_formats_are_kept(hvd: Any) -> None:
    net = make_net().to(memory_format=torch.channels_last)
    assert_reduces(hvd, distributed_sgd(hvd, net), net)
    assert net.conv.weight.grad.stride() == net.conv.weight.stride()


def test_gradients_accumulate_over_backward_passes(hvd: Any) -> None:
    pair = Comparison(hvd, backward_passes_per_step=2)
    for passes in (2, 2, 2, 1):
        if passes == 1:
            pair.optimizer.set_backward_passes_per_step(1)
            assert pair.optimizer.backward_passes_per_step == 1
        pair.reduce(passes=passes)


def test_step_before_all_passes_reduces_what_is_there(hvd: Any) -> None:
    net = make_net()
    assert_reduces(hvd, distributed_sgd(hvd, net, backward_passes_per_step=3), net)


def test_gradients_kept_in_place_accumulate_from_zeros(hvd: Any) -> None:
    pair = Comparison(hvd)
    for step in range(3):
        pair.reduce(step, set_to_none=False)


def test_ranks_without_a_gradient_contribute_zeros(hvd: Any) -> None:
    net, alone = make_net(), make_net()
    optimizer = distributed_sgd(hvd, net)
    last = hvd.size() - 1
    for step in range(4):
        optimizer.zero_grad()
        alone.zero_grad()
        # Only the last rank computes anything in odd steps, and only it uses the spare layer.
        if step % 2 == 0 or hvd.rank() == last:
            loss_of(net, batch(hvd.rank(), step), use_spare=hvd.rank() == last).backward()
        for rank in range(hvd.size()):
            if step % 2 == 0 or rank == last:
                (loss_of(alone, batch(rank, step), use_spare=rank == last) / hvd.size()).backward()
        optimizer.synchronize()
        assert_same_gradients(net, alone)
        update(optimizer)
        alone.load_state_dict(net.state_dict())
    optimizer.zero_grad()
    optimizer.step()
    assert_identical(hvd, net)


def test_gradient_set_by_hand_is_reduced(hvd: Any) -> None:
    net, optimizer = wrapped_net(hvd)
    for _ in range(2):
        optimizer.zero_grad()
        for parameter in net.parameters():
            parameter.grad = torch.full_like(parameter, float(hvd.rank()))
        optimizer.synchronize()
        for parameter in net.parameters():
            assert_close(parameter.grad, torch.full_like(parameter, (hvd.size() - 1) / 2))


def test_several_optimizers_share_a_backward_pass(hvd: Any) -> None:
    nets, alone = ([make_net(1), make_net(2)] for _ in range(2))
    # No names: those of the two are equal.
    optimizers = [hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1)) for net in nets]
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        (loss_on(nets[0], [hvd.rank()], step) * loss_on(nets[1], [hvd.rank()], step)).backward()
        for optimizer in optimizers:
            optimizer.synchronize()
        for net in alone:
            net.zero_grad()
        for rank in range(hvd.size()):
            (loss_on(alone[0], [rank], step) * loss_on(alone[1], [rank], step) / hvd.size()).backward()
        for net, expected in zip(nets, alone, strict=True):
            assert_same_gradients(net, expected, 1e-5)


def adasum(vectors: list[np.ndarray]) -> np.ndarray:
    """Return the Adasum of 2^n vectors by its definition, neighbours first."""
    while len(vectors) > 1:
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [(1 - a @ b / (2 * (a @ a) or 1.0)) * a + (1 - a @ b / (2 * (b @ b) or 1.0)) * b for a, b in pairs]
    return vectors[0]


def needs_a_power_of_two(hvd: Any) -> None:
    if hvd.size() in (1, 3):
        raise Skip("Adasum needs a power of two")


def test_adasum_combines_the_updates(hvd: Any) -> None:
    needs_a_power_of_two(hvd)
    net, replicas = make_net(), [make_net() for _ in range(hvd.size())]
    optimizer, plain = distributed_sgd(hvd, net, op=hvd.Adasum), [sgd(replica) for replica in replicas]
    for step in range(3):
        train_step(optimizer, net, batch(hvd.rank(), step))
        starts = [parameter.detach().clone() for parameter in replicas[0].parameters()]
        for rank, replica in enumerate(replicas):
            train_step(plain[rank], replica, batch(rank, step))
        for index, start in enumerate(starts):
            members = [list(replica.parameters())[index] for replica in replicas]
            deltas = [(member.detach() - start).flatten().double().numpy() for member in members]
            with torch.no_grad():
                for member in members:
                    member.copy_(start + torch.from_numpy(adasum(deltas)).float().view_as(start))
            assert_close(list(net.parameters())[index].detach(), members[0].detach(), 1e-5)
    assert_identical(hvd, net)
    hint = (
        "HINT: call optimizer.step() outside of optimizer.skip_synchronize(); with Adasum, gradients stay on their "
        "rank."
    )
    with told(AssertionError, "Skipping synchronization is not supported when using Adasum optimizer.", hint):
        optimizer.skip_synchronize().__enter__()


def test_adasum_counts_passes(hvd: Any) -> None:
    needs_a_power_of_two(hvd)
    net, optimizer = wrapped_net(hvd, op=hvd.Adasum, backward_passes_per_step=2)
    for _ in range(2):
        loss_of(net, batch(hvd.rank())).backward()
        loss_of(net, batch(hvd.rank())).backward()
        with told(AssertionError, "backward_passes_per_step"):
            loss_of(net, batch(hvd.rank())).backward()
        with told(AssertionError, "optimizer.zero_grad()"):
            optimizer.zero_grad()
        optimizer.synchronize()
        optimizer.step()
        optimizer.zero_grad()
    assert_identical(hvd, net)
