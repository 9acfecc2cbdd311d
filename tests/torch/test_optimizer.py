"""What every training loop relies on: the right gradients, and the same bits everywhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.on_ranks import on_ranks
from tests.torch.optimizer_support import (
    assert_close,
    assert_identical,
    assert_same_gradients,
    batch,
    digest,
    joined_batch,
    loss_of,
    make_net,
    train_step,
)

pytestmark = [
    on_ranks(1, 2, 3, 4, every_size=True),
    on_ranks(2, 3, name="small buckets", HOROVOD_FUSION_THRESHOLD="64"),
    on_ranks(3, 4, name="two nodes", per_node=2),
    on_ranks((4, "mpi"), name="two nodes, small buckets", per_node=2, HOROVOD_FUSION_THRESHOLD="64"),
    on_ranks((3, "torch"), name="no memory", HVDKIT_NODE_MEMORY="0"),
    # Algorithms that each sum in an order of their own.
    on_ranks((3, "mpi"), name="ring", HVDKIT_NODE_MEMORY="0", HVDKIT_ALLREDUCE="ring"),
    on_ranks((3, "torch"), name="butterfly", HVDKIT_NODE_MEMORY="0", HVDKIT_ALLREDUCE="butterfly"),
    on_ranks((2, "torch"), name="device", runner="tests.transports.pretend_device"),
    on_ranks((2, "torch"), name="shared device", runner="tests.transports.pretend_device", TESTS_SHARED_DEVICE="1"),
]


def distributed_sgd(hvd: Any, net: nn.Module, **options: Any) -> Any:
    """A DistributedOptimizer with named parameters."""
    sgd = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    return hvd.DistributedOptimizer(sgd, named_parameters=net.named_parameters(), **options)


def test_gradient_equals_one_process_on_the_joined_batch(hvd: Any) -> None:
    # In float64: PyTorch rounds a product of matrices differently for a batch of another size.
    net, alone = make_net().double(), make_net().double()
    optimizer, plain = distributed_sgd(hvd, net), torch.optim.SGD(alone.parameters(), lr=0.05, momentum=0.9)
    for step in range(4):
        inputs, targets = batch(hvd.rank(), step)
        train_step(optimizer, net, (inputs.double(), targets.double()))
        inputs, targets = joined_batch(hvd.size(), step)
        train_step(plain, alone, (inputs.double(), targets.double()))
        for ours, theirs in zip(net.parameters(), alone.parameters(), strict=True):
            assert_close(ours.detach(), theirs.detach(), 1e-12)
            if theirs.grad is not None:
                assert_close(ours.grad, theirs.grad, 1e-12)


def test_parameters_are_bit_identical_on_ranks_and_in_runs(hvd: Any) -> None:
    digests = []
    for _ in range(2):
        net = make_net()
        optimizer = distributed_sgd(hvd, net)
        for step in range(50):
            train_step(optimizer, net, batch(hvd.rank(), step))
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
    gradients = []
    for rank in range(hvd.size()):
        alone = make_net()
        loss_of(alone, batch(rank), use_spare=True).backward()
        gradients.append([parameter.grad for parameter in alone.parameters()])
    for op, reduce in reductions.items():
        net = make_net()
        optimizer = distributed_sgd(hvd, net, op=op)
        for _ in range(2):  # the second step comes through the hooks
            optimizer.zero_grad()
            loss_of(net, batch(hvd.rank()), use_spare=True).backward()
            optimizer.synchronize()
            for parameter, of_ranks in zip(net.parameters(), zip(*gradients, strict=True), strict=True):
                assert_close(parameter.grad, reduce(torch.stack(of_ranks)))


def test_float64_float16_and_bfloat16_parameters(hvd: Any) -> None:
    for dtype, relative in ((torch.float64, 1e-12), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)):
        values = nn.Parameter(torch.ones(7, dtype=dtype))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([values], lr=1.0))
        for _ in range(3):
            optimizer.zero_grad()
            (values * (hvd.rank() + 1)).sum().backward()
            optimizer.synchronize()
            assert values.grad.dtype == dtype
            assert_close(values.grad, torch.full((7,), (hvd.size() + 1) / 2, dtype=dtype), relative)
            with optimizer.skip_synchronize():
                optimizer.step()


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
        with optimizer.skip_synchronize():
            optimizer.step()


def test_scalar_and_empty_parameters(hvd: Any) -> None:
    scalar, empty = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.ones(0, 3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([scalar, empty], lr=1.0))
    for _ in range(3):
        optimizer.zero_grad()
        (scalar * hvd.rank() + empty.sum()).backward()
        optimizer.synchronize()
        assert scalar.grad.shape == ()
        assert empty.grad.shape == (0, 3)
        assert_close(scalar.grad, torch.tensor((hvd.size() - 1) / 2))


def test_memory_formats_are_kept(hvd: Any) -> None:
    net = make_net().to(memory_format=torch.channels_last)
    alone = make_net()
    optimizer = distributed_sgd(hvd, net)
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(net, batch(hvd.rank())).backward()
        optimizer.synchronize()
    loss_of(alone, joined_batch(hvd.size())).backward()
    assert_same_gradients(net, alone)
    assert net.conv.weight.grad.stride() == net.conv.weight.stride()


def test_gradients_accumulate_over_backward_passes(hvd: Any) -> None:
    net, alone = make_net(), make_net()
    optimizer = distributed_sgd(hvd, net, backward_passes_per_step=2)
    for _ in range(3):
        optimizer.zero_grad()
        alone.zero_grad()
        for part in range(2):
            loss_of(net, batch(hvd.rank(), part)).backward()
            loss_of(alone, joined_batch(hvd.size(), part)).backward()
        optimizer.synchronize()
        assert_same_gradients(net, alone)
    optimizer.set_backward_passes_per_step(1)
    assert optimizer.backward_passes_per_step == 1
    optimizer.zero_grad()
    alone.zero_grad()
    loss_of(net, batch(hvd.rank())).backward()
    loss_of(alone, joined_batch(hvd.size())).backward()
    optimizer.synchronize()
    assert_same_gradients(net, alone)


def test_step_before_all_passes_reduces_what_is_there(hvd: Any) -> None:
    net, alone = make_net(), make_net()
    optimizer = distributed_sgd(hvd, net, backward_passes_per_step=3)
    for _ in range(2):
        optimizer.zero_grad()
        alone.zero_grad()
        loss_of(net, batch(hvd.rank())).backward()
        loss_of(alone, joined_batch(hvd.size())).backward()
        optimizer.synchronize()
        assert_same_gradients(net, alone)


def test_gradients_kept_in_place_accumulate_from_zeros(hvd: Any) -> None:
    net, alone = make_net(), make_net()
    optimizer = distributed_sgd(hvd, net)
    for _ in range(3):
        optimizer.zero_grad(set_to_none=False)
        alone.zero_grad()
        loss_of(net, batch(hvd.rank())).backward()
        loss_of(alone, joined_batch(hvd.size())).backward()
        optimizer.synchronize()
        assert_same_gradients(net, alone)


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
        with optimizer.skip_synchronize():
            optimizer.step()
        alone.load_state_dict(net.state_dict())
    optimizer.zero_grad()
    optimizer.step()
    assert_identical(hvd, net)


def test_gradient_set_by_hand_is_reduced(hvd: Any) -> None:
    net = make_net()
    optimizer = distributed_sgd(hvd, net)
    for _ in range(2):
        optimizer.zero_grad()
        for parameter in net.parameters():
            parameter.grad = torch.full_like(parameter, float(hvd.rank()))
        optimizer.synchronize()
        for parameter in net.parameters():
            assert_close(parameter.grad, torch.full_like(parameter, (hvd.size() - 1) / 2))


def test_several_optimizers_share_a_backward_pass(hvd: Any) -> None:
    nets = [make_net(1), make_net(2)]
    alone = [make_net(1), make_net(2)]
    # No names: those of the two are equal.
    optimizers = [hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1)) for net in nets]
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        (loss_of(nets[0], batch(hvd.rank(), step)) * loss_of(nets[1], batch(hvd.rank(), step))).backward()
        for optimizer in optimizers:
            optimizer.synchronize()
        for net in alone:
            net.zero_grad()
        for rank in range(hvd.size()):
            losses = [loss_of(net, batch(rank, step)) for net in alone]
            (losses[0] * losses[1] / hvd.size()).backward()
        for net, expected in zip(nets, alone, strict=True):
            assert_same_gradients(net, expected, 1e-5)
