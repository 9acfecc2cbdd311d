"""HVDKIT_VERIFY on real ranks: what makes parameters differ is an error on all ranks, and nothing else is."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hvdkit import kernels
from hvdkit.engine.session import runtime
from hvdkit.errors import ParametersDifferError
from hvdkit.torch.gradients.verification import CHUNK, device_hash, hashes_of
from tests.on_ranks import on_ranks
from tests.ranks import Skip
from tests.told import told, warned
from tests.torch.optimizer_support import (
    assert_close,
    assert_identical,
    batch,
    distributed_sgd,
    loss_of,
    make_net,
    no_warnings,
    train,
    train_step,
    update,
    wrapped_net,
)

pytestmark = on_ranks(2, 3, HVDKIT_VERIFY="1", HVDKIT_DYNAMIC_PROCESS_SETS="1")

BROADCAST = "hvd.broadcast_parameters(model"


@contextmanager
def differing(hvd: Any, step: int, *texts: str) -> Iterator[None]:
    """The block raises on every rank that parameters differ after a step, and how."""
    with told(ParametersDifferError, f"after step {step}:", "HINT", *texts):
        yield


def last(hvd: Any) -> bool:
    return bool(hvd.rank() == hvd.size() - 1)


def against_the_last(hvd: Any) -> str:
    """How the last rank is told from the others."""
    if hvd.size() == 2:
        return "The values of rank 1 differ from those of rank 0"
    others = ", ".join(map(str, range(hvd.size() - 1)))
    return f"The values of rank {hvd.size() - 1} differ from those of ranks {others}"


def averages_and_adasum(hvd: Any) -> list[Any]:
    """Return reductions of which the second is compared in its own step."""
    return [hvd.Average, hvd.Sum if hvd.size() == 3 else hvd.Adasum]


def go_on_from_rank_0(hvd: Any, optimizer: Any, net: nn.Module, steps: int = 3) -> None:
    """Broadcast and train: the ranks stay alike."""
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    train(hvd, optimizer, net, steps)
    assert_identical(hvd, net)


def test_other_weights_from_the_start_are_a_warning_and_then_an_error(hvd: Any) -> None:
    net, optimizer = wrapped_net(hvd, seed=1 + last(hvd))
    with warned(BROADCAST):  # on every rank
        train_step(optimizer, net, batch(hvd.rank()))
    with differing(hvd, 2, "'conv.weight', 'conv.bias'", "(of 8) differ", "SGD.", BROADCAST):
        train_step(optimizer, net, batch(hvd.rank()))
    go_on_from_rank_0(hvd, optimizer, net)


def test_a_broadcast_after_the_first_step_is_in_time(hvd: Any) -> None:
    average, other = averages_and_adasum(hvd)
    for op, waits in ((average, False), (average, True), (other, False)):
        net, optimizer = wrapped_net(hvd, seed=1 + last(hvd), op=op)
        loss_of(net, batch(hvd.rank())).backward()
        if waits:
            optimizer.synchronize()
            update(optimizer)
        else:
            optimizer.step()
        go_on_from_rank_0(hvd, optimizer, net, 4)


def test_a_parameter_written_on_one_rank_is_named_with_rank_and_step(hvd: Any) -> None:
    for op in averages_and_adasum(hvd):
        net, optimizer = wrapped_net(hvd, op=op)
        train(hvd, optimizer, net, 4)
        if last(hvd):
            net.out.bias.data[1] += 1e-6
        with differing(hvd, 5, "'out.bias' (of 8) differ", against_the_last(hvd)):
            train_step(optimizer, net, batch(hvd.rank()))


def test_a_gradient_changed_unseen_is_found(hvd: Any) -> None:
    net, optimizer = wrapped_net(hvd)
    train(hvd, optimizer, net, 2)
    loss_of(net, batch(hvd.rank())).backward()
    optimizer.synchronize()
    if last(hvd):
        net.hidden.weight.grad.data.mul_(1.01)
    update(optimizer)  # a rank may leave this out, so nobody waits for others here
    with differing(hvd, 3, "'hidden.weight' (of 8) differ", "through .data", against_the_last(hvd)):
        train_step(optimizer, net, batch(hvd.rank()))


def test_clipping_scaling_and_steps_left_out_are_none(hvd: Any) -> None:
    net, optimizer = wrapped_net(hvd)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(8):
        optimizer.zero_grad()
        loss = loss_of(net, batch(hvd.rank(), step)) * (float("inf") if step in (0, 4) else 1.0)
        scaler.scale(loss).backward()
        with contextlib.ExitStack() as stack:
            if step % 2:
                optimizer.synchronize()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(net.parameters(), 0.1)
                stack.enter_context(optimizer.skip_synchronize())
            scaler.step(optimizer)
        scaler.update()
    assert_identical(hvd, net)


def test_a_rank_that_leaves_its_update_out_stops_nobody(hvd: Any) -> None:
    net, optimizer = wrapped_net(hvd)
    for step in range(3):
        loss_of(net, batch(hvd.rank(), step)).backward()
        optimizer.synchronize()
        if step != 1 or not last(hvd):
            update(optimizer)
        optimizer.zero_grad()
    with differing(hvd, 3, "a step that one rank left out", against_the_last(hvd)):
        train_step(optimizer, net, batch(hvd.rank()))


def test_every_way_to_train_passes(hvd: Any) -> None:
    for options in ({"backward_passes_per_step": 2}, {"compression": hvd.Compression.fp16}, {"op": hvd.Sum}):
        net, optimizer = wrapped_net(hvd, **options)
        for step in range(3):
            for _ in range(options.get("backward_passes_per_step", 1)):
                loss_of(net, batch(hvd.rank(), step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_identical(hvd, net)
    nets = [make_net(), make_net(2)]
    optimizers = [distributed_sgd(hvd, net) for net in nets]
    for step in range(4):
        for net, optimizer in zip(nets, optimizers, strict=True):
            train_step(optimizer, net, batch(hvd.rank(), step))
    for net in nets:
        assert_identical(hvd, net)


def test_parameters_frozen_thawed_and_added_go_on(hvd: Any) -> None:
    net, optimizer = wrapped_net(hvd)
    for step in range(6):
        net.conv.weight.requires_grad_(step % 3 != 0)
        train_step(optimizer, net, batch(hvd.rank(), step))
    extra = nn.Parameter(torch.zeros(3))
    optimizer.add_param_group({"params": [extra]})
    train(hvd, optimizer, net)
    assert_identical(hvd, net)
    extra.data += hvd.rank()
    with differing(hvd, 10):
        train_step(optimizer, net, batch(hvd.rank()))


def test_sparse_and_dense_gradients_together(hvd: Any) -> None:
    torch.manual_seed(1)
    table, dense = nn.Embedding(20, 3, sparse=True), nn.Linear(3, 1)
    if last(hvd):
        table.weight.data[-1] += 1  # which no rank looks up
    named = [("table", table.weight), *dense.named_parameters()]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([one for _, one in named], lr=0.1), named)

    def step() -> None:
        optimizer.zero_grad()
        dense(table(torch.arange(hvd.rank(), hvd.rank() + 4))).sum().backward()
        optimizer.step()

    with warned("'table' (of 3) differ"):
        step()
    for _ in range(8):  # a large table is looked at seldom
        step()
    with differing(hvd, 10, "'table' (of 3) differ", against_the_last(hvd)):
        step()


def test_ranks_that_have_joined_are_left_out(hvd: Any) -> None:
    for op in averages_and_adasum(hvd):
        net, optimizer = wrapped_net(hvd, op=op)
        train(hvd, optimizer, net, 3 + 2 * hvd.rank())
        hvd.join()
        # Adasum counts its steps from the join.
        step = 1 if op is hvd.Adasum else 4 + 2 * (hvd.size() - 1)
        with differing(hvd, step, *[] if op is hvd.Adasum else ["hvd.join() without a broadcast after it"]):
            train_step(optimizer, net, batch(hvd.rank()))
        go_on_from_rank_0(hvd, optimizer, net)


def test_process_sets_are_compared_among_themselves(hvd: Any) -> None:
    if hvd.size() < 3:
        raise Skip("needs a set of several ranks, and others")
    first, rest = hvd.add_process_set([0]), hvd.add_process_set(list(range(1, hvd.size())))
    mine = rest if rest.included() else first
    net, optimizer = wrapped_net(hvd, seed=1 + (hvd.rank() == 0), process_set=mine)
    train(hvd, optimizer, net, 3)
    if last(hvd):
        net.out.bias.data += 1
    if hvd.rank():
        with differing(hvd, 4, f"The values of rank {hvd.size() - 1} differ from those of rank 1"):
            train_step(optimizer, net, batch(hvd.rank()))
    # One of a set has joined, which takes no part in the set's named operations.
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    train(hvd, optimizer, net, 1 + hvd.rank())
    hvd.join()
    hvd.remove_process_set(first)
    hvd.remove_process_set(rest)


@contextmanager
def threads_by_rank(hvd: Any) -> Iterator[None]:
    """In the block, which is no small one, no two ranks compute on as many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 + hvd.rank())
    try:
        yield
    finally:
        torch.set_num_threads(before)


