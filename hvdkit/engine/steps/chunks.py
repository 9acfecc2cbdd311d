"""Gradients of a piece that the other ranks of the node cannot reach where they lie, in chunks of memory they share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hvdkit.collectives.group import Array, Steps, partition
from hvdkit.collectives.staging import Mode, Turn
from hvdkit.engine.steps.node_pass import NodePass
from hvdkit.engine.steps.offers import Part
from hvdkit.engine.steps.plan import Slot
from hvdkit.kernels import ReduceOp, Scale


class Order:
    """An order in which operations pass by their numbers; most operations leave at once."""

    def __init__(self) -> None:
        self.passed = 0  # all operations with lower numbers are through
        self._left: set[int] = set()

    def leave(self, number: int) -> None:
        """Note that this operation has passed, or need not pass."""
        if number == self.passed and not self._left:
            self.passed += 1
            return
        self._left.add(number)
        while self.passed in self._left:
            self._left.remove(self.passed)
            self.passed += 1


class Share(NamedTuple):
    """Between nodes: each rank's share of a piece, this rank's as a flat array, and where that begins in the piece."""

    of_ranks: Sequence[tuple[int, int]]
    flat: Array
    begin: int


class Chunks:
    """The chunks of one lane. An operation uses its two halves one after the other, or leaves them."""

    def __init__(self, node: NodePass, rank: int, slots: Sequence[Slot]) -> None:
        self._node, self._rank, self._slots = node, rank, slots
        self._orders = Order(), Order()  # one for each half of the memory for chunks

    def leave(self, number: int, *halves: int) -> None:
        """Note that an operation does not use these halves, or no longer."""
        for half in halves:
            self._orders[half].leave(number)

    def run(
        self,
        half: int,
        mode: Mode,
        number: int,
        parts: Sequence[Part],
        op: ReduceOp,
        scale: Scale,
        share: Share | None = None,
    ) -> Steps[None]:
        """Reduce parts of an operation in a half, in the order of operations, and leave it."""
        node, order = self._node, self._orders[half]
        if parts and order.passed != number:
            yield [Turn(order, number, self._rank)]
        for part in parts:
            array, source = part.array(), part.source()
            if array is None:
                array, source = np.zeros(part.elements, self._slots[part.slot].dtype), None
            if share is None:
                runs = partition(part.elements, len(node.members), array.itemsize)
            else:
                runs = [part.within(each) for each in share.of_ranks]
            own = slice(*runs[node.me])
            flat = None
            if share is not None and array[own].size:
                begin = part.begin - share.begin
                flat = share.flat[begin + own.start : begin + own.stop]
            if mode is Mode.ALLGATHER:
                source = None
                if flat is not None:
                    array[own] = flat
            ticket = node.staging.queues[half].draw()
            yield from node.staging.run(half, ticket, mode, array, runs, op, scale, source)
            if mode is Mode.REDUCE_SCATTER and flat is not None:
                flat[...] = array[own]
        order.leave(number)
