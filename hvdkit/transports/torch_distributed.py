"""torch.distributed carries the bytes: a Gloo process group of our own, a thread waiting for each batch.

Of Gloo's connections those are made over which buffers go. Each end tells the other that it wants one, since Gloo,
which makes it when both use it, would have the first one wait. ``GlooTransport`` carries between ranks that know each
other, ``TorchTransport`` lets the ranks of a job meet. There tensors on CUDA may travel by NCCL, in process groups of
our own too.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from hvdkit.environments.base import World
from hvdkit.errors import AuthenticationError, PeerLostError, TransportUnavailableError
from hvdkit.transports.base import Bytes, DeviceCollectives, Transfer, Transport
from hvdkit.transports.control import MESSAGE, PAIR, ControlConnections
from hvdkit.transports.gpu.device import DeviceTransfer
from hvdkit.transports.gpu.nccl import nccl_available, open_nccl
from hvdkit.transports.last_resort import LONGEST_ANSWER_SECONDS, STOPPED, ends_process_after
from hvdkit.transports.security.admission import Admission, admit, prove
from hvdkit.transports.security.credentials import Credentials
from hvdkit.transports.security.listening import addresses_for, listen
from hvdkit.transports.security.rendezvous import open_store, refused_ranks
from hvdkit.transports.security.sealed_store import STRANGERS, SealedStore, join_plain, serve_plain
from hvdkit.transports.waiters import Waiters

logger = logging.getLogger("hvdkit")

# Gloo breaks every connection when one of its own waits times out; deadlines are the engine's, per peer.
NEVER = timedelta(days=3650)
PROOF_TAG = 1 << 26  # above every tag of a collective
# Gloo waits so long for a rank that wants a connection too, but whose Python may be busy.
CONNECTING_SECONDS = 600.0


class TorchTransfer:
    """One send or receive of the process group. A waiter thread finishes it; see ``GlooTransport.watch``."""

    __slots__ = ("_begun", "_buffer", "_error", "_finished", "_work", "peer")

    def __init__(self, buffer: Bytes, peer: int) -> None:
        self.peer = peer
        self._buffer = buffer  # Gloo reads or writes it until the work is done
        self._work: Any = None
        self._begun: threading.Event | None = None
        self._finished = False
        self._error: Exception | None = None

    def begin(self, call: Callable[..., Any], tag: int) -> None:
        """Hand it to Gloo. An error is kept for ``done()``."""
        try:
            self._work = call([torch.from_numpy(self._buffer)], self.peer, tag)
        except RuntimeError as error:
            self._error = error
        if self._begun is not None:
            self._begun.set()

    def wait_for_connection(self) -> None:
        """It begins, or fails, later."""
        self._begun = threading.Event()

    def fail(self, error: Exception) -> None:
        """There will be no connection."""
        self._error = error
        if self._begun is not None:
            self._begun.set()

    def wait(self) -> None:
        """Block until done, on a waiter thread. An error is kept for ``done()``."""
        if self._begun is not None:
            self._begun.wait()
        if self._work is not None:
            try:
                self._work.wait(NEVER)
            except Exception as error:  # kept, and raised by done() where the engine names tensor and rank
                self._error = error
        self._finished = True

    def done(self) -> bool:
        if self._finished and self._error is not None:
            reason = str(self._error).splitlines()[0]
            raise PeerLostError(f"the connection to rank {self.peer} broke: {reason}", self.peer) from self._error
        return self._finished


class _Pair:
    """Gloo's connection to a peer: both ends want it, then it is open, or has failed."""

    __slots__ = ("error", "is_made", "is_open", "is_wanted", "peer_wants", "waiting")

    def __init__(self) -> None:
        # Made: who is there has not shown yet who he is.
        self.is_wanted = self.peer_wants = self.is_made = self.is_open = False
        self.error: Exception | None = None
        self.waiting: list[tuple[TorchTransfer, str, int]] = []


