"""Control messages, and their bytes, which are JSON arrays. Nothing is ever unpickled."""

from __future__ import annotations

import json
from typing import Any, NamedTuple, get_args

# Causes of an operation's error.
MISMATCH, LEFT, STALLED = "mismatch", "left", "stalled"

# Made once: json.dumps makes one for each message.
_ENCODER, _DECODER = json.JSONEncoder(separators=(",", ":")), json.JSONDecoder()


# -- to the coordinator -----------------------------------------------------------------------------------------------


class NewSignature(NamedTuple):
    """From here on the sender refers to a signature by its number."""

    number: int
    signature: dict[str, Any]


class Ask(NamedTuple):
    """The sender takes part in an operation. ``signature``: the signature itself, or its number."""

    signature: int | dict[str, Any]
    name: str
    detail: Any


class LaneClosed(NamedTuple):
    """The sender has closed a lane, and all ``sequence`` operations that it has begun there have ended."""

    lane: int
    sequence: int


class Join(NamedTuple):
    """The sender has no more data."""


class Waits(NamedTuple):
    """The sender's only thread waits in an operation, by its key, or in a lane, by its number. With None it goes on.

    ``waits_for``: ranks; ``subject``: the operation for people; ``label``: the name that the user gave.
    """

    at: list[Any] | int | None
    waits_for: list[int]
    subject: str
    label: str | None


# -- from the coordinator ---------------------------------------------------------------------------------------------


class Run(NamedTuple):
    """These operations run now. ``names``: [name, decision]; ``signatures``: for a rank that has not asked."""

    sequence: int
    process_set: int
    kind: str
    names: list[list[Any]]
    signatures: list[dict[str, Any]] | None


class Reject(NamedTuple):
    """An operation fails. ``cause``: MISMATCH, LEFT or STALLED; ``left``: the rank that left."""

    process_set: int
    kind: str
    name: str
    text: str
    cause: str
    left: int | None = None


class Joined(NamedTuple):
    """``rank`` takes part with zeros from now on."""

    rank: int


class JoinDone(NamedTuple):
    """All ranks have joined, ``rank`` last."""

    rank: int


class JoinFailed(NamedTuple):
    """The join can never end."""

    text: str


# -- from anyone ------------------------------------------------------------------------------------------------------


class LaneStarted(NamedTuple):
    """The sender has started a lane's operations up to ``sequence``: a rank that has joined starts them too."""

    lane: int
    sequence: int


class LaneFailed(NamedTuple):
    """A lane is of no use any more."""

    lane: int
    text: str


class Abandoned(NamedTuple):
    """The sender will not use a step's results."""

    lane: int
    step: int


class Ping(NamedTuple):
    """A request for a sign of life."""


class Pong(NamedTuple):
    """A sign of life."""


class Bye(NamedTuple):
    """The sender leaves the job. ``code``: the exit code that the job shall have, 0 if nothing failed."""

    reason: str
    code: int


class Left(NamedTuple):
    """A goodbye of another rank, passed on."""

    rank: int
    reason: str
    code: int


class Lost(NamedTuple):
    """``rank`` (None: unknown) is lost, or it ``lives`` and its engine has failed."""

    rank: int | None
    lives: bool
    text: str


Message = (
    NewSignature | Ask | LaneClosed | Join | Waits | Run | Reject | Joined | JoinDone | JoinFailed
    | LaneStarted | LaneFailed | Abandoned | Ping | Pong | Bye | Left | Lost
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
