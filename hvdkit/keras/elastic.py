"""Elastic training with Keras 3: ``hvd.elastic``, as ``horovod.keras.elastic``.

The classes of the callbacks' behaviour serve tf_keras too.

A call of ``fit`` that follows a reset continues in the middle of an epoch. Keras cannot begin there, so ``fit`` runs
all batches of the epoch, and those that are committed are drawn from the data without a step: for them,
``model.train_function``, which ``fit`` calls for each batch in every Keras, is replaced by a function that returns the
metrics. The state keeps what ``fit`` would forget: the metrics of the epoch and the history.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import keras

from hvdkit.api.elastic import ObjectState, State, run
from hvdkit.engine.session import runtime
from hvdkit.keras.callbacks import ForModel
from hvdkit.keras.fit_state import FitProgress, KerasState, assign_metrics

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "ObjectState",
    "State",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]


class ForState(ForModel):
    """A callback's access to the state."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self._is_first = True  # True until the first epoch of a call of ``fit`` begins
        self._own_progress = FitProgress()

    @property
    def progress(self) -> FitProgress:
        """The progress that the state keeps; of another state than KerasState, one that no later ``fit`` sees."""
        kept = getattr(self.state, "_fit_progress", None)
        return kept if isinstance(kept, FitProgress) else self._own_progress

    def on_train_begin(self, logs: Any = None) -> None:
        """Begin a call of ``fit``."""
        self._is_first, self._own_progress = True, FitProgress()


class CommitState(ForState):
    """The behaviour of CommitStateCallback."""

    def __init__(self, state: State, batches_per_commit: int = 1) -> None:
        super().__init__(state)
        self.batches_per_commit = batches_per_commit
        self._batches = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Count batches anew, so that all ranks commit after the same ones."""
        super().on_train_begin(logs)
        self._batches = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Commit: now all callbacks, and the history, have the epoch before, which an interrupt thus leaves whole."""
        self.state.commit()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Commit after so many batches."""
        if batch < self.progress.skipped:
            return
        self._batches += 1
        if self._batches % self.batches_per_commit == 0:
            self.state.commit()


class UpdateBatchState(ForState):
    """The behaviour of UpdateBatchStateCallback."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Have the first epoch continue behind the batches that are done; other numbers of ranks did other shares."""
        progress, size = self.progress, runtime.topology().size
        in_fit = callable(getattr(self.model, "train_function", None))  # not in a loop of the user's
        done = progress.batches * progress.size // size if self._is_first and in_fit else 0
        if self._is_first:
            self._restore_steps()
        self._is_first = False
        progress.batches = progress.skipped = done
        progress.size = size
        self._train_all()
        if done:
            self.state.batch = done - 1
            self._skip(done)
        else:
            progress.metrics = ()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Note the number of the batch."""
        if batch >= self.progress.skipped:
            self.state.batch = batch
            self.progress.batches, self.progress.metrics = batch + 1, None

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Begin with batch 0 again."""
        self.state.batch = self.progress.batches = self.progress.skipped = 0
        self.progress.metrics = ()
        self._train_all()

    def on_train_end(self, logs: Any = None) -> None:
        """Leave the steps per execution to the next call of ``fit``."""
        self.progress.steps = 0

    def _restore_steps(self) -> None:
        """Undo what tf_keras leaves after an exception in an epoch's last execution, which may have fewer steps."""
        variable = getattr(self.model, "_steps_per_execution", None)
        if variable is not None:
            variable.assign(self.progress.steps or variable)
            self.progress.steps = int(variable)

    def _skip(self, count: int) -> None:
        """Have ``fit`` draw the first ``count`` batches of the epoch without a step."""
        model, train, drawn = self.model, self.model.train_function, 0

        def train_or_skip(data: Any) -> Any:
            nonlocal drawn
            steps = _steps_per_execution(model)
            drawn += steps
            if drawn > count:
                return train(data)
            batches = data if isinstance(data, list) else list(islice(data, steps))  # on PyTorch they are drawn already
            if not batches:
                raise StopIteration
            if drawn == steps:
                self._restore_metrics(batches[0])
            return model.get_metrics_result()

        train_or_skip.train = train  # type: ignore[attr-defined]
        model.train_function = train_or_skip

    def _train_all(self) -> None:
        """Have ``fit`` train all batches, also where an exception has ended it while it skipped some."""
        train = getattr(getattr(self.model, "train_function", None), "train", None)
        if train is not None:
            self.model.train_function = train

    def _restore_metrics(self, batch: Any) -> None:
        """Give the metrics, which ``fit`` has reset, the values that are saved."""
        if not assign_metrics(self.model, self.progress.metrics or ()):
            # On TensorFlow, a new process makes the variables of its metrics in the first step.
            self.model.test_on_batch(*keras.utils.unpack_x_y_sample_weight(batch))
            self.model.reset_metrics()
            assign_metrics(self.model, self.progress.metrics or ())


class UpdateEpochState(ForState):
    """The behaviour of UpdateEpochStateCallback."""

    def __init__(self, state: Any) -> None:
        super().__init__(state)
        self._before = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Note the epochs before this call of ``fit``, if it counts from 0, and keep the history of those since."""
        progress, recorded = self.progress, self._numbered_history()
        if self._is_first:
            self._before = self.state.epoch - epoch
        if self._is_first and progress.history is not None and recorded is not None:
            recorded.history = {name: list(values) for name, values in progress.history.items()}
            recorded.epoch = list(progress.epochs)
        elif recorded is not None:
            progress.history = {name: list(values) for name, values in recorded.history.items()}
            progress.epochs = list(recorded.epoch)
        self._is_first = False

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Note the number of epochs that are done."""
        self.state.epoch = self._before + epoch + 1

    def on_train_end(self, logs: Any = None) -> None:
        """Leave the history to the user; the next call of ``fit`` has another."""
        self._numbered_history()
        self.progress.history, self.progress.epochs = None, []

    def _numbered_history(self) -> Any:
        """Return the History, its epochs numbered as if one call of ``fit`` had run all; None in a loop without one."""
        recorded: Any = getattr(self.model, "history", None)
        if not isinstance(getattr(recorded, "history", None), dict):
            return None
        if recorded.epoch:
            recorded.epoch = list(range(recorded.epoch[0], recorded.epoch[0] + len(recorded.epoch)))
        return recorded


class CommitStateCallback(CommitState, keras.callbacks.Callback):  # type: ignore[misc]
    """A callback that commits the state after every ``batches_per_commit`` batches and when an epoch begins.

    Put it behind those that update the state.
    """


class UpdateBatchStateCallback(UpdateBatchState, keras.callbacks.Callback):  # type: ignore[misc]
    """A callback that keeps ``state.batch`` at the batch of the epoch, and has ``fit`` continue behind it."""


class UpdateEpochStateCallback(UpdateEpochState, keras.callbacks.Callback):  # type: ignore[misc]
    """A callback that keeps ``state.epoch`` at the number of epochs that are done, and the history of ``fit``."""


def _steps_per_execution(model: Any) -> int:
    """Return the number of batches of a call of ``model.train_function``: of Keras 3, or of tf_keras at this moment."""
    steps = getattr(model, "steps_per_execution", None)
    return int(model._steps_per_execution if steps is None else steps)