class GlooTransport(Transport):
    """Carries between the ranks of ``group``, a ProcessGroupGloo that connects late, on which nobody else sends.

    ``store`` is what it was made with. Others connect to ``listener`` to say something; ``admission`` has where they
    listen for that.
    """

    name = "gloo"
    polling = False

    def __init__(
        self, rank: int, size: int, group: Any, store: Any, listener: socket.socket, admission: Admission
    ) -> None:
        self.rank, self.size, self._group, self._session = rank, size, group, admission.session
        self._store = store  # kept, since the group asks it, which may be an object of Python, whenever it connects
        self._waker: Callable[[], None] = lambda: None
        self._waiters = Waiters("hvdkit-wait")
        self._inbox: deque[tuple[int, bytes]] = deque()
        self._lost: dict[int, str] = {}
        self._pairs = [_Pair() for _ in range(size)]
        self._pairs_lock = threading.Lock()
        self._device_collectives: list[DeviceCollectives] = []
        self._control = ControlConnections(
            rank, listener, admission.addresses, admission.session, self._heard, self._loses
        )
        if rank:
            self._control.send(0, MESSAGE, b"")  # that this rank dies before it has said anything is noticed too

    def isend(self, buffer: Bytes, peer: int, tag: int) -> TorchTransfer:
        return self._posted("send", buffer, peer, tag)

    def irecv(self, buffer: Bytes, peer: int, tag: int) -> TorchTransfer:
        return self._posted("recv", buffer, peer, tag)

    def _posted(self, call: str, buffer: Bytes, peer: int, tag: int) -> TorchTransfer:
        transfer, pair = TorchTransfer(buffer, peer), self._pairs[peer]
        if not pair.is_open:
            with self._pairs_lock:
                if pair.error is not None:
                    transfer.fail(pair.error)
                    return transfer
                if not pair.is_open:
                    transfer.wait_for_connection()
                    pair.waiting.append((transfer, call, tag))
                    asks, pair.is_wanted = not pair.is_wanted, True
                    if asks:
                        self._control.send(peer, PAIR, b"")
                        if pair.peer_wants:
                            self._waiters.run(partial(self._connect, peer))
                    return transfer
        transfer.begin(getattr(self._group, call), tag)
        return transfer

    def _connect(self, peer: int) -> None:
        """On a waiter thread, once both ends want it: have Gloo connect, and see who is there."""
        pair, group = self._pairs[peer], self._group
        error: Exception | None = None
        try:
            prove(group, self.rank, peer, self._session, PROOF_TAG, partial(setattr, pair, "is_made", True))
        except (RuntimeError, AuthenticationError) as problem:
            error = problem
        with self._pairs_lock:
            pair.error = pair.error or error
            for transfer, call, tag in pair.waiting:
                if pair.error is None:
                    transfer.begin(getattr(group, call), tag)
                else:
                    transfer.fail(pair.error)
            pair.waiting.clear()
            pair.is_open = pair.error is None

    def watch(self, transfers: Sequence[Transfer]) -> None:
        """Finish these transfers on one waiter thread, then wake the engine."""
        # What waits for several is done when these are, which are watched by themselves.
        transfers = [one for one in transfers if not hasattr(one, "awaited")]
        if not transfers:
            return

        def wait_for_all() -> None:
            for transfer in transfers:
                assert isinstance(transfer, (TorchTransfer, DeviceTransfer))
                transfer.wait()
            self._waker()

        self._waiters.run(wait_for_all)

    def send_control(self, peer: int, payload: bytes) -> None:
        self._control.send(peer, MESSAGE, payload)

    def poll_control(self) -> list[tuple[int, bytes]]:
        arrived = []
        while self._inbox:
            arrived.append(self._inbox.popleft())
        return arrived

    def set_waker(self, waker: Callable[[], None]) -> None:
        self._waker = waker

    def lost_peers(self) -> dict[int, str]:
        return dict(self._lost)

    def _heard(self, peer: int, kind: int, payload: bytes) -> None:
        if kind == PAIR:
            pair = self._pairs[peer]
            with self._pairs_lock:
                connects, pair.peer_wants = pair.is_wanted and not pair.peer_wants, True
                if connects and pair.error is None:
                    self._waiters.run(partial(self._connect, peer))
        elif payload:
            self._inbox.append((peer, payload))
            self._waker()

    def _loses(self, peer: int, how: str) -> None:
        self._lost[peer] = how
        self._waker()

    def settle(self, carried: Sequence[int], unspoken: Sequence[int], agree: Callable[[], object]) -> None:
        needless = {*carried, *unspoken}
        for peer in set(range(self.rank)) - needless:
            self._control.send(peer, MESSAGE, b"")  # who is spoken with is watched from now on
        self._control.let_go(needless)  # before another rank breaks its connection to this one
        agree()
        if len(carried) == self.size - 1:
            self._end()
            self._waiters = Waiters("hvdkit-wait")
        else:
            self._control.drop()

    def close(self, graceful: bool) -> None:
        """Break the connections, so that every thread of ours ends before the process does."""
        self._waker = lambda: None
        for collectives in self._device_collectives:
            collectives.close()  # ends what waiter threads may be waiting for
        self._device_collectives.clear()
        self._end()

    def _end(self) -> None:
        """Give back connections, threads and what Gloo has."""
        self._control.close()
        with self._pairs_lock:
            for pair in self._pairs:
                pair.error = pair.error or RuntimeError("this rank has ended it")
                for transfer, _, _ in pair.waiting:
                    transfer.fail(pair.error)
                pair.waiting.clear()
            used = [peer for peer, pair in enumerate(self._pairs) if pair.is_made]
        for peer in used:
            self._break_connection(peer)
        self._waiters.close(timeout_seconds=1.0)
        self._group = self._store = None

    def _break_connection(self, peer: int) -> None:
        """Gloo has no call for it, but it closes a connection on which a wait has timed out."""
        if self._group is None:
            return
        try:
            nothing = torch.empty(1, dtype=torch.uint8)
            self._group.recv([nothing], peer, PROOF_TAG + 1).wait(timedelta(milliseconds=1))
        except RuntimeError as error:
            logger.debug("closed the connection to rank %d: %s", peer, str(error).splitlines()[0])

    def abort(self, code: int) -> None:
        """Peers notice the broken connections when this process ends; there is no job-wide end to call for."""


