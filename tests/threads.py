"""Ranks that are threads of this process: a job in milliseconds, for what no process of its own is needed to show."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from hvdkit.config import Settings
from hvdkit.engine.session import Session
from hvdkit.environments.base import World
from hvdkit.errors import HorovodInternalError
from hvdkit.transports.base import Bytes, Transfer, Transport

T = TypeVar("T")
Way = tuple[int, int, int]  # sender, receiver and tag

JOB_SECONDS = 150.0  # longer than the engine itself waits


class _Receive:
    """Done when its message has come."""

    def __init__(self, buffer: Bytes, peer: int) -> None:
        self.buffer, self.peer, self.arrived = buffer, peer, False

    def done(self) -> bool:
        return self.arrived


class _Sent:
    """A send whose bytes were copied."""

    def __init__(self, peer: int) -> None:
        self.peer = peer

    def done(self) -> bool:
        return True


class Dies(Exception):  # noqa: N818 (not an error)
    """Raised by what runs on a rank: it ends without a word, as a process that is killed."""


class Wires:
    """What connects the ranks of one job. ``cut`` is what others see of a rank that has ended."""

    def __init__(self, size: int) -> None:
        self.lock = threading.Lock()
        self.messages: dict[Way, deque[Bytes]] = defaultdict(deque)
        self.receives: dict[Way, deque[_Receive]] = defaultdict(deque)
        self.control: list[deque[tuple[int, bytes]]] = [deque() for _ in range(size)]
        self.wakers: list[Callable[[], None]] = [lambda: None] * size
        self.lost: dict[int, str] = {}

    def cut(self, rank: int) -> None:
        self.lost[rank] = "its thread has ended"
        for waker in self.wakers:
            waker()


class ThreadTransport(Transport):
    """One rank's end of the wires: event-driven, as sockets are."""

    name = "threads"
    polling = False
    beats = False

    def __init__(self, rank: int, size: int, wires: Wires) -> None:
        self.rank, self.size, self._wires = rank, size, wires

    def isend(self, buffer: Bytes, peer: int, tag: int) -> Transfer:
        way = self.rank, peer, tag
        if self.rank in self._wires.lost:
            return _Sent(peer)
        with self._wires.lock:
            if receives := self._wires.receives[way]:
                self._arrive(receives.popleft(), buffer)
            else:
                self._wires.messages[way].append(buffer.copy())
        self._wires.wakers[peer]()
        return _Sent(peer)

    def irecv(self, buffer: Bytes, peer: int, tag: int) -> Transfer:
        receive, way = _Receive(buffer, peer), (peer, self.rank, tag)
        with self._wires.lock:
            if messages := self._wires.messages[way]:
                self._arrive(receive, messages.popleft())
            else:
                self._wires.receives[way].append(receive)
        return receive

    @staticmethod
    def _arrive(receive: _Receive, message: Bytes) -> None:
        assert message.nbytes == receive.buffer.nbytes, "a message of another size than was expected"
        receive.buffer[...] = message
        receive.arrived = True

    def send_control(self, peer: int, payload: bytes) -> None:
        if self.rank in self._wires.lost:
            return
        self._wires.control[peer].append((self.rank, bytes(payload)))
        self._wires.wakers[peer]()

    def poll_control(self) -> list[tuple[int, bytes]]:
        inbox, arrived = self._wires.control[self.rank], []
        while inbox:
            arrived.append(inbox.popleft())
        return arrived

    def set_waker(self, waker: Callable[[], None]) -> None:
        self._wires.wakers[self.rank] = waker

    def lost_peers(self) -> dict[int, str]:
        return {rank: how for rank, how in self._wires.lost.copy().items() if rank != self.rank}

    def close(self, graceful: bool) -> None:
        self._wires.wakers[self.rank] = lambda: None
        self._wires.cut(self.rank)

    def abort(self, code: int) -> None:
        raise AssertionError("a thread ends no job")


def on_threads(
    size: int,
    run: Callable[[Session], T],
    process_sets: Sequence[list[int]] = (),
    transport: type[ThreadTransport] = ThreadTransport,
    **settings: Any,
) -> list[T | None]:
    """What ``run(session)`` returns on each of ``size`` ranks, each a thread with a session of its own.

    ``settings`` are fields of Settings. For one that ``Dies`` it is None. Raises what a rank raised, and AssertionError
    for one that does not end.
    """
    wires = Wires(size)
    asked = replace(Settings(), node_memory=False, verify=0, **settings)
    results: dict[int, T | None] = {}
    errors: dict[int, BaseException] = {}

    def rank_runs(rank: int) -> None:
        try:
            world = World("threads", rank, size, rank, size, 0, 1)
            session = Session(transport(rank, size, wires), world, asked, process_sets)
            try:
                results[rank] = run(session)
            except Dies:
                wires.cut(rank)
                results[rank] = None
            finally:
                lost = session.close()
            if lost is not None:
                raise lost
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=rank_runs, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOB_SECONDS)
    if errors:  # that of the engine's may follow from what failed on another rank
        raise min(errors.items(), key=lambda one: (isinstance(one[1], HorovodInternalError), one[0]))[1]
    hanging = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    assert not hanging, f"ranks {hanging} did not end in {JOB_SECONDS:g} s"
    return [results[rank] for rank in range(size)]
