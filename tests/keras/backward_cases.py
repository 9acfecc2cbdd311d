"""Keras on PyTorch: gradients that travel during a backward pass, and users' code that prevents it."""

from __future__ import annotations

import functools
import inspect
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from hvdkit.engine.loop.driver import Driver
from hvdkit.errors import HorovodInternalError
from hvdkit.torch.for_keras import TorchGradients
from hvdkit.torch.gradients.named import NamedGradients
from tests.keras.batches import FEATURES, batches, joined
from tests.keras.checks import check_close, check_same_bits
from tests.keras.models import gradients_of, train
from tests.told import told
from tests.torch.ownership_support import Passing
from tests.waiting import until

WIDTH = 160  # a matrix of so many rows and columns is large enough for the arena
GRADIENTS = 6
# Gradients that travel in each backward pass: the first step agrees on the lane, and the second one is looked at.
EARLY, LATE = [0, 0, GRADIENTS, GRADIENTS, GRADIENTS], [0] * 5


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
    routes = None if gradients is None or gradients._synchronizer is None else gradients._synchronizer._agreement
    return None if routes is None or routes.planned is None else routes.planned.lane


def layers(inside: Callable[[], keras.layers.Layer] | None = None) -> list[keras.layers.Layer]:
    """Return three dense layers with the same weights each time. ``inside`` makes one before the last."""
    keras.utils.set_random_seed(1)
    return [
        keras.layers.Input((FEATURES,), dtype="float64"),
        keras.layers.Dense(WIDTH, activation="tanh", dtype="float64"),
        keras.layers.Dense(WIDTH, activation="tanh", dtype="float64"),
        *([] if inside is None else [inside()]),
        keras.layers.Dense(1, activation="sigmoid", dtype="float64"),
    ]


def compiled(optimizer: Any, kind: Any = keras.Sequential, inside: Any = None) -> Any:
    made = kind(layers(inside))
    made.compile(optimizer=optimizer, loss=keras.losses.MeanSquaredError())
    return made


def sgd(rate: float = 0.1) -> Any:
    return keras.optimizers.SGD(rate)


def check(hvd: Any, model: Any, alone: Any) -> None:
    """Check that all ranks hold the same bits, and those of one process but for rounding."""
    check_same_bits(hvd, model)
    check_close(model, alone)  # losses are computed in float32


def check_training(hvd: Any, optimizer: Any, expected: list[int], alone: Any = None, **options: Any) -> Any:
    """Check the numbers of gradients that travel in each backward pass, and that one process with ``alone`` agrees."""
    with handed_over() as counts:
        model = train(compiled(optimizer, **options), batches(hvd.rank(), 5))
    assert counts == expected
    check(hvd, model, train(compiled(sgd() if alone is None else alone, **options), joined(hvd, 5)))
    return model


class OwnStep(keras.Sequential):
    """A model with a train_step of its own, which halves gradients."""

    def train_step(self, data):
        x, y = data[:2]
        self.zero_grad()
        loss = self.optimizer.scale_loss(self.compute_loss(x, y, self(x, training=True)))
        loss.backward()
        weights = self.trainable_weights
        for weight in weights:
            weight.value.grad.data.mul_(0.5)
        with torch.no_grad():
            self.optimizer.apply([weight.value.grad for weight in weights], weights)
        return {"loss": loss}


def case_gradients_travel_during_the_backward_pass_of_keras_own_step(hvd):
    for around in (False, True):
        optimizer = hvd.DistributedOptimizer(sgd())
        wrapped = keras.optimizers.LossScaleOptimizer(optimizer, 8.0) if around else optimizer
        model = check_training(hvd, wrapped, EARLY)
        # The gradient that is computed first travels first.
        lane = lane_of(vars(optimizer)["_hvdkit_step"]._gradients)
        assert model.optimizer is wrapped
        assert GRADIENTS - 1 in lane.arrangement.buckets[lane.arrangement.pieces[0].bucket].slots
        assert 0 in lane.arrangement.buckets[lane.arrangement.pieces[-1].bucket].slots


def case_a_step_of_ones_own_may_change_gradients_in_any_way(hvd):
    check_training(hvd, hvd.DistributedOptimizer(sgd()), LATE, kind=OwnStep)


def case_an_apply_that_a_user_put_on_the_optimizer_comes_first(hvd):
    optimizer = hvd.DistributedOptimizer(sgd())
    apply = optimizer.apply
    optimizer.apply = lambda gradients, variables: apply([0.5 * gradient for gradient in gradients], variables)
    check_training(hvd, optimizer, LATE, sgd(0.05))


class Scaling(keras.optimizers.SGD):
    """An optimizer that scales losses and gradients by itself."""

    def scale_loss(self, loss):
        return 4.0 * super().scale_loss(loss)

    def apply(self, grads, trainable_variables=None):
        super().apply([0.25 * grad for grad in grads], trainable_variables)


