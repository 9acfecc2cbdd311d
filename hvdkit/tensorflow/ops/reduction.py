"""Reductions of dense tensors, under allreduce, reducescatter and the gradients of other operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import tensorflow as tf

from hvdkit.api import checks
from hvdkit.api.gradients.compression import around, split
from hvdkit.api.operations import Invocation
from hvdkit.engine.ops.requests import ReduceRequest
from hvdkit.kernels.reduce_op import ReduceOp
from hvdkit.tensorflow.ops.bridge import differentiable, has_gradient, run
from hvdkit.tensorflow.ops.framework import OPERATIONS


def allreduce_dense(invocation: Invocation, tensors: Sequence[Any], request: ReduceRequest) -> list[Any]:
    """Return the reduced tensors, after all checks. Their gradients are reduced in the same way, as Horovod's."""

    def reduce(inputs: Sequence[Any]) -> list[Any]:
        return run(
            invocation,
            inputs,
            lambda invocation, arrays: OPERATIONS.allreduce(invocation, arrays, request),
            [(tensor.dtype, tensor.shape) for tensor in inputs],
        )

    return differentiable(
        tensors, reduce, lambda _, gradients: allreduce_dense(invocation.of_gradient(), gradients, request)
    )


def compressed(
    invocation: Invocation,
    tensors: Sequence[Any],
    compression: Any,
    op: ReduceOp,
    factors: tuple[Any, Any],
    device: str,
    reduce: Callable[[Invocation, Sequence[Any], ReduceRequest], list[Any]],
) -> list[Any]:
    """Return what ``reduce`` makes of compressed tensors, decompressed. Raise TypeError or ValueError for arguments."""
    floating = {tensor.dtype.name: has_gradient(tensor) for tensor in tensors}
    codec, compressor = split(invocation.function, compression, op, floating)
    request = ReduceRequest(op, *checks.check_factors(invocation.function, *factors), codec)
    with tf.device(device) if device else nullcontext():
        return around(compressor, tensors, lambda sent: reduce(invocation, sent, request))
