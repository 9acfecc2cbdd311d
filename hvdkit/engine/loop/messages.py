"""Control messages: what they say, and as bytes, which are JSON arrays. Nothing is ever unpickled."""

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
    """What ranks tell each other."""

    __slots__ = ()


# -- to the coordinator -----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class NewSignature(Message):
    """From here on the sender tells a signature by its number."""

    number: int
    signature: dict[str, Any]


@dataclass(slots=True)
class Ask(Message):
    """The sender takes part in an operation. ``signature`` is one, or the number of one."""

    signature: int | dict[str, Any]
    name: str
    detail: Any


@dataclass(slots=True)
class LaneClosed(Message):
    """The sender has closed a lane, and none of the ``sequence`` operations that it has begun there is open."""

    lane: int
    sequence: int


@dataclass(slots=True)
class Join(Message):
    """The sender has no more data."""


@dataclass(slots=True)
class Waits(Message):
    """The sender's only thread waits: for a key, or the number of a lane; for None it goes on.

    ``waits_for`` are ranks, ``what`` tells it in words, ``label`` is the name that the user gave.
    """

    at: list[Any] | int | None
    waits_for: list[int]
    what: str
    label: str | None


# -- from the coordinator ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Run(Message):
    """These operations run now. ``names``: [name, what was decided]; ``signatures``: for a rank that has not asked."""

    sequence: int
    process_set: int
    kind: str
    names: list[list[Any]]
    signatures: list[dict[str, Any]] | None


@dataclass(slots=True)
class Reject(Message):
    """An operation fails; ``cause`` is one of the three above, ``left`` the rank that left where that is it."""

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
    """All have joined, ``rank`` as the last one."""

    rank: int


@dataclass(slots=True)
class JoinFailed(Message):
    """A join can never end."""

    text: str


# -- from anyone ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class LaneStarted(Message):
    """A lane's operations were started up to ``sequence``: so far a rank that has joined takes part."""

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
class Ping(Message):
    """Asks for a sign of life."""


@dataclass(slots=True)
class Pong(Message):
    """A sign of life."""


@dataclass(slots=True)
class Bye(Message):
    """The sender leaves. ``code`` is the exit code that the job shall have; 0 if nothing failed."""

    reason: str
    code: int


@dataclass(slots=True)
class Left(Message):
    """What another rank said as it left."""

    rank: int
    reason: str
    code: int


@dataclass(slots=True)
class Lost(Message):
    """``rank`` cannot go on: it is lost, or it ``lives`` and its engine has failed. None where nobody knows which."""

    rank: int | None
    lives: bool
    text: str


# By the first element of their arrays, whose others are the fields.
KINDS: dict[str, type[Message]] = {
    "signature": NewSignature,
    "request": Ask,
    "lane_closed": LaneClosed,
    "join": Join,
    "blocked": Waits,
    "run": Run,
    "error": Reject,
    "joined": Joined,
    "join_done": JoinDone,
    "join_error": JoinFailed,
    "lane": LaneStarted,
    "lane_error": LaneFailed,
    "given_up": Abandoned,
    "ping": Ping,
    "pong": Pong,
    "bye": Bye,
    "left": Left,
    "lost": Lost,
}


def _fields_of(cls: type[Message]) -> Callable[[Any], tuple[Any, ...]]:
    names = cls.__match_args__  # type: ignore[attr-defined]
    if len(names) > 1:
        return attrgetter(*names)  # a tuple, made in one go
    return lambda message: tuple(getattr(message, name) for name in names)


_WRITTEN = {cls: (kind, _fields_of(cls)) for kind, cls in KINDS.items()}
_LENGTHS = {kind: 1 + len(cls.__match_args__) for kind, cls in KINDS.items()}  # type: ignore[attr-defined]


def encode(message: Message) -> bytes:
    kind, fields = _WRITTEN[type(message)]
    return _ENCODER.encode((kind, *fields(message))).encode()


# What many ranks say in the same words is read once: requests, and signatures. Nobody changes a message.
_READ: dict[bytes, Message] = {}
MOST_READ, LONGEST_READ = 1024, 512


def decode(payload: bytes) -> Message:
    """The message. Raises ValueError for bytes that no engine of this version sends."""
    known = _READ.get(payload)
    if known is not None:
        return known
    try:
        text = payload.decode()
        array, end = _DECODER.raw_decode(text)
    except RecursionError:
        raise ValueError("a control message nested too deeply") from None
    kind = array[0] if isinstance(array, list) and array and end == len(text) else None
    if not isinstance(kind, str) or _LENGTHS.get(kind) != len(array):
        raise ValueError(f"not a control message: {payload[:80]!r}")
    message = KINDS[kind](*array[1:])
    if isinstance(message, (Ask, NewSignature)) and len(payload) <= LONGEST_READ:
        if len(_READ) >= MOST_READ:
            _READ.clear()
        _READ[payload] = message
    return message
