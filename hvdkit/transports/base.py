"""The contract every transport keeps: tagged bytes from rank to rank, small control messages, and perhaps collectives
of a device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from hvdkit.compression import LossyCodec
from hvdkit.kernels import ReduceOp, Scale

Bytes = npt.NDArray[np.uint8]
# Everyone's bytes on every rank, from one's own.
Exchange = Callable[[bytes], list[bytes]]

CACHE_LINE = 64


class Transfer(Protocol):
    """One nonblocking send or receive."""

    peer: int  # -1: several; which, a method ``awaited()`` tells where there is one, else all ranks of the group

    def done(self) -> bool:
        """True when the buffer may be used again. Raises PeerLostError if the peer's connection broke."""
        ...


def aligned_empty(nbytes: int, alignment: int = CACHE_LINE) -> Bytes:
    """Return uninitialised flat memory of ``nbytes`` bytes whose address is a multiple of ``alignment``."""
    raw = np.empty(nbytes + alignment, dtype=np.uint8)
    start = -raw.ctypes.data % alignment
    return raw[start : start + nbytes]


class DeviceCollectives(ABC):
    """Collectives on memory of a device, for the ranks of one group. All of them call these in the same order.

    Buffers are opaque here: contiguous tensors of a framework. ``after`` holds marks (or None) that the work waits for.
    """

    @abstractmethod
    def allocate(self, elements: int, dtype: str) -> Any:
        """Flat memory of zeros that can be sliced and assigned to, like an array."""

    @abstractmethod
    def mark(self) -> Any:
        """What the calling thread has given the device to do so far."""

    @abstractmethod
    def allreduce(
        self,
        buffers: Sequence[Any],
        op: ReduceOp,
        prescale: float,
        scale: Scale,
        codec: str,
        after: Sequence[Any],
        memory: Any = None,
        debtors: Sequence[tuple[int, Any]] = (),
    ) -> Transfer:
        """Replace each buffer by ``scale * (prescale * rank 0's op prescale * rank 1's op ...)``.

        ``debtors`` are those of them, and where each begins in ``memory``, to which what is owed there is added once
        they are multiplied with ``prescale``.
        """

    @abstractmethod
    def memory(self, elements: int, names: Sequence[str], gaps: Sequence[tuple[int, int]]) -> Any:
        """What a codec keeps on the device of a flat buffer: arrays of these names, zeros at first.

        ``gaps`` are the elements that belong to no tensor. It can ``pull`` what it keeps into a Memory of the host, and
        ``push`` what is there to the device.
        """

    @abstractmethod
    def allreduce_encoded(
        self,
        buffer: Any,
        parts: Sequence[tuple[int, Any]],
        prescale: float,
        scale: Scale,
        codec: LossyCodec,
        way: str,
        memory: Any,
        matrices: Sequence[tuple[int, int, int]],
        turn: int,
        after: Sequence[Any],
        debtors: Sequence[tuple[int, Any]] = (),
    ) -> Transfer:
        """Replace tensors by ``scale * prescale`` times their sums, as far as the codec lets it through.

        ``parts`` are where each begins in ``buffer``, and the tensor; all are flat, and the buffer's content is lost.

        ``way`` (that of the codec: two_phase, gather, sums), ``matrices`` (where tensors begin, their rows and columns)
        and ``turn`` (how often the buffer was reduced before) are the same on all ranks. ``debtors``: as above.
        """

    @abstractmethod
    def broadcast(self, buffers: Sequence[Any], root: int, after: Sequence[Any]) -> Transfer:
        """Replace each buffer by that of the member ``root``."""

    @abstractmethod
    def allgather(
        self, buffers: Sequence[Any], rows: Sequence[Sequence[int]], after: Sequence[Any]
    ) -> tuple[list[Any], Transfer]:
        """New buffers with every member's rows; ``rows[i][p]`` is the first dimension of member p's buffer i."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back; what is in flight is lost."""


# Flat arrays of host memory, each with a flat tensor of a device of as many elements.
Pairs = Sequence[tuple[Any, Any]]


