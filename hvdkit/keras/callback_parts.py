"""The behaviour of Horovod's callbacks, which callbacks of Keras 3 and of tf_keras inherit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import keras
import numpy as np

from hvdkit.api import job, objects
from hvdkit.engine.session.process_sets import global_process_set
from hvdkit.keras.functions import average_arrays, broadcast_variables
from hvdkit.keras.keras_2 import build, is_built, needs_other_callbacks, variables_of, velocities_of
from hvdkit.keras.step import distributed_step

# The state of Dropout and other random layers, which draw different numbers on each rank.
_SEED_STATE = "seed_generator_state"


class ForModel:
    """A callback's access to the model."""

    model: Any

    def set_model(self, model: Any) -> None:
        """Receive the model from ``fit``. Raises TypeError for a model of tf_keras that needs other callbacks."""
        if needs_other_callbacks(model, self):
            raise TypeError(
                f"{type(self).__name__} is a callback of Keras 3 here, and the model is one of Keras 2 (tf_keras).\n"
                "HINT: import hvdkit.tensorflow.keras as hvd, whose callbacks are for models of tf.keras, and set "
                "TF_USE_LEGACY_KERAS=1 before TensorFlow is imported, so that tf.keras is tf_keras."
            )
        super().set_model(model)  # type: ignore[misc]  # of Keras's own class of callbacks


class BroadcastGlobalVariables(ForModel):
    """The behaviour and arguments of callbacks.BroadcastGlobalVariablesCallback."""

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self.broadcast_done = False
        if local_variables is not None and not isinstance(local_variables, Iterable):
            local_variables = [local_variables]
        self._local = {id(variable): variable for variable in local_variables or ()}

    def register_local_var(self, var: Any) -> None:
        """Leave a variable to each rank.

        Args:
            var: a variable of the model or its optimizer, of any shape. Raises nothing for other variables.

        Examples:
            >>> callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
            >>> callback.register_local_var(model.layers[0].bias)
        """
        self._local[id(var)] = var

    def on_train_begin(self, logs: Any = None) -> None:
        """Broadcast the variables, if all ranks have built the model."""
        self.broadcast_done = False
        optimizer = getattr(self.model, "optimizer", None)
        if self.model.built and optimizer is not None and not is_built(optimizer):
            build(optimizer, self.model.trainable_variables)
        if all(objects.allgather_object(bool(self.model.built), name="BroadcastGlobalVariablesCallback.built")):
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Broadcast the variables, if that was not done before."""
        if not self.broadcast_done:
            self._broadcast()

    def _broadcast(self) -> None:
        optimizer = getattr(self.model, "optimizer", None)
        variables = [*self.model.variables, *(variables_of(optimizer) if optimizer is not None else ())]
        step = distributed_step(optimizer)
        local = {*self._local, *(() if step is None else step.local)}
        local |= _slots_of(optimizer, local)
        shared = [variable for variable in variables if id(variable) not in local and variable.name != _SEED_STATE]
        broadcast_variables(shared, self.root_rank)
        self.broadcast_done = True


class MetricAverage(ForModel):
    """The behaviour and arguments of callbacks.MetricAverageCallback."""

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self.device = device

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Average ``logs``. Raises ValueError on all ranks if ranks have different metrics or learning rates."""
        logs = {} if logs is None else logs
        values = keras.tree.flatten(logs)
        arrays = [_numbers_of(value) for value in values]
        shapes = [None if array is None else str(array.shape) for array in arrays]
        names = _described(keras.tree.pack_sequence_as(logs, shapes))
        gathered = objects.allgather_object((names, _shared_rate(self.model)), name="MetricAverageCallback.names")
        rates = [rate for _, rate in gathered]
        if any(rank_names != names for rank_names, _ in gathered):
            listed = "; ".join(
                f"rank {rank}: {', '.join(metrics) or 'none'}" for rank, (metrics, _) in enumerate(gathered)
            )
            raise ValueError(
                f"MetricAverageCallback: ranks have different metrics at the end of epoch {epoch + 1}: {listed}\n"
                "HINT: pass validation_data, and the same metrics, on all ranks."
            )
        if None not in rates and len(set(rates)) > 1:
            listed = "; ".join(f"rank {rank}: {rate:g}" for rank, rate in enumerate(rates))
            raise ValueError(
                f"MetricAverageCallback: ranks have different learning rates at the end of epoch {epoch + 1}: "
                f"{listed}\n"
                "HINT: have all ranks set the same. A callback that follows a metric, as ReduceLROnPlateau does, comes "
                "after MetricAverageCallback in the list; before it, each rank follows its own."
            )
        averages = iter(average_arrays([array for array in arrays if array is not None], "MetricAverageCallback"))
        averaged = [
            value if array is None else _like(value, next(averages))
            for value, array in zip(values, arrays, strict=True)
        ]
        logs.update(keras.tree.pack_sequence_as(logs, averaged))


