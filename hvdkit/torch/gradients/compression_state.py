"""What codecs keep of an optimizer's gradients, in its state_dict and from one set of parameters to the next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import torch

from hvdkit.compression.dgc import VELOCITY
from hvdkit.compression.memory import OWED, RESIDUAL
from hvdkit.engine.steps.lane import Lane
from hvdkit.engine.steps.residuals import Note, State

KEY = "compression"

FORMAT = 3  # of what ``save`` returns
OTHER_FORMAT = (
    'What the state_dict holds under "compression" was not written by this version of hvdkit.\n'
    "HINT: leave it out, which loses the gradients that were compressed and not sent yet."
)
IN_STATE = 'the state_dict\'s "compression":'
IN_FLIGHT = (
    "optimizer.state_dict() was called after loss.backward() but before optimizer.step() or optimizer.synchronize(), "
    "while gradients are being compressed.\nHINT: call it after step()."
)

ARRAYS = {RESIDUAL, VELOCITY, OWED}
# By the index of a parameter in the optimizer: what is kept of its gradient.
Saved = dict[str, Any]
# By index: a parameter's name, and the shape of its gradient as it lies in memory.
Shapes = Mapping[Any, tuple[str, Sequence[int]]]


def save(lane: Lane, indices: Sequence[int | None]) -> Saved | None:
    """What ``optimizer.state_dict()`` says of a lane whose slots are the parameters at ``indices``; None if nothing.

    An index is None for a parameter that the optimizer has no more.
    """
    if lane.in_flight and lane.reducer.residuals.keeps_anything:
        raise AssertionError(IN_FLIGHT)
    return saved(lane, indices)


def saved(lane: Lane, indices: Sequence[int | None]) -> Saved | None:
    """As ``save``, of a lane in which nothing runs."""
    if not lane.reducer.residuals.keeps_anything:
        return None
    state = lane.reducer.kept()
    return {  # lists and tensors only, which torch.load takes without unpickling anything else
        "format": FORMAT,
        "rank": lane.group.rank,
        "size": lane.group.size,
        "place": state.fingerprint,
        "parameters": list(indices),
        "shapes": [list(slot.shape) for slot in lane.slots],
        "kept": [{name: torch.from_numpy(array) for name, array in kept.items()} for kept in state.slots],
        "units": state.units,
        "turn": state.turn,
        "notes": [
            [list(slots), *where, torch.from_numpy(one) if isinstance(one, np.ndarray) else one]
            for slots, *where, one in state.notes
        ],
    }


def _array(tensor: torch.Tensor) -> Any:
    return tensor.detach().cpu().numpy()


def shapes_of(lane: Lane, indices: Sequence[int | None]) -> Shapes:
    """Those of the parameters of a lane."""
    return {index: (slot.name, slot.shape) for index, slot in zip(indices, lane.slots, strict=True)}


def check(saved: Any, shapes: Shapes) -> list[Saved]:
    """What one or several ranks saved, as a list.

    Raises TypeError for what is neither, ValueError for what ``save`` did not make, was given twice, or is of
    parameters of other ``shapes``.
    """
    everyones = [saved] if isinstance(saved, Mapping) else saved
    if not isinstance(everyones, Sequence) or isinstance(everyones, str):
        raise TypeError(f"{IN_STATE} expected what state_dict() has there, or a list of it, got {type(saved).__name__}")
    for one in everyones:
        if not isinstance(one, Mapping):
            raise TypeError(f"{IN_STATE} expected what state_dict() has there, got {type(one).__name__} in a list")
        if one.get("format") != FORMAT:
            raise ValueError(OTHER_FORMAT)
    (rank, size), times = (
        Counter((one["rank"], one["size"]) for one in everyones).most_common(1)[0] if everyones else ((0, 0), 0)
    )
    if times > 1:
        raise ValueError(
            f"{IN_STATE} what rank {rank} of {size} kept is there twice\nHINT: give each rank's state once."
        )
    for one in everyones:
        _check_arrays(one, shapes)
    return list(everyones)


def _check_arrays(saved: Mapping[str, Any], shapes: Shapes) -> None:
    for index, shape, arrays in zip(saved["parameters"], saved["shapes"], saved["kept"], strict=True):
        name, here = shapes.get(index, (f"parameter {index}", shape))
        if list(shape) != list(here):
            raise ValueError(
                f"{IN_STATE} {name!r} was {_dims(shape)} when it was saved, and is {_dims(here)} here\n"
                "HINT: load the state of the same model, or leave it out, which loses what was not sent yet."
            )
        unknown = sorted(arrays.keys() - ARRAYS)
        if unknown:
            raise ValueError(f"{IN_STATE} of {name!r} there is {unknown}, which no codec keeps")
        for kind, array in arrays.items():
            if array.numel() != prod(shape):
                raise ValueError(
                    f"{IN_STATE} {kind!r} of {name!r} has {array.numel()} elements, expected {prod(shape)}"
                )


def _dims(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "a number"


def load(lane: Lane, indices: Sequence[int | None], saved: Saved) -> None:
    """Go on from what ``save`` returned, on this rank or another."""
    kept = [{name: _array(tensor) for name, tensor in arrays.items()} for arrays in saved["kept"]]
    notes: list[Note] = [
        (tuple(slots), name, begin, end, _array(one) if isinstance(one, torch.Tensor) else one)
        for slots, name, begin, end, one in saved["notes"]
    ]
    state = State(saved["place"], kept, saved["units"], saved["turn"], notes)
    slot_of = {index: slot for slot, index in enumerate(indices) if index is not None}
    same = saved["parameters"] == list(indices)
    lane.reducer.go_on_from(state, None if same else [slot_of.get(index) for index in saved["parameters"]])


def move(old: Lane, old_slots: Mapping[int, int], new: Lane, new_slots: Mapping[int, int]) -> None:
    """Parameters were frozen, unfrozen or added: what was owed of those that stay goes on. Slots are given by id."""
    keys = sorted(old_slots, key=lambda key: old_slots[key])
    new.reducer.go_on_from(old.reducer.kept(), [new_slots.get(key) for key in keys])


def merge_state_dicts(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The state_dict for this rank to load, from those that all ranks of an earlier job saved.

    For an optimizer whose compression keeps what was not sent: so nothing of it is lost, whatever the number of ranks
    is now.

    Args:
        states: what ``optimizer.state_dict()`` returned on all ranks, in the order of ranks.

    Returns:
        A state_dict for ``optimizer.load_state_dict()``; all but what compression keeps is that of the first.

    Raises:
        ValueError: for an empty list.

    Examples:
        >>> codec = hvd.Compression.topk(0.1, compress="everywhere")
        >>> optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression={"*": codec})
        >>> model(x).mean().backward()
        >>> optimizer.step()
        >>> states = hvd.allgather_object(optimizer.state_dict())  # or from the files that all ranks saved
        >>> optimizer.load_state_dict(hvd.merge_state_dicts(states))
    """
    if not states:
        raise ValueError("merge_state_dicts: expected the state_dicts of all ranks, got none")
    kept = [state[KEY] for state in states if KEY in state]
    return {**states[0], KEY: [one for ours in kept for one in ([ours] if isinstance(ours, Mapping) else ours)]}


def resume(lane: Lane, indices: Sequence[int | None], saved: Saved | Sequence[Saved], rank: int, size: int) -> None:
    """Go on from what one or several ranks of an earlier job saved; a warm-up, for one, is not begun again.

    Nothing may be taken twice, nor left out: a rank takes its own; with other numbers of ranks than there were, what
    rank r saved goes to rank r modulo the ranks there are, which owes it all.
    """
    everyones = check(saved, shapes_of(lane, indices))
    for one in everyones:
        if one["rank"] % size == rank:
            load(lane, indices, one)
    lane.reducer.residuals.start_at(max((one["turn"] for one in everyones), default=0))
