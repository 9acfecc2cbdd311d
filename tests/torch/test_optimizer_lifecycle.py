"""What happens to an optimizer over its life: made, changed, called in one order or another, given up, made again."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable
from time import monotonic, sleep
from typing import Any

import torch

from hvdkit.api.gradients.settings import warn_of_overlap_forward
from tests.on_ranks import on_ranks
from tests.told import told, warned
from tests.torch.optimizer_support import (
    Comparison,
    Passing,
    assert_close,
    assert_identical,
    assert_reduces,
    assert_same_gradients,
    batch,
    digest,
    distributed_sgd,
    loss_of,
    loss_on,
    make_net,
    no_warnings,
    train,
    train_step,
    update,
    wrapped_net,
)

pytestmark = on_ranks(2, 3)


def test_class_state_and_defaults_are_the_wrapped_ones(hvd: Any) -> None:
    net = make_net()
    adam = torch.optim.Adam(net.parameters(), lr=0.01, betas=(0.8, 0.9))
    loss_on(net, range(hvd.size())).backward()
    adam.step()
    adam.zero_grad()
    optimizer = hvd.DistributedOptimizer(adam, named_parameters=net.named_parameters())
    assert type(optimizer).__bases__ == (torch.optim.Adam,)
    assert type(optimizer).__name__ == "Adam"
    assert type(optimizer).__module__ == hvd.DistributedOptimizer.__module__
    assert optimizer.defaults is adam.defaults
    assert optimizer.state is adam.state
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)
    assert all(state["step"] == 1 for state in optimizer.state.values())
    assert optimizer._parameter_names[net.out.bias] == "out.bias"  # which scripts for Horovod read
    super(type(optimizer), optimizer).step()  # for which no rank waits
    train_step(optimizer, net, batch(hvd.rank()))
    assert optimizer.state[net.out.weight]["step"] == 2
    assert_identical(hvd, net)


def test_step_hooks_run_once_and_on_reduced_gradients(hvd: Any) -> None:
    net, alone = make_net(), make_net()
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    calls = []
    sgd.register_step_post_hook(lambda *_: calls.append("after"))
    optimizer = hvd.DistributedOptimizer(sgd, named_parameters=net.named_parameters())

    def before(*_: Any) -> None:
        calls.append("before")
        assert_same_gradients(net, alone)

    optimizer.register_step_pre_hook(before)
    loss_on(alone, range(hvd.size()), use_spare=True).backward()
    loss_of(net, batch(hvd.rank()), use_spare=True).backward()
    optimizer.step()
    assert calls == ["before", "after"]


def test_a_model_of_another_dtype_is_still_reduced(hvd: Any) -> None:
    pair = Comparison(hvd)
    pair.train(1)
    pair.net.double()
    pair.alone.double()
    for set_to_none in (False, True):
        pair.reduce(set_to_none=set_to_none)


def test_frozen_and_unfrozen_parameters(hvd: Any) -> None:
    for options in ({}, {"compression": Passing}):
        net = make_net()
        net.hidden.requires_grad_(False)
        optimizer = distributed_sgd(hvd, net, **options)
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


def test_added_parameter_group(hvd: Any) -> None:
    net = make_net()
    net.hidden.requires_grad_(False)
    first = [*net.conv.parameters(), *net.out.parameters(), *net.spare.parameters()]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(first, lr=0.1), named_parameters=net.named_parameters())
    assert_reduces(hvd, optimizer, net)
    net.hidden.requires_grad_(True)
    optimizer.add_param_group({"params": list(net.hidden.parameters()), "lr": 0.2})
    assert_reduces(hvd, optimizer, net, steps=3)


def test_too_many_backward_passes_raise(hvd: Any) -> None:
    net, optimizer = wrapped_net(hvd)
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(net, batch(hvd.rank())).backward()
        with told(AssertionError, "Gradients were computed more than backward_passes_per_step times", "HINT"):
            loss_of(net, batch(hvd.rank())).backward()
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.zero_grad()
        train_step(optimizer, net, batch(hvd.rank()))
    assert_identical(hvd, net)


def test_clearing_gradients_in_flight_raises(hvd: Any) -> None:
    net, optimizer = wrapped_net(hvd, backward_passes_per_step=2)
    for _ in range(2):
        loss_of(net, batch(hvd.rank())).backward()
        with told(AssertionError, "optimizer.zero_grad() was called after loss.backward()", "HINT"):
            optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
    assert_identical(hvd, net)


def test_clipping_between_synchronize_and_step(hvd: Any) -> None:
    pair = Comparison(hvd)
    for step in range(3):
        pair.reduce(step, use_spare=True)
        norms = [torch.nn.utils.clip_grad_norm_(net.parameters(), 0.01) for net in (pair.net, pair.alone)]
        assert_close(*norms, relative=1e-5)
        with no_warnings():
            pair.update()
        pair.check()


def test_step_after_synchronize_warns(hvd: Any) -> None:
    net, optimizer = wrapped_net(hvd)
    loss_of(net, batch(hvd.rank())).backward()
    optimizer.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    assert [str(w.message) for w in caught if "HINT: with optimizer.skip_synchronize()" in str(w.message)], caught
    assert caught[0].filename == __file__
    with no_warnings():
        train_step(optimizer, net, batch(hvd.rank()))
    assert_identical(hvd, net)


def test_step_that_skips_a_synchronization_that_never_was_raises(hvd: Any) -> None:
    net, optimizer = wrapped_net(hvd)
    texts = ("optimizer.skip_synchronize()", "before optimizer.synchronize()", "HINT")

    def closure() -> torch.Tensor:
        loss = loss_of(net, batch(hvd.rank()))
        loss.backward()
        return loss

    for _ in range(3):  # before and after there is a plan
        optimizer.zero_grad()
        before = digest(net)
        closure()
        with told(AssertionError, *texts):
            update(optimizer)
        assert digest(net) == before
        optimizer.synchronize()  # what the message asks for helps
        with no_warnings():
            update(optimizer)
        assert digest(net) != before
        assert_identical(hvd, net)
        optimizer.zero_grad()
        with told(AssertionError, *texts), optimizer.skip_synchronize():
            optimizer.step(closure)
        optimizer.synchronize()
    train_step(optimizer, net, batch(hvd.rank()))
    assert_identical(hvd, net)


def test_overlap_forward_warns_once_and_has_no_effect(hvd: Any) -> None:
    warn_of_overlap_forward.cache_clear()
    digests = set()
    for options, times in (({}, 0), ({"overlap_forward": True}, 1), ({"overlap_forward": True}, 0)):
        with warned("overlap_forward", times):
            net, optimizer = wrapped_net(hvd, **options)
        train_step(optimizer, net, batch(hvd.rank()))
        digests.add(digest(net))
    assert len(digests) == 1


def test_load_state_dict_forgets_a_half_done_step(hvd: Any) -> None:
    net, optimizer = wrapped_net(hvd)
    for _ in range(2):  # before and after there is a plan
        saved = copy.deepcopy(optimizer.state_dict())
        loss_of(net, batch(hvd.rank())).backward()
        optimizer.load_state_dict(saved)
        assert_reduces(hvd, optimizer, net)
    loss_of(net, batch(hvd.rank())).backward()
    with optimizer.skip_synchronize():
        optimizer.load_state_dict(saved)
        optimizer.zero_grad()
        train_step(optimizer, net, batch(hvd.rank()))  # nothing is skipped any more
    assert_identical(hvd, net)


def forget_a_step_on_the_last_rank(hvd: Any, forget: Callable[[Any, dict[str, Any]], None]) -> None:
    """The last rank gives a step up that others use: each rank raises that once, and can go on from a common state."""
    net, optimizer = wrapped_net(hvd)
    assert_reduces(hvd, optimizer, net)
    saved = copy.deepcopy(optimizer.state_dict())
    weights = copy.deepcopy(net.state_dict())
    forgetful = hvd.size() - 1
    loss_of(net, batch(hvd.rank())).backward()
    if hvd.rank() == forgetful:
        forget(optimizer, saved)
        optimizer.zero_grad()
        loss_of(net, batch(hvd.rank())).backward()
    with told(hvd.HorovodInternalError, f"rank {forgetful}", " gave up a ", "load_state_dict"):
        for _ in range(100):  # a rank may learn of it while it is in the next steps
            optimizer.step()
            optimizer.zero_grad()
            loss_of(net, batch(hvd.rank())).backward()
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


@on_ranks((2, "torch"), name="no arena", HVDKIT_ARENA="0", HVDKIT_FUSION_THRESHOLD="65536")
def test_a_forgotten_step_is_an_error_where_all_its_gradients_wait_for_step(hvd: Any) -> None:
    net = torch.nn.ParameterList([torch.ones(20_000)])  # large, which waits for step() where there is no arena
    optimizer = distributed_sgd(hvd, net)

    def backward() -> None:
        optimizer.zero_grad()
        net[0].square().sum().backward()

    for _ in range(2):
        backward()
        optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    backward()
    if hvd.rank() == hvd.size() - 1:
        optimizer.load_state_dict(saved)
        backward()
    with told(hvd.HorovodInternalError, " gave up a "):
        for _ in range(100):
            optimizer.step()
            backward()


def test_a_forgotten_step_is_an_error_where_it_is_forgotten_twice(hvd: Any) -> None:
    def forget(optimizer: Any, saved: dict[str, Any]) -> None:
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
    fact = "The parameters of this DistributedOptimizer were given to another DistributedOptimizer later."
    with told(ValueError, fact, "HINT: wrap each optimizer once, and give no parameter to two of them."):
        first.step()
    with told(ValueError, "already", "HINT"):
        hvd.DistributedOptimizer(second)


def test_given_up_optimizer_leaves_nothing(hvd: Any) -> None:
    net, optimizer = wrapped_net(hvd)
    train_step(optimizer, net, batch(hvd.rank()))
    gone = weakref.ref(optimizer), weakref.ref(optimizer._synchronizer)
    optimizer.zero_grad()
    del optimizer
    gc.collect()
    assert [reference() for reference in gone] == [None, None]
    for _ in range(2):
        loss_of(net, batch(hvd.rank())).backward()
    assert all(not parameter._post_accumulate_grad_hooks for parameter in net.parameters())


def test_init_again_in_the_middle_of_a_step(hvd: Any) -> None:
    net, optimizer = wrapped_net(hvd)
    train_step(optimizer, net, batch(hvd.rank()))
    optimizer.zero_grad()
    loss_of(net, batch(hvd.rank())).backward()
    hvd.shutdown()
    hvd.init()
    with told(hvd.HorovodInternalError, "may be half summed", "HINT"):
        optimizer.step()
    assert_reduces(hvd, optimizer, net)


def test_init_again_after_shutdown(hvd: Any) -> None:
    net, optimizer = wrapped_net(hvd)
    train_step(optimizer, net, batch(hvd.rank()))
    hvd.shutdown()
    with told(ValueError, "Horovod has not been initialized"):
        optimizer.step()
    copied_net, copied = pickle.loads(pickle.dumps((net, optimizer)))  # noqa: S301
    hvd.init()
    assert_reduces(hvd, optimizer, net)
    assert_reduces(hvd, copied, copied_net)


def test_a_step_that_is_abandoned_beside_a_rank_that_has_joined(hvd: Any) -> None:
    """Neither rank waits for ever: the joined rank gives no zeros to a step of which the others use nothing."""
    net, optimizer = wrapped_net(hvd)
    train(hvd, optimizer, net)
    state = optimizer.state_dict()
    if hvd.rank() > 0:
        optimizer.zero_grad()
        loss_of(net, batch(hvd.rank(), 3)).backward()
        optimizer.load_state_dict(state)
        optimizer.zero_grad()
    hvd.join()
    hvd.broadcast_parameters(net.state_dict(), 0)
    optimizer.zero_grad()
    train_step(optimizer, net, batch(hvd.rank(), 4))
    assert_identical(hvd, net)
