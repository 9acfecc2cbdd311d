"""What operations ask of TensorFlow's tensors, in host memory and on the job's device; in a graph, of arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdkit.api.framework import Framework
from hvdkit.api.operations import Operations
from hvdkit.tensorflow.ops.arrays import as_array, as_tensor, copy_of, empty_like
from hvdkit.tensorflow.ops.device import Device, device_for
from hvdkit.tensorflow.ops.tensor_checks import SCALAR_TO_ROW

_ARRAYS = (np.ndarray, np.generic)


class TensorFlow(Framework[Any]):
    """Through host memory. Buffers are arrays."""

    immutable = True  # in a graph they are kept by whoever reads them
    scalar_to_row = SCALAR_TO_ROW

    def on_device(self, engine: Any, tensors: Sequence[Any]) -> Framework[Any] | None:
        device = device_for(tensors)
        return None if device is None else TensorFlowOnDevice(device)

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
        """The device. In a graph there are arrays, of which TensorFlow makes tensors itself: None."""
        return None if isinstance(tensor, _ARRAYS) else str(tensor.device)

    def results(self, devices: Sequence[str | None], made: Sequence[Any]) -> list[Any]:
        """All on the first of ``devices``."""
        if devices[0] is None:
            return list(made)
        return [_at(devices[0], as_tensor(one) if isinstance(one, np.ndarray) else one) for one in made]

    def integers(self, numbers: Sequence[int], splits: Any, device: str | None) -> Any:
        """Of the type of the array of splits, else 32 bits wide."""
        return self.results([device], [np.array(numbers, dtype=np.int32 if splits is None else splits.dtype)])[0]


class TensorFlowOnDevice(TensorFlow):
    """Buffers are DeviceArrays, always copies."""

    is_device = True

    def __init__(self, device: Device) -> None:
        self._device = device

    def device(self, tensor: Any) -> str:
        return self._device.torch_name.partition(":")[0]

    def views(self, tensors: Sequence[Any]) -> list[Any]:
        return self._device.take(tensors)

    copies = views

    def results(self, devices: Sequence[str | None], made: Sequence[Any]) -> list[Any]:
        return super().results(devices, self._device.give(made))


OPERATIONS = Operations(TensorFlow())


def _at(device: str, result: Any) -> Any:
    """A result on the device of the tensor that it was made from."""
    if device == result.device:
        return result
    with tf.device(device):
        return tf.identity(result)
