"""Horovod's order of calls: backward(), synchronize(), clipping, step(), zero_grad(); and errors of other orders."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from hvdkit.api.gradients.settings import warn_of_overlap_forward
from tests.on_ranks import on_ranks
from tests.told import told
from tests.torch.optimizer_support import (
    Comparison,
    assert_close,
    assert_identical,
    batch,
    digest,
    distributed_sgd,
    loss_of,
    make_net,
    no_warnings,
    train_step,
    update,
    wrapped_net,
)

pytestmark = on_ranks(2, 3)


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
        pair.zero_grad()
        pair.backward(step, use_spare=True)
        pair.optimizer.synchronize()
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
    digests, counts = set(), []
    for options in ({}, {"overlap_forward": True}, {"overlap_forward": True}):
        net = make_net()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer = distributed_sgd(hvd, net, **options)
        counts.append(sum("overlap_forward" in str(warning.message) for warning in caught))
        train_step(optimizer, net, batch(hvd.rank()))
        digests.add(digest(net))
    assert counts == [0, 1, 0]
    assert len(digests) == 1