class HostCopies(ABC):
    """Copies between tensors of a device and memory of the host, one after the other; nothing but ``close`` blocks."""

    @abstractmethod
    def mark(self) -> Any:
        """Return what the calling thread has given the device to do so far."""

    @abstractmethod
    def to_host(self, pairs: Pairs, after: Sequence[Any]) -> Transfer:
        """Copy tensors into the arrays beside them, behind the marks ``after``, of which some may be None."""

    @abstractmethod
    def to_device(self, pairs: Pairs) -> Transfer:
        """Copy arrays into the tensors beside them."""

    @abstractmethod
    def close(self) -> None:
        """Wait for what is under way, and let go of the host's memory. Nothing can be copied afterwards."""


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
    # Ranks that share memory, by node; empty: no two do.
    nodes: Sequence[Sequence[int]] = ()
    # Where threads that wait for this transport sleep, if others ring it; see hvdkit.engine.loop.wakeup.
    wakeup: Any = None
    # The window, and the place in it, where this node's ranks count the signs of life of all; None: each by itself.
    signs_of_life: Any = None
    # Whether ranks must beat for others to see that they live; not if they are threads of one process.
    beats = True
    # The devices ("cuda", "cpu") for which there may be collectives; tensors on others are staged in host memory.
    device_types: frozenset[str] = frozenset()
    # Those of them ("cpu") whose memory is the host's, where our own kernels encode quicker than PyTorch's operations.
    host_types: frozenset[str] = frozenset()

    # What a bucket of gradients, but for the first one, should have at least; 0: what latency makes it.
    worthwhile_bytes = 0

    @property
    def carrier(self) -> str:
        """The name of the transport that carries messages, which layers may stand before."""
        return self.name

    def settle(self, carried: Sequence[int], unspoken: Sequence[int], agree: Callable[[], object]) -> None:
        """Give back what was needed to meet, and connections to the ranks ``carried``, who are reached otherwise.

        To those ``unspoken`` nothing is said any more but where a rank is lost; buffers go to them as before.
        ``agree`` returns when all ranks have called it: then nothing is under way to those.
        """
        agree()

    def start(self, exchange: Exchange, start_seconds: float, silence_seconds: float) -> Transport:
        """Start, now that all ranks are connected, what else carries buffers; the transport to use from here on.

        Collective. ``start_seconds``: how long that may take; ``silence_seconds``: how long a rank may be silent later.
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
        """Send a small message of any length; the payload is copied.

        Nothing is raised for a peer that cannot be reached: it is one of ``lost_peers()`` once all that it said has
        come in.
        """

    def advance(self) -> bool:
        """Move what does not move by itself; called in every round of the engine. True if anything moved."""
        return False

    @abstractmethod
    def poll_control(self) -> list[tuple[int, bytes]]:
        """The control messages that have come in since the last call, as (sender, payload)."""

    def lost_peers(self) -> dict[int, str]:
        """The peers whose connection is known to have broken, and how. Empty where the engine below cannot tell."""
        return {}

    def watch(self, transfers: Sequence[Transfer]) -> None:
        """Call the waker when all of these are done. A polling transport has nothing to do."""

    def set_waker(self, waker: Callable[[], None]) -> None:
        """Register what an event-driven transport calls when a transfer or a control message has come in."""

    def collectives_for(self, device: str, members: Sequence[int], label: str) -> DeviceCollectives | None:
        """New collectives of ``members`` (ascending) on this rank's ``device`` ("cuda:0"). Blocks.

        All members call this with the same ``label``, used once; all get None where their tensors must be staged in
        host memory. Raises PeerLostError where not all come.
        """
        return None

    @abstractmethod
    def close(self, graceful: bool) -> None:
        """Give everything back. ``graceful`` says that all ranks close now, so collective clean-up cannot block."""

    @abstractmethod
    def abort(self, code: int) -> None:
        """End the whole job now with this exit code, as far as the engine below can; return where it cannot."""


class Layer(Transport):
    """Stands before the transport ``inner``, and leaves to it what it does not do itself."""

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.name, self.rank, self.size, self.polling = inner.name, inner.rank, inner.size, inner.polling
        self.nodes, self.beats, self.worthwhile_bytes = inner.nodes, inner.beats, inner.worthwhile_bytes
        self.device_types, self.host_types = inner.device_types, inner.host_types

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
