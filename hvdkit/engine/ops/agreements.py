"""Agreements without tensors: a barrier, details of all ranks, the plan of a lane, adding and removing process sets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvdkit.engine.ops.batch import Kind, Requests
from hvdkit.engine.ops.hints import SAME_MODEL, for_mismatch
from hvdkit.engine.ops.requests import Key, Signature, by_value, mismatch
from hvdkit.engine.ranks.assignments import Assignments
from hvdkit.engine.ranks.groups import Groups


def plan_mismatch(key: Key, requests: Requests) -> str | None:
    """Return the error if the ranks' plans differ, with the first parameter that does."""
    return mismatch(key, requests) or _slots_mismatch(
        key, {rank: request.signature["slots"] for rank, request in sorted(requests.items())}
    )


def _slots_mismatch(key: Key, slots: dict[int, list[list[Any]]]) -> str | None:
    counts = {rank: len(listed) for rank, listed in slots.items()}
    for index in range(max(counts.values(), default=0)):
        here = {rank: listed[index] if index < len(listed) else None for rank, listed in slots.items()}
        first = here[min(here)]
        if all(value == first for value in here.values()):
            continue
        present = {rank: value for rank, value in here.items() if value is not None}
        if first is not None and len(present) == len(here) and all(s[:-1] == first[:-1] for s in present.values()):
            codecs = by_value({rank: value[-1] for rank, value in present.items()}, "codec")
            return (
                f"Mismatched compressions for {key}, parameter {_slot_text(first)}: {codecs}.\n"
                f"{for_mismatch(key.kind, 'codec')}"
            )
        differing = "; ".join(
            f"rank {rank} has {'no such parameter' if value is None else _slot_text(value)}"
            for rank, value in here.items()
        )
        return f"Mismatched parameters for {key}, parameter number {index}: {differing}.\n{SAME_MODEL}"
    return None


def _slot_text(slot: Sequence[Any]) -> str:
    name, shape, dtype, _ = slot
    return f"'{name}' {dtype}{list(shape)}"


def new_lane(assignments: Assignments, key: Key, requests: Requests) -> tuple[int, int | None] | None:
    """Return the id of the lane and its number in tags, or None if a rank has joined, which has nothing to register."""
    is_complete = len(requests) == len(assignments.members[key.process_set])
    return assignments.next_lane(key.process_set) if is_complete else None


def details(assignments: Assignments, key: Key, requests: Requests) -> tuple[bool, list[Any]]:
    """Return whether no rank has joined, and the details of all other ranks, in rank order."""
    is_complete = len(requests) == len(assignments.members[key.process_set])
    return is_complete, [request.detail for _, request in sorted(requests.items())]


def new_process_set(assignments: Assignments, key: Key, requests: Requests) -> int | None:
    """Return the number of the new set, or None if there is a set of these ranks."""
    return assignments.add_process_set(_signature(requests)["ranks"])


def is_there(assignments: Assignments, key: Key, requests: Requests) -> bool:
    """True if the set exists."""
    return _signature(requests)["id"] in assignments.members


def _signature(requests: Requests) -> Signature:
    return next(iter(requests.values())).signature


def added(groups: Groups, signature: Signature, result: Any) -> None:
    """Add the set on this rank."""
    if result is not None:
        groups.add(result, signature["ranks"])


def planned(groups: Groups, signature: Signature, result: Any) -> None:
    """Note on each rank that an agreement was put off because a rank has joined."""
    groups.plans_put_off |= result is None


def gathered(groups: Groups, signature: Signature, result: tuple[bool, list[Any]]) -> None:
    """Note on each rank that an agreement was put off because a rank has joined."""
    groups.plans_put_off |= not result[0]


def removed(groups: Groups, signature: Signature, result: Any) -> None:
    """Remove the set on this rank."""
    groups.remove(signature["id"])


BARRIER = Kind("barrier", carries_tensors=False, joined=lambda signature: [])
DETAILS = Kind(
    "details",
    carries_tensors=False,
    comes_again=False,
    joined=lambda signature: [],
    decide=details,
    ended=gathered,
)
PLAN = Kind(
    "plan",
    carries_tensors=False,
    comes_again=False,
    mismatch=plan_mismatch,
    joined=lambda signature: [],
    decide=new_lane,
    ended=planned,
)
ADD_PROCESS_SET = Kind("add_process_set", carries_tensors=False, comes_again=False, decide=new_process_set, ended=added)
REMOVE_PROCESS_SET = Kind(
    "remove_process_set",
    carries_tensors=False,
    comes_again=False,
    decide=is_there,
    ends_process_set=True,
    ended=removed,
)
