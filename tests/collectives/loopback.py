"""A network in memory: many ranks' algorithms in one process, to check bits and traffic on up to 16 ranks."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Generator
from typing import Any

from hvdkit.collectives.group import Group
from hvdkit.transports.base import Bytes, Transfer, Transport


class LoopbackTransfer:
    """Done at once for a send (the bytes are copied), when matched for a receive."""

    def __init__(self, peer: int, arrived: Callable[[], bool]) -> None:
        self.peer = peer
        self.done = arrived


class LoopbackTransport(Transport):
    """One rank's end. Messages match by (sender, receiver, tag) in order, as the contract demands."""

    name = "loopback"
    polling = True

    def __init__(self, rank: int, size: int, wires: dict[tuple[int, int, int], deque[Bytes]]) -> None:
        self.rank, self.size, self._wires = rank, size, wires
        self._receives: dict[tuple[int, int], deque[tuple[Bytes, list[bool]]]] = defaultdict(deque)

    def isend(self, buffer: Bytes, peer: int, tag: int) -> Transfer:
        self._wires[self.rank, peer, tag].append(buffer.copy())
        return LoopbackTransfer(peer, lambda: True)

    def irecv(self, buffer: Bytes, peer: int, tag: int) -> Transfer:
        arrived = [False]
        self._receives[peer, tag].append((buffer, arrived))

        def done() -> bool:
            wire, receives = self._wires[peer, self.rank, tag], self._receives[peer, tag]
            while wire and receives:
                target, flag = receives.popleft()
                message = wire.popleft()
                assert message.nbytes == target.nbytes
                target[...] = message
                flag[0] = True
            return arrived[0]

        return LoopbackTransfer(peer, done)

    def send_control(self, peer: int, payload: bytes) -> None:
        raise AssertionError("collectives send no control messages")

    def poll_control(self) -> list[tuple[int, bytes]]:
        return []

    def close(self, graceful: bool) -> None:
        pass

    def abort(self, code: int) -> None:
        pass


def run_everywhere(size: int, steps_of: Callable[[Group], Generator[list[Transfer], None, Any]]) -> list[Any]:
    """Run ``steps_of(group)`` for every rank to its end; returns (result, bytes sent) of each rank."""
    wires: dict[tuple[int, int, int], deque[Bytes]] = defaultdict(deque)
    groups = [Group(LoopbackTransport(rank, size, wires), range(size)) for rank in range(size)]
    running = {rank: (steps_of(group), []) for rank, group in enumerate(groups)}
    results: list[Any] = [None] * size
    while running:
        before = len(running)
        moved = False
        for rank, (steps, pending) in list(running.items()):
            pending[:] = [transfer for transfer in pending if not transfer.done()]
            if pending:
                continue
            moved = True
            try:
                pending.extend(next(steps))
            except StopIteration as stop:
                results[rank] = (stop.value, groups[rank].bytes_sent)
                del running[rank]
        assert moved or len(running) < before, "the algorithm waits for messages that nobody sends"
    return results