class LearningRateSchedule(ForModel):
    """The behaviour and arguments of callbacks.LearningRateScheduleCallback."""

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
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = 0
        self._multiplier = multiplier

    def multiplier(self, epoch: float) -> float:
        """Return the factor of the learning rate at an epoch."""
        if callable(self._multiplier):
            return float(self._multiplier(epoch))
        return float(self._multiplier ** (epoch - self.start_epoch))

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
        """Set the learning rate."""
        ended = self.end_epoch is not None and self.current_epoch >= self.end_epoch
        if self.current_epoch < self.start_epoch or ended:
            return
        if not self.staircase:
            assert self.steps_per_epoch is not None
            self._adjust(self.current_epoch + batch / self.steps_per_epoch)
        elif batch == 0:
            self._adjust(self.current_epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Log the learning rate."""
        if logs is not None:
            logs["lr"] = _rate_of(self.model.optimizer)

    def _adjust(self, epoch: float) -> None:
        old, new = _rate_of(self.model.optimizer), self.initial_lr * self.multiplier(epoch)
        if new == old:
            return
        self.model.optimizer.learning_rate = new
        optimizer = getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)
        if self.momentum_correction and old > 0.0 and any(kind.__name__ == "SGD" for kind in type(optimizer).__mro__):
            for velocity in velocities_of(optimizer, self.model.trainable_variables):
                velocity.assign(velocity * (new / old))


class LearningRateWarmup(LearningRateSchedule):
    """The behaviour and arguments of callbacks.LearningRateWarmupCallback."""

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
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {_rate_of(self.model.optimizer):g}.")


def _rate_of(optimizer: Any) -> float:
    return float(keras.ops.convert_to_numpy(optimizer.learning_rate))


def _shared_rate(model: Any) -> float | None:
    """Return the learning rate of a model that all ranks train together; None for other models and schedules."""
    optimizer = getattr(model, "optimizer", None)
    step, rate = distributed_step(optimizer), getattr(optimizer, "learning_rate", None)
    if step is None or step.settings.process_set is not global_process_set or rate is None or callable(rate):
        return None
    return _rate_of(optimizer)


def _numbers_of(value: Any) -> Any:
    """Return a number, an array or a tensor as an array; None for values that are not real numbers."""
    if not (isinstance(value, int | float) or hasattr(value, "shape")):
        return None
    array = np.asarray(keras.ops.convert_to_numpy(value))
    return array if np.can_cast(array.dtype, np.float64, "same_kind") else None


def _like(value: Any, average: Any) -> Any:
    """Return an average in the form of its value: a number, an array, or a tensor; integers' averages are float64."""
    if average.ndim == 0:
        return float(average)
    return average if isinstance(value, np.ndarray) else keras.ops.convert_to_tensor(average)


def _described(shapes: Mapping[str, Any]) -> list[str]:
    """Return the names of metrics, with the shapes of arrays, which must be the same on all ranks.

    ``shapes`` has the shape of each value of a metric as text, and None for values that are not averaged.
    """
    averaged = {name: shape for name, shape in shapes.items() if any(keras.tree.flatten(shape))}
    return sorted(name if shape == "()" else f"{name} of shape {shape}" for name, shape in averaged.items())


def _slots_of(optimizer: Any, local: set[int]) -> set[int]:
    """Return the ids of an optimizer's state for variables of these ids: momenta, accumulators, averages."""
    if optimizer is None or not local:
        return set()
    inner = getattr(optimizer, "inner_optimizer", None)
    variables = getattr(optimizer, "_trainable_variables", None) or []
    slots = set() if inner is None else _slots_of(inner, local)
    for state in vars(optimizer).values():
        # Keras 3 has a list for each kind of slot, with an entry for each variable.
        if state is not variables and isinstance(state, list) and len(state) == len(variables):
            slots.update(id(slot) for variable, slot in zip(variables, state, strict=True) if id(variable) in local)
    return slots
