"""The contract every transport keeps: tagged bytes from rank to rank, small control messages, and buffer memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

CACHE_LINE = 64


class Transfer(Protocol):
    """One nonblocking send or receive."""

    peer: int

    def done(self) -> bool:
        """True when the buffer may be used again. Raises PeerLostError if the peer's connection broke."""
        ...


def aligned_empty(nbytes: int) -> Bytes:
    """Uninitialised flat memory of ``nbytes`` bytes that begins on a cache line."""
    raw = np.empty(nbytes + CACHE_LINE, dtype=np.uint8)
    start = -raw.ctypes.data % CACHE_LINE
    return raw[start : start + nbytes]


class Transport(ABC):
    """Moves bytes between the ranks of one job.

    Data messages match by (peer, tag) in the order in which they were posted. Control messages from one peer arrive in
    the order in which they were sent. Nothing here blocks.
    """

    name: str
    rank: int
    size: int
    # True: done() and poll_control() must be called for anything to advance (MPI). False: events call the waker.
    polling: bool

    @abstractmethod
    def isend(self, buffer: Bytes, peer: int, tag: int) -> Transfer:
        """Send a flat contiguous buffer. It must not change until the transfer is done."""

    @abstractmethod
    def irecv(self, buffer: Bytes, peer: int, tag: int) -> Transfer:
        """Receive exactly ``buffer.nbytes`` bytes into a flat contiguous buffer."""

    @abstractmethod
    def send_control(self, peer: int, payload: bytes) -> None:
        """Send a small message of any length; the payload is copied."""

    @abstractmethod
    def poll_control(self) -> list[tuple[int, bytes]]:
        """The control messages that have come in since the last call, as (sender, payload)."""

    def lost_peers(self) -> dict[int, str]:
        """The peers whose connection is known to have broken, and how. Empty where the engine below cannot tell."""
        return {}

    def watch(self, transfers: Sequence[Transfer]) -> None:
        """Call the waker when all of these are done. A polling transport has nothing to do."""

    def allocate(self, nbytes: int) -> Bytes:
        """Memory for a fusion buffer. A transport may return memory that the ranks of a node share."""
        return aligned_empty(nbytes)

    def set_waker(self, waker: Callable[[], None]) -> None:
        """Register what an event-driven transport calls when a transfer or a control message has come in."""

    def collectives_for(self, device: str) -> Any | None:
        """The engine's own collectives for tensors of a device (NCCL), or None where buffers are staged in memory."""
        return None

    @abstractmethod
    def close(self, graceful: bool) -> None:
        """Give everything back. ``graceful`` says that all ranks close now, so collective clean-up cannot block."""

    @abstractmethod
    def abort(self, code: int) -> None:
        """End the whole job now with this exit code, as far as the engine below can; return where it cannot."""
