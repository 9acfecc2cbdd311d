"""``DistributedOptimizer``: an optimizer of Keras that trains on all ranks; and ``load_model``, which makes one."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

import keras

from hvdkit.api import checks
from hvdkit.api.gradients import planning
from hvdkit.api.gradients.compression import Compressions
from hvdkit.api.gradients.settings import check_settings, warn_of_overlap_forward
from hvdkit.engine.session import runtime
from hvdkit.engine.session.process_sets import ProcessSet, global_process_set
from hvdkit.keras.functions import backend_name
from hvdkit.keras.keras_2 import optimizer_classes
from hvdkit.keras.optimizer_class import wrap
from hvdkit.keras.step import KerasSettings, distributed_step
from hvdkit.kernels.reduce_op import ReduceOp

Optimizer = TypeVar("Optimizer")


def DistributedOptimizer(
    optimizer: Optimizer,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compressions.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = ReduceOp.AVERAGE,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | list[list[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    overlap_forward: bool = False,
) -> Optimizer:
    """Make an optimizer of the class of ``optimizer`` that reduces gradients over all ranks before it applies them.

    The result shares the variables and the learning rate of ``optimizer``, and is saved under the same name, so that
    saved models load without hvdkit; ``load_model`` of this module wraps the optimizer again. A LossScaleOptimizer may
    be inside or around. In a graph, and on PyTorch in Keras's own ``train_step``, gradients travel while the backward
    pass computes others; in a loop or a ``train_step`` of your own on PyTorch, when they are applied. The method
    ``register_local_var(variable)`` leaves the gradient of a variable to each rank. Returns the optimizer to use in the
    place of ``optimizer``.

    Args:
        optimizer: a keras.optimizers.Optimizer, also of a class of your own, or an optimizer of tf_keras.
        name: of the gradients in the timeline and in errors; by default "Distributed" and the class. Ranks match
            optimizers by name and, where several have one name, by the order in which they were made, so optimizers
            that several threads make need names of their own.
        device_dense: where reduced gradients are put, as in ``tf.device`` (TensorFlow only).
        device_sparse: where reduced gradients that are tf.IndexedSlices are put.
        compression: one of hvd.Compression, or for each variable a mapping ``{pattern of names: codec}`` or a function
            ``(name, variable) -> codec``, of names such as ``dense/kernel``, which is that of all Dense layers; biases,
            the weights of norms and small variables stay dense unless said so, and so do tf.IndexedSlices.
        sparse_as_dense: reduce tf.IndexedSlices as dense tensors; else values and indices are gathered.
        gradient_predivide_factor: an average is divided by this before the sum, and by size / this after it.
        op: hvd.Average or hvd.Sum.
        backward_passes_per_step: the number of calls of ``apply`` that add up gradients for one update.
            ``iterations`` counts the updates; Horovod counted the calls.
        average_aggregated_gradients: divide the gradients that were added up by that number.
        num_groups: deprecated, use ``groups``.
        groups: the number of groups of gradients that are reduced together, or the groups as lists of variables.
        process_set: the ranks that take part; on other ranks the optimizer is an ordinary one.
        scale_local_gradients: divide the gradients of local variables by the number of ranks.
        overlap_forward: deprecated, without effect.

    Raises:
        TypeError, ValueError: for arguments that make no sense.
        NotImplementedError: on other backends than TensorFlow and PyTorch.
        HorovodInternalError: by ``apply``, on every rank where ranks' variables differ, or if a rank is lost.

    Examples:
        >>> optimizer = hvd.DistributedOptimizer(optimizer)
        >>> model.compile(optimizer=optimizer, loss="mean_absolute_error")
        >>> history = model.fit(x, y, verbose=0)  # one step; gradients are 1 on rank 0, 2 on rank 1
        >>> print(model.get_weights()[0].round(2).ravel())
        [0.85 0.85]
    """
    if not isinstance(optimizer, (keras.optimizers.Optimizer, *optimizer_classes())):
        got = f"DistributedOptimizer: optimizer must be a keras.optimizers.Optimizer, got {type(optimizer).__name__}"
        raise TypeError(f'{got}\nHINT: keras.optimizers.get("adam") makes an optimizer from a name.')
    if distributed_step(optimizer) is not None:
        raise ValueError("DistributedOptimizer: optimizer is a DistributedOptimizer already\nHINT: wrap it once.")
    if backend_name() != "tensorflow" and isinstance(optimizer, optimizer_classes()):
        raise ValueError(
            "DistributedOptimizer: the optimizer is of Keras 2, which runs on TensorFlow, but Keras 3 runs on "
            f"{backend_name()} here\nHINT: set KERAS_BACKEND=tensorflow."
        )
    reduce_op = checks.check_op("DistributedOptimizer", op)
    if reduce_op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        got = f"DistributedOptimizer: got op=hvd.{reduce_op.name.capitalize()}"
        raise ValueError(f"op currently only supports Average and Sum\n{got}")
    if overlap_forward:
        warn_of_overlap_forward()
    settings = check_settings(
        "DistributedOptimizer",
        op=op,
        compression=compression,
        gradient_predivide_factor=gradient_predivide_factor,
        num_groups=num_groups,
        groups=groups,
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
        backward_passes_per_step=backward_passes_per_step,
        scale_local_gradients=scale_local_gradients,
        device_dense=device_dense,
        device_sparse=device_sparse,
        title=name or f"Distributed{type(optimizer).__name__}",
    )
    own = KerasSettings(**vars(settings), average_aggregated_gradients=bool(average_aggregated_gradients))
    if (engine := runtime.current()) is not None:
        own.label(engine)  # now: ranks may make their first steps in different orders
    return cast("Optimizer", wrap(optimizer, own))


def PartialDistributedOptimizer(
    optimizer: Optimizer,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compressions.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = ReduceOp.AVERAGE,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    groups: int | list[list[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Optimizer:
    """Make a DistributedOptimizer that leaves the gradients of some layers to each rank.

    The other arguments and errors are those of DistributedOptimizer(). Returns the optimizer to use in the place of
    ``optimizer``.

    Args:
        local_layers: a Keras layer, or several, which are built already; others raise ValueError.

    Examples:
        >>> optimizer = hvd.PartialDistributedOptimizer(optimizer, local_layers=[model.layers[0]])
        >>> model.compile(optimizer=optimizer, loss="mean_absolute_error")
        >>> history = model.fit(x, y, verbose=0)  # one step; each rank's gradient is divided by the ranks
        >>> print(model.get_weights()[0].round(2).ravel())  # on rank 1: [0.9 0.9]
        [0.95 0.95]
    """
    wrapped: Any = DistributedOptimizer(
        optimizer,
        name=name,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    for variable in planning.local_variables(local_layers):
        wrapped.register_local_var(variable)
    return cast("Optimizer", wrapped)


def load_model(
    filepath: str | os.PathLike[str],
    custom_optimizers: Sequence[Any] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = Compressions.none,
    legacy_opts: bool = False,
    safe_mode: bool = True,
    **options: Any,
) -> Any:
    """Load a saved model, whose optimizer continues as a DistributedOptimizer.

    Each rank reads the file, or at least rank 0, and BroadcastGlobalVariablesCallback gives its values to all. Returns
    the model, of Keras.

    Args:
        filepath: the file that ``model.save`` wrote.
        custom_optimizers: classes of your own optimizers.
        custom_objects: other classes and functions of your own, by name.
        compression: of the DistributedOptimizer; settings are not saved with a model.
        legacy_opts: accepted for compatibility, without effect.
        safe_mode: refuse functions that are part of the file, which could run any code.
        options: other arguments of the DistributedOptimizer, by name.

    Raises:
        Exception: as ``keras.models.load_model``, such as ValueError for a missing file.
        TypeError, ValueError: as DistributedOptimizer().

    Examples:
        >>> model.compile(optimizer=hvd.DistributedOptimizer(optimizer), loss="mse")
        >>> history = model.fit(x, y, verbose=0)
        >>> if hvd.rank() == 0:
        ...     model.save("model.keras")
        >>> hvd.barrier()
        >>> model = hvd.load_model("model.keras", compression=hvd.Compression.fp16)
        >>> int(model.optimizer.iterations)
        1
    """
    return load_by(keras, filepath, custom_optimizers, custom_objects, safe_mode, compression=compression, **options)


def load_by(
    keras: Any, filepath: Any, custom_optimizers: Any, custom_objects: Any, safe_mode: bool, **options: Any
) -> Any:
    """Load a model as load_model() does, by the module ``keras``: Keras 3 or tf_keras."""
    objects = {cls.__name__: cls for cls in custom_optimizers or ()}
    model = keras.models.load_model(filepath, custom_objects={**objects, **(custom_objects or {})}, safe_mode=safe_mode)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and distributed_step(optimizer) is None:
        model.optimizer = DistributedOptimizer(optimizer, **options)
        if not isinstance(optimizer, optimizer_classes()):
            model.jit_compile = bool(model.jit_compile) and keras.backend.backend() != "tensorflow"
    return model
