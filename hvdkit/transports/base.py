"""The contract of transports: tagged bytes from rank to rank, control messages, and perhaps collectives of a device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from hvdkit.transports.gpu.device import DeviceCollectives

Bytes = npt.NDArray[np.uint8]
Exchange = Callable[[bytes], list[bytes]]  # takes this rank's bytes, and returns the bytes of all ranks

CACHE_LINE = 64


class Transfer(Protocol):
    """A nonblocking send or receive."""

    peer: int  # -1: the ranks that a method ``awaited()`` returns, or all ranks of the group if there is none

    def done(self) -> bool:
        """True when the buffer may be used again. Raises PeerLostError if the peer's connection broke."""


def aligned_empty(nbytes: int, alignment: int = CACHE_LINE) -> Bytes:
    """Return uninitialised flat memory of ``nbytes`` bytes whose address is a multiple of ``alignment``."""
    raw = np.empty(nbytes + alignment, dtype=np.uint8)
    start = -raw.ctypes.data % alignment
    return raw[start : start + nbytes]


class Transport(ABC):
    """A transport of bytes between the ranks of a job. Nothing here blocks.

    Data messages match by (peer, tag) in the order in which they were posted. Control messages of a peer stay in order.
    """

    name: str
    rank: int
    size: int
    polling: bool  # True: transfers advance only in done() and poll_control() (MPI). False: it calls the waker
    nodes: Sequence[Sequence[int]] = ()  # the ranks of each node that share memory; empty if no two do
    wakeup: Any = None  # the event counter on which waiting threads sleep, if other ranks ring it (engine.loop.driver)
    # The window, and the offset in it, where this node's ranks count the signs of life of all ranks.
    signs_of_life: Any = None
    is_elastic = False  # True: the ranks form a new generation when one of them fails
    beats = True  # False for ranks that are threads of one process, which need no signs of life
    # The devices ("cuda", "cpu") for which there may be collectives; tensors on others are staged in host memory.
    device_types: frozenset[str] = frozenset()
    # The device types ("cpu") whose memory is the host's, where hvdkit's kernels encode faster than PyTorch.
    host_types: frozenset[str] = frozenset()
    worthwhile_bytes = 0  # the least size of a bucket of gradients, except the first; 0: latency decides

    @property
    def carrier(self) -> str:
        """Return the name of the transport below all layers, which carries messages."""
        return self.name

    def settle(self, carried: Sequence[int], unspoken: Sequence[int], agree: Callable[[], object]) -> None:
        """Release what only the meeting needed, and the connections to the ranks ``carried``, which a layer reaches.

        This rank sends ranks ``unspoken`` control messages only about lost ranks, and buffers as before. ``agree``
        returns when all ranks have called it: then no message to these ranks is under way.
        """
        agree()

    def start(self, exchange: Exchange, start_seconds: float, silence_seconds: float) -> Transport:
        """Start other carriers of buffers once all ranks are connected, and return the transport to use from then on.

        Collective. ``start_seconds`` limits the start; later a rank may be silent for ``silence_seconds``.
        """
        return self

    @abstractmethod
    def isend(self, buffer: Bytes, peer: int, tag: int) -> Transfer:
        """Send a flat contiguous buffer. It must not change until the transfer is done."""

    @abstractmethod
    def irecv(self, buffer: Bytes, peer: int, tag: int) -> Transfer:
        """Receive exactly ``buffer.nbytes`` bytes into a flat contiguous buffer."""

    @abstractmethod
    def send_control(self, peer: int, payload: bytes) -> None:
        """Send a copy of a message. A peer that cannot be reached is in ``lost_peers()`` once its messages are in."""

    def advance(self) -> bool:
        """Advance what does not advance by itself; called in every round of the engine. True if anything moved."""
        return False

    @abstractmethod
    def poll_control(self) -> list[tuple[int, bytes]]:
        """Return the control messages since the last call, as (sender, payload)."""

    def lost_peers(self) -> dict[int, str]:
        """Return the peers whose connections broke, with reasons. Always empty if the library below cannot tell."""
        return {}

    def watch(self, transfers: Sequence[Transfer]) -> None:
        """Call the waker when all ``transfers`` are done. A polling transport does nothing."""

    def set_waker(self, waker: Callable[[], None]) -> None:
        """Set the function that an event-driven transport calls when a transfer or a control message has come in."""

    def collectives_for(self, device: str, members: Sequence[int], label: str) -> DeviceCollectives | None:
        """Return new collectives of ``members`` (ascending) on this rank's ``device`` ("cuda:0"). Blocks.

        All members call this with the same ``label``, used once. All get None if their tensors must be staged in host
        memory. Raises PeerLostError if a member does not come.
        """
        return None

    @abstractmethod
    def close(self, graceful: bool) -> None:
        """Release everything. ``graceful``: all ranks close now, so collective clean-up cannot block."""

    @abstractmethod
    def abort(self, code: int) -> None:
        """End the whole job now with this exit code; return if the library below cannot."""


class Layer(Transport):
    """A transport in front of ``inner``, which does everything that a subclass does not override."""

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.name, self.rank, self.size, self.polling = inner.name, inner.rank, inner.size, inner.polling
        self.nodes, self.beats, self.worthwhile_bytes = inner.nodes, inner.beats, inner.worthwhile_bytes
        self.device_types, self.host_types = inner.device_types, inner.host_types
        self.is_elastic = inner.is_elastic

    @property
    def carrier(self) -> str:
        return self.inner.carrier

    def settle(self, carried: Sequence[int], unspoken: Sequence[int], agree: Callable[[], object]) -> None:
        self.inner.settle(carried, unspoken, agree)

    def start(self, exchange: Exchange, start_seconds: float, silence_seconds: float) -> Transport:
        self.inner = self.inner.start(exchange, start_seconds, silence_seconds)
        return self

    def isend(self, buffer: Bytes, peer: int, tag: int) -> Transfer:
        return self.inner.isend(buffer, peer, tag)

    def irecv(self, buffer: Bytes, peer: int, tag: int) -> Transfer:
        return self.inner.irecv(buffer, peer, tag)

    def send_control(self, peer: int, payload: bytes) -> None:
        self.inner.send_control(peer, payload)

    def advance(self) -> bool:
        return self.inner.advance()

    def poll_control(self) -> list[tuple[int, bytes]]:
        return self.inner.poll_control()

    def lost_peers(self) -> dict[int, str]:
        return self.inner.lost_peers()

    def watch(self, transfers: Sequence[Transfer]) -> None:
        self.inner.watch(transfers)

    def set_waker(self, waker: Callable[[], None]) -> None:
        self.inner.set_waker(waker)

    def collectives_for(self, device: str, members: Sequence[int], label: str) -> DeviceCollectives | None:
        return self.inner.collectives_for(device, members, label)

    def close(self, graceful: bool) -> None:
        self.inner.close(graceful)

    def abort(self, code: int) -> None:
        self.inner.abort(code)


class SoloTransport(Transport):
    """The transport of a rank alone. Algorithms never send to themselves, so a transfer is a broken invariant."""

    name, rank, size, polling = "solo", 0, 1, False

    def isend(self, buffer: Bytes, peer: int, tag: int) -> Transfer:
        raise AssertionError("a rank alone has nobody to send to")

    irecv = isend

    def send_control(self, peer: int, payload: bytes) -> None:
        raise AssertionError("a rank alone has nobody to send to")

    def poll_control(self) -> list[tuple[int, bytes]]:
        return []

    def close(self, graceful: bool) -> None:
        """Do nothing."""

    def abort(self, code: int) -> None:
        """Do nothing: the caller's own exit is enough."""
