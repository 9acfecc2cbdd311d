"""A stricter network in memory: a send is done only when it was received, and the ranks go on in a random order.

It shows a buffer that is written or received into while it is being sent, a dead-lock of ranks that send before they
receive, and a result that depends on who was fast.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable, Generator
from typing import Any

import numpy as np

from hvdkit.collectives.group import Group
from hvdkit.transports.base import Bytes, Transfer
from tests.collectives.loopback import LoopbackTransfer, LoopbackTransport


class RendezvousTransport(LoopbackTransport):
    """The bytes stay with the sender until the receiver takes them."""

    def __init__(self, rank: int, size: int, wires: dict[tuple[int, int, int], deque[Bytes]]) -> None:
        super().__init__(rank, size, wires)
        self.tags: set[int] = set()
        self._unfinished: list[Bytes] = []  # what is sent until the algorithm has seen that it is done

    def isend(self, buffer: Bytes, peer: int, tag: int) -> Transfer:
        self.tags.add(tag)
        message = buffer[:]  # the same memory, under an identity of its own
        wire = self._wires[self.rank, peer, tag]
        wire.append(message)
        self._unfinished.append(message)

        def done() -> bool:
            if any(waiting is message for waiting in wire):
                return False
            self._unfinished = [other for other in self._unfinished if other is not message]
            return True

        return LoopbackTransfer(peer, done)

    def irecv(self, buffer: Bytes, peer: int, tag: int) -> Transfer:
        assert not any(np.may_share_memory(buffer, message) for message in self._unfinished), "it is being sent"
        return super().irecv(buffer, peer, tag)


def run_in_random_order(
    size: int, steps_of: Callable[[Group], Generator[list[Transfer], None, Any]], seed: int
) -> list[set[int]]:
    """Run ``steps_of(group)`` for every rank to its end; returns the tags that each rank sent with."""
    generator = random.Random(seed)
    wires: dict[tuple[int, int, int], deque[Bytes]] = defaultdict(deque)
    transports = [RendezvousTransport(rank, size, wires) for rank in range(size)]
    running = [(steps_of(Group(transport, range(size))), []) for transport in transports]
    while running:
        moved = False
        generator.shuffle(running)
        for one in list(running):
            steps, pending = one
            waiting = [transfer for transfer in pending if not transfer.done()]
            moved = moved or len(waiting) < len(pending) or not pending
            pending[:] = waiting
            if not pending:
                try:
                    pending.extend(next(steps))
                except StopIteration:
                    running.remove(one)
        assert moved, "the algorithm waits for messages that nobody sends"
    assert not any(wires.values()), "a message was sent that nobody received"
    return [transport.tags for transport in transports]
