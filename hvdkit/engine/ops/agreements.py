"""Agreements without tensors: a barrier, details of all ranks, the plan of a lane, adding and removing process sets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvdkit.engine.ops.batch import Kind, Requests
from hvdkit.engine.ops.hints import SAME_MODEL, for_mismatch
from hvdkit.engine.ops.requests import Key, Signature, by_value, mismatch
from hvdkit.engine.ranks.assignments import Assignments
from hvdkit.engine.ranks.groups import Groups


def _plan_mismatch(key: Key, requests: Requests) -> str | None:
    """Return the error if the ranks' plans differ, with the first parameter that does."""
    if (text := mismatch(key, requests)) is not None:
        return text
    slots: dict[int, list[list[Any]]] = {rank: request.signature["slots"] for rank, request in sorted(requests.items())}
    for index in range(max(map(len, slots.values()), default=0)):
        here = {rank: listed[index] if index < len(listed) else None for rank, listed in slots.items()}
        first, *others = here.values()
        if all(value == first for value in others):
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


def _is_complete(assignments: Assignments, key: Key, requests: Requests) -> bool:
    return len(requests) == len(assignments.members[key.process_set])


def _new_lane(assignments: Assignments, key: Key, requests: Requests) -> tuple[int, int | None] | None:
    """Return the id of the lane and its number in tags, or None if a rank has joined, which has nothing to register."""
    return assignments.next_lane(key.process_set) if _is_complete(assignments, key, requests) else None


def _details(assignments: Assignments, key: Key, requests: Requests) -> tuple[bool, list[Any]]:
    """Return whether no rank has joined, and the details of all other ranks, in rank order."""
    return _is_complete(assignments, key, requests), [request.detail for _, request in sorted(requests.items())]


def _signature(requests: Requests) -> Signature:
    return next(iter(requests.values())).signature


def _added(groups: Groups, signature: Signature, result: int | None) -> None:
    if result is not None:
        groups.ranks[result] = list(signature["ranks"])


def _planned(groups: Groups, signature: Signature, result: Any) -> None:
    """Note on each rank that an agreement was put off because a rank has joined."""
    groups.plans_put_off |= result is None


def _gathered(groups: Groups, signature: Signature, result: tuple[bool, list[Any]]) -> None:
    """Note on each rank that an agreement was put off because a rank has joined."""
    groups.plans_put_off |= signature["for_plan"] and not result[0]


BARRIER = Kind("barrier", carries_tensors=False, joined=lambda signature: [])
DETAILS = Kind(
    "details", carries_tensors=False, comes_again=False, joined=lambda signature: [], decide=_details, ended=_gathered
)
PLAN = Kind(
    "plan",
    carries_tensors=False,
    comes_again=False,
    mismatch=_plan_mismatch,
    joined=lambda signature: [],
    decide=_new_lane,
    ended=_planned,
)
ADD_PROCESS_SET = Kind(
    "add_process_set",
    carries_tensors=False,
    comes_again=False,
    decide=lambda assignments, key, requests: assignments.add_process_set(_signature(requests)["ranks"]),
    ended=_added,
)
REMOVE_PROCESS_SET = Kind(
    "remove_process_set",
    carries_tensors=False,
    comes_again=False,
    decide=lambda assignments, key, requests: _signature(requests)["id"] in assignments.members,
    ends_process_set=True,
    ended=lambda groups, signature, result: groups.remove(signature["id"]),
)
