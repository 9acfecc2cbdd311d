"""The framework under Keras: TensorFlow or PyTorch, and what of hvdkit goes with it."""

from __future__ import annotations

import importlib
from typing import Any


def backend() -> str:
    """Its name, "tensorflow" or "torch". Raises NotImplementedError for another one."""
    import keras

    name = str(keras.backend.backend())
    if name not in ("tensorflow", "torch"):
        raise NotImplementedError(
            f"hvdkit.keras: Keras runs on {name}, which hvdkit does not reduce gradients for.\n"
            "HINT: set KERAS_BACKEND=tensorflow or KERAS_BACKEND=torch before keras is imported."
        )
    return name


def adapter() -> Any:
    """The module with the operations on the backend's tensors."""
    return importlib.import_module(f"hvdkit.{backend()}")


def tensor(value: Any) -> Any:
    """A tensor of the backend of anything that it can make one of."""
    if backend() == "tensorflow":
        import tensorflow as tf

        return tf.convert_to_tensor(value)
    import torch

    return torch.as_tensor(value)
