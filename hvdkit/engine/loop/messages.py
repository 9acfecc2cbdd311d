"""Control messages, and their bytes, which are JSON arrays. Nothing is ever unpickled."""

from __future__ import annotations

import json
from typing import Any, NamedTuple, get_args

MISMATCH, LEFT, STALLED = "mismatch", "left", "stalled"  # causes of an operation's error
# Made once: json.dumps makes one for each message.
_ENCODER, _DECODER = json.JSONEncoder(separators=(",", ":")), json.JSONDecoder()


# -- to the coordinator -----------------------------------------------------------------------------------------------


class NewSignature(NamedTuple):
    number: int  # by which the sender refers to the signature from here on
    signature: dict[str, Any]


class Ask(NamedTuple):
    """The sender takes part in an operation."""

    signature: int | dict[str, Any]  # itself, or its number
    name: str
    detail: Any


class LaneClosed(NamedTuple):
    lane: int
    sequence: int  # the operations that the sender has begun in this lane; all of them have ended


class Join(NamedTuple):
    """The sender has no more data."""


class Waits(NamedTuple):
    """The sender's only thread waits in an operation or a lane, or goes on."""

    at: list[Any] | int | None  # the operation's key, the lane's number; None: it goes on
    waits_for: list[int]  # ranks
    subject: str  # the operation for people
    label: str | None  # the name that the user gave


# -- from the coordinator ---------------------------------------------------------------------------------------------


class Run(NamedTuple):
    """These operations run now."""

    sequence: int
    process_set: int
    kind: str
    names: list[list[Any]]  # [name, decision] of each
    signatures: list[dict[str, Any]] | None  # for a rank that has not asked


class Reject(NamedTuple):
    """An operation fails."""

    process_set: int
    kind: str
    name: str
    text: str
    cause: str  # MISMATCH, LEFT or STALLED
    left: int | None = None  # the rank that left


class Joined(NamedTuple):
    rank: int  # which takes part with zeros from now on


class JoinDone(NamedTuple):
    rank: int  # the last; all ranks have joined


class JoinFailed(NamedTuple):
    text: str  # why the join can never end


# -- from anyone ------------------------------------------------------------------------------------------------------


class LaneStarted(NamedTuple):
    lane: int
    sequence: int  # the sender has started the lane's operations up to it: a rank that has joined starts them too


class LaneFailed(NamedTuple):
    lane: int  # which is of no use any more
    text: str


class GroupFailed(NamedTuple):
    group: int  # the number of a group of ordered operations, which is of no use any more
    text: str


class MessageOffer(NamedTuple):
    """A message that the sender has for the receiver, which lies on another node."""

    group: int  # the number of the group of ordered operations
    tag: int  # the user's
    nbytes: int
    data_tag: int  # under which the transport carries it


class Abandoned(NamedTuple):
    lane: int
    step: int  # whose results the sender will not use


class Ping(NamedTuple):
    """A request for a sign of life."""


class Pong(NamedTuple):
    """A sign of life."""


class Bye(NamedTuple):
    reason: str  # why the sender leaves the job
    code: int  # the exit code that the job shall have, 0 if nothing failed


class Left(NamedTuple):
    """A goodbye of another rank, passed on."""

    rank: int
    reason: str
    code: int


class Lost(NamedTuple):
    rank: int | None  # None: unknown
    lives: bool  # its engine has failed; otherwise it is lost
    text: str


Message = (
    NewSignature | Ask | LaneClosed | Join | Waits | Run | Reject | Joined | JoinDone | JoinFailed
    | LaneStarted | LaneFailed | GroupFailed | MessageOffer | Abandoned | Ping | Pong | Bye | Left | Lost
)  # fmt: skip
_CLASSES: dict[str, Any] = {cls.__name__: cls for cls in get_args(Message)}


def encode(message: Message) -> bytes:
    return _ENCODER.encode((type(message).__name__, *message)).encode()


# Requests and signatures, which many ranks send in the same bytes, are parsed once.
_PARSED: dict[bytes, Message] = {}
MOST_PARSED, LONGEST_PARSED = 1024, 512


def decode(payload: bytes) -> Message:
    """Return the message. Raises ValueError for bytes that no engine of this version sends."""
    parsed = _PARSED.get(payload)
    if parsed is not None:
        return parsed
    try:
        text = payload.decode()
        array, end = _DECODER.raw_decode(text)
    except RecursionError:
        raise ValueError("a control message nested too deeply") from None
    name = array[0] if isinstance(array, list) and array and end == len(text) else None
    cls = _CLASSES.get(name) if isinstance(name, str) else None
    if cls is None or len(cls._fields) != len(array) - 1:
        raise ValueError(f"not a control message: {payload[:80]!r}")
    message: Message = cls(*array[1:])
    if isinstance(message, (Ask, NewSignature)) and len(payload) <= LONGEST_PARSED:
        if len(_PARSED) >= MOST_PARSED:
            _PARSED.clear()
        _PARSED[payload] = message
    return message