def case_an_optimizer_may_scale_losses_by_itself(hvd):
    check_training(hvd, hvd.DistributedOptimizer(Scaling(0.1)), EARLY, Scaling(0.1))
    around = keras.optimizers.LossScaleOptimizer
    check_training(hvd, around(hvd.DistributedOptimizer(Scaling(0.1)), 8.0), EARLY, around(Scaling(0.1), 8.0))


def case_a_class_of_a_distributed_optimizer_may_scale_losses_by_itself(hvd):
    optimizer = hvd.DistributedOptimizer(sgd())

    class Doubling(type(optimizer)):
        def scale_loss(self, loss):
            return 2.0 * super().scale_loss(loss)

    optimizer.__class__ = Doubling
    check_training(hvd, optimizer, LATE, sgd(0.2))  # the user's part that comes after hvdkit's is unknown


class Auxiliary(keras.Sequential):
    """A loss with a backward pass of its own, whose gradients are added."""

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        if y_pred.requires_grad:  # Keras builds a model by running this with nothing to learn
            self.optimizer.scale_loss(super().compute_loss(x, 1 - y, self(x))).backward()
        return super().compute_loss(x, y, y_pred)


def case_a_backward_pass_in_the_loss_is_added(hvd):
    check_training(hvd, hvd.DistributedOptimizer(sgd()), EARLY, kind=Auxiliary)


def case_a_hook_of_the_users_that_comes_later_is_not_raced_with(hvd):
    def halve(parameter):
        parameter.grad.data.mul_(0.5)

    def trained(made, data):
        train(made, data[:3])
        hook = made.trainable_weights[2].value.register_post_accumulate_grad_hook(halve)
        train(made, data[3:5])
        hook.remove()
        return train(made, data[5:])

    with handed_over() as counts:
        model = trained(compiled(hvd.DistributedOptimizer(sgd())), batches(hvd.rank(), 7))
    assert counts == [0, 0, GRADIENTS, 0, 0, GRADIENTS, GRADIENTS]
    check(hvd, model, trained(compiled(sgd()), joined(hvd, 7)))


class Twice(keras.layers.Layer):
    """A dense layer that is run twice, each time in a backward pass inside of the backward pass."""

    def __init__(self):
        super().__init__(dtype="float64")
        self.dense = keras.layers.Dense(WIDTH, activation="tanh", dtype="float64")
        self.times = 2

    def build(self, shape):
        self.dense.build(shape)

    def call(self, x):
        for _ in range(self.times):
            x = checkpoint(self.dense, x, use_reentrant=True)
        return x


def case_gradients_that_become_complete_twice_travel_at_the_end(hvd):
    check_training(hvd, hvd.DistributedOptimizer(sgd()), LATE, inside=Twice)


def case_a_gradient_that_becomes_complete_again_is_an_error(hvd):
    inside = Twice()
    model = compiled(hvd.DistributedOptimizer(sgd()), inside=lambda: inside)
    data = batches(hvd.rank(), 6)
    inside.times = 1
    train(model, data[:3])
    inside.times = 2
    with told(
        AssertionError,
        "The gradient of '",
        "' was changed again in a backward pass that had already completed it.",
        "HINT: a backward pass inside of the backward pass does that: pass use_reentrant=False to "
        "torch.utils.checkpoint, or give the model its own train_step, whose gradients are reduced when they are "
        "applied.",
    ):
        model.train_on_batch(*data[3])
    train(model, data[4:])
    check_same_bits(hvd, model)


def case_what_goes_by_name_travels_at_the_end(hvd):
    submitted: list[int] = []
    submit = NamedGradients._submit

    def counted(self, group):
        # In the backward pass there is no reduce() on the stack.
        submitted.append(any(frame.function == "reduce" for frame in inspect.stack(0)))
        submit(self, group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NamedGradients, "_submit", counted)
        check_training(hvd, hvd.DistributedOptimizer(sgd(), compression=Passing), LATE, sgd())
    assert submitted == [True] * 5 * GRADIENTS


def case_passes_that_are_added_up_travel_at_the_end(hvd):
    optimizer = hvd.DistributedOptimizer(sgd(), backward_passes_per_step=2, average_aggregated_gradients=True)
    with handed_over() as counts:
        train(compiled(optimizer), batches(hvd.rank(), 6))
    assert counts == [0, 0, 0]


def case_two_optimizers_take_turns_on_one_model(hvd):
    model, alone = keras.Sequential(layers()), keras.Sequential(layers())
    optimizers = [hvd.DistributedOptimizer(sgd(rate)) for rate in (0.1, 0.01)]
    plain = [sgd(rate) for rate in (0.1, 0.01)]
    with handed_over() as counts:
        for own_batch, joint_batch in zip(batches(hvd.rank(), 8), joined(hvd, 8), strict=True):
            for made, optimizer, batch in ((model, optimizers[0], own_batch), (alone, plain[0], joint_batch)):
                made.compile(optimizer=optimizer, loss=keras.losses.MeanSquaredError())
                made.train_on_batch(*batch)
            optimizers.reverse()
            plain.reverse()
    assert counts == [0, 0, 0, 0, *[GRADIENTS] * 4]
    check(hvd, model, alone)


