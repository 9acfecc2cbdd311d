"""What codecs keep of an optimizer's gradients, in its state_dict and from one set of parameters to the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hvdkit.compression.memory import RESIDUAL
from hvdkit.engine.lane import Lane
from hvdkit.engine.memories import State

KEY = "compression"

# By the place of a parameter in the optimizer: what is kept of its gradient.
Saved = dict[str, Any]


def save(lane: Lane, places: Sequence[int]) -> Saved | None:
    """What ``optimizer.state_dict()`` says of a lane whose slots are the parameters at ``places``; None if nothing."""
    memories = lane.home.memories
    if not memories.keeps_anything:
        return None
    state = memories.state(lane.home.place(), lane.home.units())
    return {
        "rank": lane.group.rank,
        "size": lane.group.size,
        "place": state.place,
        "parameters": list(places),
        "kept": [{name: torch.from_numpy(array) for name, array in kept.items()} for kept in state.slots],
        "units": state.units,
        "numbers": [[list(slots), [[*place, number] for place, number in numbers.items()]]
                    for slots, numbers in state.numbers.items()],
    }  # fmt: skip


def load(lane: Lane, places: Sequence[int], saved: Saved) -> None:
    """Go on from what ``save`` returned, on this rank or another."""
    kept = [{name: tensor.numpy() for name, tensor in arrays.items()} for arrays in saved["kept"]]
    if saved["parameters"] == list(places):
        numbers = {
            tuple(slots): {(name, begin, end): number for name, begin, end, number in ours}
            for slots, ours in saved["numbers"]
        }
        state = State(saved["place"], kept, saved["units"], numbers)
        lane.home.memories.restore(state, lane.home.place(), lane.home.contribution())
        return
    slot_of = {place: slot for slot, place in enumerate(places)}
    for place, arrays, unit in zip(saved["parameters"], kept, saved["units"], strict=True):
        if place in slot_of:
            lane.home.memories.owe(slot_of[place], arrays, unit, lane.home.contribution())


def move(old: Lane, old_parameters: Mapping[int, int], new: Lane, new_parameters: Mapping[int, int]) -> None:
    """Parameters were frozen, unfrozen or added: what was kept of those that stay is sent with their next gradients.

    ``old_parameters``, ``new_parameters``: slots by id.
    """
    state = old.home.memories.state("", old.home.units())
    for key, slot in old_parameters.items():
        if key in new_parameters:
            new.home.memories.owe(new_parameters[key], state.slots[slot], state.units[slot], new.home.contribution())


def merge_state_dicts(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The state_dict for this rank to load, from those that all ranks of an earlier job saved, in the order of ranks.

    For an optimizer whose compression keeps what was not sent: so nothing of it is lost, whatever the number of ranks
    is now. All else is that of the first. Raises ValueError for an empty list.
    """
    if not states:
        raise ValueError("merge_state_dicts: expected the state_dicts of all ranks, got none")
    return {**states[0], KEY: [state[KEY] for state in states if KEY in state]}


def choose(saved: Saved | Sequence[Saved], rank: int, size: int) -> Saved | None:
    """What this rank takes of what one or several ranks saved: nothing may be taken twice, nor left out.

    A rank takes its own; with other numbers of ranks than there were, what rank r saved goes to rank r modulo the ranks
    there are, and is summed there.
    """
    everyones = [saved] if isinstance(saved, Mapping) else list(saved)
    mine = [one for one in everyones if one["rank"] % size == rank]
    if not mine:
        return None
    if len(mine) == 1:
        return mine[0]
    total = {**mine[0], "place": "", "kept": []}
    for slot, unit in enumerate(mine[0]["units"]):
        residuals = [
            one["kept"][slot][RESIDUAL].numpy() * np.float32(one["units"][slot] / unit if unit else 0.0)
            for one in mine
            if RESIDUAL in one["kept"][slot]
        ]
        total["kept"].append({RESIDUAL: torch.from_numpy(np.sum(residuals, axis=0))} if residuals else {})
    return total
