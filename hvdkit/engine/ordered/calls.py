"""Collective calls, and the descriptions of them that the ranks of a group compare."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from hvdkit.collectives.group import Array, Steps, equal_parts
from hvdkit.engine.ranks.turns import Reading
from hvdkit.kernels import ONE, ReduceOp, Scale

Words = tuple[int, int, int, int, int, int]


class CollectiveKind(IntEnum):
    """The collective operations. Errors have their names."""

    BARRIER = 1
    ALL_REDUCE = 2
    REDUCE = 3
    BROADCAST = 4
    ALL_GATHER = 5
    GATHER = 6
    SCATTER = 7
    REDUCE_SCATTER = 8
    ALL_TO_ALL = 9


class Description(NamedTuple):
    """The facts about a call that are the same on all ranks. ``elements`` is -1 where each rank may have its own."""

    kind: CollectiveKind
    dtype: str = ""
    elements: int = 0
    op: str = ""
    root: int = 0
    codec: int = 0  # a number for the codec, 0 for none

    def __str__(self) -> str:
        name = self.kind.name.lower()
        if self.kind == CollectiveKind.BARRIER:
            return name
        count = "" if self.elements < 0 else f" of {self.elements} elements"
        root = f" with root {self.root}" if self.kind in _ROOTED else ""
        codec = f" with codec {self.codec:08x}" if self.codec else ""
        return f"{name}{f' ({self.op})' if self.op else ''}{count} of {self.dtype}{root}{codec}"


_ROOTED = (CollectiveKind.REDUCE, CollectiveKind.BROADCAST, CollectiveKind.GATHER, CollectiveKind.SCATTER)
_MOST = (1 << 64) - 1
# The names in descriptions, which travel as numbers.
DTYPES = (
    "", "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "bfloat16",
    "float32", "float64", "complex32", "complex64", "complex128", "bytes",
)  # fmt: skip
OPS = ("", "sum", "avg", "min", "max", "product", "premul_sum")


def words_of(description: Description, own: int = 0) -> Words:
    """Return a description as the words that ranks publish. ``own``: a number of this rank, which is not compared."""
    names = DTYPES.index(description.dtype) | OPS.index(description.op) << 8 | description.codec << 32
    return int(description.kind), description.root, description.elements & _MOST, names, own, 0


def description_of(words: Sequence[int]) -> Description:
    """Return the description in the words that a rank has published. Raises ValueError, IndexError for other words."""
    elements = words[2] - _MOST - 1 if words[2] >> 63 else words[2]
    dtype, op, codec = DTYPES[words[3] & 0xFF], OPS[words[3] >> 8 & 0xFF], words[3] >> 32
    return Description(CollectiveKind(words[0]), dtype, elements, op, words[1], codec)


def nothing_left() -> None:
    """Do nothing: the result of a call is in its place, or another call brings it there."""


@dataclass(slots=True)
class Collective:
    """A collective call of this rank.

    ``source``: this rank's contribution, ``target``: the place of its result; flat arrays, empty where there is none.
    They are of a dtype that the kernels know, or bytes. Where the parts of ranks have lengths of their own,
    ``outgoing`` and ``incoming`` have an array for each rank in their place.
    """

    description: Description
    source: Array
    target: Array
    op: ReduceOp = ReduceOp.SUM
    scale: Scale = ONE
    outgoing: Sequence[Array] = ()
    incoming: Sequence[Array] = ()
    finished: Callable[[], None] = nothing_left  # brings the result to where the caller wants it
    steps: Callable[[int], Steps[None]] | None = None  # the algorithm for a tag, in place of that of its kind
    is_agreed: bool = False  # between nodes ranks do not compare it: an earlier call did for this one

    @property
    def arrays(self) -> list[Array]:
        """The memory that the call reads and writes, unless its own ``steps`` do."""
        return [array for array in (self.source, self.target, *self.outgoing, *self.incoming) if array.size]

    @property
    def kind(self) -> CollectiveKind:
        return self.description.kind

    def part_bytes(self, size: int) -> int:
        """Return the bytes that the largest part of a rank has; the same on all ranks."""
        if self.kind == CollectiveKind.SCATTER:
            return self.target.nbytes * size
        if self.kind == CollectiveKind.BROADCAST:
            return max(self.source.nbytes, self.target.nbytes)
        return self.source.nbytes


NO_ARRAY = np.empty(0, dtype=np.uint8)


def reading_of(call: Collective, me: int, size: int) -> tuple[Reading, int]:
    """Return the reading of rank ``me`` of ``size`` once each rank has published its ``source``, and its first byte."""
    kind, is_root = call.kind, call.description.root == me
    if kind in (CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE):
        return (Reading.REDUCE if kind == CollectiveKind.ALL_REDUCE or is_root else Reading.NOTHING), 0
    if kind == CollectiveKind.REDUCE_SCATTER:
        return Reading.REDUCE, me * call.target.nbytes
    if kind in (CollectiveKind.ALL_GATHER, CollectiveKind.GATHER):
        return (Reading.GATHER if kind == CollectiveKind.ALL_GATHER or is_root else Reading.NOTHING), 0
    if kind == CollectiveKind.ALL_TO_ALL:
        return Reading.GATHER, me * (call.target.nbytes // size)
    if kind == CollectiveKind.BROADCAST:
        return (Reading.NOTHING if is_root else Reading.COPY), 0
    if kind == CollectiveKind.SCATTER:
        return Reading.COPY, me * call.target.nbytes
    return Reading.NOTHING, 0


def with_parts(call: Collective, me: int, size: int) -> Collective:
    """Return a gather or scatter with a part for each rank; other calls as they are."""
    nothing, root = [NO_ARRAY] * size, call.description.root
    if call.kind == CollectiveKind.GATHER:
        outgoing = [*nothing[:root], call.source, *nothing[root + 1 :]]
        return replace(call, outgoing=outgoing, incoming=equal_parts(call.target, size) if me == root else nothing)
    if call.kind == CollectiveKind.SCATTER:
        incoming = [*nothing[:root], call.target, *nothing[root + 1 :]]
        return replace(call, outgoing=equal_parts(call.source, size) if me == root else nothing, incoming=incoming)
    return call


def mismatch(number: int, descriptions: Sequence[Description], ranks: Sequence[int]) -> str:
    """Return the error text for calls of ``ranks`` that differ at one place of their order."""
    by_text: dict[str, list[int]] = {}
    for rank, description in zip(ranks, descriptions, strict=True):
        by_text.setdefault(str(description), []).append(rank)
    calls = "; ".join(f"ranks {these}: {text}" for text, these in by_text.items())
    return (
        f"operation {number} of the group is not the same on its ranks: {calls}.\n"
        "HINT: all ranks of a group must call the same operations in the same order, with the same shapes and dtypes."
    )


def wrong_lengths(call: Collective, lengths: Array, ranks: Sequence[int]) -> str:
    """Return an error text if the lengths of the parts that ``ranks`` send and expect differ, else an empty text.

    ``lengths``: for each rank the bytes that it sends to each rank, then those that it expects of each.
    """
    size = len(ranks)
    sent, expected = lengths[:, :size], lengths[:, size:].T
    if bool((sent == expected).all()):
        return ""
    sender, receiver = (int(index) for index in np.argwhere(sent != expected)[0])
    return (
        f"{call.description}: rank {ranks[sender]} sends {int(sent[sender, receiver])} bytes to rank "
        f"{ranks[receiver]}, which expects {int(expected[sender, receiver])}.\n"
        "HINT: the splits of the sender's input and of the receiver's output must agree."
    )


def lengths_of(call: Collective) -> Array:
    """Return the sizes of a call's parts in bytes: first of the outgoing parts, then of the incoming ones."""
    return np.array([part.nbytes for part in (*call.outgoing, *call.incoming)], dtype="<i8")
