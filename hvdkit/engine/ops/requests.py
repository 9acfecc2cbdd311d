"""What a rank asks for: the signature that must match on all ranks, and how it is told to people."""

from __future__ import annotations

from typing import Any, NamedTuple

from hvdkit.compression import CASTS, Codec
from hvdkit.engine.ops.hints import for_mismatch
from hvdkit.kernels import ReduceOp

# In names that operations without one get.
AUTOMATIC = ".noname."

# A signature travels as a JSON object with these fields; absent ones do not apply to the kind of operation.
Signature = dict[str, Any]


class Key(NamedTuple):
    """What identifies an operation on all ranks: the same name may be used by other kinds and process sets at once."""

    process_set: int
    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} '{self.name}'" + (f" in process set {self.process_set}" if self.process_set else "")


def automatic_key(process_set: int, kind: str, number: int) -> Key:
    """Of an operation without a name, of which ranks have counted ``number`` before."""
    return Key(process_set, kind, f"{kind}{AUTOMATIC}{number}")


def automatic_number(key: Key) -> int | None:
    """What ``automatic_key`` was given; None for the key of an operation with a name."""
    kind, automatic, number = key.name.partition(AUTOMATIC)
    return int(number) if automatic and kind == key.kind and number.isdecimal() else None


class Call(NamedTuple):
    """How an operation was called: what all of them have in common."""

    name: str | None
    process_set_id: int = 0
    device: str = "cpu"  # the type of device where the user's tensors are
    wake: bool = True  # False leaves the driving to a caller who waits at once
    number: int | None = None  # of a call without a name, where it was counted


class ReduceRequest(NamedTuple):
    """What becomes of the elements of a reduction. They are multiplied before, in their type, and after it."""

    op: ReduceOp
    prescale: float = 1.0
    postscale: float = 1.0
    codec: Codec = CASTS["none"]  # a payload codec encodes sums and averages of floats; it keeps nothing

    def signature(self) -> Signature:
        """What must match on all ranks."""
        encoding = {"codec": self.codec.summary} if self.codec.encodes else {}
        return {"op": int(self.op), "prescale": self.prescale, "postscale": self.postscale, **encoding}


class Request(NamedTuple):
    """One rank's request. ``detail`` holds what may differ between ranks: first dimensions, splits.

    Of an alltoall that is [rows, splits or None], or in words what is wrong with the splits that the user gave.
    """

    signature: Signature
    detail: Any = None


def mismatch(key: Key, requests: dict[int, Request]) -> str | None:
    """What is wrong between the requests of all ranks for one key, each rank's value named; None where they agree."""
    ranks = sorted(requests)
    first = requests[ranks[0]].signature
    for request in requests.values():
        if request.signature is not first and request.signature != first:
            break
    else:
        return None
    counts = {rank: len(requests[rank].signature.get("dtype") or ()) for rank in ranks}
    if len(set(counts.values())) > 1:
        return (
            f"Mismatched numbers of tensors for {key}: {by_value(counts, 'count')}.\n{for_mismatch(key.kind, 'count')}"
        )
    for field, title in (
        ("dtype", "data types"),
        ("shape", "shapes"),
        ("op", "reduce operations"),
        ("root", "root ranks"),
        ("prescale", "prescale factors"),
        ("postscale", "postscale factors"),
        ("device", "devices"),
        ("direct", "ways (device to device: True)"),
        ("codec", "compressions"),
        ("earlier", "numbers of earlier steps"),
        ("groups", "groups"),
        ("ranks", "process sets"),
        ("id", "process set ids"),
    ):
        values = {rank: requests[rank].signature.get(field) for rank in ranks}
        if any(value != values[ranks[0]] for value in values.values()):
            return f"Mismatched {title} for {key}: {by_value(values, field)}.\n{for_mismatch(key.kind, field)}"
    return None


def by_value(values: dict[int, Any], field: str) -> str:
    """Ranks with the same value together: 'rank 0, 2: [4]; rank 1: [5]'."""
    ranks_of: dict[str, list[int]] = {}
    for rank, value in values.items():
        if field == "op" and value is not None:
            text = ReduceOp(value).name
        elif isinstance(value, list) and len(value) == 1:
            text = str(value[0])
        else:
            text = str(value)
        ranks_of.setdefault(text, []).append(rank)
    return "; ".join(f"rank {', '.join(map(str, ranks))} sent {text}" for text, ranks in ranks_of.items())
