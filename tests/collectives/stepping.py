"""Many ranks' algorithms in one process, resumed in turn: bits and traffic on up to 16 ranks, and what order shows.

``reduce_in_random_order`` has a stricter network: a send is done only when it was received. It shows a buffer that is
written or received into while it is being sent, a dead-lock of ranks that send before they receive, and a result that
depends on who was fast.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from typing import Any

import numpy as np

from hvdkit.collectives.group import Group
from hvdkit.kernels import DTYPES
from hvdkit.transports.base import Bytes, Transfer
from tests.network import MemoryTransport, Wires

Steps = Generator[list[Transfer], None, Any]
StepsOf = Callable[[Group], Steps]
BufferStepsOf = Callable[[Group, Any], Steps]


def random_inputs(size: int, elements: int, dtype: str = "float32") -> list[np.ndarray]:
    """Draw each rank's array."""
    generator = np.random.default_rng(size * 1000 + elements)
    if dtype == "bool":
        return [generator.random(elements) < 1 / size for _ in range(size)]
    if dtype.startswith("int"):
        limits = np.iinfo(dtype)
        return [generator.integers(limits.min, limits.max, elements, dtype) for _ in range(size)]
    return [generator.standard_normal(elements).astype(DTYPES[dtype]) for _ in range(size)]


def run_everywhere(size: int, steps_of: StepsOf) -> list[Any]:
    """Run ``steps_of(group)`` for every rank to its end; returns (result, bytes sent) of each rank."""
    wires = Wires(size)
    groups = [Group(MemoryTransport(rank, size, wires), range(size)) for rank in range(size)]
    results = run(groups, steps_of)
    return [(result, group.bytes_sent) for result, group in zip(results, groups, strict=True)]


def reduce_everywhere(inputs: list[np.ndarray], steps_of: BufferStepsOf) -> tuple[np.ndarray, list[int]]:
    """Run ``steps_of(group, buffer)`` on copies of the ranks' inputs, which must end with the same bits.

    Returns these, and the bytes that each rank sent.
    """
    buffers = [one.copy() for one in inputs]
    outcomes = run_everywhere(len(inputs), lambda group: steps_of(group, buffers[group.rank]))
    return the_same_bits(buffers), [sent for _, sent in outcomes]


def reduce_in_random_order(
    inputs: list[np.ndarray], steps_of: BufferStepsOf, seed: int
) -> tuple[np.ndarray, list[set[int]]]:
    """Do the same in a random order. Returns the bits, and the tags that each rank sent with."""
    size = len(inputs)
    buffers, wires = [one.copy() for one in inputs], Wires(size)
    transports = [RendezvousTransport(rank, size, wires) for rank in range(size)]
    groups = [Group(transport, range(size)) for transport in transports]
    run(groups, lambda group: steps_of(group, buffers[group.rank]), random.Random(seed).shuffle)
    assert not any(wires.messages.values()), "a message was sent that nobody received"
    return the_same_bits(buffers), [transport.tags for transport in transports]


def the_same_bits(buffers: list[np.ndarray]) -> np.ndarray:
    """Check that all ranks' buffers have the same bits; returns the first of them."""
    for buffer in buffers:
        assert buffer.tobytes() == buffers[0].tobytes()
    return buffers[0]


def run(
    groups: list[Group],
    steps_of: StepsOf,
    arrange: Callable[[list[Any]], None] = lambda running: None,
    idle_rounds: int = 0,
) -> list[Any]:
    """Return the ranks' results, of rounds in which each goes on that can, in the order that ``arrange`` makes of them.

    ``idle_rounds``: in how many rounds one after the other no transfer may end, as where it goes on chunk by chunk.
    """
    running: list[tuple[int, Any, list[Transfer]]] = [(rank, steps_of(group), []) for rank, group in enumerate(groups)]
    results: list[Any] = [None] * len(groups)
    idle = 0
    while running:
        idle += 1
        arrange(running)
        for item in list(running):
            rank, steps, pending = item
            waiting = [transfer for transfer in pending if not transfer.done()]
            if len(waiting) < len(pending) or not pending:
                idle = 0
            pending[:] = waiting
            if not pending:
                try:
                    pending.extend(next(steps))
                except StopIteration as stop:
                    results[rank] = stop.value
                    running.remove(item)
        assert idle <= idle_rounds, "the algorithm waits for messages that nobody sends"
    return results


class RendezvousTransport(MemoryTransport):
    """The bytes stay with the sender until the receiver takes them."""

    def __init__(self, rank: int, size: int, wires: Wires) -> None:
        super().__init__(rank, size, wires)
        self.tags: set[int] = set()
        self._unfinished: list[Bytes] = []  # what is sent until the algorithm has seen that it is done

    def isend(self, buffer: Bytes, peer: int, tag: int) -> Transfer:
        self.tags.add(tag)
        message = buffer[:]  # the same memory, under an identity of its own
        self.wires.messages[self.rank, peer, tag].append(message)
        self._unfinished.append(message)
        return _Offered(self, message, peer, tag)

    def irecv(self, buffer: Bytes, peer: int, tag: int) -> Transfer:
        assert not any(np.may_share_memory(buffer, message) for message in self._unfinished), "it is being sent"
        return super().irecv(buffer, peer, tag)

    def finished(self, message: Bytes, peer: int, tag: int) -> bool:
        """Whether its receiver has taken it."""
        if any(waiting is message for waiting in self.wires.messages[self.rank, peer, tag]):
            return False
        self._unfinished = [other for other in self._unfinished if other is not message]
        return True


class _Offered:
    def __init__(self, transport: RendezvousTransport, message: Bytes, peer: int, tag: int) -> None:
        self.peer = peer
        self.done: Callable[[], bool] = lambda: transport.finished(message, peer, tag)
