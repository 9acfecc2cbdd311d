"""Control messages, and their bytes, which are JSON arrays. Nothing is ever unpickled."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

# Causes of an operation's error.
MISMATCH, LEFT, STALLED = "mismatch", "left", "stalled"

# Made once: json.dumps makes one for each message.
_ENCODER = json.JSONEncoder(separators=(",", ":"))
_DECODER = json.JSONDecoder()


class Message:
    """A control message of one rank to others."""

    __slots__ = ()


# -- to the coordinator -----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class NewSignature(Message):
    """From here on the sender refers to a signature by its number."""

    number: int
    signature: dict[str, Any]


@dataclass(slots=True)
class Ask(Message):
    """The sender takes part in an operation. ``signature``: the signature itself, or its number."""

    signature: int | dict[str, Any]
    name: str
    detail: Any


@dataclass(slots=True)
class LaneClosed(Message):
    """The sender has closed a lane, and all ``sequence`` operations that it has begun there have ended."""

    lane: int
    sequence: int


@dataclass(slots=True)
class Join(Message):
    """The sender has no more data."""


@dataclass(slots=True)
class Waits(Message):
    """The sender's only thread waits in an operation, by its key, or in a lane, by its number. With None it goes on.

    ``waits_for``: ranks; ``subject``: the operation for people; ``label``: the name that the user gave.
    """

    at: list[Any] | int | None
    waits_for: list[int]
    subject: str
    label: str | None


# -- from the coordinator ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Run(Message):
    """These operations run now. ``names``: [name, decision]; ``signatures``: for a rank that has not asked."""

    sequence: int
    process_set: int
    kind: str
    names: list[list[Any]]
    signatures: list[dict[str, Any]] | None


@dataclass(slots=True)
class Reject(Message):
    """An operation fails. ``cause``: MISMATCH, LEFT or STALLED; ``left``: the rank that left."""

    process_set: int
    kind: str
    name: str
    text: str
    cause: str
    left: int | None = None


@dataclass(slots=True)
class Joined(Message):
    """``rank`` takes part with zeros from now on."""

    rank: int


@dataclass(slots=True)
class JoinDone(Message):
    """All ranks have joined, ``rank`` last."""

    rank: int


@dataclass(slots=True)
class JoinFailed(Message):
    """The join can never end."""

    text: str


# -- from anyone ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class LaneStarted(Message):
    """The sender has started a lane's operations up to ``sequence``: a rank that has joined starts them too."""

    lane: int
    sequence: int


@dataclass(slots=True)
class LaneFailed(Message):
    """A lane is of no use any more."""

    lane: int
    text: str


@dataclass(slots=True)
class Abandoned(Message):
    """The sender will not use a step's results."""

    lane: int
    step: int


@dataclass(slots=True)
class Ended(Message):
    """The sender takes no part in a step, nor in later ones."""

    lane: int
    step: int


@dataclass(slots=True)
class Ping(Message):
    """A request for a sign of life."""


@dataclass(slots=True)
class Pong(Message):
    """A sign of life."""


@dataclass(slots=True)
class Bye(Message):
    """The sender leaves the job. ``code``: the exit code that the job shall have, 0 if nothing failed."""

    reason: str
    code: int


@dataclass(slots=True)
class Left(Message):
    """The goodbye of another rank, passed on."""

    rank: int
    reason: str
    code: int


@dataclass(slots=True)
class Lost(Message):
    """``rank`` (None: unknown) is lost, or it ``lives`` and its engine has failed."""

    rank: int | None
    lives: bool
    text: str


_CLASSES: dict[str, type[Message]] = {
    cls.__name__: cls
    for cls in (
        *(NewSignature, Ask, LaneClosed, Join, Waits),
        *(Run, Reject, Joined, JoinDone, JoinFailed),
        *(LaneStarted, LaneFailed, Abandoned, Ended, Ping, Pong, Bye, Left, Lost),
    )
}


def _fields_of(cls: type[Message]) -> Callable[[Any], tuple[Any, ...]]:
    names = cls.__match_args__  # type: ignore[attr-defined]
    if len(names) > 1:
        return attrgetter(*names)  # a tuple, made in one go
    return lambda message: tuple(getattr(message, name) for name in names)


_FIELDS = {cls: _fields_of(cls) for cls in _CLASSES.values()}


def encode(message: Message) -> bytes:
    cls = type(message)
    return _ENCODER.encode((cls.__name__, *_FIELDS[cls](message))).encode()


# Requests and signatures, which many ranks send in the same bytes, are parsed once. Nobody changes a message.
_PARSED: dict[bytes, Message] = {}
MOST_PARSED, LONGEST_PARSED = 1024, 512


def decode(payload: bytes) -> Message:
    """Return the message. Raises ValueError for bytes that no engine of this version sends."""
    message = _PARSED.get(payload)
    if message is not None:
        return message
    try:
        text = payload.decode()
        array, end = _DECODER.raw_decode(text)
    except RecursionError:
        raise ValueError("a control message nested too deeply") from None
    name = array[0] if isinstance(array, list) and array and end == len(text) else None
    cls = _CLASSES.get(name) if isinstance(name, str) else None
    if cls is None or len(cls.__match_args__) != len(array) - 1:  # type: ignore[attr-defined]
        raise ValueError(f"not a control message: {payload[:80]!r}")
    message = cls(*array[1:])
    if isinstance(message, (Ask, NewSignature)) and len(payload) <= LONGEST_PARSED:
        if len(_PARSED) >= MOST_PARSED:
            _PARSED.clear()
        _PARSED[payload] = message
    return message
