"""Comparison of the parameters that all ranks train: in which steps, and by which messages.

At the end of some steps of a lane, which follow from its count of steps, ranks tell each other whether they have hashed
what the update before left, and whether the update of this step follows at once, as in ``optimizer.step()``. If all
present ranks have hashed, they compare by named operations; if all update at once, they do so after the update. A hash
does not tell rounding from an unrelated model: once hashes have differed, every later statement has a sketch of each
parameter, by which ranks measure their distance from the first rank.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from enum import IntFlag
from hashlib import shake_128
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from hvdkit import kernels
from hvdkit.collectives.exchange import allgather
from hvdkit.collectives.group import Array, Group, Steps
from hvdkit.engine.ops.requests import Call, ReduceRequest
from hvdkit.kernels import ReduceOp

if TYPE_CHECKING:
    from hvdkit.engine.loop.named import NamedOperations

FIRST_STEPS = (1, 10, 100)  # ranks that differ from the beginning, or soon, are noticed soon
# A step touches a few rows of parameters with sparse gradients: reading all of them costs far more than the step.
SPARSE_AS_OFTEN = 100

ROW = np.dtype([(name, np.uint64) for name in ("present", "first", "sketched", "count", "checksum")] + [("on", "S256")])
# Numbers of a sketch, and elements that are read for it at a time.
SKETCH, CHUNK = 64, 1 << 16
# Smaller norms count as this, so that a subnormal number which one rank flushes to zero is no difference.
SMALLEST_NORM = 1e-30


class Word(IntFlag):
    """The word of a rank at the end of a step; 0 if it gave the step up."""

    PRESENT, UPDATES, HASHED, JOINED = 1, 2, 4, 8


def is_due(step: int, every: int, sparse: bool = False) -> bool:
    """True if parameters are compared after ``step`` (from 1); ``every`` is HVDKIT_VERIFY; ``sparse`` ones seldom."""
    every *= SPARSE_AS_OFTEN if sparse else 1
    return every > 0 and step > 0 and (step in FIRST_STEPS or step % every == 0)


def sketch(elements: int, read: Callable[[int, int], Array]) -> Array:
    """Return SKETCH float64 numbers of a tensor; the distance of two sketches is that of the tensors.

    Each element is added, with a sign that follows from its offset, to the number of its offset modulo SKETCH (M.
    Charikar et al., "Finding frequent items in data streams", 2002). The Euclidean distance of tensors of more than
    SKETCH elements is met to about 9 %, of others exactly. Infinities and NaN count as very large numbers.
    ``read(begin, end)`` returns these elements as a flat array of real numbers.
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
    """A rank's description of its parameters after an update."""

    machine: str  # what decides how this rank's kernels round
    hashes: Array  # uint64, one for each parameter
    sketches: Array | None = None  # float64 of shape (parameters, SKETCH)
    is_first: bool = False  # this rank has never compared these parameters
    names: Sequence[str] = ()  # this and the eps of each parameter's type stay on this rank
    precisions: Sequence[float] = ()


@dataclass(frozen=True)
class Comparison:
    """The statements of the ranks that take part, as each of them received them."""

    is_first: bool  # some rank compares these parameters for the first time
    machines: dict[int, str]
    hashes: dict[int, Array] = field(default_factory=dict)  # empty if hashes and machines are the same
    distances: dict[int, Array] = field(default_factory=dict)  # from the first rank's, relative to its norms


# This rank's words and how many each rank sends; answered by the words of all.
Conversation: TypeAlias = Generator[tuple[Array, list[int]], list[Array], Comparison]


