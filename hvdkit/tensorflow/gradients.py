"""The gradients of a step, reduced by a lane, by operations with names, or by gathering.

A lane reduces dense gradients of variables. Gradients of tensors, and all gradients with Adasum or with a compression
class of the user's, are reduced by name. Sparse gradients are gathered.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import tensorflow as tf

from hvdkit.api.gradients.pairing import Pairing
from hvdkit.api.gradients.planning import plain_name
from hvdkit.api.gradients.settings import GradientSettings, is_variable, names_of
from hvdkit.engine.ops import hints
from hvdkit.engine.session import runtime
from hvdkit.engine.session.process_sets import ProcessSet, global_process_set
from hvdkit.tensorflow.gradient_planned import can_be_planned, reduce_planned, warn
from hvdkit.tensorflow.ops.bridge import after, as_written, ordered_node
from hvdkit.tensorflow.ops.reductions import grouped_allreduce, quotient, size_in_graph
from hvdkit.tensorflow.verification import verified

SPARSE = (
    "the gradient of {names} is sparse (tf.IndexedSlices): its rows are gathered as they are, not compressed.\n"
    "HINT: with sparse_as_dense=True it is compressed like the other gradients; if most rows are untouched, gathering "
    "sends less, and a pattern or a function in compression= can leave this gradient out."
)


@as_written
def reduce_gradients(
    settings: GradientSettings,
    gradients: Sequence[Any],
    sources: Sequence[Any],
    local: Collection[int] = (),
    use_generic_names: bool = False,
) -> list[Any]:
    """Return the gradients as all ranks of the process set have them. Collective.

    ``gradients`` has a tensor, tf.IndexedSlices or None for each source, a variable or a tensor. None stays None. Every
    rank has gradients for the same sources. ``local``: ids of the sources whose gradients stay this rank's, divided by
    the number of ranks if the settings say so. With ``use_generic_names`` gradients are named by place, not after the
    variables. Raises HorovodInternalError on every rank where ranks disagree.
    """
    if not _takes_part(settings):
        return list(gradients)
    if settings.pairing is None:
        settings = replace(settings, pairing=_pairing_of(settings, sources))
    label = settings.label(runtime.engine())  # on the user's thread, in the order of the program
    results = list(gradients)
    names = names_of(sources, use_generic_names)
    planned: list[int] = []
    named: list[int] = []
    sparse: list[int] = []
    for index, (gradient, source) in enumerate(zip(gradients, sources, strict=True)):
        if gradient is None:
            continue
        if id(source) in local:
            results[index] = _scaled(gradient, settings) if settings.scale_local_gradients else gradient
        elif isinstance(gradient, tf.IndexedSlices) and not settings.sparse_as_dense:
            sparse.append(index)
        else:
            results[index] = _of_known_shape(tf.convert_to_tensor(gradient), source)
            if can_be_planned(settings, results[index], source):
                planned.append(index)
            else:
                named.append(index)

    def items(indices: Sequence[int], values: Sequence[Any]) -> list[Any]:
        return [values[index] for index in indices]

    reduce_by_name = partial(
        grouped_allreduce,
        device_dense=settings.device_dense,
        device_sparse=settings.device_sparse,
        compression=settings.compressor,
        op=settings.op,
        process_set=settings.process_set,
        ignore_name_scope=True,
    )
    reduced: list[Any] = []
    if planned:
        indices = sorted([*planned, *named, *sparse])
        variables = verified(items(indices, names), items(indices, sources), [index in sparse for index in indices])
        reduced += reduce_planned(
            settings, variables, items(planned, results), items(planned, sources), items(planned, names)
        )
    if named:
        before, after = settings.scales
        name = f"{label}.{names[named[0]]}"
        reduced += reduce_by_name(items(named, results), prescale_factor=before, postscale_factor=after, name=name)
    if sparse:
        is_lossy = settings.policy.is_lossy_for  # the user asked for compression
        encoded = [plain_name(names[index]) for index in sparse if is_lossy(names[index], sources[index])]
        warn(settings, SPARSE.format(names=", ".join(encoded)) if encoded else None)
        # Slices are not summed, so nothing is divided before the sum.
        reduced += reduce_by_name(items(sparse, results), name=f"{label}.{names[sparse[0]]}{hints.SPARSE}")
    for index, gradient in zip([*planned, *named, *sparse], reduced, strict=True):
        results[index] = gradient
    has_local = any(id(source) in local for source in sources)
    return _together(results, reduced) if sum(map(bool, (planned, named, sparse, has_local))) > 1 else results


def _together(results: Sequence[Any], reduced: Sequence[Any]) -> list[Any]:
    """Return the results so that in a graph none is there before all are reduced: a step changes all variables or none.

    One operation gives all its gradients at once, or raises.
    """
    if tf.executing_eagerly():
        return list(results)
    with after(reduced):
        return [None if result is None else _at_its_place(result) for result in results]


def _at_its_place(result: Any) -> Any:
    """Return the same tensor or slices, on the same device."""
    with tf.device(result.device):
        return tf.identity(result)


def _takes_part(settings: GradientSettings) -> bool:
    """True if gradients are reduced: if there are other ranks, or will be when a graph of an elastic job runs.

    Other graphs, and those of a process set, raise RuntimeError when their ranks have changed.
    """
    traced = _ranks(settings.process_set)
    has_others = len(traced[1]) > 1
    if tf.executing_eagerly():
        return has_others
    if settings.process_set is global_process_set and runtime.is_elastic():
        return True

    def check() -> None:
        now = _ranks(settings.process_set) if runtime.is_initialized() else traced
        if now != traced:
            raise RuntimeError(
                f"{settings.title}: this graph was traced for the ranks {traced[1]}, but the ranks are now {now[1]}.\n"
                "HINT: make the tf.function again after hvd.init(), or compile the model again."
            )

    ordered_node(check, [], tf.int64, "hvdkit_check")
    return has_others


def _ranks(process_set: ProcessSet) -> tuple[int | None, list[int]]:
    """Return a process set's number and its ranks, or no ranks if this rank is not in it."""
    members = list(process_set.ranks or range(runtime.topology().size)) if process_set.included() else []
    return process_set.process_set_id, members


