"""A step's gradients, reduced: in a plan, sparse by gathering, or by operations that have names."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from hvdkit.api import checks
from hvdkit.api.gradients.pairing import Pairing
from hvdkit.api.gradients.planning import form_groups, plain_name
from hvdkit.api.gradients.settings import GradientSettings, is_variable, names_of
from hvdkit.api.operations import Asked
from hvdkit.engine.ops import hints
from hvdkit.engine.ops.requests import ReduceRequest
from hvdkit.engine.session import runtime
from hvdkit.engine.session.process_sets import ProcessSet
from hvdkit.engine.steps.plan import Slot
from hvdkit.kernels.reduce_op import ReduceOp
from hvdkit.tensorflow.gradient_planned import PlannedGradients, plan_of, reduce_planned
from hvdkit.tensorflow.ops.allreduce import grouped_allreduce
from hvdkit.tensorflow.ops.bridge import check_functions, differentiable, in_order
from hvdkit.tensorflow.ops.exceptions import in_graph, raised_as_tensorflows
from hvdkit.tensorflow.ops.reduction import reduce
from hvdkit.tensorflow.ops.sparse import quotient
from hvdkit.tensorflow.ops.unconverted import as_written
from hvdkit.tensorflow.verification import Verified, verified

SPARSE = (
    "the gradient of {names} is sparse (tf.IndexedSlices): its rows are gathered as they are, not compressed.\n"
    "HINT: with sparse_as_dense=True it is compressed as the others are; where most rows are untouched, gathering is "
    "less, and compression= can leave it out by a pattern or a function."
)

_PLANNED_DTYPES = (tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.complex64, tf.complex128)


@as_written
def reduce_gradients(
    settings: GradientSettings,
    gradients: Sequence[Any],
    sources: Sequence[Any],
    local: Collection[int] = (),
    use_generic_names: bool = False,
) -> list[Any]:
    """The gradients as all ranks of the process set have them.

    ``gradients``: one tensor, tf.IndexedSlices or None for each of ``sources``; None stays None. ``local`` are ids of
    sources whose gradients stay this rank's, divided by the number of ranks if the settings say so. Collective: every
    rank has gradients for the same sources. Raises HorovodInternalError on every rank where ranks disagree.
    """
    if not takes_part(settings):
        return list(gradients)
    if settings.pairing is None:
        settings = replace(settings, pairing=_pairing_of(settings, sources))
    settings.label(runtime.engine())  # on the user's thread, in the order of the program
    results = list(gradients)
    names = names_of(sources, use_generic_names)
    planned: list[int] = []
    sparse: list[int] = []
    named: list[int] = []
    for index, (gradient, source) in enumerate(zip(gradients, sources, strict=True)):
        if gradient is None:
            continue
        if id(source) in local:
            results[index] = _scaled(gradient, settings) if settings.scale_local_gradients else gradient
        elif isinstance(gradient, tf.IndexedSlices) and not settings.sparse_as_dense:
            sparse.append(index)
        else:
            results[index] = _of_known_shape(tf.convert_to_tensor(gradient), source)
            (planned if _can_be_planned(settings, results[index], source) else named).append(index)
    reduced = sorted([*planned, *named, *sparse])
    variables = verified(_these(names, reduced), _these(sources, reduced), [index in sparse for index in reduced])
    for indices, way in ((planned, partial(_planned, variables)), (named, _named), (sparse, _sparse)):
        if indices:
            some = (_these(results, indices), _these(sources, indices), _these(names, indices))
            for index, result in zip(indices, way(settings, *some), strict=True):
                results[index] = result
    return results


def takes_part(settings: GradientSettings) -> bool:
    """Whether there are other ranks to reduce with. In a graph this is decided once, and must hold on."""
    traced = _ranks(settings.process_set)
    if not tf.executing_eagerly():
        check_functions()

        @in_graph
        def check() -> None:
            now = _ranks(settings.process_set) if runtime.is_initialized() else traced
            if now != traced:
                raise RuntimeError(
                    f"{settings.title}: this graph was traced for the ranks {traced[1]}, now they are {now[1]}.\n"
                    "HINT: make the tf.function again after hvd.init(), or compile the model again."
                )

        in_order(lambda: tf.numpy_function(check, [], tf.int64, name="hvdkit_check"))
    return len(traced[1]) > 1


_PAIRINGS: dict[Any, Pairing] = {}  # of this process, by the variables that tapes are asked for


def _pairing_of(settings: GradientSettings, sources: Sequence[Any]) -> Pairing | None:
    """Return what tapes of these variables have in common; None without variables. It goes when one of them does."""
    variables = [source for source in sources if is_variable(source)]
    key = settings.title, settings.process_set.process_set_id, tuple(map(id, variables))
    if variables and key not in _PAIRINGS:
        _PAIRINGS[key] = Pairing("DistributedGradientTape", settings.title)
        for variable in variables:
            weakref.finalize(variable, _PAIRINGS.pop, key, None)
    return _PAIRINGS.get(key)


def _ranks(process_set: ProcessSet) -> tuple[int | None, list[int]]:
    """A process set's number and its ranks; none where this rank is not in it."""
    members = list(process_set.ranks or range(runtime.topology().size)) if process_set.included() else []
    return process_set.process_set_id, members


def _these(items: Sequence[Any], indices: Sequence[int]) -> list[Any]:
    return [items[index] for index in indices]


