"""What was submitted under a name, and what runs of it at once, alike on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvdkit.collectives.group import Group
from hvdkit.compression import CASTS, Codec, Tally
from hvdkit.engine.ops.handle import Handle
from hvdkit.engine.ops.requests import Key, Signature
from hvdkit.kernels import ReduceOp, Scale

_OPS = {int(op): op for op in ReduceOp}  # quicker than the enumeration itself


@dataclass(slots=True)
class Submission:
    """What this rank has announced under a key: its own arrays and the handle that waits."""

    key: Key
    signature: Signature
    arrays: list[Any]  # numpy arrays, or DeviceArrays
    detail: Any
    handle: Handle
    # For each array, where its values are if not in the array itself, which then only takes the result.
    sources: list[Any] | None = None
    codec: Codec = CASTS["none"]
    tally: Tally | None = None  # what encoding costs and saves, where the codec encodes
    turn: int = 0  # a number for what a codec draws at random: the same on all ranks and in each run

    def gather_sources(self) -> None:
        """Bring the values into the arrays, for what works in place."""
        for array, source in zip(self.arrays, self.sources or [], strict=False):
            array[...] = source
        self.sources = None


def effective(op: ReduceOp, postscale: float, size: int) -> tuple[ReduceOp, Scale]:
    """AVERAGE is SUM, divided."""
    return (ReduceOp.SUM, Scale(postscale, size)) if op == ReduceOp.AVERAGE else (op, Scale(postscale))


@dataclass
class Batch:
    """Operations of one kind that run as one. Only allreduces come several at once."""

    group: Group
    submissions: Sequence[Submission]
    extras: Sequence[Any]  # by submission: what the coordinator said with it
    tag: int  # the first of tags.TAGS_PER_OPERATION
    side_by_side: bool = True  # whether parts of it may go on at the same time
    # Is told what is done from now on, and of what if it goes its way from here, for the timeline.
    trace: Callable[..., None] = lambda activity, about=None: None
    # What ranks agree on, and what encodes: those of the first, from which others differ in shapes alone.
    signature: Signature = field(init=False)
    codec: Codec = field(init=False)

    def __post_init__(self) -> None:
        first = self.submissions[0]
        self.signature, self.codec = first.signature, first.codec

    def __str__(self) -> str:
        more = f" and {len(self.submissions) - 1} more" if len(self.submissions) > 1 else ""
        return f"{self.submissions[0].key}{more}"

    @property
    def nbytes(self) -> int:
        """Of all arrays together."""
        return sum(array.nbytes for submission in self.submissions for array in submission.arrays)

    def reduction(self) -> tuple[ReduceOp, Scale]:
        """What the signature asks for, as the group's ranks do it."""
        return effective(_OPS[self.signature["op"]], self.signature["postscale"], self.group.size)