_PAIRINGS: dict[Any, Pairing] = {}  # of this process, by the variables that tapes are asked for


def _pairing_of(settings: GradientSettings, sources: Sequence[Any]) -> Pairing | None:
    """Return the pairing of all tapes of these variables, or None without variables. It goes when a variable does."""
    variables = [source for source in sources if is_variable(source)]
    key = settings.title, settings.process_set.process_set_id, tuple(map(id, variables))
    if variables and key not in _PAIRINGS:
        _PAIRINGS[key] = Pairing("DistributedGradientTape", settings.title)
        for variable in variables:
            weakref.finalize(variable, _PAIRINGS.pop, key, None)
    return _PAIRINGS.get(key)


def _of_known_shape(gradient: Any, source: Any) -> Any:
    """Return a gradient with the static shape of its variable.

    TensorFlow loses the shape where batch dimensions are unknown: of the kernel of a Dense layer on [None, None, 64].
    """
    if is_variable(source) and not gradient.shape.is_fully_defined():
        shape = tf.TensorShape(source.shape)
        if shape.is_fully_defined() and gradient.shape.is_compatible_with(shape):
            return tf.ensure_shape(gradient, shape)
    return gradient


def _scaled(gradient: Any, settings: GradientSettings) -> Any:
    """Divide a gradient by the number of ranks, as if the other ranks' gradients of a shared variable were zero."""
    size = size_in_graph(settings.process_set)
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(quotient(gradient.values, size), gradient.indices, gradient.dense_shape)
    return quotient(gradient, size)
