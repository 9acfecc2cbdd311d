"""The framework under Keras: TensorFlow or PyTorch, and what of hvdkit goes with it."""

from __future__ import annotations

from typing import Any

from hvdkit.api import backends


def backend_name() -> str:
    """Its name, "tensorflow" or "torch". Raises NotImplementedError for another one."""
    import keras

    name = str(keras.backend.backend())
    if name not in backends.ADAPTERS:
        raise NotImplementedError(
            f"hvdkit.keras: Keras runs on {name}, which hvdkit does not reduce gradients for.\n"
            "HINT: set KERAS_BACKEND=tensorflow or KERAS_BACKEND=torch before keras is imported."
        )
    return name


def adapter() -> Any:
    """The module with the operations on the backend's tensors."""
    return backends.adapter(backend_name())


def backend() -> backends.Backend:
    """What Keras asks of it beyond operations."""
    return backends.backend(backend_name())
