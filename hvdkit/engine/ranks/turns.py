"""Small allreduces by name that the ranks of a node call in the same order: reduced below Python, without coordinator.

Each such call is a turn (``transports/csrc/turns``), at which all ranks publish their arrays. Where not all ranks call
the same within moments, or one submits in another way, the turn ends for all without a result, and the call goes
through the coordinator, which knows what to do about ranks that are late, lost, or call something else. Ranks that have
come to different turns go on from the latest of them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from enum import IntEnum
from hashlib import blake2b
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hvdkit.collectives.group import Array, Group, two_phase_bytes
from hvdkit.kernels import DTYPES, NAMES, ReduceOp, Scale

if TYPE_CHECKING:
    from hvdkit.engine.ops.batch import DeviceArray
    from hvdkit.engine.ops.requests import Call, ReduceRequest

PATIENCE_SECONDS = 200e-6  # of ranks for each other; if one comes later, the coordinator would not have been slower
# After a turn in vain, the ranks that went through the coordinator need longer to come to the next one.
NEXT_PATIENCE_SECONDS = 2e-3
# After so many turns in a row at which this rank waited in vain, it waits at every so many turns only.
VAIN_TURNS, SKIPPED_TURNS = 4, 32
MOST_CALLS = 4096  # calls whose words are remembered
LATEST_TURN = 1 << 47  # turns have 48 bits in the memory of the ranks
BUSY, OPEN, COMPLETE, WITHDRAWN, DIFFERENT = range(5)  # the states of a turn, in transports/csrc/turns.h


class Reading(IntEnum):
    """The data that a rank reads of the parts of all ranks, by the numbers of transports/csrc/turns_module.cpp."""

    NOTHING = 0
    REDUCE = 1
    GATHER = 2
    COPY = 3


def most_bytes(ranks: int) -> int:
    """Return the size of the largest part that a rank publishes. Each rank reads the parts of all ranks."""
    return max(4 * 1024, 128 * 1024 // ranks)


class TurnCall(NamedTuple):
    """The facts about a small allreduce that its ranks compare, without its number, and its reduction."""

    digest: int  # of name, dtype, shape and operation
    factor: int  # of the result, as bits
    op: ReduceOp
    scale: Scale


def effective(op: ReduceOp, postscale: float, size: int) -> tuple[ReduceOp, Scale]:
    """Return the operation and the scale of its result: AVERAGE is SUM, divided."""
    return (ReduceOp.SUM, Scale(postscale, size)) if op == ReduceOp.AVERAGE else (op, Scale(postscale))


class SmallReductions:
    """The small allreduces of a process set whose ranks share memory. ``turns``: the native Turns in it."""

    def __init__(self, group: Group, turns: Any, give_back: Callable[[], None]) -> None:
        self._group, self._turns = group, turns
        self._give_back = give_back  # frees the memory of the turns
        self._lock = Lock()
        self._turn_calls: dict[Any, TurnCall | None] = {}
        self._in_vain, self._has_left = 0, False
        self.turn = 0  # the last one of this rank
        self.reduced = 0  # how many calls went this way
        self.under_way: set[str | None] = set()  # the names of the calls that this rank runs now

    def turn_call(self, array: Array | DeviceArray, request: ReduceRequest, call: Call) -> TurnCall | None:
        """Return the facts about a call that its ranks compare; None, on all of them, if the call has no turn."""
        op, encodes = request.op, request.codec.encodes
        content = call.name, array.dtype, array.shape, op, request.prescale, request.postscale, encodes, call.device
        if content in self._turn_calls:
            return self._turn_calls[content]
        if len(self._turn_calls) >= MOST_CALLS:
            self._turn_calls.clear()
        turn_call = None
        if (
            isinstance(array, np.ndarray)
            and array.nbytes <= self._turns.most_bytes()
            and (request.prescale, call.device, encodes) == (1.0, "cpu", False)
            and op != ReduceOp.ADASUM
            and NAMES[array.dtype] in DTYPES
        ):
            text = repr((call.name, NAMES[array.dtype], array.shape, int(op))).encode()
            (digest,) = struct.unpack("<Q", blake2b(text, digest_size=8).digest())
            (factor,) = struct.unpack("<Q", struct.pack("<d", request.postscale))
            action = effective(op, request.postscale, self._group.size)
            turn_call = TurnCall(digest, factor, *action)
        self._turn_calls[content] = turn_call
        return turn_call

    def reduce(
        self, array: Array, source: Array | None, turn_call: TurnCall, call: Call, negotiates: bool
    ) -> int | None:
        """Reduce an array. Returns its turn if the call must be submitted, as always where the caller ``negotiates``.

        Returns None if the array is reduced.
        """
        name, number = call.name, call.number
        words = turn_call.digest, turn_call.factor, 0 if number is None else number + 1, 0, 0, 0
        with self._lock:
            self.turn = turn = self.turn + 1
            if self._has_left:
                return turn
            skips = self._in_vain >= VAIN_TURNS and turn % SKIPPED_TURNS
            if negotiates or skips or turn > LATEST_TURN:
                self._turns.withdraw(turn)
                return turn
            flat = array.reshape(-1)
            reading = flat, Reading.REDUCE, 0, 0, turn_call.op, turn_call.scale
            self.under_way.add(name)
            try:
                patience = NEXT_PATIENCE_SECONDS if self._in_vain == 1 else PATIENCE_SECONDS
                state = self._turns.run(turn, words, flat if source is None else source.reshape(-1), *reading, patience)
                if state not in (COMPLETE, DIFFERENT):
                    self._turns.withdraw(turn)
                    state = self._turns.wait(turn, PATIENCE_SECONDS)  # the last rank may have come at this moment
                    if state == COMPLETE:
                        self._turns.read(turn, *reading)
                if state == DIFFERENT:
                    self._turns.finish(turn)
            finally:
                self.under_way.discard(name)
            if state != COMPLETE:
                self._in_vain += 1
                return turn
            self._in_vain = 0
            self.reduced += 1
            self._group.bytes_sent += two_phase_bytes(array.nbytes, self._group.size)
            return None

    def catch_up(self, turn: int) -> None:
        """Go on after the latest turn of any rank, at a call that ran through the coordinator."""
        with self._lock:
            self.turn = max(self.turn, turn)

    def leave(self) -> None:
        """End the turns of a removed process set. The last of its ranks frees their memory."""
        with self._lock:
            self._has_left = True
            if self._turns.leave():
                self._give_back()
