"""The reduction under allreduce and under the gradients of other operations: tensors in, reduced ones out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from hvdkit.api import checks
from hvdkit.compression import CASTS, Codec
from hvdkit.engine import runtime
from hvdkit.engine.process_sets import ProcessSet
from hvdkit.kernels.reduce_op import ReduceOp
from hvdkit.tensorflow.arrays import Array, empty_like
from hvdkit.tensorflow.bridge import backward, gradient_name, is_recorded, operation_name, run


@dataclass(frozen=True)
class Reduction:
    """What is done with tensors, checked."""

    op: ReduceOp
    process_set: ProcessSet
    ignore_name_scope: bool
    name: str | None
    prescale: float = 1.0
    postscale: float = 1.0
    codec: Codec = CASTS["none"]

    def backward(self) -> Reduction:
        """The reduction of the gradients: the same, as Horovod's."""
        return replace(self, name=gradient_name(self.name))


def reduce(kind: str, tensors: Sequence[Any], reduction: Reduction) -> list[Any]:
    """The reduced tensors. Differentiable: the gradients are reduced in the same way."""

    def start(arrays: list[Array], name: str | None, wake: bool) -> tuple[Any, Callable[[Any], list[Array]]]:
        # While this thread waits nobody can change the tensors; in a graph they are kept by whoever reads them.
        outputs = [empty_like(array) for array in arrays]
        handle = runtime.engine().allreduce(
            outputs,
            name=name,
            op=reduction.op,
            prescale=reduction.prescale,
            postscale=reduction.postscale,
            process_set_id=checks.check_process_set(kind.lower(), reduction.process_set),
            wake=wake,
            sources=arrays,
            codec=reduction.codec,
        )
        return handle, lambda _: outputs

    def reduced(inputs: Sequence[Any]) -> list[Any]:
        name = operation_name(kind, reduction.name, inputs, reduction.ignore_name_scope)
        return run(inputs, name, start, [(tensor.dtype, tensor.shape) for tensor in inputs])

    if not is_recorded():
        return reduced(tensors)

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def differentiable(*inputs: Any) -> tuple[list[Any], Callable[..., Any]]:
        outputs = reduced(inputs)

        def gradient(*gradients: Any) -> list[Any]:
            return backward(outputs, gradients, lambda known: reduce(kind, known, reduction.backward()))

        return outputs, gradient

    return list(differentiable(*tensors))
