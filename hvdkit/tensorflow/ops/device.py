"""Tensors of a GPU, which PyTorch's collectives move: TensorFlow's memory as a tensor of PyTorch, by DLPack.

The two libraries order their work on streams that the other one does not know. So what TensorFlow computed is waited
for before PyTorch reads it, and what PyTorch reads or writes before TensorFlow may use the memory again. The engine
works on copies that nobody else has.

Tensors of a GPU (``tensorflow/ops/device``) are moved by PyTorch's collectives where the transport has them: allreduce,
broadcast and allgather of the dtypes that TensorFlow keeps in the GPU's memory, which int32 is not, and lanes. In a
graph the pair is then of ``tf.py_function``s on the GPU. TensorFlow's memory is a tensor of PyTorch by DLPack, with
PyTorch's number of the GPU written over TensorFlow's, who counts visible ones. Neither library knows the other's
streams, so memory changes hands when TensorFlow's compute stream, or PyTorch's current one, has been waited for; the
whole device never is, since a collective on its way there may wait for a rank that was lost. The engine works on copies
that nobody else has, in TensorFlow's memory, since PyTorch would keep what it once had; lanes are PyTorch's, and are
handed over in fewer, larger parts. What decides is the dtype and the operation, not where a tensor happens to lie, so
that ranks cannot differ; a tensor elsewhere is copied. Where TensorFlow was not told to leave memory
(``set_memory_growth``), or NCCL is not there, tensors are staged in host memory, and local rank 0 says so once.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import tensorflow as tf

from hvdkit.engine.life import runtime
from hvdkit.environments.libraries import forced_memory_growth
from hvdkit.tensorflow.ops.arrays import as_array, as_tensor

THROUGH_HOST = "TensorFlow's GPU tensors travel through host memory here: correct, but slower than NCCL.\nHINT: %s"
NO_NCCL = (
    "NCCL needs a PyTorch that was built for CUDA, beside TensorFlow, and ranks that torchrun or hvdkitrun --gloo "
    "started, not MPI."
)
NO_ROOM = (
    "call tf.config.experimental.set_memory_growth(gpu, True) for each GPU before its first use. TensorFlow else takes "
    "all memory of the GPU and leaves none for NCCL."
)

# What TensorFlow keeps in the memory of the device it names, which it does not with int32, and PyTorch can copy.
DTYPES = frozenset({"float16", "bfloat16", "float32", "float64", "uint8", "int8", "int64"})

# In DLManagedTensor of dlpack.h: after the address and the device's type, 8 and 4 bytes.
_DEVICE_NUMBER_AT = 12
# The same devices, by the names of TensorFlow and of PyTorch.
_KINDS = {"GPU": "cuda", "CPU": "cpu"}

_devices: WeakKeyDictionary[Any, Device | None] = WeakKeyDictionary()  # by engine

logger = logging.getLogger("hvdkit")


class Device:
    """A device that is TensorFlow's ``name`` ("GPU:0") and PyTorch's ``torch_name`` ("cuda:3")."""

    def __init__(self, name: str, torch_name: str) -> None:
        self.name = name
        self.torch_name = torch_name

    def take(self, tensors: Sequence[Any]) -> list[Any]:
        """Copies for the engine, as DeviceArrays."""
        from hvdkit.torch.ops.framework import device_array

        return [device_array(copy) for copy in self.copies(tensors)]

    def copies(self, tensors: Sequence[Any]) -> list[Any]:
        """Copies for the engine, as tensors of PyTorch, which ``give`` makes TensorFlow's again."""
        # In TensorFlow's memory, since PyTorch would keep its own and leave less to TensorFlow.
        memories = [self._empty(tensor.shape, tensor.dtype.name) for tensor in tensors]
        copies = [self._shared(memory) for memory in memories]
        self._wait_for_tensorflow()
        for copy, tensor, memory in zip(copies, tensors, memories, strict=True):
            copy.copy_(self._view(tensor).reshape(copy.shape))
            copy.hvdkit_memory = memory
        self._wait_for_pytorch()
        return copies

    def give(self, results: Sequence[Any]) -> list[Any]:
        """What the engine returned as eager tensors: of DeviceArrays, of tensors of PyTorch, of arrays that it staged.

        The first ones are the copies that ``take`` made; of tensors of PyTorch they are copies.
        """
        outputs: list[Any] = []
        copied = []
        for result in results:
            if isinstance(result, np.ndarray):
                outputs.append(as_tensor(result))
            elif hasattr(result, "hvdkit_memory"):
                outputs.append(result.hvdkit_memory)
            else:
                outputs.append(self._empty(tuple(result.shape), str(result.dtype).removeprefix("torch.")))
                copied.append((outputs[-1], result))
        if copied:
            self._wait_for_tensorflow()
            for output, result in copied:
                self._shared(output).copy_(result)
            self._wait_for_pytorch()
        return outputs

    def _empty(self, shape: Any, dtype: str) -> Any:
        """Memory that no other tensor shares, as constants may."""
        with tf.device(self.name):
            return tf.fill(shape, tf.zeros([], dtype))

    def _view(self, tensor: Any) -> Any:
        """A tensor of PyTorch with the values of an eager tensor or array; the same memory if it is on this device."""
        if isinstance(tensor, np.ndarray) or not self._has(tensor):
            from hvdkit.torch.ops.framework import as_tensor as torch_tensor

            array = as_array(tensor)
            return torch_tensor(array if array.flags.writeable else array.copy())  # of others PyTorch warns
        return self._shared(tensor)

    def _has(self, tensor: Any) -> bool:
        return str(tensor.backing_device).endswith(self.name) and tensor.dtype.name in DTYPES

    def _shared(self, tensor: Any) -> Any:
        """A tensor of PyTorch in the memory of an eager tensor of this device."""
        import torch

        assert self._has(tensor), (tensor.backing_device, tensor.dtype)
        capsule = tf.experimental.dlpack.to_dlpack(tensor)  # which also waits for it
        _, number = _managed(capsule)
        number.value = torch.device(self.torch_name).index or 0
        return torch.utils.dlpack.from_dlpack(capsule)

    # Neither waits for the whole device: a collective that is on its way there may wait for a rank that was lost.

    def _wait_for_tensorflow(self) -> None:
        tf.test.experimental.sync_devices()  # also for what asynchronous execution has not begun yet

    def _wait_for_pytorch(self) -> None:
        if self.torch_name.startswith("cuda"):
            import torch

            torch.cuda.current_stream(self.torch_name).synchronize()


