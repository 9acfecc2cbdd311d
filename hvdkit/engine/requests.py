"""What a rank asks for: the signature that must match on all ranks, and how it is told to people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hvdkit.kernels import ReduceOp

# A signature travels as a JSON object with these fields; absent ones do not apply to the kind of operation.
Signature = dict[str, Any]

DATA_KINDS = ("allreduce", "allgather", "broadcast", "alltoall", "reducescatter")
KINDS = (
    *DATA_KINDS,
    "barrier",
    "plan",
    "add_process_set",
    "remove_process_set",
)


class Key(NamedTuple):
    """What identifies an operation on all ranks: the same name may be used by other kinds and process sets at once."""

    process_set: int
    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} '{self.name}'" + (f" in process set {self.process_set}" if self.process_set else "")


@dataclass(frozen=True)
class Request:
    """One rank's request. ``detail`` holds what may differ between ranks: first dimensions, splits.

    Of an alltoall that is [rows, splits or None], or in words what is wrong with the splits that the user gave.
    """

    signature: Signature
    detail: Any = None


def mismatch(key: Key, requests: dict[int, Request]) -> str | None:
    """What is wrong between the requests of all ranks for one key, each rank's value named; None where they agree."""
    ranks = sorted(requests)
    first = requests[ranks[0]].signature
    if all(request.signature == first for request in requests.values()):
        return None
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
        ("groups", "groups"),
        ("ranks", "process sets"),
        ("id", "process set ids"),
    ):
        values = {rank: requests[rank].signature.get(field) for rank in ranks}
        if any(value != values[ranks[0]] for value in values.values()):
            return f"Mismatched {title} for {key}: {_told(values, field)}."
    if first["kind"] == "plan":
        return _plan_mismatch(key, {rank: requests[rank].signature["slots"] for rank in ranks})
    return None


def wrong_by_itself(key: Key, rank: int, request: Request, size: int) -> str | None:
    """What is wrong with one rank's request in a process set of ``size``, whatever the others ask for."""
    if key.kind != "alltoall":
        return None
    if isinstance(request.detail, str):
        return f"Mismatched splits for {key}: rank {rank}: {request.detail}"
    rows, splits = request.detail
    if splits is None and rows % size:
        return (
            f"Mismatched splits for {key}: rank {rank} sent no splits, and its first dimension {rows} "
            f"cannot be divided by {size} ranks."
        )
    if splits is not None and (len(splits) != size or min(splits) < 0 or sum(splits) > rows):
        return (
            f"Mismatched splits for {key}: rank {rank} sent splits {splits} for a first dimension of {rows} "
            f"and {size} ranks."
        )
    return None


def _told(values: dict[int, Any], field: str) -> str:
    """Ranks with the same value together: 'rank 0, 2: [4]; rank 1: [5]'."""
    by_value: dict[str, list[int]] = {}
    for rank, value in values.items():
        if field == "op" and value is not None:
            text = ReduceOp(value).name
        elif isinstance(value, list) and len(value) == 1:
            text = str(value[0])
        else:
            text = str(value)
        by_value.setdefault(text, []).append(rank)
    return "; ".join(f"rank {', '.join(map(str, ranks))} sent {text}" for text, ranks in by_value.items())


def _plan_mismatch(key: Key, slots: dict[int, list[list[Any]]]) -> str | None:
    counts = {rank: len(listed) for rank, listed in slots.items()}
    for place in range(max(counts.values(), default=0)):
        here = {rank: listed[place] if place < len(listed) else None for rank, listed in slots.items()}
        first = here[min(here)]
        if all(value == first for value in here.values()):
            continue
        present = {rank: value for rank, value in here.items() if value is not None}
        if first is not None and len(present) == len(here) and all(one[:-1] == first[:-1] for one in present.values()):
            codecs = _told({rank: value[-1] for rank, value in present.items()}, "codec")
            return f"Mismatched compressions for {key}, parameter {_slot_told(first)}: {codecs}."
        told = "; ".join(
            f"rank {rank} has {'no such parameter' if value is None else _slot_told(value)}"
            for rank, value in here.items()
        )
        return (
            f"Mismatched parameters for {key}, parameter number {place}: {told}.\n"
            "HINT: build the same model and freeze the same parameters on every rank."
        )
    return None


def _slot_told(slot: Sequence[Any]) -> str:
    name, shape, dtype, _ = slot
    return f"'{name}' {dtype}{list(shape)}"