def test_rounding_between_ranks_that_compute_otherwise_is_one_warning(hvd: Any) -> None:
    for op in averages_and_adasum(hvd):
        with threads_by_rank(hvd):
            net, optimizer = wrapped_net(hvd, op=op)
            train(hvd, optimizer, net, 2)
            if last(hvd):
                net.hidden.weight.data *= 1 + 2e-6
            with warned("do not compute alike", times=int(hvd.rank() == 0)):
                train(hvd, optimizer, net, 10)
            if last(hvd):
                net.hidden.weight.data[0, 0] += 1
            with differing(hvd, 13, "rounding does not explain this", "of the norm of 'hidden.weight'"):
                train_step(optimizer, net, batch(hvd.rank()))
            hvd.broadcast_parameters(net.state_dict(), root_rank=0)
            with no_warnings():
                train(hvd, optimizer, net)


def test_unrelated_models_are_an_error_whatever_ranks_compute_on(hvd: Any) -> None:
    for op in averages_and_adasum(hvd):
        with threads_by_rank(hvd):
            net, optimizer = wrapped_net(hvd, seed=1 + hvd.rank(), op=op)
            with warned(BROADCAST):
                train_step(optimizer, net, batch(hvd.rank()))
            with differing(hvd, 2, "rounding does not explain this"):
                train_step(optimizer, net, batch(hvd.rank()))