def device_of_job() -> Device | None:
    """The device whose tensors the present job's transport moves without host memory; None if there is none.

    The same on all ranks of a job whose ranks are set up alike.
    """
    engine = runtime.engine()
    try:
        return _devices[engine]
    except KeyError:
        return _devices.setdefault(engine, _find(engine))


def device_for(tensors: Sequence[Any]) -> Device | None:
    """The device of the present job, if these tensors, or what has dtypes as they do, can be put there.

    A graph may outlive the job that it was made in, so it is the present job's that counts, or ranks could differ.
    """
    device = device_of_job()
    return device if device is not None and all(tensor.dtype.name in DTYPES for tensor in tensors) else None


def _find(engine: Any) -> Device | None:
    kind = next((one for one in _KINDS if _KINDS[one] in engine.transport.device_types), None)
    gpus = tf.config.get_visible_devices("GPU")
    problem = None
    if gpus and kind is None:
        problem = NO_NCCL
    elif gpus and kind == "GPU" and not all(map(_leaves_memory, gpus)):
        problem = NO_ROOM
    if problem and engine.topology.size > 1 and engine.topology.local_rank == 0:
        logger.warning(THROUGH_HOST, problem)
    if problem or kind is None or (kind == "GPU" and not gpus):
        return None
    name = f"{kind}:0"
    return Device(name, "cpu" if kind == "CPU" else f"cuda:{_number_of(name)}")


def _leaves_memory(gpu: Any) -> bool:
    """Whether TensorFlow takes only what it needs of a GPU's memory, or what it was told."""
    limits = [device.memory_limit for device in tf.config.get_logical_device_configuration(gpu) or []]
    if limits and all(limits):
        return True
    forced = forced_memory_growth()
    return bool(tf.config.experimental.get_memory_growth(gpu)) if forced is None else forced


class _Memory:
    """A byte of a GPU, of which PyTorch finds out where it is."""

    def __init__(self, address: int) -> None:
        self.__cuda_array_interface__ = {"data": (address, False), "shape": (1,), "typestr": "|u1", "version": 2}


def _number_of(name: str) -> int:
    """PyTorch's number of a GPU, which need not be TensorFlow's, who counts those that it was allowed to see."""
    import torch

    with tf.init_scope(), tf.device(name):  # a graph may be traced just now
        byte = tf.fill([1], tf.zeros([], tf.uint8))
    capsule = tf.experimental.dlpack.to_dlpack(byte)
    torch.cuda.init()  # type: ignore[no-untyped-call]
    address, _ = _managed(capsule)
    found: int = torch.as_tensor(_Memory(address)).device.index
    return found


def _managed(capsule: Any) -> tuple[int, Any]:
    """The address of a tensor's memory and the number of its device, which may be written, as in dlpack.h."""
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    tensor = get_pointer(capsule, b"dltensor")
    return ctypes.c_uint64.from_address(tensor).value, ctypes.c_int32.from_address(tensor + _DEVICE_NUMBER_AT)
