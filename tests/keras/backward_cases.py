"""Keras on PyTorch: gradients that travel during a backward pass, and users' code that prevents it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import pytest
import torch

from hvdkit.errors import HorovodInternalError
from hvdkit.torch.for_keras import TorchGradients
from tests.keras.batches import FEATURES, batches, check_close, check_same_bits, joined, train
from tests.told import told

WIDTH = 160  # a matrix of so many rows and columns is large enough for the arena
GRADIENTS = 6


@contextmanager
def handed_over() -> Iterator[list[int]]:
    """Yield a list that gets, for each step, the number of gradients that the lane had when reduce() was called."""
    counts: list[int] = []
    reduce = TorchGradients.reduce

    def counted(self: TorchGradients, *arguments: Any) -> Any:
        lane = lane_of(self)
        counts.append(0 if lane is None else len(lane.slots) - len(lane.unready_slots()))
        return reduce(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchGradients, "reduce", counted)
        yield counts


def lane_of(gradients: Any) -> Any:
    """The lane of an optimizer's gradients, if there is one."""
    routes = None if gradients is None or gradients._synchronizer is None else gradients._synchronizer._agreement
    return None if routes is None or routes.planned is None else routes.planned.lane


def layers(inside: keras.layers.Layer | None = None) -> list[keras.layers.Layer]:
    """Return three dense layers with the same weights each time. ``inside`` comes between the second and the third."""
    keras.utils.set_random_seed(1)
    return [
        keras.layers.Input((FEATURES,), dtype="float64"),
        keras.layers.Dense(WIDTH, activation="tanh", dtype="float64"),
        keras.layers.Dense(WIDTH, activation="tanh", dtype="float64"),
        *([] if inside is None else [inside]),
        keras.layers.Dense(1, activation="sigmoid", dtype="float64"),
    ]


def compiled(optimizer: Any, kind: Any = keras.Sequential, inside: keras.layers.Layer | None = None) -> Any:
    """Return a model of a class with an optimizer."""
    made = kind(layers(inside))
    made.compile(optimizer=optimizer, loss=keras.losses.MeanSquaredError())
    return made


def sgd(rate: float = 0.1) -> Any:
    """Return a plain optimizer."""
    return keras.optimizers.SGD(rate)


def one_process(hvd: Any, steps: int, optimizer: Any = None, kind: Any = keras.Sequential) -> Any:
    """Return a model that one process trained on all ranks' batches."""
    return train(compiled(sgd() if optimizer is None else optimizer, kind), joined(hvd, steps))


def check(hvd: Any, model: Any, alone: Any) -> None:
    """Check that all ranks hold the same bits, and those of one process but for rounding."""
    check_same_bits(hvd, model)
    check_close(model, alone)  # losses are computed in float32


class OwnStep(keras.Sequential):
    """A model with a train_step of its own."""

    change: Callable[[list[torch.Tensor]], None] | None = None

    def train_step(self, data: Any) -> Any:
        x, y = data[:2]
        self.zero_grad()
        loss = self.optimizer.scale_loss(self.compute_loss(x, y, self(x, training=True)))
        loss.backward()
        weights = self.trainable_weights
        if self.change is not None:
            self.change([weight.value.grad for weight in weights])
        with torch.no_grad():
            self.optimizer.apply([weight.value.grad for weight in weights], weights)
        return {"loss": loss}


def case_gradients_travel_during_the_backward_pass_of_keras_own_step(hvd: Any) -> None:
    for around in (False, True):
        optimizer = hvd.DistributedOptimizer(sgd())
        with handed_over() as counts:
            model = train(
                compiled(keras.optimizers.LossScaleOptimizer(optimizer, 8.0) if around else optimizer),
                batches(hvd.rank(), 5),
            )
        # The first step agrees on the lane, and the second one is looked at.
        assert counts == [0, 0, GRADIENTS, GRADIENTS, GRADIENTS]
        check(hvd, model, one_process(hvd, 5))
        # The gradient that is computed first travels first.
        lane = lane_of(vars(optimizer)["_hvdkit_step"]._gradients)
        assert GRADIENTS - 1 in lane.arrangement.buckets[lane.arrangement.pieces[0].bucket].slots
        assert 0 in lane.arrangement.buckets[lane.arrangement.pieces[-1].bucket].slots


def case_a_step_of_ones_own_may_change_gradients_in_any_way(hvd: Any) -> None:
    model = compiled(hvd.DistributedOptimizer(sgd()), OwnStep)
    model.change = lambda gradients: [gradient.data.mul_(0.5) for gradient in gradients] and None
    with handed_over() as counts:
        train(model, batches(hvd.rank(), 5))
    assert counts == [0] * 5
    check(hvd, model, one_process(hvd, 5, sgd(0.05)))


def case_a_hook_of_the_users_that_comes_later_is_not_raced_with(hvd: Any) -> None:
    def halve(parameter: torch.Tensor) -> None:
        parameter.grad.data.mul_(0.5)  # type: ignore[union-attr]

    model = compiled(hvd.DistributedOptimizer(sgd()))
    with handed_over() as counts:
        data = batches(hvd.rank(), 7)
        train(model, data[:3])
        hook = model.trainable_weights[2].value.register_post_accumulate_grad_hook(halve)
        train(model, data[3:5])
        hook.remove()
        train(model, data[5:])
    assert counts == [0, 0, GRADIENTS, 0, 0, GRADIENTS, GRADIENTS]
    alone, data = compiled(sgd()), joined(hvd, 7)
    train(alone, data[:3])
    hook = alone.trainable_weights[2].value.register_post_accumulate_grad_hook(halve)
    train(alone, data[3:5])
    hook.remove()
    check(hvd, model, train(alone, data[5:]))


class Failing(torch.autograd.Function):
    """A function that raises in its backward pass, if ``shall`` is set."""

    shall = False

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        if Failing.shall:
            raise ArithmeticError("in the middle of a backward pass")
        return gradient


class Breakable(keras.layers.Layer):
    """A layer that may fail, between two other layers."""

    def call(self, x: Any) -> Any:
        return Failing.apply(x)  # type: ignore[no-untyped-call]


def case_an_exception_in_a_backward_pass_is_an_error_on_all_ranks(hvd: Any) -> None:
    model = compiled(hvd.DistributedOptimizer(sgd()), inside=Breakable(dtype="float64"))
    data = batches(hvd.rank(), 7)
    with handed_over() as counts:
        train(model, data[:3])
        fails = Failing.shall = hvd.rank() == 1
        try:
            with told(ArithmeticError, "backward") if fails else told(HorovodInternalError, "rank 1", "an exception"):
                model.train_on_batch(*data[3])
        finally:
            Failing.shall = False
        train(model, data[4:])
    assert counts[:3] == [0, 0, GRADIENTS]
    assert counts[-3:] == [0, GRADIENTS, GRADIENTS]
    check_same_bits(hvd, model)
