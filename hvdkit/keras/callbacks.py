"""Horovod's callbacks for ``model.fit``; callbacks of Keras 3 and of tf_keras inherit their behaviour."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import keras

from hvdkit.api import job, objects
from hvdkit.engine.session.process_sets import global_process_set
from hvdkit.keras.functions import average_values, broadcast_variables, numbers_of
from hvdkit.keras.keras_2 import build, rate_of, slots_of, variables_of, velocities_of
from hvdkit.keras.step import distributed_step


class ForModel:
    """A callback's access to the model."""

    model: Any

    def set_model(self, model: Any) -> None:
        """Receive the model from ``fit``. Raises TypeError for a model of tf_keras that needs other callbacks."""
        keras2 = sys.modules.get("tf_keras")
        if keras2 and isinstance(model, keras2.Model) and not isinstance(self, keras2.callbacks.Callback):
            raise TypeError(
                f"{type(self).__name__} is a callback of Keras 3 here, but the model belongs to Keras 2 (tf_keras).\n"
                "HINT: import hvdkit.tensorflow.keras as hvd, whose callbacks are for models of tf.keras, and set "
                "TF_USE_LEGACY_KERAS=1 before TensorFlow is imported, so that tf.keras is tf_keras."
            )
        super().set_model(model)  # type: ignore[misc]  # of Keras's own class of callbacks


