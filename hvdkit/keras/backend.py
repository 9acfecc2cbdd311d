"""The framework under Keras, TensorFlow or PyTorch, and hvdkit's adapter for it."""

from __future__ import annotations

import importlib
from typing import Any

from hvdkit.api import backends


def backend_name() -> str:
    """Return the name of Keras's backend, "tensorflow" or "torch". Raises NotImplementedError for other backends."""
    import keras

    name = str(keras.backend.backend())
    if name not in backends.ADAPTERS:
        raise NotImplementedError(
            f"hvdkit.keras: Keras runs on {name}, which hvdkit does not reduce gradients for.\n"
            "HINT: set KERAS_BACKEND=tensorflow or KERAS_BACKEND=torch before keras is imported."
        )
    return name


def adapter() -> Any:
    """Return the adapter's module, with the operations on the backend's tensors."""
    return importlib.import_module(backends.ADAPTERS[backend_name()])


def backend() -> backends.Backend:
    """Return the adapter's functions for Keras."""
    functions: backends.Backend = importlib.import_module(f"{backends.ADAPTERS[backend_name()]}.for_keras").BACKEND
    return functions
