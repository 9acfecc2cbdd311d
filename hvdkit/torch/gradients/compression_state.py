"""Residuals of an optimizer's gradients: in its state_dict, and from one set of parameters to the next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from hvdkit.collectives.group import Group
from hvdkit.engine.steps.lane import Lane
from hvdkit.engine.steps.plan import Slot
from hvdkit.engine.steps.reducer import Reducer
from hvdkit.engine.steps.residuals import Checkpoint

KEY = "compression"

FORMAT = 4  # of the dict that ``save`` returns
OTHER_FORMAT = (
    "The state of the compression in the state_dict was not written by this version of hvdkit.\n"
    "HINT: load without it (the entry 'compression' of an optimizer's state_dict, or the whole state_dict of a "
    "ddp_hook), which loses the parts of gradients that compression has not sent yet."
)
IN_STATE = 'the state_dict\'s "compression":'
IN_FLIGHT = (
    "optimizer.state_dict() was called after loss.backward() but before optimizer.step() or optimizer.synchronize(), "
    "while gradients are being compressed.\nHINT: call it after step()."
)


class WithResiduals(Protocol):
    """A lane, or other gradients with a reducer."""

    @property
    def slots(self) -> Sequence[Slot]:
        """Return the gradients."""

    @property
    def group(self) -> Group:
        """Return the ranks."""

    @property
    def reducer(self) -> Reducer:
        """Return the owner of the residuals."""


Saved = dict[str, Any]
Shapes = Mapping[str, Sequence[int]]  # by name: the shape of a parameter's gradient as it lies in memory


def save(lane: Lane) -> Saved | None:
    """Return the residuals of a lane by the names of its parameters, for ``optimizer.state_dict()``; None if none."""
    if lane.in_flight and lane.reducer.residuals.keeps_anything:
        raise AssertionError(IN_FLIGHT)
    return saved(lane, [slot.name for slot in lane.slots])


def saved(lane: WithResiduals, names: Sequence[str]) -> Saved | None:
    """Return the residuals of a lane in which nothing runs by these names of its slots; None if there are none."""
    if not lane.reducer.residuals.keeps_anything:
        return None
    state = lane.reducer.checkpoint(names)
    return {  # lists, dicts and tensors only, which torch.load takes without unpickling anything else
        "format": FORMAT,
        "rank": lane.group.rank,
        "size": lane.group.size,
        "place": state.fingerprint,
        "shapes": {name: list(shape) for name, shape in shapes_of(lane, names).items()},
        "kept": {
            name: {kind: torch.from_numpy(array) for kind, array in arrays.items()}
            for name, arrays in state.arrays.items()
        },
        "units": state.units,
        "turn": state.turn,
        "notes": [
            [*key, torch.from_numpy(value) if isinstance(value, np.ndarray) else value] for *key, value in state.notes
        ],
    }


def shapes_of(lane: WithResiduals, names: Sequence[str]) -> Shapes:
    """Return the shapes of a lane's parameters by these names of its slots."""
    return {name: slot.shape for name, slot in zip(names, lane.slots, strict=True)}


def check(saved: Any, shapes: Shapes) -> list[Saved]:
    """Return the residuals that one or several ranks saved, as a list.

    Raises TypeError for other types, ValueError for residuals of another version of ``save``, that were given twice, or
    that are of parameters of other ``shapes``.
    """
    states = [saved] if isinstance(saved, Mapping) else saved
    if not isinstance(states, Sequence) or isinstance(states, str):
        raise TypeError(f"{IN_STATE} expected what state_dict() has there, or a list of it, got {type(saved).__name__}")
    for state in states:
        if not isinstance(state, Mapping):
            raise TypeError(f"{IN_STATE} expected what state_dict() has there, got {type(state).__name__} in a list")
        if state.get("format") != FORMAT:
            raise ValueError(OTHER_FORMAT)
    for (rank, size), times in Counter((state["rank"], state["size"]) for state in states).most_common(1):
        if times > 1:
            raise ValueError(
                f"{IN_STATE} the state of rank {rank} of {size} is there twice\nHINT: give each rank's state once."
            )
    for state in states:
        for name, shape in state["shapes"].items():
            here = shapes.get(name)
            if here is not None and list(shape) != list(here):
                was, now = (" x ".join(map(str, each)) or "a number" for each in (shape, here))
                raise ValueError(
                    f"{IN_STATE} {name!r} was {was} when it was saved, but is {now} here\n"
                    "HINT: load the state of the same model, or leave the entry out, which loses what was not sent yet."
                )
    return list(states)