class BroadcastGlobalVariables(ForModel):
    """The behaviour of BroadcastGlobalVariablesCallback."""

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        self.root_rank, self.device = root_rank, device
        self.broadcast_done = False
        variables = local_variables if isinstance(local_variables, Iterable) else [local_variables]
        self._local = {id(variable): variable for variable in variables if variable is not None}

    def register_local_var(self, var: Any) -> None:
        """Leave ``var``, a variable of the model or its optimizer of any shape, to each rank. Raises nothing.

        Examples:
            >>> callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
            >>> callback.register_local_var(model.layers[0].bias)
        """
        self._local[id(var)] = var

    def on_train_begin(self, logs: Any = None) -> None:
        """Broadcast the variables, if all ranks have built the model."""
        self.broadcast_done = False
        optimizer = getattr(self.model, "optimizer", None)
        if self.model.built and optimizer is not None:
            build(optimizer, self.model.trainable_variables)
        if all(objects.allgather_object(bool(self.model.built), name="BroadcastGlobalVariablesCallback.built")):
            self.on_train_batch_end(-1)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Broadcast the variables, if that was not done before."""
        if self.broadcast_done:
            return
        optimizer = getattr(self.model, "optimizer", None)
        step = distributed_step(optimizer)
        local = {*self._local, *(() if step is None else step.local)}
        local |= slots_of(optimizer, local)
        variables = [*self.model.variables, *variables_of(optimizer)]
        shared = [variable for variable in variables if id(variable) not in local]
        # Dropout and other random layers draw different numbers on each rank.
        alike = [variable for variable in shared if variable.name != "seed_generator_state"]
        broadcast_variables(alike, self.root_rank)
        self.broadcast_done = True


class BroadcastGlobalVariablesCallback(BroadcastGlobalVariables, keras.callbacks.Callback):  # type: ignore[misc]
    """A callback that broadcasts the variables of ``root_rank``: those of the model and of its optimizer.

    The broadcast is before the first batch, or after it where the variables do not exist before. The state of random
    numbers stays each rank's own. Raises HorovodInternalError while training, on every rank where ranks disagree, as on
    a shape.

    Args:
        root_rank: the rank whose values all ranks get.
        device: accepted for compatibility.
        local_variables: a variable, or several, that stay each rank's own.

    Examples:
        >>> _ = model.layers[0].bias.assign([float(hvd.rank())])  # ranks begin apart
        >>> model.compile(optimizer=hvd.DistributedOptimizer(optimizer), loss="mse")
        >>> history = model.fit(x, y, verbose=0, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
        >>> first, second = hvd.allgather_object(model.get_weights())
        >>> np.array_equal(first[1], second[1])
        True
    """


class MetricAverage(ForModel):
    """The behaviour of MetricAverageCallback."""

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self.device = device

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Average ``logs``. Raises ValueError on all ranks if ranks have different metrics or learning rates."""
        logs = {} if logs is None else logs
        values = keras.tree.flatten(logs)
        arrays = [numbers_of(value) for value in values]
        shapes = keras.tree.pack_sequence_as(logs, [None if array is None else str(array.shape) for array in arrays])
        numeric = {name: shape for name, shape in shapes.items() if any(keras.tree.flatten(shape))}
        names = sorted(name if shape == "()" else f"{name} of shape {shape}" for name, shape in numeric.items())
        gathered = objects.allgather_object((names, _shared_rate(self.model)), name="MetricAverageCallback.names")
        all_names, rates = zip(*gathered, strict=True)
        if any(other != names for other in all_names):
            listed = "; ".join(f"rank {rank}: {', '.join(metrics) or 'none'}" for rank, metrics in enumerate(all_names))
            raise ValueError(
                f"MetricAverageCallback: ranks have different metrics at the end of epoch {epoch + 1}: {listed}\n"
                "HINT: pass validation_data, and the same metrics, on all ranks."
            )
        if None not in rates and len(set(rates)) > 1:
            listed = "; ".join(f"rank {rank}: {rate:g}" for rank, rate in enumerate(rates))
            raise ValueError(
                f"MetricAverageCallback: ranks have different learning rates at the end of epoch {epoch + 1}: "
                f"{listed}\n"
                "HINT: set the same rate on all ranks. Put callbacks that follow a metric, such as ReduceLROnPlateau, "
                "after MetricAverageCallback in the list; before it, each rank follows its own metric."
            )
        averaged = average_values(values, arrays, "MetricAverageCallback")
        logs.update(keras.tree.pack_sequence_as(logs, averaged))


def _shared_rate(model: Any) -> float | None:
    """Return the learning rate of a model that all ranks train together; None for other models and schedules."""
    optimizer = getattr(model, "optimizer", None)
    step, rate = distributed_step(optimizer), getattr(optimizer, "learning_rate", None)
    if step is None or step.settings.process_set is not global_process_set or rate is None or callable(rate):
        return None
    return rate_of(optimizer)


class MetricAverageCallback(MetricAverage, keras.callbacks.Callback):  # type: ignore[misc]
    """A callback that averages metrics over all ranks at the end of each epoch, for the callbacks that come after it.

    A metric of several values (an array, a tensor, or a list, tuple or dictionary of these and of numbers) is averaged
    element by element and keeps its form; averages of integers and booleans are floating. Text and None stay.
    ``device`` is accepted for compatibility.

    Raises:
        ValueError: at the end of an epoch, on all ranks where they have different metrics, or metrics of different
            shapes, or other learning rates for one optimizer: put callbacks that set the rate by a metric after this.

    Examples:
        >>> model.compile(optimizer=hvd.DistributedOptimizer(optimizer), loss="mse")
        >>> history = model.fit(x, y, verbose=0, callbacks=[hvd.callbacks.MetricAverageCallback()])
        >>> history.history["loss"]  # the average of 4 on rank 0 and 16 on rank 1
        [10.0]
    """


class LearningRateSchedule(ForModel):
    """The behaviour of LearningRateScheduleCallback."""

    params: dict[str, Any]

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ValueError("Parameter `initial_lr` is required")
        self.initial_lr = float(initial_lr)
        self.start_epoch, self.end_epoch = start_epoch, end_epoch
        self.current_epoch = 0
        self.staircase, self.steps_per_epoch = staircase, steps_per_epoch
        self.momentum_correction = momentum_correction
        self._multiplier = multiplier

    def multiplier(self, epoch: float) -> float:
        """Return the factor of the learning rate at an epoch."""
        by_epoch = self._multiplier
        return float(by_epoch(epoch) if callable(by_epoch) else by_epoch ** (epoch - self.start_epoch))

    def on_train_begin(self, logs: Any = None) -> None:
        """Set the number of steps of an epoch. Raises ValueError where it is needed and unknown."""
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self.params.get("steps")
            if not self.steps_per_epoch:
                raise ValueError(
                    "Could not autodetect the number of steps per epoch. Please specify the steps_per_epoch parameter "
                    f"to the {type(self).__name__}()."
                )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Store the epoch."""
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set the learning rate, and scale the velocities of an SGD to it."""
        is_over = self.end_epoch is not None and self.current_epoch >= self.end_epoch
        if self.current_epoch < self.start_epoch or is_over or (self.staircase and batch > 0):
            return
        epoch = self.current_epoch if self.staircase else self.current_epoch + batch / (self.steps_per_epoch or 1)
        old, new = rate_of(self.model.optimizer), self.initial_lr * self.multiplier(epoch)
        if new == old:
            return
        self.model.optimizer.learning_rate = new
        optimizer = getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)
        if self.momentum_correction and old > 0.0 and any(kind.__name__ == "SGD" for kind in type(optimizer).__mro__):
            for velocity in velocities_of(optimizer, self.model.trainable_variables):
                velocity.assign(velocity * (new / old))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Log the learning rate."""
        if logs is not None:
            logs["lr"] = rate_of(self.model.optimizer)


class LearningRateScheduleCallback(LearningRateSchedule, keras.callbacks.Callback):  # type: ignore[misc]
    """A callback that sets the learning rate to ``initial_lr * multiplier(epoch)`` in epochs of a range.

    Args:
        initial_lr: the rate that is multiplied.
        multiplier: a function of the epoch, or a number that is raised to the epochs since ``start_epoch``.
        start_epoch: the first epoch in which the rate is set, from 0.
        end_epoch: the epoch from which the rate is no longer set; None for never.
        staircase: set the rate once an epoch; else with each batch, by a fractional epoch.
        momentum_correction: scale an SGD's velocities, which were accumulated at the old rate, to the new rate, by P.
            Goyal et al., "Accurate, Large Minibatch SGD" (2017), remark 2.
        steps_per_epoch: needed without ``staircase`` where Keras does not know the number.

    Raises:
        ValueError: without ``initial_lr``; and when training begins, without ``steps_per_epoch`` where it is needed.

    Examples:
        >>> model.compile(optimizer=hvd.DistributedOptimizer(optimizer), loss="mse")
        >>> decay = hvd.callbacks.LearningRateScheduleCallback(initial_lr=0.1, multiplier=0.5)
        >>> history = model.fit(x, y, epochs=3, verbose=0, callbacks=[decay])
        >>> [round(rate, 3) for rate in history.history["lr"]]
        [0.1, 0.05, 0.025]
    """


class LearningRateWarmup(LearningRateSchedule):
    """The behaviour of LearningRateWarmupCallback."""

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def warm_up(epoch: float) -> float:
            # One step ahead, so that an epoch ends on a round number.
            epoch += 1.0 / (self.steps_per_epoch or 1)
            return 1.0 / job.size() * (epoch * (job.size() - 1) / warmup_epochs + 1)

        super().__init__(initial_lr, warm_up, 0, warmup_epochs, False, momentum_correction, steps_per_epoch)
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Log the learning rate."""
        super().on_epoch_end(epoch, logs)
        if self.end_epoch is not None and epoch == self.end_epoch - 1 and self.verbose > 0 and job.rank() == 0:
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {rate_of(self.model.optimizer):g}.")


class LearningRateWarmupCallback(LearningRateWarmup, keras.callbacks.Callback):  # type: ignore[misc]
    """A callback that raises the learning rate with each batch from ``initial_lr / size`` to ``initial_lr``.

    ``momentum_correction``, ``steps_per_epoch`` and errors are those of LearningRateScheduleCallback().

    Args:
        initial_lr: the rate for all ranks together, as a rule the rate for one process times ``hvd.size()``.
        warmup_epochs: the number of epochs until the rate is ``initial_lr``.
        verbose: above 0 to print on rank 0 when the rate is ``initial_lr``.

    Examples:
        >>> model.compile(optimizer=hvd.DistributedOptimizer(optimizer), loss="mse")
        >>> warmup = hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.1 * hvd.size(), warmup_epochs=2)
        >>> history = model.fit(x, y, epochs=3, verbose=0, callbacks=[warmup])
        >>> [round(rate, 3) for rate in history.history["lr"]]
        [0.15, 0.2, 0.2]
    """


__all__ = ["BroadcastGlobalVariablesCallback", "MetricAverageCallback"]
__all__ += ["LearningRateScheduleCallback", "LearningRateWarmupCallback"]
