"""Tensors as the engine sees them: contiguous numpy arrays in host memory, shared with the tensor where possible."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hvdkit.kernels.dtypes import BFLOAT16
from hvdkit.transports.base import aligned_empty

Array = npt.NDArray[Any]

# What numpy cannot describe to others.
_AS_INTEGERS = {BFLOAT16: (np.dtype(np.int16), tf.bfloat16)}
_COPIED = (np.dtype(np.bool_),)
# In bytes, of the memory of tensors.
ALIGNMENT = 64


def as_array(tensor: Any) -> Array:
    """The values of an eager tensor: its own memory on the CPU, not to be written; it lives as long as the array.

    Of an array itself, if it is contiguous.
    """
    if isinstance(tensor, np.ndarray | np.generic):
        return np.ascontiguousarray(tensor).reshape(tensor.shape)
    array: Array = np.asarray(tensor) if tensor.shape.rank else np.array(tensor.numpy())
    return array


def as_tensor(array: Array) -> Any:
    """An eager tensor of an array that nobody writes any more; it takes over the memory where it is aligned."""
    if array.dtype in _COPIED or not array.size:
        return tf.convert_to_tensor(array)
    if array.dtype in _AS_INTEGERS:
        integers, dtype = _AS_INTEGERS[array.dtype]
        with tf.device("CPU:0"):
            return tf.bitcast(as_tensor(array.view(integers)), dtype)
    if array.__array_interface__["data"][0] % ALIGNMENT:  # TensorFlow takes it so, and its kernels abort the process
        array = copy_of(array)
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())


def empty_like(array: Array) -> Array:
    """Memory of an array's shape and type with any content, aligned as tensors are."""
    return aligned_empty(array.nbytes)[: array.nbytes].view(array.dtype).reshape(array.shape)


def copy_of(array: Array) -> Array:
    """The same values in memory of their own, aligned as tensors are."""
    copy = empty_like(array)
    copy[...] = array
    return copy
