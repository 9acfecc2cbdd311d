"""Whether all ranks hold the same parameters: in which steps they ask each other, and what they tell.

In a lane it is one more operation at the end of a step, so that it needs no negotiation, cannot overtake or be
overtaken, and goes on with ranks that have joined, or gave the step up, which tell nothing.

After some steps (``HVDKIT_VERIFY``) all ranks compare hashes of what they train (``engine/telemetry/verifying``: when,
and what is told; ``api/gradients/verification``: what is said of it, by a pure function). It is one more operation at
the end of a lane's step, told by a schedule of the lane's steps alone: ranks that have joined or gave the step up count
along and tell nothing, a lane that fails ends it, and nothing can be overtaken or waited for in vain. In a step of the
schedule each rank tells whether its update follows at once, as in ``optimizer.step()``; if all say so they compare
after it by a named operation. Otherwise what the update left is hashed then, and told at the end of the next step; a
rank that made no update tells nothing, and then nothing is compared. TensorFlow has no hook after an update: variables
are read in a branch of the graph when the next step begins, before anything can write them. Adasum's updates are
combined by name, so they are compared by name too, counted from the last join. The hash is ``kernels.checksum`` in host
memory; on a device a weighted sum of integers in torch's operations, of which only the result is copied. Rows hold a
checksum of all hashes; the hashes themselves, and what a rank computes on, travel only where these differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hvdkit import kernels
from hvdkit.collectives.exchange import allgather
from hvdkit.collectives.group import Array, Group, Steps
from hvdkit.engine.ops.named import NamedOperations
from hvdkit.engine.ops.requests import Call, ReduceRequest
from hvdkit.kernels import ReduceOp

# What is wrong from the beginning, or soon, is found soon.
FIRST_STEPS = (1, 10, 100)
# A step touches a few rows of parameters whose gradients are sparse: to read them all is far more than the step reads.
SPARSE_AS_OFTEN = 100

# A row of 64-bit words for each rank: whether it takes part, updates at once, has hashes; how many, their checksum.
PRESENT, UPDATES, HASHED, COUNT, CHECKSUM = range(5)
FIELDS = 5
# The machine's description goes with the hashes, cut off or filled up to so many words.
MACHINE_WORDS = 32


def is_due(step: int, every: int) -> bool:
    """Whether the parameters are compared as the update of ``step`` (from 1) left them; ``every`` is HVDKIT_VERIFY."""
    return every > 0 and step > 0 and (step in FIRST_STEPS or step % every == 0)


def is_due_for_sparse(step: int, every: int) -> bool:
    """The same for parameters whose gradients are sparse."""
    return is_due(step, SPARSE_AS_OFTEN * every)


@dataclass(frozen=True)
class Statement:
    """What a rank tells. ``hashes``: uint64, one for each parameter; None if this rank made no update in that step.

    ``machine``: what decides how this rank's kernels round. ``updates``: whether it goes on to the update of the
    present step with nothing of the user's in between.
    """

    machine: str = ""
    hashes: Array | None = None
    updates: bool = False

    def row(self) -> Array:
        """What is told of it in any case."""
        row = np.zeros(FIELDS, dtype=np.uint64)
        row[PRESENT], row[UPDATES] = 1, self.updates
        if self.hashes is not None:
            both = np.concatenate([self.hashes, _words(self.machine)])
            row[HASHED], row[COUNT], row[CHECKSUM] = 1, len(self.hashes), kernels.checksum(both.view(np.uint8))
        return row

    def details(self) -> Array:
        """What is told where the rows differ."""
        if self.hashes is None:
            return np.zeros(0, dtype=np.uint64)
        return np.concatenate([self.hashes, _words(self.machine)])


@dataclass(frozen=True)
class Heard:
    """What all ranks told, by their places in the group: their rows, and the details where the rows differ."""

    rows: Array
    details: Sequence[Array] = ()

    @property
    def all_update(self) -> bool:
        """Whether every rank, none of which has joined, goes on to its update at once."""
        return bool(self.rows[:, PRESENT].all() and self.rows[:, UPDATES].all())

    @property
    def present(self) -> list[int]:
        """The ranks that take part."""
        return [index for index, row in enumerate(self.rows) if row[PRESENT]]

    @property
    def differs(self) -> bool:
        """Whether there is something to compare, and it is not the same.

        Where some ranks made an update and others none, nothing is said: those may be about to.
        """
        present = self.rows[self.rows[:, PRESENT] == 1]
        comparable = len(present) > 1 and bool(present[:, HASHED].all())
        return comparable and bool((present[:, COUNT:] != present[0, COUNT:]).any())

    def hashes(self, index: int) -> Array:
        """The hashes of a rank's parameters, where ``differs``."""
        return self.details[index][: int(self.rows[index, COUNT])]

    def machine(self, index: int) -> str:
        """What a rank runs on, where ``differs``."""
        words = self.details[index][int(self.rows[index, COUNT]) :][:MACHINE_WORDS]
        return words.tobytes().rstrip(b"\0").decode(errors="replace")


