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

A hash does not tell rounding from an unrelated model. Once rows have differed, every later statement also has a sketch
of each parameter (``sketch``), by which the ranks measure their distance from the first rank that takes part.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from hashlib import shake_128
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from hvdkit import kernels
from hvdkit.collectives.exchange import allgather
from hvdkit.collectives.group import Array, Group, Steps
from hvdkit.engine.ops.requests import Call, ReduceRequest
from hvdkit.kernels import ReduceOp

if TYPE_CHECKING:
    from hvdkit.engine.loop.named import NamedOperations

# What is wrong from the beginning, or soon, is found soon.
FIRST_STEPS = (1, 10, 100)
# A step touches a few rows of parameters whose gradients are sparse: to read them all is far more than the step reads.
SPARSE_AS_OFTEN = 100

# A row of 64-bit words for each rank: whether it takes part, updates at once, compares for the first time, has hashes,
# has sketches; how many hashes, their checksum.
PRESENT, UPDATES, FIRST, HASHED, SKETCHED, COUNT, CHECKSUM = range(7)
FIELDS = 7
# The machine's description goes with the hashes, cut off or filled up to so many words.
MACHINE_WORDS = 32
# Numbers of a sketch, and elements that are read for it at a time.
SKETCH, CHUNK = 64, 1 << 16
# Norms below this count as this, so that a subnormal number which one rank flushes to zero is no difference.
SMALLEST_NORM = 1e-30


def is_due(step: int, every: int) -> bool:
    """Whether the parameters are compared as the update of ``step`` (from 1) left them; ``every`` is HVDKIT_VERIFY."""
    return every > 0 and step > 0 and (step in FIRST_STEPS or step % every == 0)


def is_due_for_sparse(step: int, every: int) -> bool:
    """The same for parameters whose gradients are sparse."""
    return is_due(step, SPARSE_AS_OFTEN * every)


