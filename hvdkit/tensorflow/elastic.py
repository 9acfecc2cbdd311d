"""Elastic training with TensorFlow 2: ``hvd.elastic``, as ``horovod.tensorflow.elastic``."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdkit.api.elastic import ObjectState, State, run
from hvdkit.api.variables import VariablesState, stepped_by
from hvdkit.tensorflow.functions import broadcast_variables

__all__ = ["ObjectState", "State", "TensorFlowKerasState", "TensorFlowState", "run"]


class TensorFlowState(VariablesState):
    """The state of variables of TensorFlow.

    Args:
        variables: tf.Variable objects, the same on all ranks in the same order.
        session: ignored: there are none in TensorFlow 2.
        kwargs: any objects that can be copied and pickled; they are attributes.
    """

    def __init__(self, variables: Any, session: Any = None, **kwargs: Any) -> None:
        self.variables = list(variables)
        super().__init__(**kwargs)

    def _variables(self) -> list[Any]:
        return self.variables

    def _array(self, variable: Any) -> npt.NDArray[Any]:
        return np.asarray(variable)

    def _broadcast(self, variables: list[Any]) -> None:
        # A variable of Keras 3 has a tf.Variable as its value.
        broadcast_variables([each if callable(each.value) else each.value for each in variables], root_rank=0)


class TensorFlowKerasState(TensorFlowState):
    """The state of a Keras model, of Keras 3 on TensorFlow or of tf_keras, and of its optimizer.

    Args:
        model: a model that is built.
        optimizer: by default that with which the model was compiled.
        backend: ignored, as in Horovod since TensorFlow 2.
        kwargs: any objects that can be copied and pickled; they are attributes.

    Raises:
        ValueError: the model is not built.
    """

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any) -> None:
        if not model.built:
            raise ValueError(
                "TensorFlowKerasState: the model is not built.\nHINT: call model.build(input_shape) first."
            )
        self.model, self.optimizer = model, optimizer or getattr(model, "optimizer", None)
        if self.optimizer is not None:
            make = getattr(self.optimizer, "_create_all_weights", None)  # of optimizers before Keras 2.11
            (make or self.optimizer.build)(model.trainable_variables)
        super().__init__([], **kwargs)

    def _variables(self) -> list[Any]:
        variables = getattr(self.optimizer, "variables", ())
        return [*self.model.variables, *(variables() if callable(variables) else variables)]

    def _stepped(self) -> tuple[int, Collection[int]]:
        return stepped_by(self.optimizer, self.model)
