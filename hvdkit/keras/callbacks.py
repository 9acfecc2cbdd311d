"""Horovod's callbacks for ``model.fit``."""

from __future__ import annotations

import keras

from hvdkit.keras import callback_parts as parts


class BroadcastGlobalVariablesCallback(parts.BroadcastGlobalVariables, keras.callbacks.Callback):  # type: ignore[misc]
    """A callback that broadcasts the variables of ``root_rank``: those of the model and of its optimizer.

    The broadcast is before the first batch, or after it where the variables do not exist before. The state of random
    numbers stays each rank's own.

    Args:
        root_rank: the rank whose values all ranks get.
        device: accepted for compatibility.
        local_variables: a variable, or several, that stay each rank's own.

    Raises:
        HorovodInternalError: while training, on every rank where ranks disagree, as on a shape.

    Examples:
        >>> _ = model.layers[0].bias.assign([float(hvd.rank())])  # ranks begin apart
        >>> model.compile(optimizer=hvd.DistributedOptimizer(optimizer), loss="mse")
        >>> history = model.fit(x, y, verbose=0, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
        >>> first, second = hvd.allgather_object(model.get_weights())
        >>> np.array_equal(first[1], second[1])
        True
    """


class MetricAverageCallback(parts.MetricAverage, keras.callbacks.Callback):  # type: ignore[misc]
    """A callback that averages metrics over all ranks at the end of each epoch, for the callbacks that come after it.

    A metric of several values (an array, a tensor, or a list, tuple or dictionary of these and of numbers) is averaged
    element by element and keeps its form; averages of integers and booleans are floating. Text and None stay.

    Args:
        device: accepted for compatibility.

    Raises:
        ValueError: at the end of an epoch, on all ranks where they have different metrics, or metrics of different
            shapes, or other learning rates for one optimizer: put callbacks that set the rate by a metric after this.

    Examples:
        >>> model.compile(optimizer=hvd.DistributedOptimizer(optimizer), loss="mse")
        >>> history = model.fit(x, y, verbose=0, callbacks=[hvd.callbacks.MetricAverageCallback()])
        >>> history.history["loss"]  # the average of 4 on rank 0 and 16 on rank 1
        [10.0]
    """


class LearningRateScheduleCallback(parts.LearningRateSchedule, keras.callbacks.Callback):  # type: ignore[misc]
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


class LearningRateWarmupCallback(parts.LearningRateWarmup, keras.callbacks.Callback):  # type: ignore[misc]
    """A callback that raises the learning rate with each batch from ``initial_lr / size`` to ``initial_lr``.

    ``momentum_correction``, ``steps_per_epoch`` and errors are those of LearningRateScheduleCallback().

    Args:
        initial_lr: the rate for all ranks together, as a rule the rate for one process times ``hvd.size()``.
        warmup_epochs: the number of epochs until the rate is ``initial_lr``.
        verbose: above 0 to print on rank 0 when the rate is ``initial_lr``.

    Raises:
        ValueError: as LearningRateScheduleCallback().

    Examples:
        >>> model.compile(optimizer=hvd.DistributedOptimizer(optimizer), loss="mse")
        >>> warmup = hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.1 * hvd.size(), warmup_epochs=2)
        >>> history = model.fit(x, y, epochs=3, verbose=0, callbacks=[warmup])
        >>> [round(rate, 3) for rate in history.history["lr"]]
        [0.15, 0.2, 0.2]
    """


__all__ = [
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]
