"""Allreduce: every rank gets the same reduction of all ranks' tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from hvdkit.api import checks
from hvdkit.compression import CASTS, Codec
from hvdkit.engine import runtime
from hvdkit.engine.process_sets import ProcessSet, global_process_set
from hvdkit.kernels.reduce_op import ReduceOp
from hvdkit.tensorflow import tensor_checks
from hvdkit.tensorflow.arrays import Array, copy_of, empty_like
from hvdkit.tensorflow.bridge import backward, operation_name, run
from hvdkit.tensorflow.compression import Compression, split_compression
from hvdkit.tensorflow.tensor_checks import check_process_set


@dataclass(frozen=True)
class _Reduction:
    """What is done with tensors, checked."""

    op: ReduceOp
    prescale: float
    postscale: float
    process_set: ProcessSet
    ignore_name_scope: bool
    name: str | None
    codec: Codec = CASTS["none"]

    def backward(self) -> _Reduction:
        """The reduction of the gradients: the same, as Horovod's."""
        return replace(self, name=None if self.name is None else f"{self.name}.gradient")


def _reduction(
    function: str, tensors: Sequence[Any], op: ReduceOp, prescale: Any, postscale: Any, process_set: ProcessSet,
    ignore_name_scope: bool, name: str | None, codec: Codec,
) -> _Reduction:  # fmt: skip
    engine = runtime.engine()
    checks.check_name(function, name)
    check_process_set(function, process_set)
    if op == ReduceOp.ADASUM:
        floating = {tensor.dtype.name: tensor.dtype.is_floating for tensor in tensors}
        checks.check_adasum(function, floating, process_set, engine.topology.size)
    before = checks.check_factor(function, "prescale_factor", prescale)
    after = checks.check_factor(function, "postscale_factor", postscale)
    return _Reduction(op, before, after, process_set, ignore_name_scope, name, codec)


def _reduce(kind: str, tensors: Sequence[Any], reduction: _Reduction) -> list[Any]:
    """Differentiable: the gradients are reduced in the same way."""

    def start(arrays: list[Array], name: str | None, wake: bool) -> tuple[Any, Callable[[Any], list[Array]]]:
        # While this thread waits nobody can change the tensors; in a graph they are kept by whoever reads them.
        adasum = reduction.op == ReduceOp.ADASUM
        outputs = [copy_of(array) if adasum else empty_like(array) for array in arrays]
        handle = runtime.engine().allreduce(
            outputs,
            name=name,
            op=reduction.op,
            prescale=reduction.prescale,
            postscale=reduction.postscale,
            process_set_id=checks.check_process_set(kind.lower(), reduction.process_set),
            wake=wake,
            sources=None if adasum else arrays,
            codec=reduction.codec,
        )
        return handle, lambda _: outputs

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def reduce(*inputs: Any) -> tuple[list[Any], Callable[..., Any]]:
        name = operation_name(kind, reduction.name, inputs, reduction.ignore_name_scope)
        outputs = run(inputs, name, start, [(tensor.dtype, tensor.shape) for tensor in inputs])

        def gradient(*gradients: Any) -> list[Any]:
            return backward(outputs, gradients, lambda known: _reduce(kind, known, reduction.backward()))

        return outputs, gradient

    return list(reduce(*tensors))


def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Reduce a tensor over all ranks of ``process_set``; the average unless ``op`` says otherwise.

    ``tensor`` (tf.Tensor, tf.Variable or tf.IndexedSlices) has the same shape and type on all ranks. ``op`` is
    hvd.Average, Sum, Min, Max, Product or Adasum; ``average`` is its deprecated form. Each element is multiplied by
    ``prescale_factor`` before and ``postscale_factor`` after the reduction. ``name`` tells concurrent operations apart;
    in eager execution, without one, ranks must make their calls in the same order. In a tf.function names are made of
    the tensors', with the name scope in front unless ``ignore_name_scope``. Of IndexedSlices values and indices are
    gathered. Differentiable: the gradient is reduced in the same way. ``device_dense`` and ``device_sparse`` are where
    results are put, as in ``tf.device``. ``compression`` is one of hvd.Compression, or a class with ``compress`` and
    ``decompress``.

    Returns a tensor of the same shape and type. Raises TypeError or ValueError for arguments that make no sense,
    NotImplementedError for Adasum on a number of ranks that is no power of two or on IndexedSlices, and
    HorovodInternalError on every rank where ranks disagree.
    """
    reduce_op = checks.op_or_average("allreduce", op, average)
    if isinstance(tensor, tf.IndexedSlices):
        from hvdkit.tensorflow.ops_sparse import allreduce_slices

        factors = (prescale_factor, postscale_factor)
        with tf.device(device_sparse):
            return allreduce_slices("allreduce", [tensor], reduce_op, factors, name, process_set, ignore_name_scope)[0]
    found = tensor_checks.check_tensor("allreduce", tensor, tensor_checks.REDUCIBLE_DTYPES)
    codec, compressor = split_compression("allreduce", compression, reduce_op, [found])
    reduction = _reduction(
        "allreduce", [found], reduce_op, prescale_factor, postscale_factor, process_set, ignore_name_scope, name, codec
    )
    with tf.device(device_dense):
        compressed, context = compressor.compress(found)
        return compressor.decompress(_reduce("Allreduce", [compressed], reduction)[0], context)


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """Reduce several tensors over all ranks as one operation: none starts before all are ready on all ranks.

    Arguments, gradients and errors are those of allreduce(). IndexedSlices among them are one operation of their own.
    Returns a list of tensors; an empty one for an empty list.
    """
    function = "grouped_allreduce"
    reduce_op = checks.op_or_average(function, op, average)
    if len(tensors) == 0:
        return []
    slices = [place for place, one in enumerate(tensors) if isinstance(one, tf.IndexedSlices)]
    dense = [place for place in range(len(tensors)) if place not in slices]
    results: list[Any] = [None] * len(tensors)
    if slices:
        from hvdkit.tensorflow.ops_sparse import allreduce_slices

        factors = (prescale_factor, postscale_factor)
        with tf.device(device_sparse):
            gathered = allreduce_slices(
                function, [tensors[place] for place in slices], reduce_op, factors, name, process_set, ignore_name_scope
            )
        for place, result in zip(slices, gathered, strict=True):
            results[place] = result
    if dense:
        found = tensor_checks.check_tensors(
            function, [tensors[place] for place in dense], tensor_checks.REDUCIBLE_DTYPES
        )
        codec, compressor = split_compression(function, compression, reduce_op, found)
        reduction = _reduction(
            function, found, reduce_op, prescale_factor, postscale_factor, process_set, ignore_name_scope, name, codec
        )
        with tf.device(device_dense):
            compressed, contexts = zip(*(compressor.compress(tensor) for tensor in found), strict=True)
            reduced = _reduce("GroupedAllreduce", compressed, reduction)
            for place, result, context in zip(dense, reduced, contexts, strict=True):
                results[place] = compressor.decompress(result, context)
    return results