def converse(index: int, members: Sequence[int], statement: Statement) -> Conversation:
    """Exchange rows, then, where these differ, the first rank's sketches if all ranks have them, then details.

    ``index``: this rank's in ``members``. Ranks that have joined send zeros.
    """
    own, sketches = statement.hashes, statement.sketches
    checksum = kernels.checksum(own.view(np.uint8))
    row = (1, statement.is_first, sketches is not None, len(own), checksum, statement.machine.encode())
    words = yield np.array([row], dtype=ROW).view(np.uint64), [ROW.itemsize // 8] * len(members)
    rows = np.concatenate(words).view(ROW)
    present, counts = np.nonzero(rows["present"])[0].tolist(), rows["count"].tolist()
    stated = rows[present]
    machines = {members[each]: rows["on"][each].decode(errors="replace") for each in present}
    comparison = Comparison(bool(stated["first"].any()), machines)
    if all(len(set(stated[column].tolist())) == 1 for column in ("count", "checksum", "on")):
        return comparison
    lengths = counts
    if is_measured := bool(sketches is not None and stated["sketched"].all()):
        assert sketches is not None
        first = present[0]
        flat = sketches.reshape(-1).view(np.uint64)[: None if index == first else 0]
        words = yield flat, [count * SKETCH if each == first else 0 for each, count in enumerate(counts)]
        own = np.concatenate([own, _distances(sketches, words[first].view(np.float64)).view(np.uint64)])
        lengths = [2 * count for count in counts]
    details = yield own, lengths
    return replace(
        comparison,
        hashes={members[each]: details[each][: counts[each]] for each in present},
        distances={members[each]: details[each][counts[each] :].view(np.float64) for each in present if is_measured},
    )


def _distances(sketches: Array, flat: Array) -> Array:
    """Return each sketch's distance from the reference, relative to the latter's norm; infinities if shapes differ."""
    reference = flat.reshape(-1, SKETCH)
    if sketches.shape != reference.shape:
        return np.full(len(sketches), np.inf)
    norms = np.maximum(np.linalg.norm(reference, axis=1), SMALLEST_NORM)
    distances: Array = np.linalg.norm(sketches - reference, axis=1) / norms
    return distances


def compare_by_name(named: NamedOperations, name: str, process_set_id: int, statement: Statement) -> Comparison:
    """Compare statements, where all ranks are at the same line. Blocks. A rank that has joined adds zeros to sums."""
    group = named.groups.group(process_set_id)
    conversation = converse(group.rank, group.members, statement)
    answer: Any = None
    number = 0
    while True:
        try:
            own, lengths = conversation.send(answer)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        ends = np.cumsum([0, *lengths])
        words = np.zeros(ends[-1], dtype=np.int64)
        words[ends[group.rank] : ends[group.rank + 1]] = own.view(np.int64)
        call = Call(f"{name}.parameters.{number}", process_set_id, wake=False)
        named.allreduce([words], ReduceRequest(ReduceOp.SUM), call).wait()
        answer = np.split(words.view(np.uint64), ends[1:-1])
        number += 1


class LaneVerification:
    """The exchange of words at the end of a lane's steps; ``ask`` returns this rank's word."""

    def __init__(self, group: Group, every: int) -> None:
        self.ask: Callable[[], int] = lambda: Word.PRESENT
        self.every = every
        self.words: list[int] = []  # of all members in the step that has just ended; none if there was no exchange
        self._group = group
        self._own = 0

    def next_due(self, step: int) -> int:
        """Return the first step from ``step`` on (from 1) at whose end all ranks exchange words; 0 if there is none."""
        if self._group.size == 1 or self.every <= 0:
            return 0
        multiple = (step - 1) // self.every * self.every
        compared = [after for after in (*FIRST_STEPS, multiple, multiple + self.every) if after > 0]
        return min(at for after in compared for at in (after, after + 1) if at >= step)

    def prepare(self) -> None:
        """Take the word of this rank, which uses the step that ends now."""
        self._own, self.words = self.ask(), []

    def exchange(self, joined: bool, tag: int) -> Steps[None]:
        """Exchange words by messages under ``tag``."""
        own = Word.JOINED if joined else self._own
        self._own = 0
        words = np.zeros(self._group.size, dtype=np.uint64)
        yield from allgather(self._group, np.array([own], dtype=np.uint64), np.split(words, len(words)), tag)
        self.words = words.tolist() if own & Word.PRESENT else []
