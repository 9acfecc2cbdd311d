"""``DistributedGradientTape``: a tf.GradientTape whose gradients are those of all ranks."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from hvdkit.api.checks import check_name
from hvdkit.api.gradients import guard, planning
from hvdkit.api.gradients.settings import check_settings
from hvdkit.engine.session.process_sets import ProcessSet, global_process_set
from hvdkit.kernels.reduce_op import ReduceOp
from hvdkit.tensorflow.compression import Compression
from hvdkit.tensorflow.gradients import reduce_gradients
from hvdkit.tensorflow.ops.bridge import as_written

_FUNCTION = "DistributedGradientTape"


@as_written
def DistributedGradientTape(
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: int = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | list[list[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    name: str | None = None,
) -> Any:
    """Return a tape with the record of ``gradtape``, whose ``gradient()`` reduces over all ranks of ``process_set``.

    ``gradient()`` is collective: all ranks ask for gradients with respect to the same variables in the same order.
    ``jacobian()`` and ``batch_jacobian()`` are this rank's own, and not reduced. ``register_local_source(variable)`` of
    the result leaves the gradient of a variable to each rank. The other arguments are those of
    hvdkit.keras.DistributedOptimizer(). Returns the tape to ask for gradients, which have the shapes and dtypes of the
    sources.

    Args:
        gradtape: the tf.GradientTape; it may be recording still.
        op: hvd.Average, Sum, Min, Max, Product or Adasum.
        process_set: the ranks that take part; on other ranks the tape is an ordinary one.
        name: of its gradients in errors and in the timeline. Ranks match tapes by name and, where several have one
            name, by the order in which their variables are first asked for, so tapes in several threads need names.

    Raises:
        TypeError, ValueError: for arguments that make no sense.
        HorovodInternalError: by ``gradient()``, on every rank where ranks ask for other gradients, or a rank is lost.

    Examples:
        >>> with tf.GradientTape() as tape:
        ...     loss = tf.reduce_mean(model(x))
        >>> tape = hvd.DistributedGradientTape(tape)
        >>> weight, bias = tape.gradient(loss, model.trainable_variables)
        >>> weight.numpy().tolist()  # the average of 1 on rank 0 and 2 on rank 1
        [[1.5], [1.5]]
        >>> optimizer.apply([weight, bias], model.trainable_variables)
    """
    if not isinstance(gradtape, tf.GradientTape):
        raise TypeError(f"{_FUNCTION}: gradtape must be a tf.GradientTape, got {type(gradtape).__name__}")
    if hasattr(type(gradtape), "register_local_source"):
        raise ValueError(f"{_FUNCTION}: gradtape is a DistributedGradientTape already\nHINT: wrap it once.")
    check_name(_FUNCTION, name)
    settings = check_settings(
        _FUNCTION,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        num_groups=num_groups,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
        title=name,
        is_kept=False,
    )
    base: Any = type(gradtape)
    distributed = object.__new__(_tape_class(base))
    distributed.__dict__ = gradtape.__dict__  # both record as one tape
    distributed._hvdkit_settings = settings
    distributed._hvdkit_local = {}
    return distributed


@as_written
def PartialDistributedGradientTape(
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: int = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | list[list[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Return a DistributedGradientTape that leaves the gradients of some layers to each rank.

    The other arguments and errors are those of DistributedGradientTape(). Returns the tape to ask for gradients.

    Args:
        local_layers: a Keras layer, or several, which have their variables already; others raise ValueError.

    Examples:
        >>> with tf.GradientTape() as tape:
        ...     loss = tf.reduce_mean(model(x))
        >>> tape = hvd.PartialDistributedGradientTape(tape, local_layers=model.layers[0], scale_local_gradients=False)
        >>> tape.gradient(loss, model.trainable_variables)[0].numpy().tolist()  # on rank 1: [[2.0], [2.0]]
        [[1.0], [1.0]]
    """
    tape = DistributedGradientTape(
        gradtape,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        num_groups=num_groups,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    for variable in planning.local_variables(local_layers):
        tape.register_local_source(variable)
    return tape


@functools.cache
def _tape_class(base: Any) -> Any:
    """Return a subclass of ``base`` with the name of ``base``."""

    class DistributedTape(base):  # type: ignore[misc]  # the base is known at run time only
        # Slots, since the dictionary is shared by all tapes around one.
        __slots__ = ("_hvdkit_local", "_hvdkit_settings")

        def register_local_source(self, source: Any) -> None:
            """Leave the gradient of a variable to each rank.

            ``source`` is a variable, of any shape, which may differ between ranks. Raises nothing for a variable that
            is not asked for.

            Examples:
                >>> with tf.GradientTape() as tape:
                ...     loss = tf.reduce_mean(model(x))
                >>> tape = hvd.DistributedGradientTape(tape)
                >>> tape.register_local_source(model.layers[0].kernel)
            """
            self._hvdkit_local[id(source)] = source

        @as_written
        def gradient(
            self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: Any = False, **others: Any
        ) -> Any:
            """Return the gradients of tf.GradientTape.gradient(), reduced over all ranks.

            Errors are those of DistributedGradientTape(), and the example is that of DistributedGradientTape(), too.
            Returns gradients in the structure of ``sources``.

            Args:
                target: the tensors to differentiate, of any shape.
                sources: variables, or a structure of them.
                output_gradients: of the targets, in their shapes; ones, if None.
                use_generic_names: whether operations are named by place, not after the variables.
                others: TensorFlow's, as ``unconnected_gradients``.
            """
            if isinstance(use_generic_names, tf.UnconnectedGradients):  # this position in tf.GradientTape
                others["unconnected_gradients"], use_generic_names = use_generic_names, False
            gradients = super().gradient(target, sources, output_gradients, **others)
            flat = tf.nest.flatten(sources)
            guard.mark(flat)
            unreduced = tf.nest.flatten(gradients, expand_composites=False)
            reduced = reduce_gradients(self._hvdkit_settings, unreduced, flat, self._hvdkit_local, use_generic_names)
            return tf.nest.pack_sequence_as(gradients, reduced)

        @as_written
        def jacobian(self, *args: Any, **options: Any) -> Any:
            """Return the Jacobians of tf.GradientTape.jacobian(), of this rank alone: nothing is reduced.

            ``args`` and ``options`` are TensorFlow's: ``target``, ``sources`` and how it is computed. Returns Jacobians
            in the structure of ``sources``, and raises what TensorFlow raises.

            Examples:
                >>> weight = tf.Variable([1.0, 2.0])
                >>> with tf.GradientTape() as tape:
                ...     target = weight * (1.0 + hvd.rank())
                >>> tape = hvd.DistributedGradientTape(tape)
                >>> tape.jacobian(target, weight).numpy().tolist()  # on rank 1: [[2.0, 0.0], [0.0, 2.0]]
                [[1.0, 0.0], [0.0, 1.0]]
            """
            return self._hvdkit_undistributed().jacobian(*args, **options)

        @as_written
        def batch_jacobian(self, *args: Any, **options: Any) -> Any:
            """Return the Jacobians of tf.GradientTape.batch_jacobian(), of this rank alone. Returns a tensor.

            Arguments and errors are those of DistributedGradientTape.jacobian(), with ``source`` for ``sources``, and
            the example is that of DistributedGradientTape.jacobian(), too.
            """
            return self._hvdkit_undistributed().batch_jacobian(*args, **options)

        def _hvdkit_undistributed(self) -> Any:
            """Return the same tape under its own class, whose ``gradient()`` TensorFlow calls for each row."""
            tape: Any = object.__new__(base)
            tape.__dict__ = self.__dict__
            return tape

        @as_written
        def get_local_and_global_gradients(
            self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False
        ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
            """Return the gradients, those of local sources apart.

            Arguments and errors are those of DistributedGradientTape.gradient(). Returns two lists of pairs of source
            and gradient, of local sources, and of the others.

            Examples:
                >>> with tf.GradientTape() as tape:
                ...     loss = tf.reduce_mean(model(x))
                >>> tape = hvd.DistributedGradientTape(tape)
                >>> tape.register_local_source(model.layers[0].bias)
                >>> local, reduced = tape.get_local_and_global_gradients(loss, model.trainable_variables)
                >>> [variable.name for variable, gradient in reduced]
                ['kernel']
            """
            gradients = self.gradient(target, sources, output_gradients, use_generic_names)
            pairs = list(zip(sources, gradients, strict=True))
            local = [pair for pair in pairs if id(pair[0]) in self._hvdkit_local]
            return local, [pair for pair in pairs if id(pair[0]) not in self._hvdkit_local]

    for attribute in ("__name__", "__qualname__", "__doc__"):
        setattr(DistributedTape, attribute, getattr(base, attribute))
    return DistributedTape