def _words(text: str) -> Array:
    nbytes = 8 * MACHINE_WORDS
    return np.frombuffer(text.encode()[:nbytes].ljust(nbytes, b"\0"), dtype=np.uint64)


def _length(row: Array) -> int:
    return int(row[COUNT]) + MACHINE_WORDS if row[HASHED] else 0


class LaneVerification:
    """What the ranks of a lane tell each other at the end of its steps; ``ask`` gives this rank's statement."""

    def __init__(self, group: Group, every: int) -> None:
        self.ask: Callable[[], Statement] | None = None
        self.every = every
        self._group = group
        self._mine: Statement | None = None
        self._heard: Heard | None = None

    def due(self, step: int) -> bool:
        """Whether something is told at the end of ``step`` (from 1), which is the same on all ranks.

        After a step of which the parameters are compared, and before its own update: then all ranks learn whether they
        can compare at once.
        """
        return self._group.size > 1 and (is_due(step - 1, self.every) or is_due(step, self.every))

    def prepare(self) -> None:
        """This rank uses the step that ends now."""
        self._mine = Statement() if self.ask is None else self.ask()

    def take(self) -> Heard | None:
        """What was told in the step that has just ended; None if it was none of those."""
        heard, self._heard = self._heard, None
        return heard

    def exchange(self, joined: bool, tag: int) -> Steps[None]:
        """Tell and hear. Uses ``tag`` and ``tag + 1``."""
        mine, self._mine = None if joined else self._mine, None
        group = self._group
        own = np.zeros(FIELDS, dtype=np.uint64) if mine is None else mine.row()
        rows = np.zeros((group.size, FIELDS), dtype=np.uint64)
        yield from allgather(group, own, list(rows), tag)
        heard = Heard(rows)
        if heard.differs:
            details = [np.zeros(_length(row), dtype=np.uint64) for row in rows]
            own = np.zeros(0, dtype=np.uint64) if mine is None else mine.details()
            yield from allgather(group, own, details, tag + 1)
            heard = Heard(rows, details)
        self._heard = None if mine is None else heard


def exchange_by_name(named: NamedOperations, name: str, process_set_id: int, mine: Statement) -> Heard:
    """The same by named operations, where all ranks are at the same line. Blocks.

    A sum in which each rank has a place of its own, since one that has joined can take part in nothing else.
    """
    group = named.groups.group(process_set_id)

    def gather(own: Array, length: int, what: str) -> Array:
        rows = np.zeros((group.size, length), dtype=np.int64)
        rows[group.rank, : len(own)] = own.view(np.int64)
        call = Call(f"{name}.{what}", process_set_id, wake=False)
        named.allreduce([rows], ReduceRequest(ReduceOp.SUM), call).wait()
        return rows.view(np.uint64)

    heard = Heard(gather(mine.row(), FIELDS, "parameters"))
    if not heard.differs:
        return heard
    lengths = [_length(row) for row in heard.rows]
    details = gather(mine.details(), max(lengths), "hashes")
    return Heard(heard.rows, [row[:length] for row, length in zip(details, lengths, strict=True)])