def sketch(elements: int, read: Callable[[int, int], Array]) -> Array:
    """Return SKETCH float64 numbers of a tensor; the distance of two sketches is that of the tensors.

    Each element is added, with a sign that follows from its offset, to the number of its offset modulo SKETCH (M.
    Charikar et al., "Finding frequent items in data streams", 2002). The Euclidean distance of tensors of more than
    SKETCH elements is met to about 9 %, of others exactly. Infinities and NaN count as very large
    numbers: rounding does not explain them on some ranks only.

    Args:
        elements: how many the tensor has.
        read: ``read(begin, end)`` returns these elements as a flat array of real numbers.
    """
    total = np.zeros(SKETCH)
    for number, begin in enumerate(range(0, elements, CHUNK)):
        end = min(begin + CHUNK, elements)
        bits = np.frombuffer(shake_128(b"%d" % number).digest(CHUNK // 8), dtype=np.uint8)
        values = np.nan_to_num(read(begin, end).astype(np.float64), nan=3e100, posinf=1e100, neginf=-1e100)
        signed = np.zeros(-(-len(values) // SKETCH) * SKETCH)
        signed[: len(values)] = np.where(np.unpackbits(bits, count=len(values)), values, -values)
        total += signed.reshape(-1, SKETCH).sum(axis=0)
    return total


@dataclass(frozen=True)
class Statement:
    """What a rank tells. ``hashes``: uint64, one for each parameter; None if this rank made no update in that step.

    ``machine``: what decides how this rank's kernels round. ``updates``: whether it goes on to the update of the
    present step with nothing of the user's in between. ``sketches``: float64 of shape (parameters, SKETCH), or None.
    ``is_first``: whether this rank has compared these parameters never before.
    """

    machine: str = ""
    hashes: Array | None = None
    updates: bool = False
    sketches: Array | None = None
    is_first: bool = False

    def row(self) -> Array:
        """What is told of it in any case."""
        row = np.zeros(FIELDS, dtype=np.uint64)
        row[PRESENT], row[UPDATES], row[FIRST] = 1, self.updates, self.is_first
        if self.hashes is not None:
            both = np.concatenate([self.hashes, _words(self.machine)])
            row[HASHED], row[COUNT], row[CHECKSUM] = 1, len(self.hashes), kernels.checksum(both.view(np.uint8))
            row[SKETCHED] = self.sketches is not None
        return row

    def details(self, reference: Array | None) -> Array:
        """Return what is told where the rows differ: hashes, distances from ``reference`` if there is one, machine."""
        if self.hashes is None:
            return _NOTHING
        distances = _NOTHING if reference is None else self._distances(reference).view(np.uint64)
        return np.concatenate([self.hashes, distances, _words(self.machine)])

    def _distances(self, reference: Array) -> Array:
        """Return for each parameter the distance of its sketch from the reference's, relative to the latter's norm."""
        if self.sketches is None or self.sketches.shape != reference.shape:
            return np.full(0 if self.hashes is None else len(self.hashes), np.inf)
        norms: Array = np.linalg.norm(reference, axis=1)
        distances: Array = np.linalg.norm(self.sketches - reference, axis=1) / np.maximum(norms, SMALLEST_NORM)
        return distances


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
    def is_compared(self) -> bool:
        """True if all ranks that take part, more than one, told hashes.

        Where some ranks made an update and others none, nothing is compared: those may be about to.
        """
        return len(self.present) > 1 and bool(self.rows[self.present, HASHED].all())

    @property
    def differs(self) -> bool:
        """Whether there is something to compare, and it is not the same."""
        return self.is_compared and bool((self.rows[self.present, COUNT:] != self.rows[self.present[0], COUNT:]).any())

    @property
    def is_first(self) -> bool:
        """True if some rank that takes part compares these parameters for the first time."""
        return bool(self.rows[self.present, FIRST].any())

    @property
    def is_measured(self) -> bool:
        """True if all ranks that take part told sketches, so that distances are known where ``differs``."""
        return bool(self.rows[self.present, SKETCHED].all())

    def length(self, index: int) -> int:
        """Return how many words of details a rank tells."""
        row = self.rows[index]
        return int(row[COUNT]) * (1 + self.is_measured) + MACHINE_WORDS if row[HASHED] else 0

    def hashes(self, index: int) -> Array:
        """The hashes of a rank's parameters, where ``differs``."""
        return self.details[index][: int(self.rows[index, COUNT])]

    def distances(self, index: int) -> Array | None:
        """Return how far a rank's parameters are from the first present rank's, relative to the latter's norms.

        None where that was not measured.
        """
        count = int(self.rows[index, COUNT])
        return self.details[index][count : 2 * count].view(np.float64) if self.is_measured else None

    def machine(self, index: int) -> str:
        """What a rank runs on, where ``differs``."""
        return self.details[index][-MACHINE_WORDS:].tobytes().rstrip(b"\0").decode(errors="replace")


_NOTHING: Array = np.zeros(0, dtype=np.uint64)


def _words(text: str) -> Array:
    nbytes = 8 * MACHINE_WORDS
    return np.frombuffer(text.encode()[:nbytes].ljust(nbytes, b"\0"), dtype=np.uint64)


# This rank's words and how many each rank sends; answered by the words of all.
Conversation: TypeAlias = Generator[tuple[Array, list[int]], list[Array], Heard]


def converse(rank: int, size: int, mine: Statement | None) -> Conversation:
    """Tell and hear, in up to three exchanges, of which each follows from what all ranks heard in those before."""
    rows = yield np.zeros(FIELDS, dtype=np.uint64) if mine is None else mine.row(), [FIELDS] * size
    heard = Heard(np.stack(rows))
    if not heard.differs:
        return heard
    reference = None
    if heard.is_measured:
        first = heard.present[0]
        lengths = [int(heard.rows[first, COUNT]) * SKETCH if other == first else 0 for other in range(size)]
        own = _NOTHING
        if rank == first:
            assert mine is not None
            assert mine.sketches is not None
            own = mine.sketches.reshape(-1).view(np.uint64)
        words = yield own, lengths
        reference = words[first].view(np.float64).reshape(-1, SKETCH)
    lengths = [heard.length(other) for other in range(size)]
    details = yield _NOTHING if mine is None else mine.details(reference), lengths
    return Heard(heard.rows, details)


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
        """Tell and hear. Uses ``tag`` and the two after it."""
        mine, self._mine = None if joined else self._mine, None
        group = self._group
        conversation = converse(group.rank, group.size, mine)
        try:
            own, lengths = next(conversation)
            while True:
                words = [np.zeros(length, dtype=np.uint64) for length in lengths]
                yield from allgather(group, own, words, tag)
                tag += 1
                own, lengths = conversation.send(words)
        except StopIteration as end:
            self._heard = None if mine is None else end.value


def exchange_by_name(named: NamedOperations, name: str, process_set_id: int, mine: Statement) -> Heard:
    """The same by named operations, where all ranks are at the same line. Blocks.

    A sum in which each rank has a place of its own, since one that has joined can take part in nothing else.
    """
    group = named.groups.group(process_set_id)
    conversation = converse(group.rank, group.size, mine)
    own, lengths = next(conversation)
    number = 0
    while True:
        ends = np.cumsum([0, *lengths])
        words = np.zeros(ends[-1], dtype=np.int64)
        words[ends[group.rank] : ends[group.rank + 1]] = own.view(np.int64)
        call = Call(f"{name}.parameters.{number}", process_set_id, wake=False)
        named.allreduce([words], ReduceRequest(ReduceOp.SUM), call).wait()
        try:
            own, lengths = conversation.send(np.split(words.view(np.uint64), ends[1:-1]))
        except StopIteration as end:
            heard: Heard = end.value
            return heard
        number += 1