class TorchTransport(GlooTransport):
    """Ranks that meet at a store. Construction is collective."""

    name = "torch"

    def __init__(self, world: World, generation: int, start_timeout_seconds: float) -> None:
        store, secret = open_store(world, generation, start_timeout_seconds)
        credentials = None if secret is None else Credentials(secret, world.job, generation)
        addresses = addresses_for(world)
        listener = listen(addresses[0])
        try:
            address = listener.getsockname()[:2]
            admission = admit(store, world, credentials, generation, address, start_timeout_seconds)
            gloo_store = SealedStore(admission.store, "gloo", admission.session)
            group = open_gloo(gloo_store, world.rank, world.size, addresses, start_timeout_seconds)
        except TransportUnavailableError as error:
            listener.close()
            if ranks := refused_ranks(world):
                raise AuthenticationError(
                    f"who says to be rank {ranks[0]} does not know the job's secret.\n{STRANGERS}"
                ) from error
            raise
        except BaseException:
            listener.close()
            raise
        super().__init__(world.rank, world.size, group, gloo_store, listener, admission)
        self._admission: Admission | None = admission
        self._address = addresses[0]
        self._plain_stores: list[Any] = []  # of device collectives
        self._start_timeout_seconds = start_timeout_seconds
        self.device_types = frozenset({"cuda"}) if world.size > 1 and nccl_available() else frozenset()

    def collectives_for(self, device: str, members: Sequence[int], label: str) -> DeviceCollectives | None:
        admission, members = self._admission, list(members)
        if admission is None or device.partition(":")[0] not in self.device_types:
            return None
        # The members are in the prefix since jobs of different ranks (init(comm=[...])) may share the store.
        prefix = f"device/{label}/{'-'.join(map(str, members))}"
        store = SealedStore(admission.store, prefix, admission.session)
        if members.index(self.rank) == 0:
            self._plain_stores.append(serve_plain(store, self._address))
        else:
            self._plain_stores.append(join_plain(store, self._start_timeout_seconds))
        opened = self._open_device(store, members.index(self.rank), len(members), device, self._start_timeout_seconds)
        if opened is not None:
            self._device_collectives.append(opened)
        return opened

    # Replaced in tests, which have no GPU.
    _open_device: Callable[[Any, int, int, str, float], DeviceCollectives | None] = staticmethod(open_nccl)

    def settle(self, carried: Sequence[int], unspoken: Sequence[int], agree: Callable[[], object]) -> None:
        super().settle(carried, unspoken, agree)
        if self._group is None and not self.device_types:  # else more is agreed on at the store
            self._admission = None

    def close(self, graceful: bool) -> None:
        super().close(graceful)
        self._meeting = None
        self._plain_stores.clear()


def open_gloo(store: Any, rank: int, size: int, addresses: Sequence[str], timeout_seconds: float) -> Any:
    """A ProcessGroupGloo that listens at the addresses, and connects two ranks when both use it.

    Raises TransportUnavailableError.
    """
    gloo: Any = dist.ProcessGroupGloo  # its point-to-point calls are missing from the stubs
    options = gloo._Options()
    options._timeout = timedelta(seconds=CONNECTING_SECONDS)
    # Left to itself, Gloo looks up the host's name, which may lead out of the machine or nowhere.
    options._devices = [gloo.create_device(hostname=address, lazy_init=True) for address in addresses]
    options._threads = 2 * len(options._devices)
    late = f"rank {rank} was not answered by the store where the ranks say where they listen.\n{STOPPED}"
    try:
        with ends_process_after(timeout_seconds + LONGEST_ANSWER_SECONDS, late):
            return gloo(store, rank, size, options)
    except RuntimeError as error:
        raise TransportUnavailableError(
            f"rank {rank} could not open Gloo: {str(error).splitlines()[0]}\n"
            "HINT: see what rank 0 printed, which may serve the store, and which addresses this host has "
            "(GLOO_SOCKET_IFNAME)."
        ) from error
