"""The reduction under allreduce and under the gradients of other operations: tensors in, reduced ones out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hvdkit.api.operations import Asked, gradient_name
from hvdkit.engine.life.process_sets import ProcessSet
from hvdkit.engine.ops.device_operations import reduces_directly
from hvdkit.engine.ops.requests import ReduceRequest
from hvdkit.tensorflow.ops.bridge import differentiable, run
from hvdkit.tensorflow.ops.framework import OPERATIONS


@dataclass(frozen=True)
class Reduction:
    """What is done with tensors, checked."""

    request: ReduceRequest
    process_set: ProcessSet
    ignore_name_scope: bool
    name: str | None

    def stays_on_device(self, tensors: Sequence[Any]) -> bool:
        """Whether it needs no host memory."""
        return reduces_directly(self.request, [tensor.dtype.name for tensor in tensors])

    def backward(self) -> Reduction:
        """The reduction of the gradients: the same, as Horovod's."""
        return replace(self, name=gradient_name(self.name))


def reduce(kind: str, tensors: Sequence[Any], reduction: Reduction) -> list[Any]:
    """The reduced tensors. Differentiable: the gradients are reduced in the same way."""

    def reduced(inputs: Sequence[Any]) -> list[Any]:
        return run(
            kind,
            Asked(kind.lower(), reduction.name, reduction.process_set, waits=True),
            inputs,
            lambda asked, some: OPERATIONS.allreduce(asked, some, reduction.request),
            [(tensor.dtype, tensor.shape) for tensor in inputs],
            reduction.ignore_name_scope,
            lambda: reduction.stays_on_device(inputs),
        )

    return differentiable(tensors, reduced, lambda _, gradients: reduce(kind, gradients, reduction.backward()))
