"""What happens to an optimizer over its life: made, changed, copied, pickled, given up, made again."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from time import monotonic, sleep
from typing import Any

import pytest
import torch
from torch import nn

from tests.on_ranks import on_ranks
from tests.torch.optimizer_support import (
    assert_close,
    assert_identical,
    assert_same_gradients,
    batch,
    expect,
    joined_batch,
    loss_of,
    make_net,
    train_step,
)
from tests.torch.test_optimizer import distributed_sgd

pytestmark = on_ranks(2, 3)


def assert_reduces(hvd: Any, optimizer: Any, net: nn.Module, steps: int = 2) -> None:
    """The gradients of ``net`` are those of one process on the joined batch, in this and the next steps."""
    alone = make_net()
    alone.load_state_dict(net.state_dict())
    for ours, theirs in zip(net.parameters(), alone.parameters(), strict=True):
        theirs.requires_grad_(ours.requires_grad)
    for step in range(steps):
        optimizer.zero_grad()
        alone.zero_grad()
        loss_of(net, batch(hvd.rank(), step)).backward()
        loss_of(alone, joined_batch(hvd.size(), step)).backward()
        optimizer.synchronize()
        for ours, theirs in zip(net.parameters(), alone.parameters(), strict=True):
            if theirs.grad is not None:
                assert_close(ours.grad, theirs.grad)


def test_class_state_and_defaults_are_the_wrapped_ones(hvd: Any) -> None:
    net = make_net()
    adam = torch.optim.Adam(net.parameters(), lr=0.01, betas=(0.8, 0.9))
    loss_of(net, joined_batch(hvd.size())).backward()
    adam.step()
    adam.zero_grad()
    optimizer = hvd.DistributedOptimizer(adam, named_parameters=net.named_parameters())
    assert isinstance(optimizer, torch.optim.Adam)
    assert type(optimizer).__name__ == "Adam"
    assert type(optimizer).__module__ == hvd.DistributedOptimizer.__module__
    assert optimizer.defaults is adam.defaults
    assert optimizer.state is adam.state
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)
    assert all(state["step"] == 1 for state in optimizer.state.values())
    train_step(optimizer, net, batch(hvd.rank()))
    assert optimizer.state[net.out.weight]["step"] == 2
    assert_identical(hvd, net)


def test_step_hooks_run_once_and_on_reduced_gradients(hvd: Any) -> None:
    net, alone = make_net(), make_net()
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    calls = []
    sgd.register_step_post_hook(lambda *_: calls.append("after"))
    optimizer = hvd.DistributedOptimizer(sgd, named_parameters=net.named_parameters())
    optimizer.register_step_pre_hook(lambda *_: (calls.append("before"), assert_same_gradients(net, alone))[:0] or None)
    loss_of(alone, joined_batch(hvd.size())).backward()
    for parameter in alone.spare.parameters():
        parameter.grad = torch.zeros_like(parameter)
    loss_of(net, batch(hvd.rank())).backward()
    for parameter in net.spare.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert calls == ["before", "after"]


def test_plain_step_is_the_parent_class(hvd: Any) -> None:
    net = make_net()
    optimizer = distributed_sgd(hvd, net)
    super(type(optimizer), optimizer).step()  # no rank waits for another
    assert type(optimizer).__bases__ == (torch.optim.SGD,)


def test_gradients_that_were_moved_elsewhere_are_still_reduced(hvd: Any) -> None:
    net = make_net()
    optimizer = distributed_sgd(hvd, net)
    train_step(optimizer, net, batch(hvd.rank()))
    for step in range(2):
        for parameter in net.parameters():
            assert parameter.grad is not None
            parameter.grad.data = parameter.grad.data.clone()  # the same tensor, with memory of its own
        alone = make_net()
        alone.load_state_dict(net.state_dict())
        optimizer.zero_grad(set_to_none=False)
        loss_of(net, batch(hvd.rank(), step)).backward()
        loss_of(alone, joined_batch(hvd.size(), step)).backward()
        optimizer.synchronize()
        assert_same_gradients(net, alone)


def test_a_model_of_another_dtype_is_still_reduced(hvd: Any) -> None:
    net = make_net()
    optimizer = distributed_sgd(hvd, net)
    train_step(optimizer, net, batch(hvd.rank()))
    net.double()
    for set_to_none in (False, True):
        alone = make_net().double()
        alone.load_state_dict(net.state_dict())
        optimizer.zero_grad(set_to_none=set_to_none)
        loss_of(net, tuple(data.double() for data in batch(hvd.rank()))).backward()
        loss_of(alone, tuple(data.double() for data in joined_batch(hvd.size()))).backward()
        optimizer.synchronize()
        assert_same_gradients(net, alone)


def test_frozen_and_unfrozen_parameters(hvd: Any) -> None:
    net = make_net()
    net.hidden.requires_grad_(False)
    optimizer = distributed_sgd(hvd, net)
    assert_reduces(hvd, optimizer, net)
    assert net.hidden.weight.grad is None
    net.hidden.requires_grad_(True)
    net.out.requires_grad_(False)
    for parameter in net.out.parameters():
        parameter.grad = None
    assert_reduces(hvd, optimizer, net, steps=3)
    assert net.out.weight.grad is None
    net.out.requires_grad_(True)
    assert_reduces(hvd, optimizer, net, steps=3)
    optimizer.zero_grad()
    for frozen in [True, False] * 3:  # every other step
        net.conv.requires_grad_(not frozen)
        train_step(optimizer, net, batch(hvd.rank()))
    assert_identical(hvd, net)


def test_frozen_parameter_is_not_sent(hvd: Any) -> None:
    net = make_net()
    optimizer = distributed_sgd(hvd, net)
    train_step(optimizer, net, batch(hvd.rank()))
    net.hidden.requires_grad_(False)
    train_step(optimizer, net, batch(hvd.rank()))
    planned = optimizer._synchronizer._agreement.planned
    assert id(net.hidden.weight) not in planned.index
    assert net.hidden.weight.grad is None
    assert len(planned.parameters) == 6


def test_frozen_parameters_with_a_custom_compressor(hvd: Any) -> None:
    class Same(hvd.Compression.none):  # type: ignore[misc,name-defined]
        pass

    net = make_net()
    optimizer = distributed_sgd(hvd, net, compression=Same)
    for frozen in (False, True, False):
        net.hidden.requires_grad_(not frozen)
        net.zero_grad()
        assert_reduces(hvd, optimizer, net)


def test_added_parameter_group(hvd: Any) -> None:
    net = make_net()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([*net.conv.parameters(), *net.out.parameters(), *net.spare.parameters()], lr=0.1),
        named_parameters=net.named_parameters(),
    )
    for parameter in net.hidden.parameters():
        parameter.requires_grad_(False)
    assert_reduces(hvd, optimizer, net)
    net.hidden.requires_grad_(True)
    optimizer.add_param_group({"params": list(net.hidden.parameters()), "lr": 0.2})
    assert_reduces(hvd, optimizer, net, steps=3)
    with optimizer.skip_synchronize():
        optimizer.step()
    assert_identical(hvd, net)


def test_pickle_gives_a_distributed_optimizer(hvd: Any) -> None:
    net = make_net()
    optimizer = distributed_sgd(hvd, net)
    train_step(optimizer, net, batch(hvd.rank()))
    optimizer.zero_grad()
    for dump in (pickle.dumps, lambda both: torch_bytes(both)):
        data = dump((net, optimizer))
        net2, optimizer2 = pickle.loads(data) if dump is pickle.dumps else torch_load(data)  # noqa: S301
        assert type(optimizer2) is type(optimizer)
        assert optimizer2.param_groups[0]["params"][0] is next(net2.parameters())
        assert optimizer2.process_set is hvd.global_process_set
        buffers = [state["momentum_buffer"] for state in optimizer2.state.values()]
        assert len(buffers) == len(optimizer.state) >= 6
        assert_reduces(hvd, optimizer2, net2)
    assert_reduces(hvd, optimizer, net)


def torch_bytes(both: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(both, buffer)
    return buffer.getvalue()


def torch_load(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


def test_deepcopy_follows_the_model(hvd: Any) -> None:
    net = make_net()
    optimizer = distributed_sgd(hvd, net, groups=[list(net.out.parameters())])
    train_step(optimizer, net, batch(hvd.rank()))
    optimizer.zero_grad()
    net2, optimizer2 = copy.deepcopy((net, optimizer))
    assert optimizer2.param_groups[0]["params"][0] is net2.conv.weight
    assert optimizer2.process_set is optimizer.process_set
    for _ in range(3):
        train_step(optimizer2, net2, batch(hvd.rank()))
        train_step(optimizer, net, batch(hvd.rank()))
    for ours, theirs in zip(net.parameters(), net2.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_copy_made_on_one_rank_only(hvd: Any) -> None:
    net = make_net()
    optimizer = distributed_sgd(hvd, net)
    kept = copy.deepcopy((net, optimizer)) if hvd.rank() == 0 else None
    for _ in range(2):
        net = make_net()
        optimizer = distributed_sgd(hvd, net)
        assert_reduces(hvd, optimizer, net)
    del kept


def test_state_dict_round_trip(hvd: Any) -> None:
    net = make_net()
    optimizer = distributed_sgd(hvd, net)
    train_step(optimizer, net, batch(hvd.rank()))
    saved = copy.deepcopy(optimizer.state_dict())
    assert set(saved) == {"state", "param_groups"}
    plain = torch.optim.SGD(net.parameters(), lr=0.3)
    plain.load_state_dict(saved)
    optimizer.load_state_dict(saved)
    assert_close(optimizer.state[net.out.weight]["momentum_buffer"], plain.state[net.out.weight]["momentum_buffer"])
    assert_reduces(hvd, optimizer, net)


def test_load_state_dict_forgets_a_half_done_step(hvd: Any) -> None:
    net = make_net()
    optimizer = distributed_sgd(hvd, net)
    for _ in range(2):  # before and after there is a plan
        saved = copy.deepcopy(optimizer.state_dict())
        loss_of(net, batch(hvd.rank())).backward()
        optimizer.load_state_dict(saved)
        optimizer.zero_grad()
        assert_reduces(hvd, optimizer, net)
    with optimizer.skip_synchronize():
        optimizer.load_state_dict(saved)
        assert optimizer._synchronizer.should_synchronize


def forget_a_step_on_the_last_rank(hvd: Any, forget: Callable[[Any, dict[str, Any]], None]) -> None:
    """The last rank gives a step up that others use: each rank raises that once, and can go on from a common state."""
    net = make_net()
    optimizer = distributed_sgd(hvd, net)
    assert_reduces(hvd, optimizer, net)
    saved = copy.deepcopy(optimizer.state_dict())
    weights = copy.deepcopy(net.state_dict())
    forgetful = hvd.size() - 1
    loss_of(net, batch(hvd.rank())).backward()
    if hvd.rank() == forgetful:
        forget(optimizer, saved)
        optimizer.zero_grad()
        loss_of(net, batch(hvd.rank())).backward()

    def many_steps() -> None:
        for _ in range(100):  # a rank may learn of it while it is in the next steps
            optimizer.step()
            optimizer.zero_grad()
            loss_of(net, batch(hvd.rank())).backward()

    if hvd.size() > 1:
        with pytest.raises(hvd.HorovodInternalError, match=rf"(?s)rank {forgetful}\b.* gave up a .*load_state_dict"):
            many_steps()
    # All ranks go back, and on from there.
    optimizer.load_state_dict(saved)
    optimizer.zero_grad()
    net.load_state_dict(weights)
    hvd.join()  # which ends only where nothing is left of the steps before
    assert_reduces(hvd, optimizer, net)


def test_a_step_that_one_rank_forgets_is_an_error_on_all(hvd: Any) -> None:
    forget_a_step_on_the_last_rank(hvd, lambda optimizer, saved: optimizer.load_state_dict(saved))


def wait_for_failure(lane: Any) -> None:
    until = monotonic() + 60
    while lane.error is None and monotonic() < until:
        sleep(0.01)
    assert lane.error is not None


def test_a_forgotten_step_is_an_error_where_others_were_quicker(hvd: Any) -> None:
    """The rank that forgets hears of the failure while it forgets, not in a later step."""

    def forget(optimizer: Any, saved: dict[str, Any]) -> None:
        if hvd.size() == 1:
            return
        lane = optimizer._synchronizer._agreement.planned.lane
        end = lane.end

        def late_end() -> None:
            lane.step.finishing = True  # as the end does first; the engine's thread drives what it then waits for
            lane._driver.wake()
            wait_for_failure(lane)
            end()

        lane.end = late_end
        optimizer.load_state_dict(saved)

    forget_a_step_on_the_last_rank(hvd, forget)


def test_a_forgotten_step_is_an_error_where_it_is_forgotten_twice(hvd: Any) -> None:
    def forget(optimizer: Any, saved: dict[str, Any]) -> None:
        if hvd.size() == 1:
            return
        lane = optimizer._synchronizer._agreement.planned.lane
        optimizer.load_state_dict(saved)
        if optimizer._synchronizer._agreement is not None:
            wait_for_failure(lane)
        optimizer.load_state_dict(saved)

    forget_a_step_on_the_last_rank(hvd, forget)


def test_wrapping_again_takes_the_parameters_over(hvd: Any) -> None:
    net = make_net()
    first = distributed_sgd(hvd, net)
    train_step(first, net, batch(hvd.rank()))
    second = distributed_sgd(hvd, net)
    assert_reduces(hvd, second, net)
    if hvd.size() > 1:
        with expect(ValueError, "another DistributedOptimizer", "HINT"):
            first.step()
    with expect(ValueError, "already", "HINT"):
        hvd.DistributedOptimizer(second)


def test_given_up_optimizer_leaves_nothing(hvd: Any) -> None:
    net = make_net()
    optimizer = distributed_sgd(hvd, net)
    train_step(optimizer, net, batch(hvd.rank()))
    gone = weakref.ref(optimizer), weakref.ref(optimizer._synchronizer)
    optimizer.zero_grad()
    del optimizer
    gc.collect()
    assert [reference() for reference in gone] == [None, None]
    for _ in range(2):
        loss_of(net, batch(hvd.rank())).backward()
    assert all(not parameter._post_accumulate_grad_hooks for parameter in net.parameters() if hvd.size() > 1)


def test_bad_arguments_are_value_errors(hvd: Any) -> None:
    net = make_net()
    names = list(net.named_parameters())

    def make(**options: Any) -> Any:
        return hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), **options)

    with expect(ValueError, "should be a sequence of tuples"):
        make(named_parameters=[name for name, _ in names])
    with expect(ValueError, "must be unique. Found duplicates: conv.bias"):
        make(named_parameters=[*names, ("conv.bias", net.conv.bias)])
    with expect(ValueError, "one or more model parameters were not named"):
        make(named_parameters=names[1:])
    with expect(ValueError, "backward_passes_per_step must be > 0"):
        make(backward_passes_per_step=0)
    with expect(ValueError, "gradient_predivide_factor not supported with op != Average"):
        make(op=hvd.Sum, gradient_predivide_factor=2.0)
    with expect(ValueError, "non-negative integer"):
        make(groups=-1)
    with expect(ValueError, "groups must consist of torch.Tensor"):
        make(groups=[["conv.bias"]])
    with expect(ValueError, "only appear once in groups"):
        make(groups=[[net.conv.bias], [net.conv.bias]])
    with expect(TypeError, "optimizer must be"):
        hvd.DistributedOptimizer(net)


def test_init_again_in_the_middle_of_a_step(hvd: Any) -> None:
    net = make_net()
    optimizer = distributed_sgd(hvd, net)
    train_step(optimizer, net, batch(hvd.rank()))
    optimizer.zero_grad()
    loss_of(net, batch(hvd.rank())).backward()
    hvd.shutdown()
    hvd.init()
    with expect(hvd.HorovodInternalError, "may be half summed", "HINT"):
        optimizer.step()
    assert_reduces(hvd, optimizer, net)


def test_init_again_after_shutdown(hvd: Any) -> None:
    net = make_net()
    optimizer = distributed_sgd(hvd, net)
    train_step(optimizer, net, batch(hvd.rank()))
    hvd.shutdown()
    with expect(ValueError, "Horovod has not been initialized"):
        optimizer.step()
    data = pickle.dumps((net, optimizer))
    net2, optimizer2 = pickle.loads(data)  # noqa: S301
    hvd.init()
    optimizer.zero_grad()
    assert_reduces(hvd, optimizer, net)
    assert_reduces(hvd, optimizer2, net2)


def test_a_step_that_is_abandoned_beside_a_rank_that_has_joined(hvd: Any) -> None:
    """Neither rank waits for ever: the joined rank gives no zeros to a step of which the others use nothing."""
    net = make_net()
    optimizer = distributed_sgd(hvd, net)
    for step in range(3):
        train_step(optimizer, net, batch(hvd.rank(), step))
    state = optimizer.state_dict()
    if hvd.rank() > 0 or hvd.size() == 1:
        optimizer.zero_grad()
        loss_of(net, batch(hvd.rank(), 3)).backward()
        optimizer.load_state_dict(state)
        optimizer.zero_grad()
    hvd.join()
    hvd.broadcast_parameters(net.state_dict(), 0)
    optimizer.zero_grad()
    train_step(optimizer, net, batch(hvd.rank(), 4))
    assert_identical(hvd, net)
