"""The state_dict of a communication hook: checked, and shared out among the ranks there are now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvdkit.compression import Codec
from hvdkit.torch.ddp_units import Units

KEYS = {"codec", "rank", "size", "turn", "units"}
FUNCTION = "ddp_hook.load_state_dict"


@dataclass
class Saved:
    """What one or several ranks saved, in the order of their ranks."""

    states: list[Mapping[str, Any]]

    def restore(self, units: Units, codec: Codec, rank: int, size: int) -> None:
        """Let rank ``rank`` of ``size`` go on from it: see ``DDPHook.load_state_dict``."""
        first = self.states[0]
        mine = [state for state in self.states if state["rank"] % size == rank]
        same_codec = first["codec"] == codec.told
        own = first["size"] == size and len(mine) == 1
        # A residual is of a sum, of which 1 / ranks is applied.
        units.restore(first, mine, size / first["size"], same_codec, own)


def save(units: Units | None, codec: Codec, rank: int, size: int) -> dict[str, Any]:
    """What a rank saves: lists, numbers, strings and tensors, which torch.load takes with ``weights_only``."""
    kept = {"turn": 0, "units": []} if units is None else units.saved()
    return {"codec": codec.told, "rank": rank, "size": size, **kept}


def check(saved: Any, codec: Codec) -> Saved:
    """What a user gave, as an object.

    Raises TypeError for what is no state_dict of a hook and no list of them, ValueError for states that are not of one
    moment of one job, or that hold what the codec would lose.
    """
    states = [saved] if isinstance(saved, Mapping) else saved
    if not isinstance(states, Sequence) or isinstance(states, str):
        raise TypeError(
            f"{FUNCTION}: expected a state_dict or a list of those of all ranks, got {type(saved).__name__}"
        )
    if not states:
        raise ValueError(f"{FUNCTION}: expected the state_dicts of all ranks, got none")
    for number, state in enumerate(states):
        if not isinstance(state, Mapping) or not state.keys() >= KEYS:
            told = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
            raise TypeError(f"{FUNCTION}: expected the state_dict of a ddp_hook, got {told} as number {number}")
        for name, of in (("size", _size), ("turn", _turn), ("codec", _codec), ("layout of the buckets", _layout)):
            if of(state) != of(states[0]):
                raise ValueError(
                    f"{FUNCTION}: the state_dicts are not of one moment of one job: number {number} has another {name} "
                    "than number 0\nHINT: load those that all ranks saved after the same step."
                )
        _check_kept(state, codec)
    return Saved(list(states))


def _check_kept(state: Mapping[str, Any], codec: Codec) -> None:
    keeps = codec.keeps
    for unit in state["units"]:
        for name, array in unit["kept"].items():
            if name not in keeps and bool(array.any()):
                raise ValueError(
                    f"{FUNCTION}: {state['codec']} kept a {name}, which {codec.told} would lose\n"
                    "HINT: go on with a codec that has feedback, or do not load this state."
                )


def _size(state: Mapping[str, Any]) -> Any:
    return state["size"]


def _turn(state: Mapping[str, Any]) -> Any:
    return state["turn"]


def _codec(state: Mapping[str, Any]) -> Any:
    return state["codec"]


def _layout(state: Mapping[str, Any]) -> Any:
    return [unit["members"] for unit in state["units"]]
