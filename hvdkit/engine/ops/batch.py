"""Named operations from submission to result: the row of each kind, submissions, handles, and batches that run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hvdkit.collectives.group import Array, Group, Steps
from hvdkit.compression import CASTS, Codec, Tally
from hvdkit.engine.ops.requests import Key, ReduceRequest, Request, Signature, mismatch
from hvdkit.engine.ranks.assignments import Assignments
from hvdkit.engine.ranks.groups import Groups
from hvdkit.engine.ranks.turns import effective
from hvdkit.errors import abridged
from hvdkit.kernels import ReduceOp, Scale

if TYPE_CHECKING:
    from hvdkit.engine.loop.waiting import WaitingThreads
    from hvdkit.transports.gpu.device import DeviceCollectives

_OPS = {int(op): op for op in ReduceOp}  # quicker than the enumeration itself
# The types that collectives of a device reduce.
_FLOATS, _INTEGERS = {"float16", "bfloat16", "float32", "float64"}, {"uint8", "int8", "int32", "int64"}

Requests = dict[int, Request]  # by rank
# Generators that run side by side. The last one to end returns a result for each submission.
Parts = list[Steps[list[Any]]]


class Handle:
    """The result of an asynchronous operation. The engine finishes it once, with a result or an error."""

    __slots__ = ("_description", "_error", "_finished", "_result", "_waiting", "label")

    def __init__(self, description: object, label: str | None, waiting: WaitingThreads | None) -> None:
        """``label``: the name that the user gave, if any. ``waiting``: None for a handle that nobody waits for."""
        self._description, self.label, self._waiting = description, label, waiting
        self._finished = False
        self._result: Any = None
        self._error: BaseException | None = None

    @property
    def description(self) -> str:
        """The operation for messages: "allreduce 'loss'"."""
        return str(self._description)

    def done(self) -> bool:
        """True when ``wait`` returns at once."""
        return self._finished

    def wait(self) -> Any:
        """Return the result. Raises HorovodInternalError if the operation failed."""
        if not self._finished:
            assert self._waiting is not None, f"{self._description} was not submitted here"
            self._waiting.wait(self, self.done)
        if self._error is not None:
            raise self._error
        return self._result

    def finish(self, result: Any) -> None:
        if not self._finished:
            self._result = result
            self._finished = True

    def fail(self, error: BaseException) -> None:
        if not self._finished:
            self._error = error
            self._finished = True


@dataclass(frozen=True)
class DeviceArray:
    """A contiguous tensor of a device. The tensor and the mark behind which it holds its values are opaque here."""

    tensor: Any
    shape: tuple[int, ...]
    dtype: str  # numpy's name
    device: str  # "cuda:0"
    mark: Any
    to_host: Callable[[], Array]  # waits for the values and copies them


def reduces_directly(request: ReduceRequest, dtypes: Iterable[str]) -> bool:
    """True if a device's collectives can do this: no Adasum, no scaled integers (averages are cut off), no codec."""
    scaled = request.op == ReduceOp.AVERAGE or request.prescale != 1.0 or request.postscale != 1.0
    supported = _FLOATS if scaled else _FLOATS | _INTEGERS
    return request.op != ReduceOp.ADASUM and supported.issuperset(dtypes) and request.codec.name == "none"


@dataclass(slots=True)
class Submission:
    """An operation that this rank has submitted: its key, its own arrays, and the handle of its result."""

    key: Key
    signature: Signature
    arrays: list[Any]  # numpy arrays, or DeviceArrays
    detail: Any
    handle: Handle
    # For each array, where its values are if not in the array itself, which then only takes the result.
    sources: list[Any] | None = None
    codec: Codec = CASTS["none"]
    tally: Tally | None = None  # bytes and seconds of encoding, where the codec encodes
    turn: int = 0  # a number for what a codec draws at random: the same on all ranks and in each run


@dataclass
class Batch:
    """Operations of one kind that run as one. Only an allreduce shares a batch with others."""

    group: Group
    submissions: Sequence[Submission]
    extras: Sequence[Any]  # by submission: the coordinator's decision
    tag: int  # the first of assignments.TAGS_PER_OPERATION
    side_by_side: bool = True  # parts of the batch may run at the same time
    # Records the batch's activities in the timeline. ``about``: a batch whose algorithm is recorded with its reason.
    trace: Callable[..., None] = lambda activity, about=None: None
    signature: Signature = field(init=False)  # of the first submission; others differ in shapes alone
    codec: Codec = field(init=False)

    def __post_init__(self) -> None:
        self.signature, self.codec = self.submissions[0].signature, self.submissions[0].codec

    def __str__(self) -> str:
        return abridged([str(submission.key) for submission in self.submissions], 1)

    def reduction(self) -> tuple[ReduceOp, Scale]:
        """Return the operation and scale that the signature asks for."""
        return effective(_OPS[self.signature["op"]], self.signature["postscale"], self.group.size)


def _agreed(batch: Batch) -> Steps[list[Any]]:
    """Return the coordinator's decision, without any step. The unreachable yield makes this a generator."""
    return [batch.extras[0]]
    yield []


@dataclass(frozen=True)
class Kind:
    """A kind of operation."""

    name: str
    carries_tensors: bool = True  # a name is in flight once among all kinds that do
    comes_again: bool = True  # ranks send the signature once, and its number afterwards
    fuses: bool = False  # ready operations of the same type, operation and factors may share a batch
    ends_process_set: bool = False  # the process set that its signature names as "id"
    # Returns an error in the request of one rank alone, in a process set of ``size`` ranks; None if there is none.
    wrong: Callable[[Key, int, Request, int], str | None] | None = None
    # Returns an error where the requests of all ranks differ and must not.
    mismatch: Callable[[Key, Requests], str | None] = mismatch
    # Returns the coordinator's decision: details of all members, or an assigned number. None: no decision is needed.
    decide: Callable[[Assignments, Key, Requests], Any] | None = None
    # Takes note of the decision on each rank when the operation starts.
    begun: Callable[[Groups, Submission, Any], None] | None = None
    # Returns the arrays that a rank that has joined contributes. None: such a rank cannot take part.
    joined: Callable[[Signature], list[Array]] | None = None
    run: Callable[[Batch], Parts] = lambda batch: [_agreed(batch)]
    # Runs the batch by the collectives of the tensors' device. It launches everything before it first yields.
    run_on_device: Callable[[DeviceCollectives, Batch], Steps[list[Any]]] | None = None
    why: Callable[[Batch], str] | None = None  # returns the algorithm and the reason for it, for the timeline
    ended: Callable[[Groups, Signature, Any], None] | None = None  # takes note of the result on each rank
