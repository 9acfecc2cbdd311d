"""The protocol by which operations read and write a framework's tensors, and reusable buffers for large results."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import numpy.typing as npt

T = TypeVar("T")

Bytes = npt.NDArray[np.uint8]

STEP_BYTES = 1 << 21  # to which sizes are rounded up: results of similar sizes share a buffer one after the other
KEPT_RESULTS = 2  # of the largest size, in unused buffers: one is in use while the next result is made


class Framework(ABC, Generic[T]):
    """The tensors of one framework, for one kind of memory; an adapter implements it.

    A buffer is contiguous memory that one operation reads or writes, in any form that the framework has for it.
    """

    immutable: ClassVar[bool] = False  # True if tensors never change, so that operations in flight may read them
    is_device: ClassVar[bool] = False  # True if buffers are a device's: the engine returns the results, not buffers
    scalar_to_row: ClassVar[str] = "tensor.reshape(1)"  # turns a scalar into a row, for hints

    def on_device(self, engine: Any, tensors: Sequence[T]) -> Framework[T] | None:
        """Return the Framework for the tensors' device, or None if the engine's transport has no collectives for it."""
        return None

    @abstractmethod
    def device(self, tensor: T) -> str:
        """Return the type of the tensor's device, which ranks compare: "cpu", "cuda"."""

    @abstractmethod
    def dtype(self, tensor: T) -> str:
        """Return numpy's name of the tensor's dtype."""

    @abstractmethod
    def views(self, tensors: Sequence[T]) -> list[Any]:
        """Return buffers with the tensors' values: the memory of contiguous tensors, copies of others."""

    @abstractmethod
    def copies(self, tensors: Sequence[T]) -> list[Any]:
        """Return buffers with the tensors' values that nothing else refers to."""

    @abstractmethod
    def likes(self, tensors: Sequence[Any]) -> list[Any]:
        """Return new buffers of the shapes and dtypes of tensors or buffers, with any content."""

    @abstractmethod
    def arrays(self, buffers: list[Any]) -> list[Any]:
        """Return the buffers in the engine's form: numpy arrays, or DeviceArrays of a device."""

    def device_of(self, tensor: T) -> Any:
        """Return the tensor's device and form, for ``results``. The tensor may be gone before there are results."""
        return None

    @abstractmethod
    def results(self, devices: Sequence[Any], made: Sequence[Any]) -> list[T]:
        """Return new tensors on ``devices`` from buffers or from arrays that the engine returned."""

    @abstractmethod
    def integers(self, numbers: Sequence[int], splits: Any, device: Any) -> T:
        """Return a new vector, of the type of the caller's ``splits``; ``device`` is that of the caller's tensor."""

    def check_writable(self, function: str, tensors: Sequence[T]) -> None:
        """Raise ValueError for a tensor that cannot be written in place."""

    def write(self, tensors: Sequence[T], made: Sequence[Any]) -> None:
        """Copy buffers, or arrays that the engine returned, into the tensors, unless they share memory."""
        raise TypeError(f"{type(self).__name__}: tensors cannot be written in place")


class ResultBuffers:
    """Host memory that is used again for results: fresh pages cost more than the allreduce that fills them.

    A buffer comes back when the last tensor on it is gone, perhaps inside of take(): so there is no lock, but each
    operation on the attributes is atomic. The sizes that were unused longest are freed first.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[Bytes]] = {}  # by size; the size used last is at the end
        self._largest = 0

    def take(self, nbytes: int) -> Bytes:
        """Return ``nbytes`` bytes with any content, which are the caller's as long as something refers to them."""
        size = -(-nbytes // STEP_BYTES) * STEP_BYTES
        self._largest = max(self._largest, size)
        try:
            buffer = self._free[size].pop()
        except (KeyError, IndexError):
            buffer = np.empty(size, dtype=np.uint8)  # numpy asks the system for huge pages, torch does not
        lent = buffer[:nbytes]
        weakref.finalize(lent, self._give_back, buffer).atexit = False
        return lent

    def _give_back(self, buffer: Any) -> None:
        self._free[buffer.nbytes] = [*self._free.pop(buffer.nbytes, []), buffer]
        for size, unused in list(self._free.items()):
            while unused and self.kept() > KEPT_RESULTS * self._largest:
                del unused[:1]
            if not unused:
                self._free.pop(size, None)

    def kept(self) -> int:
        """Return the number of bytes in unused buffers."""
        return sum(size * len(held) for size, held in list(self._free.items()))


RESULTS = ResultBuffers()
