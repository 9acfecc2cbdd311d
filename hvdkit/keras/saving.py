"""Models that were saved with an optimizer, loaded with a distributed one."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from hvdkit.api.compression import Compressions
from hvdkit.keras.legacy import is_legacy
from hvdkit.keras.optimizer import DistributedOptimizer
from hvdkit.keras.optimizer_class import distributed_step


def load_model(
    filepath: str | os.PathLike[str],
    custom_optimizers: Sequence[Any] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = Compressions.none,
    legacy_opts: bool = False,
    safe_mode: bool = True,
    **options: Any,
) -> Any:
    """A saved model, whose optimizer goes on where it was and is a DistributedOptimizer.

    Arguments:
        filepath: what ``model.save`` wrote.
        custom_optimizers: classes of optimizers of one's own.
        custom_objects: other classes and functions of one's own, by name.
        compression: of the DistributedOptimizer, as are ``options``; settings are not saved with a model.
        legacy_opts: of Keras 2, not used.
        safe_mode: whether to refuse functions that are part of the file, which could do anything.

    Each rank reads the file, or at least rank 0, and BroadcastGlobalVariablesCallback gives its values to all. Errors
    are those of keras.models.load_model.
    """
    import keras

    return load_by(
        keras,
        filepath,
        custom_optimizers,
        custom_objects,
        compression=compression,
        legacy_opts=legacy_opts,
        safe_mode=safe_mode,
        **options,
    )


def load_by(
    keras: Any,
    filepath: str | os.PathLike[str],
    custom_optimizers: Sequence[Any] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    *,
    legacy_opts: bool = False,
    safe_mode: bool = True,
    **options: Any,
) -> Any:
    """load_model(), by Keras 3 or tf_keras, whichever module ``keras`` is."""
    objects = {cls.__name__: cls for cls in custom_optimizers or ()}
    model = keras.models.load_model(filepath, custom_objects={**objects, **(custom_objects or {})}, safe_mode=safe_mode)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and distributed_step(optimizer) is None:
        model.optimizer = DistributedOptimizer(optimizer, **options)
        if not is_legacy(optimizer):
            model.jit_compile = bool(model.jit_compile) and keras.backend.backend() != "tensorflow"
    return model
