"""What operations ask of a framework's tensors: the protocol that an adapter fills in, once for each kind of memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, TypeVar

T = TypeVar("T")


class Framework(ABC, Generic[T]):
    """Tensors of one framework, read and written by the engine in host memory; those of ``on_device`` on a device.

    A buffer is contiguous memory that one operation reads or writes, in whatever form the framework has for it.
    """

    # Tensors never change, so an operation in flight may read them where they are.
    immutable: ClassVar[bool] = False
    # Buffers are a device's. Results are what the engine returns then, in host memory they are in the buffers.
    is_device: ClassVar[bool] = False
    # How one makes a row of a scalar, for hints.
    scalar_to_row: ClassVar[str] = "tensor.reshape(1)"

    def on_device(self, engine: Any, tensors: Sequence[T]) -> Framework[T] | None:
        """The same for memory of the tensors' device, where the engine's transport has collectives for it."""
        return None

    @abstractmethod
    def device(self, tensor: T) -> str:
        """The type of the device that ranks tell each other: "cpu", "cuda"."""

    @abstractmethod
    def dtype(self, tensor: T) -> str:
        """The name that numpy has for it."""

    @abstractmethod
    def views(self, tensors: Sequence[T]) -> list[Any]:
        """Buffers with the tensors' values: their own memory where that is contiguous, else copies."""

    @abstractmethod
    def copies(self, tensors: Sequence[T]) -> list[Any]:
        """Buffers with the tensors' values that nobody else holds."""

    @abstractmethod
    def likes(self, tensors: Sequence[Any]) -> list[Any]:
        """Buffers that nobody else holds, of the shapes and types of tensors or buffers, with any content."""

    @abstractmethod
    def arrays(self, buffers: list[Any]) -> list[Any]:
        """The buffers as the engine takes them: numpy arrays, or DeviceArrays of a device."""

    def device_of(self, tensor: T) -> Any:
        """Where a tensor lies and in what form, without the tensor, which may be gone before there are results."""
        return None

    @abstractmethod
    def results(self, devices: Sequence[Any], made: Sequence[Any]) -> list[T]:
        """New tensors on ``devices``, of buffers or of what the engine has returned."""

    @abstractmethod
    def integers(self, numbers: Sequence[int], splits: Any, device: Any) -> T:
        """A new vector of the kind that the caller's ``splits`` are, who passed them with a tensor on ``device``."""

    def check_writable(self, function: str, tensors: Sequence[T]) -> None:
        """Raises ValueError for a tensor that cannot be written in place."""

    def write(self, tensors: Sequence[T], made: Sequence[Any]) -> None:
        """Bring buffers, or what the engine has returned, into the tensors, unless it is their own memory."""
        raise TypeError(f"{type(self).__name__}: tensors cannot be written in place")