def test_differences_are_measured_where_the_next_step_tells_them(hvd: Any) -> None:
    with threads_by_rank(hvd):
        net, optimizer = wrapped_net(hvd)

        def step() -> None:
            loss_of(net, batch(hvd.rank())).backward()
            optimizer.synchronize()
            update(optimizer)
            optimizer.zero_grad()

        step()
        if last(hvd):
            net.out.bias.data *= 1 + 1e-5
        with warned("do not compute alike", times=int(hvd.rank() == 0)):
            for _ in range(4):
                step()
        if last(hvd):
            net.out.bias.data *= 1.01
        step()
        with differing(hvd, 6, "rounding does not explain this", "of the norm of 'out.bias'"):
            step()


def strange_parameters() -> list[nn.Parameter]:
    """Parameters whose sizes and strides are not those of most tensors."""
    torch.manual_seed(1)
    trained = [
        torch.from_numpy(np.empty(0)),
        torch.from_numpy(np.empty((0, 3), np.float32).T),
        torch.ones(9)[3:3],
        torch.tensor(1.0),
        torch.ones(9)[::5][:1],
        torch.ones(9).bfloat16()[::5][:1],
        torch.randn(4, 3).t(),
        torch.randn(12)[::2],
        torch.randn(2, 3, 2, 2).to(memory_format=torch.channels_last),
        torch.randn(3, dtype=torch.float16),
        torch.randn(3, dtype=torch.bfloat16),
        torch.randn(3, dtype=torch.float64),
    ]
    frozen = [
        torch.ones(1).expand(5),
        torch.arange(3),
        torch.tensor([True, False]),
        torch.ones(3, dtype=torch.complex64),
        torch.ones(3, dtype=torch.complex64).conj(),
        torch.ones(3).to(torch.float8_e4m3fn),
        torch.ones(3, device="meta"),
        torch.eye(3).to_sparse(),
        torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    ]
    given_back = nn.Parameter(torch.ones(8), requires_grad=False)
    given_back.untyped_storage().resize_(0)
    parameters = [nn.Parameter(one) for one in trained] + [nn.Parameter(one, requires_grad=False) for one in frozen]
    return [*parameters, given_back, nn.UninitializedParameter(requires_grad=False)]


def test_parameters_of_strange_sizes_and_strides_are_no_different(hvd: Any) -> None:
    optimizers = []
    for is_ours in (True, False):
        parameters = strange_parameters()
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        optimizer = hvd.DistributedOptimizer(optimizer) if is_ours else hvd.unsynchronized(optimizer)
        for step in range(3):
            loss = sum((one.double() ** 2).sum() for one in parameters if one.requires_grad)
            (loss * ((1 + step) * (1 + hvd.rank() if is_ours else (hvd.size() + 1) / 2))).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizers.append(parameters)
    for ours, expected in zip(*optimizers, strict=True):
        if ours.requires_grad and ours.numel():
            assert_close(ours.double(), expected.double(), {2: 1e-2, 4: 1e-6, 8: 1e-12}[ours.element_size()])
    with threads_by_rank(hvd):
        parameters = strange_parameters()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1e-3))
        if last(hvd):
            parameters[0] = nn.Parameter(parameters[0])
            parameters[3].data *= 2
        for step in (1, 2):
            sum((one.double() ** 2).sum() for one in parameters[1:] if one.requires_grad).backward()
            with differing(hvd, 2, "'allreduce.noname.0.3'") if step == 2 else warned(BROADCAST):
                optimizer.step()
            optimizer.zero_grad()


