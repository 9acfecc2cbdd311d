"""torch.distributed carries the bytes: a Gloo process group of our own, a thread waiting for each batch.

``GlooTransport`` carries over one that is connected, ``TorchTransport`` lets the ranks of a job meet. There tensors on
CUDA may travel by NCCL, in process groups of our own too.
"""

from __future__ import annotations

import logging
import re
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from hvdkit.environments.base import World
from hvdkit.errors import PeerLostError, TransportUnavailableError
from hvdkit.transports.base import Bytes, DeviceCollectives, Transfer, Transport
from hvdkit.transports.gpu.device import DeviceTransfer
from hvdkit.transports.gpu.nccl import nccl_available, open_nccl
from hvdkit.transports.last_resort import LONGEST_ANSWER_SECONDS, STOPPED, ends_process_after
from hvdkit.transports.security.admission import SealedStore, greet, meet
from hvdkit.transports.security.credentials import Credentials
from hvdkit.transports.security.listening import addresses_for
from hvdkit.transports.security.rendezvous import open_store
from hvdkit.transports.waiters import Waiters

logger = logging.getLogger("hvdkit")

# Gloo breaks every connection when one of its own waits times out; deadlines are the engine's, per peer.
NEVER = timedelta(days=3650)
CONTROL_TAG = 1 << 26  # above every tag of a collective
FRAME_BYTES = 2048
# A frame of a control message: bytes of it in this frame, and whether it is the last one of its message.
FRAME_HEADER = struct.Struct("<HB")
FRAMES_KEPT = 256
LONGEST_MESSAGE = 1 << 28  # a plan has some hundred bytes for each parameter
FRAME_PAYLOAD = FRAME_BYTES - FRAME_HEADER.size


class TorchTransfer:
    """One send or receive of the process group. A waiter thread finishes it; see ``GlooTransport.watch``."""

    __slots__ = ("_buffer", "_error", "_finished", "peer", "work")

    def __init__(self, work: Any, buffer: Any, peer: int) -> None:
        self.work = work
        self.peer = peer
        self._buffer = buffer  # Gloo reads or writes it until the work is done
        self._finished = False
        self._error: Exception | None = None

    def wait(self) -> None:
        """Block until done, on a waiter thread. An error is kept for ``done()``."""
        try:
            self.work.wait(NEVER)
        except Exception as error:  # kept, and raised by done() where the engine names tensor and rank
            self._error = error
        self._finished = True

    def done(self) -> bool:
        if self._finished and self._error is not None:
            reason = str(self._error).splitlines()[0]
            raise PeerLostError(f"the connection to rank {self.peer} broke: {reason}", self.peer) from self._error
        return self._finished