def case_a_loop_of_ones_own_between_steps_of_keras(hvd):
    def trained(made, data):
        for step, (x, y) in enumerate(data):
            if step % 3 != 1:
                made.train_on_batch(x, y)
                continue
            made.zero_grad()
            for _ in range(2):  # passes, whose gradients are added
                torch.mean(torch.square(made(torch.as_tensor(x)) - torch.as_tensor(y))).backward()
            weights = made.trainable_weights
            with torch.no_grad():
                made.optimizer.apply([weight.value.grad for weight in weights], weights)
        return made

    with handed_over() as counts:
        model = trained(compiled(hvd.DistributedOptimizer(sgd())), batches(hvd.rank(), 6))
    assert counts == [0, 0, 0, GRADIENTS, 0, GRADIENTS]
    check(hvd, model, trained(compiled(sgd()), joined(hvd, 6)))


def case_a_variable_that_becomes_local_later_is_left_alone(hvd):
    optimizer = hvd.PartialDistributedOptimizer(sgd(), local_layers=[], scale_local_gradients=False)
    model, alone, data = compiled(optimizer), compiled(sgd()), batches(hvd.rank(), 6)
    local = model.trainable_weights[2]
    with handed_over() as counts:
        train(model, data[:3])
        for target, source in zip(alone.variables, model.variables, strict=True):
            target.assign(source.value)
        wanted = keras.ops.convert_to_numpy(local.value) - 0.1 * gradients_of(alone, *data[3])[2].numpy()
        optimizer.register_local_var(local)
        train(model, data[3:4])
        assert abs(keras.ops.convert_to_numpy(local.value) - wanted).max() < 1e-6
        train(model, data[4:])
    assert counts == [0, 0, GRADIENTS, 0, GRADIENTS - 1, GRADIENTS - 1]
    others = [weight.value.tolist() for weight in model.trainable_weights if weight is not local]
    assert len({str(values) for values in hvd.allgather_object(others)}) == 1


class Failing(torch.autograd.Function):
    """A function that raises in its backward pass, if ``shall`` is set."""

    shall = False

    @staticmethod
    def forward(_, x):
        return x.clone()

    @staticmethod
    def backward(_, gradient):
        if Failing.shall:
            raise ArithmeticError("in the middle of a backward pass")
        return gradient


class Breakable(keras.layers.Layer):
    """A layer that may fail, between two other layers."""

    def call(self, x):
        return Failing.apply(x)


def case_an_exception_in_a_backward_pass_is_an_error_on_all_ranks(hvd):
    model = compiled(hvd.DistributedOptimizer(sgd()), inside=functools.partial(Breakable, dtype="float64"))
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


def case_a_gradient_that_was_changed_after_all_is_an_error(hvd):
    model, data = compiled(hvd.DistributedOptimizer(sgd())), batches(hvd.rank(), 6)
    train(model, data[:3])
    weight = model.trainable_weights[2].value
    node = weight.expand_as(weight).grad_fn.next_functions[0][0]  # where no hook of hvdkit's can come last

    def change(*_):
        weight.grad.mul_(0.5)

    hook = node.register_hook(change)
    with told(AssertionError, "Gradients were changed after", "train_step of the model's own", "kernel (2)"):
        model.train_on_batch(*data[3])
    hook.remove()
    train(model, data[4:])
    check_same_bits(hvd, model)


class Late(BaseException):
    """The exception of a watchdog, after a long wait."""


def ring(_: int, frame: Any) -> None:
    """Raise Late while ``reduce()`` waits, on slow machines too, and between two rounds of the engine."""
    waits = frame.f_code is Driver.drive_until.__code__ and not frame.f_locals["self"]._turn.locked()
    while waits and frame is not None:
        if frame.f_code is TorchGradients.reduce.__code__:
            raise Late
        frame = frame.f_back
    signal.setitimer(signal.ITIMER_REAL, 0.01)


def case_who_waits_for_a_late_rank_can_be_interrupted(hvd):
    model, data = compiled(hvd.DistributedOptimizer(sgd())), batches(hvd.rank(), 9)
    for number, (x, y) in enumerate(data):
        if number not in (1, 5):  # before gradients travel in the backward pass, and after it
            model.train_on_batch(x, y)
            continue
        folder = hvd.broadcast_object(tempfile.mkdtemp() if hvd.rank() == 0 else None, 0)
        is_interrupted = Path(folder, "interrupted")
        if hvd.rank() == 0:
            before = signal.signal(signal.SIGALRM, ring)
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            try:
                with pytest.raises(Late):
                    model.train_on_batch(x, y)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, before)
            is_interrupted.touch()
            continue
        # Also until this rank has heard of it: rank 0 may have sent all that this rank needs for the step.
        lane = lane_of(vars(model.optimizer)["_hvdkit_step"]._gradients)
        until(lambda lane=lane, path=is_interrupted: path.exists() and lane.abandonment.ranks, what="rank 0 gives up")
        shutil.rmtree(folder)
        with told(HorovodInternalError, "rank 0", "an exception"):
            model.train_on_batch(x, y)
    check_same_bits(hvd, model)
