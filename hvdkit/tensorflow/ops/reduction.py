"""The reduction under allreduce and under the gradients of other operations: tensors in, reduced ones out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvdkit.api.operations import Asked
from hvdkit.engine.ops.batch import reduces_directly
from hvdkit.engine.ops.requests import ReduceRequest
from hvdkit.tensorflow.ops.bridge import differentiable, run
from hvdkit.tensorflow.ops.framework import OPERATIONS


def reduce(asked: Asked, tensors: Sequence[Any], request: ReduceRequest) -> list[Any]:
    """The reduced tensors, after all checks. Differentiable: gradients are reduced in the same way, as Horovod's."""

    def reduced(inputs: Sequence[Any]) -> list[Any]:
        return run(
            asked,
            inputs,
            lambda asked, some: OPERATIONS.allreduce(asked, some, request),
            [(tensor.dtype, tensor.shape) for tensor in inputs],
            stays_on_device=lambda: reduces_directly(request, [tensor.dtype.name for tensor in inputs]),
        )

    return differentiable(tensors, reduced, lambda _, gradients: reduce(asked.of_gradient(), gradients, request))
