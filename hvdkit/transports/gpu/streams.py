"""Streams of a device, on which work is launched in order beside the threads of the training script."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from hvdkit.errors import PeerLostError

CAPTURED = (
    "a CUDA graph cannot capture an operation of hvdkit, in which threads of the host take part: each replay would use "
    "gradients of this rank alone.\n"
    "HINT: capture the model by torch.cuda.make_graphed_callables or torch.compile(mode='reduce-overhead'), and leave "
    "operations, backward() and optimizer.step() outside of graphs of your own."
)

# Puts the work that follows on the stream behind a collective's work.
Wait = Callable[[Any], None]
# Launches collectives and arithmetic on the stream.
Launch = Callable[[Wait], None]


class End(Protocol):
    """The end of launched work."""

    def query(self) -> bool:
        """True if the work is over. Raises RuntimeError if it failed."""
        ...

    def synchronize(self) -> None:
        """Block until the work is over or failed."""
        ...


class Stream(Protocol):
    """A queue that runs launched work in order, beside the threads of the training script."""

    def mark(self, device: torch.device) -> Any:
        """Return a point in the calling thread's work on ``device``."""
        ...

    def launch(self, device: torch.device, after: Sequence[Any], tensors: list[Tensor], work: Launch) -> End:
        """Run ``work`` behind the marks ``after``. ``tensors`` belong to others and must outlive the work."""
        ...


def cuda_mark(device: torch.device) -> Any:
    """Return an event behind the calling thread's work on a GPU.

    Raises:
        ValueError: that work is being captured in a CUDA graph.
    """
    if torch.cuda.is_current_stream_capturing():
        raise ValueError(CAPTURED)
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


class CudaEnd:
    """An event behind the last kernel, and the collectives before it, each of which NCCL may have given up."""

    def __init__(self, event: Any, works: list[Any]) -> None:
        self._event = event
        self._works = works

    def query(self) -> bool:
        if not self._event.query():
            return False
        for work in self._works:
            # NCCL's watchdog notes a failure here before it aborts the kernel, so a wrong result is never taken.
            result = work.get_future_result() if hasattr(work, "get_future_result") else None
            if result is not None and result.done() and result.value() != 0:
                raise RuntimeError(f"NCCL gave the operation up (result {result.value()})")
        self._works.clear()
        return True

    def synchronize(self) -> None:
        self._event.synchronize()


class CudaStream:
    """A stream for each CUDA device that is used."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}

    def mark(self, device: torch.device) -> Any:
        return cuda_mark(device)

    def launch(self, device: torch.device, after: Sequence[Any], tensors: list[Tensor], work: Launch) -> End:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream = self._streams[device]
        works: list[Any] = []

        def wait(collective: Any) -> None:
            collective.wait()  # the stream waits, not this thread
            works.append(collective)

        with torch.cuda.stream(stream):  # selects the device as well
            for mark in after:
                stream.wait_event(mark)
            for tensor in tensors:
                tensor.record_stream(stream)
            work(wait)
            event: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record(stream)
        return CudaEnd(event, works)


class DeviceTransfer:
    """The transfer of a launch. It waits for all ranks, so its peer is -1."""

    __slots__ = ("_tensors", "end", "peer")

    def __init__(self, end: End, tensors: list[Tensor]) -> None:
        self.peer = -1
        self.end = end
        self._tensors = tensors  # kernels read or write these until the end

    def done(self) -> bool:
        try:
            return self.end.query()
        except RuntimeError as error:
            raise collective_failed(error) from error

    def wait(self) -> None:
        """Block until done, on a waiter thread. ``done()`` raises an error."""
        try:
            self.end.synchronize()
        except RuntimeError:
            return


def collective_failed(error: RuntimeError) -> PeerLostError:
    """Return the error of a collective that failed on the device."""
    return PeerLostError(f"the device's collective failed: {str(error).splitlines()[0]}")
