"""TensorFlow's tensors, checked, and as the engine takes them: contiguous numpy arrays in host memory.

In eager execution an array shares the memory of its tensor on the CPU and keeps it; a tensor of a GPU is copied. In a
graph TensorFlow itself passes arrays to the operations and makes tensors of their results.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hvdkit.api import checks
from hvdkit.api.framework import Framework
from hvdkit.api.operations import Operations
from hvdkit.kernels.dtypes import BFLOAT16
from hvdkit.transports.base import aligned_empty

Array = npt.NDArray[Any]

# In bytes. TensorFlow takes memory of a lower alignment by DLPack, and then its kernels abort the process.
ALIGNMENT = 64

# Dictionaries, since the comparison of dtypes is slow and these are looked up by hash.
REDUCIBLE_DTYPES = dict.fromkeys(
    (
        *(tf.uint8, tf.int8, tf.uint16, tf.int16, tf.uint32, tf.int32, tf.uint64, tf.int64),
        *(tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.complex64, tf.complex128),
    )
)
MOVABLE_DTYPES = dict.fromkeys((*REDUCIBLE_DTYPES, tf.bool))


def check_tensor(function: str, tensor: Any, dtypes: Collection[Any], argument: str = "tensor") -> Any:
    """Return a tensor, a variable, or a value of which TensorFlow makes a tensor, as a tensor.

    Raise TypeError for anything else, ValueError unless the tensor is dense and of one of ``dtypes``.
    """
    if not isinstance(tensor, tf.Tensor):
        if isinstance(tensor, tf.IndexedSlices | tf.SparseTensor | tf.RaggedTensor):
            raise ValueError(
                f"{function}: {argument} must be dense, got a tf.{type(tensor).__name__}\n"
                "HINT: use tf.convert_to_tensor(), tf.sparse.to_dense(), or gather values and indices separately."
            )
        try:
            tensor = tf.convert_to_tensor(tensor)
        except (TypeError, ValueError) as error:
            text = f"{function}: {argument} must be a tf.Tensor or tf.Variable, got {tensor!r}: {error}"
            raise TypeError(text) from None
    if tensor.dtype not in dtypes:
        raise checks.wrong_dtype(function, argument, [dtype.name for dtype in dtypes], tensor.dtype.name)
    return tensor


def check_tensors(function: str, tensors: Any, dtypes: Collection[Any]) -> list[Any]:
    """Return the tensors of a grouped operation as a list. Raise TypeError or ValueError."""
    checks.check_listed(function, tensors, (tf.Tensor, tf.Variable))
    return [check_tensor(function, tensor, dtypes, f"tensors[{index}]") for index, tensor in enumerate(tensors)]


def as_array(tensor: Any) -> Array:
    """Return the values of an eager tensor, or of an array, as a contiguous array that nobody may write."""
    if isinstance(tensor, np.ndarray | np.generic):
        return np.ascontiguousarray(tensor).reshape(tensor.shape)
    array: Array = np.asarray(tensor) if tensor.shape.rank else np.array(tensor.numpy())
    return array


def as_tensor(array: Array) -> Any:
    """Return an eager tensor of an array that nobody writes any more. The tensor takes over memory that is aligned."""
    if array.dtype == np.bool_ or not array.size:  # DLPack has no booleans
        return tf.convert_to_tensor(array)
    if array.dtype == BFLOAT16:  # numpy cannot describe bfloat16 to other libraries
        with tf.device("CPU:0"):
            return tf.bitcast(as_tensor(array.view(np.int16)), tf.bfloat16)
    if array.__array_interface__["data"][0] % ALIGNMENT:
        array = copy_of(array)
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())


def empty_like(array: Array) -> Array:
    """Return uninitialised memory of an array's shape and dtype, aligned as the memory of tensors is."""
    return aligned_empty(array.nbytes, ALIGNMENT).view(array.dtype).reshape(array.shape)


def copy_of(array: Array) -> Array:
    """Return a copy of an array, aligned as the memory of tensors is."""
    copy = empty_like(array)
    copy[...] = array
    return copy


class TensorFlow(Framework[Any]):
    """Tensors of TensorFlow, and arrays of a graph. Buffers are arrays."""

    immutable = True  # in a graph the operation that reads an array keeps it
    scalar_to_row = "tf.reshape(tensor, [1])"

    def device(self, tensor: Any) -> str:
        return "cpu"

    def dtype(self, tensor: Any) -> str:
        return str(tensor.dtype.name)

    def views(self, tensors: Sequence[Any]) -> list[Any]:
        return list(map(as_array, tensors))

    def copies(self, tensors: Sequence[Any]) -> list[Any]:
        return [copy_of(as_array(tensor)) for tensor in tensors]

    def likes(self, tensors: Sequence[Any]) -> list[Any]:
        return [empty_like(as_array(tensor)) for tensor in tensors]

    def arrays(self, buffers: list[Any]) -> list[Any]:
        return buffers

    def device_of(self, tensor: Any) -> str | None:
        """Return the device of an eager tensor, None for an array of a graph."""
        return None if isinstance(tensor, np.ndarray | np.generic) else str(tensor.device)

    def results(self, devices: Sequence[str | None], made: Sequence[Any]) -> list[Any]:
        """Return arrays for a graph as they are, and eager tensors on the first of ``devices``."""
        if (device := devices[0]) is None:
            return list(made)
        tensors = list(map(as_tensor, made))
        for index, tensor in enumerate(tensors):
            if tensor.device != device:
                with tf.device(device):
                    tensors[index] = tf.identity(tensor)
        return tensors

    def integers(self, numbers: Sequence[int], splits: Any, device: str | None) -> Any:
        """Return integers of the dtype of ``splits``, or of 32 bits."""
        return self.results([device], [np.array(numbers, dtype=np.int32 if splits is None else splits.dtype)])[0]


OPERATIONS = Operations(TensorFlow())
