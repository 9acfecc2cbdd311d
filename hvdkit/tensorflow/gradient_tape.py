"""``DistributedGradientTape``: a tf.GradientTape whose gradients are those of all ranks."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from hvdkit.api.checks import check_name
from hvdkit.api.gradients import guard, planning
from hvdkit.api.gradients.settings import GradientSettings, check_settings
from hvdkit.engine.life.process_sets import ProcessSet, global_process_set
from hvdkit.kernels.reduce_op import ReduceOp
from hvdkit.tensorflow.compression import Compression
from hvdkit.tensorflow.gradients import reduce_gradients
from hvdkit.tensorflow.ops.unconverted import as_written

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
    """A tape with what ``gradtape`` has recorded, whose ``gradient()`` reduces over all ranks of ``process_set``.

    ``gradient()`` is collective: all ranks ask for gradients with respect to the same variables in the same order.
    ``jacobian()`` and ``batch_jacobian()`` are this rank's own, and not reduced.
    ``register_local_source(variable)`` of the result leaves the gradient of a variable to each rank.

    Args:
        gradtape: the tf.GradientTape; it may be recording still.
        device_dense: where dense results are put, as in ``tf.device``.
        device_sparse: where results that are tf.IndexedSlices are put.
        compression: one of hvd.Compression, for each variable by patterns or a function, or a class of one's own with
            ``compress`` and ``decompress``: as for a DistributedOptimizer.
        sparse_as_dense: reduce tf.IndexedSlices as dense tensors; else values and indices are gathered.
        op: hvd.Average, Sum, Min, Max, Product or Adasum.
        gradient_predivide_factor: an average is divided by this before the sum, and by size / this after it.
        num_groups: deprecated, use ``groups``.
        groups: how many groups of gradients are reduced together, or the groups as lists of variables.
        process_set: the ranks that take part; on other ranks the tape is an ordinary one.
        scale_local_gradients: divide the gradients of local sources by the number of ranks.
        name: what its gradients are called in errors and in the timeline. Tapes of the ranks belong together by their
            names and, where several have one name, by the order in which their variables are first asked for. So
            models that are trained in several threads need tapes with names of their own, the same on all ranks.

    Returns:
        The tape to ask for gradients, which have the shapes and dtypes of what they are of.

    Raises:
        TypeError, ValueError: for arguments that make no sense.
        HorovodInternalError: by ``gradient()``, on every rank where ranks ask for other gradients, or if a rank is
            lost.

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
        op=op,
        compression=compression,
        gradient_predivide_factor=gradient_predivide_factor,
        num_groups=num_groups,
        groups=groups,
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
        device_dense=device_dense,
        device_sparse=device_sparse,
        title=name,
        is_kept=False,
    )
    base: Any = type(gradtape)
    distributed = object.__new__(_tape_class(base))
    distributed.__dict__ = gradtape.__dict__  # one tape under two names, as far as recording goes
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
    """A DistributedGradientTape that leaves the gradients of some layers to each rank.

    The other arguments and errors are those of DistributedGradientTape().

    Args:
        local_layers: a Keras layer, or several, which have their variables already.

    Returns:
        The tape to ask for gradients.

    Raises:
        ValueError: for what is no layer, or has no variables yet.

    Examples:
        >>> with tf.GradientTape() as tape:
        ...     loss = tf.reduce_mean(model(x))
        >>> tape = hvd.PartialDistributedGradientTape(tape, local_layers=model.layers[0], scale_local_gradients=False)
        >>> tape.gradient(loss, model.trainable_variables)[0].numpy().tolist()  # on rank 1: [[2.0], [2.0]]
        [[1.0], [1.0]]
    """
    tape = DistributedGradientTape(
        gradtape,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
    )
    for variable in planning.local_variables(local_layers):
        tape.register_local_source(variable)
    return tape


@functools.cache
def _tape_class(base: Any) -> Any:
    """A subclass of ``base`` with its name."""

    class Distributed(base):  # type: ignore[misc]  # the base is known at run time only
        # Not in the dictionary, which all tapes around one have in common.
        __slots__ = ("_hvdkit_local", "_hvdkit_settings")

        _hvdkit_settings: GradientSettings
        _hvdkit_local: dict[int, Any]

        def register_local_source(self, source: Any) -> None:
            """Leave the gradient of a variable to each rank.

            Args:
                source: a variable, of any shape; it may differ between ranks. Raises nothing for one that is not asked
                    for.

            Examples:
                >>> with tf.GradientTape() as tape:
                ...     loss = tf.reduce_mean(model(x))
                >>> tape = hvd.DistributedGradientTape(tape)
                >>> tape.register_local_source(model.layers[0].kernel)
            """
            self._hvdkit_local[id(source)] = source

        @as_written
        def gradient(
            self,
            target: Any,
            sources: Any,
            output_gradients: Any = None,
            use_generic_names: Any = False,
            **options: Any,
        ) -> Any:
            """As tf.GradientTape.gradient(), reduced over all ranks. Errors are those of DistributedGradientTape().

            Args:
                target: what is differentiated, tensors of any shape.
                sources: variables, or a structure of them.
                output_gradients: of the targets, in their shapes; ones, if None.
                use_generic_names: whether operations are named by place, not after the variables.
                options: TensorFlow's, as ``unconnected_gradients``.

            Returns:
                Gradients in the structure of ``sources``.

            Examples:
                >>> weight = tf.Variable(1.0)
                >>> with tf.GradientTape() as tape:
                ...     loss = weight * (1.0 + hvd.rank())
                >>> hvd.DistributedGradientTape(tape).gradient(loss, weight).numpy().item()
                1.5
            """
            if isinstance(use_generic_names, tf.UnconnectedGradients):  # what stands there in tf.GradientTape
                options["unconnected_gradients"], use_generic_names = use_generic_names, False
            gradients = super().gradient(target, sources, output_gradients, **options)
            guard.mark(tf.nest.flatten(sources))
            flat = tf.nest.flatten(gradients, expand_composites=False)
            reduced = reduce_gradients(
                self._hvdkit_settings, flat, tf.nest.flatten(sources), self._hvdkit_local, use_generic_names
            )
            return tf.nest.pack_sequence_as(gradients, reduced)

        @as_written
        def jacobian(self, *args: Any, **options: Any) -> Any:
            """As tf.GradientTape.jacobian(), of this rank alone: nothing is reduced.

            Args:
                args: those of TensorFlow, as are ``options``: ``target``, ``sources`` and how it is computed.

            Returns:
                Jacobians in the structure of ``sources``. Raises what TensorFlow raises.

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
            """As tf.GradientTape.batch_jacobian(), of this rank alone: nothing is reduced.

            Args:
                args: those of TensorFlow, as are ``options``: ``target``, ``source`` and how it is computed.

            Returns:
                A tensor with a Jacobian for each row. Raises what TensorFlow raises.

            Examples:
                >>> inputs = tf.constant([[1.0], [2.0]])
                >>> with tf.GradientTape() as tape:
                ...     tape.watch(inputs)
                ...     target = inputs * inputs
                >>> hvd.DistributedGradientTape(tape).batch_jacobian(target, inputs).numpy().tolist()
                [[[2.0]], [[4.0]]]
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
            """Gradients, those of local sources apart.

            Arguments and errors are those of DistributedGradientTape.gradient().

            Returns:
                Two lists of pairs of source and gradient, of local sources, and of the others.

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

    Distributed.__name__ = base.__name__
    Distributed.__qualname__ = base.__qualname__
    Distributed.__doc__ = base.__doc__
    return Distributed
