"""Control messages as bytes: JSON arrays whose first element says what they are. Nothing is ever unpickled."""

from __future__ import annotations

import json
from typing import Any

Message = list[Any]

# Causes of an operation's error.
MISMATCH, LEFT, STALLED = "mismatch", "left", "stalled"

# Made once: json.dumps makes one for each message.
_ENCODER = json.JSONEncoder(separators=(",", ":"))
_DECODER = json.JSONDecoder()

# By first element: how many elements the message has.
SHAPES = {
    # to the coordinator
    "signature": 3,  # id, signature
    "request": 4,  # signature id or signature, name, detail
    "join": 1,
    "blocked": 5,  # key, lane id or null; ranks waited for; in words; label
    # from the coordinator
    "run": 6,  # sequence, process set, kind, [[name, extra], ...], signatures or null
    "error": 6,  # process set, kind, name, text, cause
    "joined": 2,  # rank
    "join_done": 2,  # last rank
    "join_error": 2,  # text
    # from anyone
    "lane_error": 3,  # lane id, text
    "given_up": 3,  # lane id, step: the sender will not use its results
    "ended": 3,  # lane id, step: the sender takes no part in it, nor in later ones
    "lane": 3,  # lane id, sequence: a rank that has joined takes part up to here
    "ping": 1,
    "pong": 1,
    "bye": 3,  # reason, exit code that the job shall have; 0 if nothing failed
    "left": 4,  # rank, and what its "bye" said
    "lost": 3,  # rank, text: a rank was found lost
}


def encode(message: Message) -> bytes:
    return _ENCODER.encode(message).encode()


def decode(payload: bytes) -> Message:
    """The message. Raises ValueError for bytes that no engine of this version sends."""
    try:
        message: Any = _DECODER.decode(payload.decode())
    except RecursionError:
        raise ValueError("a control message nested too deeply") from None
    kind = message[0] if isinstance(message, list) and message else None
    if not isinstance(kind, str) or SHAPES.get(kind) != len(message):
        raise ValueError(f"not a control message: {payload[:80]!r}")
    decoded: Message = message
    return decoded
