"""Keras on PyTorch: what travels during a backward pass, and what of the user's keeps it from that."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import pytest
import torch

from hvdkit.errors import HorovodInternalError
from hvdkit.keras.torch_gradients import TorchGradients
from tests.keras.batches import batches, joined, train
from tests.keras.models import check_close, check_same_bits, compiled, model, steps_of_one_process
from tests.told import told


@contextmanager
def handed_over() -> Iterator[list[int]]:
    """By step, how many gradients the lane had when the step came to reduce them."""
    found: list[int] = []
    reduce = TorchGradients.reduce

    def counted(self: TorchGradients, *arguments: Any) -> Any:
        routes = None if self._synchronizer is None else self._synchronizer._routes
        planned = None if routes is None else routes.planned
        found.append(0 if planned is None else len(planned.parameters) - len(planned.lane.unready_slots()))
        return reduce(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchGradients, "reduce", counted)
        yield found


class Plain(keras.Sequential):
    """A model with a train_step of its own, which Keras's does nothing for."""

    def train_step(self, data: Any) -> Any:
        x, y = data[:2]
        self.zero_grad()
        loss = self.optimizer.scale_loss(self.compute_loss(x, y, self(x, training=True)))
        loss.backward()
        weights = self.trainable_weights
        self.change([weight.value.grad for weight in weights])
        with torch.no_grad():
            self.optimizer.apply([weight.value.grad for weight in weights], weights)
        return {"loss": loss}

    def change(self, gradients: list[Any]) -> None:
        """Nothing."""


class Halved(Plain):
    """One that changes gradients where nobody sees it."""

    def change(self, gradients: list[Any]) -> None:
        for gradient in gradients:
            gradient.data.mul_(0.5)


def of(kind: Any, optimizer: Any) -> Any:
    """The model, as one of a class."""
    made = kind(model().layers)
    made.compile(optimizer=optimizer, loss=keras.losses.MeanSquaredError())
    return made


def case_gradients_travel_during_the_backward_pass_of_keras_own_step(hvd: Any) -> None:
    for around in (False, True):
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
        with handed_over() as early:
            ours = train(
                compiled(keras.optimizers.LossScaleOptimizer(optimizer, 8.0) if around else optimizer),
                batches(hvd.rank(), 4),
            )
        assert early == [0, 4, 4, 4]  # the first step agrees on the lane
        with handed_over() as early:
            late = train(of(Plain, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))), batches(hvd.rank(), 4))
        assert early == [0, 0, 0, 0]
        check_close(ours, late, 1e-12, 0)
        check_same_bits(hvd, ours)
        check_close(ours, steps_of_one_process(keras.optimizers.SGD(0.1), hvd, 4))


def case_a_step_of_ones_own_may_change_gradients_in_any_way(hvd: Any) -> None:
    ours = train(of(Halved, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))), batches(hvd.rank()))
    check_close(ours, steps_of_one_process(keras.optimizers.SGD(0.05), hvd))


def case_passes_that_are_added_up_travel_at_the_end(hvd: Any) -> None:
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.1), backward_passes_per_step=2, average_aggregated_gradients=True
    )
    with handed_over() as early:
        train(compiled(optimizer), batches(hvd.rank(), 6))
    assert early == [0, 0, 0]


def case_two_optimizers_take_turns_on_one_model(hvd: Any) -> None:
    ours, alone = model(), model()
    optimizers = [hvd.DistributedOptimizer(keras.optimizers.SGD(rate)) for rate in (0.1, 0.01)]
    plain = [keras.optimizers.SGD(rate) for rate in (0.1, 0.01)]
    with handed_over() as early:
        for mine, theirs in zip(batches(hvd.rank(), 6), joined(hvd, 6), strict=True):
            for made, one, batch in ((ours, optimizers[0], mine), (alone, plain[0], theirs)):
                made.compile(optimizer=one, loss=keras.losses.MeanSquaredError())
                made.train_on_batch(*batch)
            optimizers.reverse()
            plain.reverse()
    assert early == [0, 0, 4, 4, 4, 4]
    check_close(ours, alone)


def case_a_loop_of_ones_own_between_steps_of_keras(hvd: Any) -> None:
    ours = compiled(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    with handed_over() as early:
        for step, (x, y) in enumerate(batches(hvd.rank(), 6)):
            if step % 3 != 1:
                ours.train_on_batch(x, y)
                continue
            ours.zero_grad()
            for _ in range(2):  # passes, whose gradients are added
                torch.mean(torch.square(ours(torch.as_tensor(x)) - torch.as_tensor(y))).backward()
            weights = ours.trainable_weights
            with torch.no_grad():
                ours.optimizer.apply([weight.value.grad for weight in weights], weights)
    assert early == [0, 0, 4, 4, 0, 4]
    check_same_bits(hvd, ours)


class Failing(torch.autograd.Function):
    """Raises in the backward pass, if it shall."""

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
    """Between two layers."""

    def call(self, x: Any) -> Any:
        return Failing.apply(x)  # type: ignore[no-untyped-call]


def case_an_exception_in_a_backward_pass_is_an_error_on_all_ranks(hvd: Any) -> None:
    first, last = model().layers
    ours = keras.Sequential([first, Breakable(dtype="float64"), last])
    ours.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss=keras.losses.MeanSquaredError())
    data = batches(hvd.rank(), 5)
    train(ours, data[:2])
    fails = Failing.shall = hvd.rank() == 1
    try:
        with told(ArithmeticError, "backward") if fails else told(HorovodInternalError, "rank 1"):
            ours.train_on_batch(*data[2])
    finally:
        Failing.shall = False
    if hvd.rank() == 1:
        with told(HorovodInternalError, "rank 1"):  # as on the others, once
            ours.train_on_batch(*data[2])
    train(ours, data[3:])
    check_same_bits(hvd, ours)
