"""What codecs keep of an optimizer's gradients, in its state_dict and from one set of parameters to the next."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hvdkit.compression.memory import Place
from hvdkit.engine.lane import Lane
from hvdkit.engine.memories import State

KEY = "compression"

LOST_ON_A_DEVICE = (
    "The state_dict holds gradients that were compressed and not sent yet. Those of parameters that are not compressed "
    "here are lost, since gradients stay on the device.\n"
    "HINT: load it into an optimizer with the same compression, or call optimizer.reset_compression()."
)
IN_FLIGHT = (
    "optimizer.state_dict() was called after loss.backward() but before optimizer.step() or optimizer.synchronize(), "
    "while gradients are being compressed.\nHINT: call it after step()."
)

# By the place of a parameter in the optimizer: what is kept of its gradient.
Saved = dict[str, Any]


def save(lane: Lane, places: Sequence[int | None]) -> Saved | None:
    """What ``optimizer.state_dict()`` says of a lane whose slots are the parameters at ``places``; None if nothing.

    A place is None for a parameter that the optimizer has no more.
    """
    if not lane.home.memories.keeps_anything:
        return None
    if lane.in_flight:
        raise AssertionError(IN_FLIGHT)
    state = lane.home.kept()
    return {
        "rank": lane.group.rank,
        "size": lane.group.size,
        "place": state.place,
        "parameters": list(places),
        "kept": [{name: torch.from_numpy(array) for name, array in kept.items()} for kept in state.slots],
        "units": state.units,
        "owed": [None if owed is None else torch.from_numpy(owed) for owed in state.owed],
        "contribution": state.contribution,
        "turn": state.turn,
        "numbers": _listed(state.numbers),
        "vectors": _listed(state.vectors),
    }


def _listed(by_bucket: Mapping[tuple[int, ...], Mapping[Place, Any]]) -> list[Any]:
    """For a checkpoint: lists and tensors only, which torch.load takes without unpickling anything else."""
    return [
        [list(slots), [[*place, torch.from_numpy(one) if isinstance(one, np.ndarray) else one] for place, one in ours]]
        for slots, ours in ((slots, by_place.items()) for slots, by_place in by_bucket.items())
    ]


def _by_place(listed: list[Any]) -> dict[tuple[int, ...], dict[Place, Any]]:
    return {
        tuple(slots): {
            (name, begin, end): _array(one) if isinstance(one, torch.Tensor) else one for name, begin, end, one in ours
        }
        for slots, ours in listed
    }


def _array(tensor: torch.Tensor) -> Any:
    return tensor.detach().cpu().numpy()


def load(lane: Lane, places: Sequence[int | None], saved: Saved) -> None:
    """Go on from what ``save`` returned, on this rank or another."""
    kept = [{name: _array(tensor) for name, tensor in arrays.items()} for arrays in saved["kept"]]
    owed = [None if one is None else _array(one) for one in saved["owed"]]
    numbers, vectors = _by_place(saved["numbers"]), _by_place(saved["vectors"])
    contribution, turn = saved["contribution"], saved["turn"]
    state = State(saved["place"], kept, saved["units"], owed, contribution, turn, numbers, vectors)
    slot_of = {place: slot for slot, place in enumerate(places)}
    slots = {slot: slot_of.get(place) for slot, place in enumerate(saved["parameters"])}
    lost = [
        slot
        for slot, new in slots.items()
        if new is not None and (kept[slot] or owed[slot] is not None) and not lane.home.memories.of_slot(new)
    ]
    if lane.on_device and lost:
        warnings.warn(LOST_ON_A_DEVICE, stacklevel=2)
    if saved["parameters"] == list(places):
        lane.home.go_on_from(state)
    else:
        _hand_on(state, lane, slots)


def _hand_on(state: State, lane: Lane, slots: Mapping[int, int | None]) -> None:
    """Give a lane what was kept of its tensors in slots of another."""
    for slot, new in slots.items():
        if new is not None:
            lane.home.owe(new, state, slot)


def move(old: Lane, old_slots: Mapping[int, int], new: Lane, new_slots: Mapping[int, int]) -> None:
    """Parameters were frozen, unfrozen or added: what was kept of those that stay goes on. Slots are given by id."""
    _hand_on(old.home.kept(), new, {slot: new_slots.get(key) for key, slot in old_slots.items()})


def merge_state_dicts(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The state_dict for this rank to load, from those that all ranks of an earlier job saved, in the order of ranks.

    For an optimizer whose compression keeps what was not sent: so nothing of it is lost, whatever the number of ranks
    is now. All else is that of the first. Raises ValueError for an empty list.
    """
    if not states:
        raise ValueError("merge_state_dicts: expected the state_dicts of all ranks, got none")
    kept = [state[KEY] for state in states if KEY in state]
    return {**states[0], KEY: [one for ours in kept for one in ([ours] if isinstance(ours, Mapping) else ours)]}


def resume(lane: Lane, places: Sequence[int | None], saved: Saved | Sequence[Saved], rank: int, size: int) -> None:
    """Go on from what one or several ranks of an earlier job saved; a warm-up, for one, is not begun again."""
    everyones = [saved] if isinstance(saved, Mapping) else list(saved)
    mine = choose(everyones, rank, size)
    if mine is not None:
        load(lane, places, mine)
    lane.home.memories.start_at(max((one["turn"] for one in everyones), default=0))


def choose(everyones: Sequence[Saved], rank: int, size: int) -> Saved | None:
    """What this rank takes of what one or several ranks saved: nothing may be taken twice, nor left out.

    A rank takes its own; with other numbers of ranks than there were, what rank r saved goes to rank r modulo the ranks
    there are, and is summed there.
    """
    mine = [one for one in everyones if one["rank"] % size == rank]
    if not mine:
        return None
    total = mine[0]
    for one in mine[1:]:
        total = _sum(total, one)
    return total


def _sum(one: Saved, other: Saved) -> Saved:
    """What two ranks kept, as one rank would have kept it; elsewhere than either."""
    kept = []
    for ours, theirs, unit, their_unit in zip(one["kept"], other["kept"], one["units"], other["units"], strict=True):
        both = dict(ours)
        for name, tensor in theirs.items():
            scaled = tensor * (their_unit / unit if unit else 0.0)
            both[name] = both[name] + scaled if name in both else scaled
        kept.append(both)
    factor = other["contribution"] / one["contribution"] if one["contribution"] else 0.0
    owed = [
        ours if theirs is None else theirs * factor if ours is None else ours + theirs * factor
        for ours, theirs in zip(one["owed"], other["owed"], strict=True)
    ]
    return {**one, "place": "", "kept": kept, "owed": owed, "turn": max(one["turn"], other["turn"])}
