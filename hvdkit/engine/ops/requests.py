"""Requests of ranks: the signatures that must match on all ranks, and errors where they do not."""

from __future__ import annotations

from typing import Any, NamedTuple

from hvdkit.compression import CASTS, Codec
from hvdkit.engine.ops.hints import FIELDS, for_mismatch
from hvdkit.kernels import ReduceOp

AUTOMATIC = ".noname."  # part of the names that operations without a name get
Signature = dict[str, Any]  # a JSON object; fields that are absent do not apply to the kind of operation


class Key(NamedTuple):
    """The identity of an operation on all ranks. Other process sets may use the same name at once."""

    process_set: int
    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} '{self.name}'" + (f" in process set {self.process_set}" if self.process_set else "")


def automatic_name(kind: str, number: int) -> str:
    """Return the name of an operation without one, the ``number``-th of its kind and process set."""
    return f"{kind}{AUTOMATIC}{number}"


def automatic_number(key: Key) -> int | None:
    """Return the number in a name of ``automatic_name``, or None for an operation with a name of its own."""
    kind, automatic, number = key.name.partition(AUTOMATIC)
    return int(number) if automatic and kind == key.kind and number.isdecimal() else None


class Call(NamedTuple):
    """The arguments that all named operations have."""

    name: str | None
    process_set_id: int = 0
    device: str = "cpu"  # the type of the device of the user's tensors
    wake: bool = True  # False if the caller waits at once, and so drives the engine
    number: int | None = None  # of a call without a name that was counted already


class ReduceRequest(NamedTuple):
    """The arithmetic of a reduction. Elements are multiplied before it, in their type, and after it."""

    op: ReduceOp
    prescale: float = 1.0
    postscale: float = 1.0
    codec: Codec = CASTS["none"]  # a payload codec encodes sums and averages of floats; it keeps nothing

    def signature(self) -> Signature:
        """Return the fields that must match on all ranks."""
        encoding = {"codec": self.codec.summary} if self.codec.encodes else {}
        return {"op": int(self.op), "prescale": self.prescale, "postscale": self.postscale, **encoding}


class Request(NamedTuple):
    """A rank's request. ``detail`` may differ between ranks: first dimensions, splits."""

    signature: Signature
    detail: Any = None


def mismatch(key: Key, requests: dict[int, Request]) -> str | None:
    """Return the error if the requests of all ranks for a key differ, with each rank's value; None if they agree."""
    ranks = sorted(requests)
    first = requests[ranks[0]].signature
    for request in requests.values():
        if request.signature is not first and request.signature != first:
            break
    else:
        return None
    for field, (noun, _) in FIELDS.items():
        values = {rank: requests[rank].signature.get(field) for rank in ranks}
        if field == "count":
            values = {rank: len(requests[rank].signature.get("dtype") or ()) for rank in ranks}
        if any(value != values[ranks[0]] for value in values.values()):
            return f"Mismatched {noun} for {key}: {by_value(values, field)}.\n{for_mismatch(key.kind, field)}"
    return None


def by_value(values: dict[int, Any], field: str) -> str:
    """Return the ranks by value, as text: 'rank 0, 2 sent [4]; rank 1 sent [5]'."""
    ranks_of: dict[str, list[int]] = {}
    for rank, value in values.items():
        if field == "op" and value is not None:
            text = ReduceOp(value).name
        else:
            text = str(value[0] if isinstance(value, list) and len(value) == 1 else value)
        ranks_of.setdefault(text, []).append(rank)
    return "; ".join(f"rank {', '.join(map(str, ranks))} sent {text}" for text, ranks in ranks_of.items())