@contextmanager
def verifying(hvd: Any, value: str | None) -> Iterator[None]:
    """Run the block in a job of this HVDKIT_VERIFY, or of none."""
    before = os.environ.pop("HVDKIT_VERIFY")
    if value is not None:
        os.environ["HVDKIT_VERIFY"] = value
    hvd.shutdown()
    hvd.init()
    try:
        yield
    finally:
        os.environ["HVDKIT_VERIFY"] = before
        hvd.shutdown()
        hvd.init()


def test_nothing_is_compared_where_it_is_switched_off(hvd: Any) -> None:
    with verifying(hvd, "0"):
        net = make_net(seed=hvd.rank())
        train(hvd, distributed_sgd(hvd, net), net, 11)


def test_by_default_the_first_step_warns_and_the_tenth_raises(hvd: Any) -> None:
    with verifying(hvd, None):
        for op in averages_and_adasum(hvd):
            net, optimizer = wrapped_net(hvd, seed=hvd.rank(), op=op)
            with warned(BROADCAST):
                train(hvd, optimizer, net, 9)
            with differing(hvd, 10, BROADCAST):
                train_step(optimizer, net, batch(hvd.rank()))
        net, optimizer = wrapped_net(hvd)
        for step in range(1, 10):
            train_step(optimizer, net, batch(hvd.rank(), step))
            net.out.bias.data += hvd.rank()
        with differing(hvd, 10, "'out.bias' (of 8) differ", "HVDKIT_VERIFY=1"):
            train_step(optimizer, net, batch(hvd.rank()))


def test_the_rest_of_the_job_goes_on(hvd: Any) -> None:
    assert runtime.engine().mailbox.error is None
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [hvd.size()] * 2


@pytest.mark.parametrize("hashes", [hashes_of, lambda some: np.array([device_hash(one).item() for one in some])])
def test_hashes_follow_values_not_strides_and_see_one_bit(hashes) -> None:
    torch.manual_seed(1)
    wide = torch.randn(5, 7, 3, 3)
    types = [wide.half(), wide.bfloat16(), wide.double(), wide.to(torch.complex64), wide.to(torch.complex128).conj()]
    layouts = [wide, wide.to(memory_format=torch.channels_last), wide[:, ::2]]
    tensors = [*layouts, *types, wide > 0, torch.tensor(3.0), torch.zeros(0)]
    copies = [tensor.clone() for tensor in tensors]
    before = hashes(tensors)
    assert all(map(torch.equal, tensors, copies))
    assert before[0] == before[1]
    assert len(set(before.tolist())) == len(tensors) - 1
    for tensor, its in zip(tensors, before, strict=True):
        assert hashes([tensor.clone()])[0] == its, tensor.dtype
        flat = tensor.clone().reshape(-1)
        for index in range(0, flat.numel(), 13):
            other = flat.clone()
            other[index] = ~other[index] if tensor.dtype is torch.bool else 3 - other[index]
            assert hashes([other])[0] != its
    assert len(set(hashes([torch.tensor([0.0, -0.0]), torch.tensor([-0.0, 0.0]), torch.zeros(2)]).tolist())) == 3


def test_hashes_are_the_kernels_checksum_and_on_a_device_the_weighted_sum_that_it_says() -> None:
    numbers = torch.randn(1000)
    assert hashes_of([numbers])[0] == kernels.checksum(numbers.numpy().view(np.uint8))
    numbers = torch.randint(-(2**31), 2**31 - 1, (CHUNK + 3,), dtype=torch.int32)
    words = numbers.numpy().astype(np.int64).view(np.uint64)
    offsets = np.arange(CHUNK, dtype=np.uint64)
    weights = (offsets * np.uint64(0x9E3779B97F4A7C15)) ^ (offsets << np.uint64(21)) | np.uint64(1)
    with np.errstate(over="ignore"):
        first = (words[:CHUNK] * weights).sum(dtype=np.uint64)
        expected = first * np.uint64(0xC2B2AE3D27D4EB4F) + (words[CHUNK:] * weights[:3]).sum(dtype=np.uint64)
    assert device_hash(numbers).numpy().view(np.uint64) == expected
