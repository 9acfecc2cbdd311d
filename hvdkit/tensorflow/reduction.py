"""The reduction under allreduce and under the gradients of other operations: tensors in, reduced ones out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from hvdkit.api import checks
from hvdkit.engine import runtime
from hvdkit.engine.direct import DeviceArray, reduces_directly
from hvdkit.engine.process_sets import ProcessSet
from hvdkit.engine.requests import Call, ReduceRequest
from hvdkit.tensorflow.arrays import empty_like
from hvdkit.tensorflow.bridge import backward, gradient_name, is_recorded, operation_name, run
from hvdkit.tensorflow.device import kind_of


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

    def start(arrays: list[Any], name: str | None, wake: bool) -> tuple[Any, Callable[[Any], list[Any]]]:
        on_device = isinstance(arrays[0], DeviceArray)  # copies, to be reduced in place
        # While this thread waits nobody can change the tensors; in a graph they are kept by whoever reads them.
        outputs = arrays if on_device else [empty_like(array) for array in arrays]
        call = Call(name, checks.check_process_set(kind.lower(), reduction.process_set), kind_of(arrays), wake)
        handle = runtime.engine().allreduce(outputs, reduction.request, call, None if on_device else arrays)
        return handle, list if on_device else lambda _: outputs

    def reduced(inputs: Sequence[Any]) -> list[Any]:
        name = operation_name(kind, reduction.name, inputs, reduction.ignore_name_scope)
        outputs = [(tensor.dtype, tensor.shape) for tensor in inputs]
        return run(inputs, name, start, outputs, lambda: reduction.stays_on_device(inputs))

    if not is_recorded():
        return reduced(tensors)

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def differentiable(*inputs: Any) -> tuple[list[Any], Callable[..., Any]]:
        outputs = reduced(inputs)

        def gradient(*gradients: Any) -> list[Any]:
            return backward(outputs, gradients, lambda known: reduce(kind, known, reduction.backward()))

        return outputs, gradient

    return list(differentiable(*tensors))
