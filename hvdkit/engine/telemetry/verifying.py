"""Comparison of the parameters that all ranks train: in which steps, and by which messages.

The comparison is one more operation at the end of a lane's step, in steps that follow from the lane's count alone. So
it needs no negotiation, and ranks that have joined or gave the step up count along and send an empty row. In such a
step each rank also says whether its update follows at once, as in ``optimizer.step()``. If all ranks say so, they
compare after the update by a named operation; otherwise they send hashes of what the update left at the end of the next
step. A hash does not tell rounding from an unrelated model. So once hashes have differed, every later statement has a
sketch of each parameter, by which ranks measure their distance from the first rank.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
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

# Ranks that differ from the beginning, or soon, are noticed soon.
FIRST_STEPS = (1, 10, 100)
# A step touches a few rows of parameters with sparse gradients: reading all of them costs far more than the step.
SPARSE_AS_OFTEN = 100

FLAGS = ("present", "updates", "first", "hashed", "sketched")
ROW = np.dtype([(name, np.uint64) for name in (*FLAGS, "count", "checksum")] + [("machine", "S256")])
# Numbers of a sketch, and elements that are read for it at a time.
SKETCH, CHUNK = 64, 1 << 16
# Smaller norms count as this, so that a subnormal number which one rank flushes to zero is no difference.
SMALLEST_NORM = 1e-30


def is_due(step: int, every: int, sparse: bool = False) -> bool:
    """True if the parameters are compared as the update of ``step`` (from 1) left them; ``every`` is HVDKIT_VERIFY.

    ``sparse``: if those whose gradients are sparse are compared too.
    """
    every *= SPARSE_AS_OFTEN if sparse else 1
    return every > 0 and step > 0 and (step in FIRST_STEPS or step % every == 0)


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
    """The parameters of a rank after an update, as it describes them to the other ranks."""

    machine: str = ""  # what decides how this rank's kernels round
    hashes: Array | None = None  # uint64, one for each parameter; None if this rank made no update in that step
    updates: bool = False  # the update of the present step follows with no user code in between
    sketches: Array | None = None  # float64 of shape (parameters, SKETCH)
    is_first: bool = False  # this rank has never compared these parameters
    names: Sequence[str] = ()  # of the parameters, for messages of this rank
    precisions: Sequence[float] = ()  # the eps of each parameter's type, for the judgement of this rank

    def row(self) -> Array:
        """Return the ROW that travels in any case."""
        row = np.zeros(1, dtype=ROW)
        row["present"], row["updates"], row["first"] = 1, self.updates, self.is_first
        if self.hashes is not None:
            row["hashed"], row["count"], row["sketched"] = 1, len(self.hashes), self.sketches is not None
            row["checksum"], row["machine"] = kernels.checksum(self.hashes.view(np.uint8)), self.machine.encode()
        return row

    def distances(self, reference: Array) -> Array:
        """Return for each parameter the distance of its sketch from the reference's, relative to the latter's norm."""
        if self.sketches is None or self.sketches.shape != reference.shape:
            return np.full(0 if self.hashes is None else len(self.hashes), np.inf)
        norms: Array = np.linalg.norm(reference, axis=1)
        distances: Array = np.linalg.norm(self.sketches - reference, axis=1) / np.maximum(norms, SMALLEST_NORM)
        return distances


@dataclass(frozen=True)
class Comparison:
    """The statements of all ranks about one step, as every rank received them."""

    present: list[int]  # the ranks that take part; others have joined or gave the step up
    all_update: bool  # no rank has joined, and every rank goes on to its update at once
    is_first: bool  # some present rank compares these parameters for the first time
    # All present ranks, more than one, sent hashes. If some made no update, nothing is compared: they may be about to.
    is_compared: bool
    machines: dict[int, str]
    hashes: dict[int, Array] = field(default_factory=dict)  # empty if hashes and machines are the same
    distances: dict[int, Array] = field(default_factory=dict)  # from the first rank's, by its norms


# This rank's words and how many each rank sends; answered by the words of all.
Conversation: TypeAlias = Generator[tuple[Array, list[int]], list[Array], Comparison]


def converse(index: int, members: Sequence[int], statement: Statement | None) -> Conversation:
    """Exchange rows, then, where these differ, reference sketches if all ranks have them, then details.

    Each exchange follows from what all ranks received before.

    Args:
        index: this rank's in ``members``, the ranks of a group.
        statement: None if this rank has joined or gave the step up.
    """
    row = np.zeros(1, dtype=ROW) if statement is None else statement.row()
    rows = np.concatenate((yield row.view(np.uint64), [ROW.itemsize // 8] * len(members))).view(ROW)
    present, counts = np.nonzero(rows["present"])[0].tolist(), rows["count"].tolist()
    present_rows = rows[present]
    comparison = Comparison(
        [members[each] for each in present],
        all_update=bool(rows["present"].all() and rows["updates"].all()),
        is_first=bool(present_rows["first"].any()),
        is_compared=len(present) > 1 and bool(present_rows["hashed"].all()),
        machines={members[each]: rows["machine"][each].decode(errors="replace") for each in present},
    )
    is_same = all(len(set(present_rows[column].tolist())) == 1 for column in ("count", "checksum", "machine"))
    if is_same or not comparison.is_compared:
        return comparison
    nothing: Array = np.zeros(0, dtype=np.uint64)
    own = nothing if statement is None or statement.hashes is None else statement.hashes
    lengths = counts
    if is_measured := bool(present_rows["sketched"].all()):
        first = present[0]
        sketches = None if statement is None or index != first else statement.sketches
        reference = nothing if sketches is None else sketches.reshape(-1).view(np.uint64)
        words = yield reference, [count * SKETCH if each == first else 0 for each, count in enumerate(counts)]
        if statement is not None:
            distances = statement.distances(words[first].view(np.float64).reshape(-1, SKETCH))
            own = np.concatenate([own, distances.view(np.uint64)])
        lengths = [2 * count for count in counts]
    details = yield own, lengths
    return replace(
        comparison,
        hashes={members[each]: details[each][: counts[each]] for each in present},
        distances={members[each]: details[each][counts[each] :].view(np.float64) for each in present if is_measured},
    )


class LaneVerification:
    """The comparisons at the end of a lane's steps; ``ask`` returns this rank's statement."""

    def __init__(self, group: Group, every: int) -> None:
        self.ask: Callable[[], Statement] = Statement
        self.every = every
        self._group = group
        self._statement: Statement | None = None
        self._comparison: Comparison | None = None

    def next_due(self, step: int) -> int:
        """Return the first step from ``step`` on (from 1) at whose end rows are exchanged, on all ranks alike; or 0.

        After a step of which the parameters are compared, and before its own update: then all ranks learn whether they
        can compare at once.
        """
        if self._group.size == 1 or self.every <= 0:
            return 0
        while not (is_due(step - 1, self.every) or is_due(step, self.every)):
            step += 1
        return step

    def prepare(self) -> None:
        """Take the statement of this rank, which uses the step that ends now."""
        self._statement = self.ask()

    def take(self) -> Comparison | None:
        """Return the comparison of the step that has just ended; None if there was none."""
        comparison, self._comparison = self._comparison, None
        return comparison

    def exchange(self, joined: bool, tag: int) -> Steps[None]:
        """Compare. Uses ``tag`` and the two after it."""
        statement, self._statement = None if joined else self._statement, None
        conversation = converse(self._group.rank, self._group.members, statement)
        try:
            own, lengths = next(conversation)
            while True:
                words = [np.zeros(length, dtype=np.uint64) for length in lengths]
                yield from allgather(self._group, own, words, tag)
                tag += 1
                own, lengths = conversation.send(words)
        except StopIteration as end:
            self._comparison = None if statement is None else end.value


def exchange_by_name(named: NamedOperations, name: str, process_set_id: int, statement: Statement) -> Comparison:
    """Compare by named operations, where all ranks are at the same line. Blocks.

    Each rank fills words of its own in a sum, since a rank that has joined can take part in nothing else.
    """
    group = named.groups.group(process_set_id)
    conversation = converse(group.rank, group.members, statement)
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
            comparison: Comparison = end.value
            return comparison
        number += 1
