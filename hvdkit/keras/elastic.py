"""Elastic training with Keras 3: ``hvd.elastic``, as ``horovod.keras.elastic``.

The classes of the callbacks' behaviour serve tf_keras too.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy.typing as npt

from hvdkit.api.elastic import ObjectState, State, VariablesState, run
from hvdkit.keras.callbacks import ForModel
from hvdkit.keras.functions import broadcast_variables
from hvdkit.keras.keras_2 import build, variables_of

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "ObjectState",
    "State",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]


class KerasState(VariablesState):
    """The state of a Keras model and its optimizer.

    Args:
        model: a model that is built.
        optimizer: by default that with which the model was compiled.
        backend: ignored, as in Horovod since TensorFlow 2.
        kwargs: any objects that can be copied and pickled, as ``batch=0, epoch=0``; they are attributes.

    Raises:
        ValueError: the model is not built.
    """

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any) -> None:
        if not model.built:
            raise ValueError("KerasState: the model is not built.\nHINT: call model.build(input_shape) before.")
        self.model, self.optimizer = model, optimizer or getattr(model, "optimizer", None)
        if self.optimizer is not None:
            build(self.optimizer, model.trainable_variables)
        super().__init__(**kwargs)

    def _variables(self) -> list[Any]:
        return [*self.model.variables, *variables_of(self.optimizer)]

    def _array(self, variable: Any) -> npt.NDArray[Any]:
        array: npt.NDArray[Any] = keras.ops.convert_to_numpy(variable)
        return array

    def _broadcast(self, variables: list[Any]) -> None:
        broadcast_variables(variables, root_rank=0)


class CommitState(ForModel):
    """The behaviour of CommitStateCallback."""

    def __init__(self, state: State, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state, self.batches_per_commit = state, batches_per_commit
        self._batches = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Count batches anew, so that all ranks commit after the same ones."""
        self._batches = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Commit after so many batches."""
        self._batches += 1
        if self._batches % self.batches_per_commit == 0:
            self.state.commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Commit at the end of each epoch."""
        self.state.commit()


class UpdateBatchState(ForModel):
    """The behaviour of UpdateBatchStateCallback."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Note the number of the batch."""
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Begin with batch 0 again."""
        self.state.batch = 0


class UpdateEpochState(ForModel):
    """The behaviour of UpdateEpochStateCallback."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self._first = state.epoch

    def on_train_begin(self, logs: Any = None) -> None:
        """Note the epoch in which this call of ``fit`` begins, which counts from 0."""
        self._first = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Note the number of epochs that are done."""
        self.state.epoch = self._first + epoch + 1


class CommitStateCallback(CommitState, keras.callbacks.Callback):  # type: ignore[misc]
    """A callback that commits the state after every ``batches_per_commit`` batches and at the end of each epoch.

    Put it behind those that update the state.
    """


class UpdateBatchStateCallback(UpdateBatchState, keras.callbacks.Callback):  # type: ignore[misc]
    """A callback that keeps ``state.batch`` at the batch of the epoch."""


class UpdateEpochStateCallback(UpdateEpochState, keras.callbacks.Callback):  # type: ignore[misc]
    """A callback that keeps ``state.epoch`` at the number of epochs that are done, over all calls of ``fit``."""
