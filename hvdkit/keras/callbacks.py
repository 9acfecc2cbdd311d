"""Horovod's callbacks for ``model.fit``."""

from __future__ import annotations

import keras

from hvdkit.keras import callback_parts as parts


class BroadcastGlobalVariablesCallback(parts.BroadcastGlobalVariables, keras.callbacks.Callback):  # type: ignore[misc]
    """Gives all ranks the variables that ``root_rank`` begins with: of the model and of its optimizer.

    Before the first batch where they exist by then, else after it; but for the state of random numbers.

    Args:
        root_rank: whose values all get.
        device: taken for compatibility.
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
    """Averages metrics over all ranks at the end of each epoch, in place, for the callbacks that come after it.

    A metric of several values (an array, a tensor, or a list, tuple or dictionary of these and of numbers) is averaged
    element by element and keeps its form; averages of integers and booleans are floating. Text and None stay.

    Args:
        device: taken for compatibility.

    Raises:
        ValueError: at the end of an epoch, on all ranks where they have different metrics, or metrics of different
            shapes, or other learning rates for one optimizer: what sets these by a metric comes after this callback.

    Examples:
        >>> model.compile(optimizer=hvd.DistributedOptimizer(optimizer), loss="mse")
        >>> history = model.fit(x, y, verbose=0, callbacks=[hvd.callbacks.MetricAverageCallback()])
        >>> history.history["loss"]  # the average of 4 on rank 0 and 16 on rank 1
        [10.0]
    """


class LearningRateScheduleCallback(parts.LearningRateSchedule, keras.callbacks.Callback):  # type: ignore[misc]
    """Sets the learning rate to ``initial_lr * multiplier(epoch)`` from ``start_epoch`` to before ``end_epoch``.

    Args:
        initial_lr: the rate that is multiplied.
        multiplier: a function of the epoch, or a number, whose power by the epochs since ``start_epoch`` is taken.
        start_epoch: the first epoch in which the rate is set, from 0.
        end_epoch: the first one in which it is not any more; None for never.
        staircase: whether once an epoch, else with each batch, where the epoch is a fraction.
        momentum_correction: whether a velocity that was added up under the old rate is scaled to the new one, as P.
            Goyal et al., "Accurate, Large Minibatch SGD" (2017), remark 2, advise.
        steps_per_epoch: needed without ``staircase``, if Keras does not know it.

    Raises:
        ValueError: without ``initial_lr``; and when training begins, without ``steps_per_epoch`` where that is needed.

    Examples:
        >>> model.compile(optimizer=hvd.DistributedOptimizer(optimizer), loss="mse")
        >>> decay = hvd.callbacks.LearningRateScheduleCallback(initial_lr=0.1, multiplier=0.5)
        >>> history = model.fit(x, y, epochs=3, verbose=0, callbacks=[decay])
        >>> [round(rate, 3) for rate in history.history["lr"]]
        [0.1, 0.05, 0.025]
    """


class LearningRateWarmupCallback(parts.LearningRateWarmup, keras.callbacks.Callback):  # type: ignore[misc]
    """Raises the learning rate, batch by batch, from ``initial_lr / size`` to ``initial_lr`` in ``warmup_epochs``.

    ``momentum_correction``, ``steps_per_epoch`` and errors are those of LearningRateScheduleCallback().

    Args:
        initial_lr: the rate for all ranks together, as a rule the rate for one multiplied by ``hvd.size()``.
        warmup_epochs: in how many epochs.
        verbose: above 0 to say on rank 0 when it is there.

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