def resume(
    lane: WithResiduals,
    saved: Saved | Sequence[Saved],
    names: Sequence[str] | None = None,
    is_own: bool = False,
) -> None:
    """Go on from the residuals that one or several ranks of an earlier job saved, and from the turn of its warm-up.

    ``names``: of the lane's slots, if not their own. ``is_own``: this process saved them, so that it takes them. Else
    each rank's residuals are taken once: a rank takes its own; with another number of ranks, those of rank r go to rank
    r modulo the number of ranks here, which owes them all.
    """
    names = [slot.name for slot in lane.slots] if names is None else names
    states = check(saved, shapes_of(lane, names))
    for state in states:
        if is_own or state["rank"] % lane.group.size == lane.group.rank:
            arrays = {
                name: {kind: _as_array(tensor) for kind, tensor in kept.items()} for name, kept in state["kept"].items()
            }
            notes = [(*key, _as_array(value)) for *key, value in state["notes"]]
            lane.reducer.go_on_from(Checkpoint(state["place"], arrays, state["units"], state["turn"], notes), names)
    lane.reducer.residuals.start_at(max((state["turn"] for state in states), default=0))


def _as_array(value: Any) -> Any:
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else value


def move(old: Lane, old_slots: Mapping[int, int], new: Lane, new_slots: Mapping[int, int]) -> None:
    """Let a new lane go on with the residuals of an old one, of the parameters in both. Slots are given by id."""
    old_ids, new_ids = (sorted(slots, key=lambda key: slots[key]) for slots in (old_slots, new_slots))
    new.reducer.go_on_from(old.reducer.checkpoint(old_ids), new_ids)


class OptimizerCodecs:
    """The state of an optimizer's codecs: in its lane, or saved while it has no lane."""

    def __init__(self) -> None:
        self._lane: Lane | None = None
        self._saved: Any = None  # loaded, or of an earlier lane
        self._is_own = False  # saved by this process, whose rank may be another now

    def enter(self, lane: Lane | None) -> None:
        """Go on in a new lane; None: the optimizer has no lane now."""
        self._lane = lane
        if lane is not None and self._saved is not None:
            saved, self._saved = self._saved, None
            resume(lane, saved, is_own=self._is_own)

    def leave(self) -> None:
        """Leave the lane, with its state if the last step is over."""
        lane, self._lane = self._lane, None
        if lane is not None and lane.error is None and not lane.in_flight:
            self._saved, self._is_own = save(lane), True

    def state(self) -> Any:
        """Return this rank's state for ``optimizer.state_dict()``; None if there is none."""
        return self._saved if self._lane is None else save(self._lane)

    def load(self, saved: Any, is_own: bool = False) -> None:
        """Go on from a checked state of this or other ranks; from nothing if it is None. ``is_own``: see ``resume``."""
        self.reset()
        self._saved, self._is_own = saved, is_own
        self.enter(self._lane)

    def hold(self, saved: Saved) -> None:
        """Go on from a saved state in the next lane; the present one runs no step any more."""
        self._lane, self._saved, self._is_own = None, saved, False

    def reset(self) -> None:
        """Forget the state."""
        self._saved = None
        if self._lane is not None:
            self._lane.reducer.reset()


def merge_state_dicts(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the state_dict for this rank to load, from those that all ranks of an earlier job saved.

    Nothing that compression kept and had not sent is lost, whatever the number of ranks is now.

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
    return {**states[0], KEY: [part for state in kept for part in ([state] if isinstance(state, Mapping) else state)]}