class GlooTransport(Transport):
    """Carries between the ranks of ``group``, a ProcessGroupGloo on which nobody else sends."""

    name = "gloo"
    polling = False

    def __init__(self, rank: int, size: int, group: Any) -> None:
        self.rank, self.size, self._group = rank, size, group
        self._waker: Callable[[], None] = lambda: None
        self._waiters = Waiters("hvdkit-wait")
        self._inbox: deque[tuple[int, bytes]] = deque()
        self._frames_sent: deque[TorchTransfer] = deque()
        self._lost: dict[int, str] = {}
        self._closing = False
        self._is_left = False  # all ranks are reached otherwise
        self._device_collectives: list[DeviceCollectives] = []
        self._receivers = {
            peer: threading.Thread(
                target=self._receive_control, args=(peer,), name=f"hvdkit-control-{peer}", daemon=True
            )
            for peer in range(size)
            if peer != rank
        }
        for receiver in self._receivers.values():
            receiver.start()

    def isend(self, buffer: Bytes, peer: int, tag: int) -> TorchTransfer:
        return TorchTransfer(self._posted(self._group.send, buffer, peer, tag), buffer, peer)

    def irecv(self, buffer: Bytes, peer: int, tag: int) -> TorchTransfer:
        return TorchTransfer(self._posted(self._group.recv, buffer, peer, tag), buffer, peer)

    def _posted(self, call: Callable[..., Any], buffer: Bytes, peer: int, tag: int) -> Any:
        try:
            return call([torch.from_numpy(buffer)], peer, tag)
        except RuntimeError as error:
            raise PeerLostError(f"the connection to rank {peer} broke: {str(error).splitlines()[0]}", peer) from error

    def watch(self, transfers: Sequence[Transfer]) -> None:
        """Finish these transfers on one waiter thread, then wake the engine."""

        def wait_for_all() -> None:
            for transfer in transfers:
                assert isinstance(transfer, (TorchTransfer, DeviceTransfer))
                transfer.wait()
            self._waker()

        self._waiters.run(wait_for_all)

    def send_control(self, peer: int, payload: bytes) -> None:
        for start in range(0, max(len(payload), 1), FRAME_PAYLOAD):
            part = payload[start : start + FRAME_PAYLOAD]
            last = start + FRAME_PAYLOAD >= len(payload)
            frame = np.frombuffer(bytearray(FRAME_HEADER.pack(len(part), last) + part), dtype=np.uint8)
            try:
                transfer = self.isend(frame, peer, CONTROL_TAG)
            except PeerLostError as error:
                # Whoever receives from it says so, after a goodbye that may have come before.
                logger.debug("could not tell rank %d anything: %s", peer, error)
                return
            # A frame must live until it is sent, which takes no time unless the peer is stuck. Nobody waits for the
            # newest ones: a thread for each would cost more than the message.
            self._frames_sent.append(transfer)
            if len(self._frames_sent) > FRAMES_KEPT:
                self.watch([self._frames_sent.popleft() for _ in range(FRAMES_KEPT // 2)])

    def poll_control(self) -> list[tuple[int, bytes]]:
        arrived = []
        while self._inbox:
            arrived.append(self._inbox.popleft())
        return arrived

    def set_waker(self, waker: Callable[[], None]) -> None:
        self._waker = waker

    def lost_peers(self) -> dict[int, str]:
        return dict(self._lost)

    def _receive_control(self, peer: int) -> None:
        """Wait for a peer's frames, put messages together, wake the engine. Ends when the connection does."""
        frame = torch.empty(FRAME_BYTES, dtype=torch.uint8)
        raw = frame.numpy()
        message = bytearray()
        while True:
            try:
                self._group.recv([frame], peer, CONTROL_TAG).wait(NEVER)
            except RuntimeError as error:
                # A thread of its own for each peer, since this is also how a dead peer is noticed at once.
                if not self._closing and not self._is_left:
                    self._lost[peer] = str(error).splitlines()[0]
                    self._waker()
                return
            length, last = FRAME_HEADER.unpack_from(raw.data)
            message += raw[FRAME_HEADER.size : FRAME_HEADER.size + length].tobytes()
            if len(message) > LONGEST_MESSAGE:
                self._lost[peer] = f"it sent a control message of more than {LONGEST_MESSAGE} bytes"
                self._waker()
                return
            if last:
                self._inbox.append((peer, bytes(message)))
                message.clear()
                self._waker()

    def settle(self, carried: Sequence[int], agree: Callable[[], object]) -> None:
        self._is_left = len(carried) == self.size - 1  # before another rank breaks its connection to this one
        agree()
        if self._is_left:  # Gloo breaks either all of its connections or none
            self._break_connections()
            self._waiters.close(timeout_seconds=1.0)
            self._waiters = Waiters("hvdkit-wait")
            self._group = None

    def close(self, graceful: bool) -> None:
        """Break the connections, so that every thread of ours ends before the process does."""
        self._closing = True
        self._waker = lambda: None
        for collectives in self._device_collectives:
            collectives.close()  # ends what waiter threads may be waiting for
        self._device_collectives.clear()
        self._break_connections()
        self._waiters.close(timeout_seconds=1.0)
        self._frames_sent.clear()
        self._group = None  # gives Gloo's threads and sockets back

    def _break_connections(self) -> None:
        for peer, receiver in self._receivers.items():
            if receiver.is_alive():
                self._break_connection(peer)
            receiver.join(timeout=1.0)
        self._receivers.clear()

    def _break_connection(self, peer: int) -> None:
        """Gloo has no call for it, but it closes a connection on which a wait has timed out."""
        try:
            nothing = torch.empty(1, dtype=torch.uint8)
            self._group.recv([nothing], peer, CONTROL_TAG + 1).wait(timedelta(milliseconds=1))
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
        self._store, session = meet(store, world, credentials, start_timeout_seconds)
        self._session = session
        gloo: Any = dist.ProcessGroupGloo  # its point-to-point calls are missing from the stubs
        options = _gloo_options(world, start_timeout_seconds)
        late = f"rank {world.rank} could not connect to all ranks: the store or one of them is silent.\n{STOPPED}"
        try:
            with ends_process_after(start_timeout_seconds + LONGEST_ANSWER_SECONDS, late):
                group = gloo(self._sealed("gloo"), world.rank, world.size, options)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise TransportUnavailableError(
                f"rank {world.rank} could not connect to all ranks within {start_timeout_seconds:g} s: "
                f"{_silent(reason)}{reason}\n"
                "HINT: see whether a rank died, and whether hosts reach each other (GLOO_SOCKET_IFNAME, firewalls)."
            ) from error
        if session is not None:
            greet(group, world, session, CONTROL_TAG, start_timeout_seconds)
        super().__init__(world.rank, world.size, group)
        self._start_timeout_seconds = start_timeout_seconds
        self.device_types = frozenset({"cuda"}) if world.size > 1 and nccl_available() else frozenset()

    def _sealed(self, prefix: str) -> Any:
        """A part of the store in which nobody but the ranks can write what is believed, if there is a secret."""
        if self._session is None:
            return PrefixStore(prefix, self._store)
        return SealedStore(self._store, prefix, self._session)

    def collectives_for(self, device: str, members: Sequence[int], label: str) -> DeviceCollectives | None:
        if device.partition(":")[0] not in self.device_types:
            return None
        # The members are in the prefix since jobs of different ranks (init(comm=[...])) may share the store.
        store = self._sealed(f"device/{label}/{'-'.join(map(str, members))}")
        members = list(members)
        opened = self._open_device(store, members.index(self.rank), len(members), device, self._start_timeout_seconds)
        if opened is not None:
            self._device_collectives.append(opened)
        return opened

    # Replaced in tests, which have no GPU.
    _open_device: Callable[[Any, int, int, str, float], DeviceCollectives | None] = staticmethod(open_nccl)

    def settle(self, carried: Sequence[int], agree: Callable[[], object]) -> None:
        super().settle(carried, agree)
        if not self.device_types:  # else more is agreed on there
            self._store = None

    def close(self, graceful: bool) -> None:
        super().close(graceful)
        self._store = None


def _silent(reason: str) -> str:
    """Which rank Gloo waited for, if for one: the addresses of each are under a key that ends in its number."""
    key = re.search(r"wait timeout.* keys: \S*gloo\S*/(\d+)$", reason)
    return f"rank {key[1]} did not say where it listens; " if key else ""


def _gloo_options(world: World, start_timeout_seconds: float) -> Any:
    """Where Gloo listens, and how long it may take to connect; every wait afterwards is given a time of its own."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=start_timeout_seconds)
    # Left to itself, Gloo looks up the host's name, which may lead out of the machine or nowhere.
    options._devices = [gloo.create_device(hostname=address) for address in addresses_for(world)]
    options._threads = 2 * len(options._devices)
    return options