def _of_known_shape(gradient: Any, source: Any) -> Any:
    """A gradient whose shape a graph knows, if it is that of its variable.

    TensorFlow loses it where batch dimensions are unknown: of the kernel of a Dense layer on [None, None, 64], say.
    """
    if not is_variable(source) or gradient.shape.is_fully_defined():
        return gradient
    shape = tf.TensorShape(source.shape)
    if not (shape.is_fully_defined() and gradient.shape.is_compatible_with(shape)):
        return gradient
    return tf.ensure_shape(gradient, shape)


def _can_be_planned(settings: GradientSettings, gradient: Any, source: Any) -> bool:
    return (
        is_variable(source)
        and gradient.dtype in _PLANNED_DTYPES
        and gradient.shape.is_fully_defined()
        and settings.op is not ReduceOp.ADASUM
        and not settings.policy.whole_tensors
    )


def _scaled(gradient: Any, settings: GradientSettings) -> Any:
    """Divided by the number of ranks, as a variable of all ranks would have it if the others' gradients were zero."""
    size = checks.size_of(settings.process_set)
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(quotient(gradient.values, size), gradient.indices, gradient.dense_shape)
    return quotient(gradient, size)


def _planned(
    variables: Sequence[Verified],
    settings: GradientSettings,
    gradients: Sequence[Any],
    sources: Sequence[Any],
    names: Sequence[str],
) -> list[Any]:
    """``variables`` are all that are reduced in this step, whichever way."""
    plan = _plan(settings, gradients, sources, names)

    asked = Asked("grouped_allreduce", None, settings.process_set, waits=True)
    request = ReduceRequest(settings.op, *settings.scales)
    with raised_as_tensorflows(), tf.device(settings.device_dense):
        return differentiable(
            gradients,
            lambda inputs: _as_they_were(inputs, reduce_planned(plan, _as_real(inputs), variables)),
            lambda _, known: reduce(asked, known, request),
        )


def _as_real(tensors: Sequence[Any]) -> list[Any]:
    """Return tensors as their slots hold them: complex elements as pairs of real numbers, along one axis more."""
    return [tf.bitcast(one, one.dtype.real_dtype) if one.dtype.is_complex else one for one in tensors]


def _as_they_were(tensors: Sequence[Any], results: Sequence[Any]) -> list[Any]:
    """Return results in the dtypes of tensors, from what ``_as_real`` made of them."""
    return [
        tf.bitcast(result, tensor.dtype) if tensor.dtype.is_complex else result
        for tensor, result in zip(tensors, results, strict=True)
    ]


def _plan(
    settings: GradientSettings, gradients: Sequence[Any], sources: Sequence[Any], names: Sequence[str]
) -> PlannedGradients:
    """The plan of these gradients: the same one each time for the same variables and settings."""
    codecs, numbers = settings.policy.choose(list(zip(names, sources, strict=True)))
    slots = []
    for name, gradient, number in zip(names, gradients, numbers, strict=True):
        kind, pair = (" (complex)", [2]) if gradient.dtype.is_complex else ("", [])
        dtype = np.dtype(gradient.dtype.real_dtype.as_numpy_dtype)
        slots.append(Slot(f"{name}{kind}", (*gradient.shape, *pair), dtype, number))
    index_of = {id(source): index for index, source in enumerate(sources)}
    groups = [[index_of[id(member)] for member in group] for group in form_groups(sources, settings.groups)]
    process_set_id = checks.check_process_set(settings.title, settings.process_set)
    key = (
        settings.title,
        tuple(map(id, sources)),
        tuple(slots),
        tuple(codec.summary for codec in codecs),
        settings.op,
        settings.scales,
        tuple(map(tuple, groups)),
        process_set_id,
    )

    def make() -> PlannedGradients:
        _warn(settings, settings.policy.complaint(names))
        assert settings.pairing is not None, "what is planned has variables"
        return PlannedGradients(settings.pairing, slots, settings.op, settings.scales, codecs, groups, process_set_id)

    return plan_of(key, sources, make)


def _warn(settings: GradientSettings, text: str | None) -> None:
    """Say something to the user, on one rank for all."""
    if text is not None and runtime.topology().rank == 0:
        warnings.warn(f"{settings.title}: {text}", stacklevel=2)


def _named(
    settings: GradientSettings, gradients: Sequence[Any], sources: Sequence[Any], names: Sequence[str]
) -> list[Any]:
    prescale, postscale = settings.scales
    return grouped_allreduce(
        gradients,
        device_dense=settings.device_dense,
        compression=settings.compressor,
        op=settings.op,
        prescale_factor=prescale,
        postscale_factor=postscale,
        process_set=settings.process_set,
        ignore_name_scope=True,
        name=f"{settings.label(runtime.engine())}.{names[0]}",
    )


def _sparse(
    settings: GradientSettings, gradients: Sequence[Any], sources: Sequence[Any], names: Sequence[str]
) -> list[Any]:
    encoded = [name for name, source in zip(names, sources, strict=True) if settings.policy.is_lossy_for(name, source)]
    _warn(settings, SPARSE.format(names=", ".join(map(plain_name, encoded))) if encoded else None)
    return grouped_allreduce(
        gradients,
        device_sparse=settings.device_sparse,
        op=settings.op,
        process_set=settings.process_set,
        ignore_name_scope=True,
        name=f"{settings.label(runtime.engine())}.{names[0]}{hints.SPARSE}",
    )
