"""Load a saved model with a distributed optimizer."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from hvdkit.api.gradients.compression import Compressions
from hvdkit.keras.keras_2 import is_keras_2
from hvdkit.keras.optimizer import DistributedOptimizer
from hvdkit.keras.step import distributed_step


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

    Each rank reads the file, or at least rank 0, and BroadcastGlobalVariablesCallback gives its values to all.

    Args:
        filepath: the file that ``model.save`` wrote.
        custom_optimizers: classes of your own optimizers.
        custom_objects: other classes and functions of your own, by name.
        compression: of the DistributedOptimizer; settings are not saved with a model.
        legacy_opts: accepted for compatibility, without effect.
        safe_mode: refuse functions that are part of the file, which could run any code.
        options: other arguments of the DistributedOptimizer, by name.

    Returns:
        The model, of Keras.

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
    import keras

    options.update(custom_optimizers=custom_optimizers, custom_objects=custom_objects, safe_mode=safe_mode)
    return load_by(keras, filepath, compression=compression, **options)


def load_by(
    keras: Any, filepath: Any, custom_optimizers: Any, custom_objects: Any, safe_mode: bool, **options: Any
) -> Any:
    """Load a model as load_model() does, by the module ``keras``: Keras 3 or tf_keras."""
    objects = {cls.__name__: cls for cls in custom_optimizers or ()}
    model = keras.models.load_model(filepath, custom_objects={**objects, **(custom_objects or {})}, safe_mode=safe_mode)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and distributed_step(optimizer) is None:
        model.optimizer = DistributedOptimizer(optimizer, **options)
        if not is_keras_2(optimizer):
            model.jit_compile = bool(model.jit_compile) and keras.backend.backend() != "tensorflow"
    return model
