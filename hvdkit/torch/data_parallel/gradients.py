"""The gradients of a DistributedDataParallel in a lane, as those of an optimizer are, and what codecs keep of them.

Each parameter is a slot. What is encoded together, and when it travels, is for the lane: that DDP lays out its buckets
anew after the first step changes neither.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.futures import Future

from hvdkit.api.gradients.compression_policy import Policy
from hvdkit.compression import Codec
from hvdkit.engine.life.core import Engine
from hvdkit.engine.steps.lane import Lane
from hvdkit.engine.steps.offers import FILLED, offer_of
from hvdkit.engine.steps.plan import Slot
from hvdkit.kernels import ReduceOp
from hvdkit.torch.gradients import compression_state
from hvdkit.torch.gradients.layout import memory_order
from hvdkit.torch.ops.framework import Array, as_array

logger = logging.getLogger("hvdkit")

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
NAMED = 3  # of a bucket's parameters, in errors
LOADING = "ddp_hook.load_state_dict"
# What a state_dict must have, and what of it all ranks' have in common.
KEYS = {"codec", "rank", "size", "turn", "shapes", "kept"}
ALIKE = {"size": "size", "turn": "turn", "codec": "codec", "shapes": "list of parameters"}


@dataclass(eq=False)
class Bucket:
    """What DDP hands over in one step. ``host``: the same in host memory; ``ready``: when ``flat`` has its values."""

    flat: Tensor
    parameters: list[Tensor]
    ready: Any
    future: Future[Tensor]
    host: Tensor
    errors: list[BaseException] = field(default_factory=list)

    def fail(self, error: BaseException) -> None:
        """End the Future with an error."""
        self.errors = [error]
        try:
            if not self.future.done():
                # Not of the device, which may be what failed; nobody sees it.
                self.future.set_result(torch.empty(0))
        except Exception:  # the other buckets' Futures must end all the same
            logger.exception("ddp_hook: a bucket's Future could not be ended")

    def runs(self) -> Iterator[tuple[Tensor, Array]]:
        """Each parameter with its gradient in host memory, flat."""
        values, begin = as_array(self.host), 0
        for parameter in self.parameters:
            end = begin + _elements(parameter)
            yield parameter, values[begin:end]
            begin = end
        assert begin == values.size, (begin, values.size)


class Gradients:
    """Those of one model. ``lane``: None before its first step is complete, which tells all that ranks agree on."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._names: dict[Tensor, str] = {}  # in the model's order, if they were told
        self._slots: dict[Tensor, int] = {}
        self._shapes: list[list[int]] = []
        self._earlier = 0  # steps before the lane's
        self.lane: Lane | None = None

    @property
    def knows_any(self) -> bool:
        """Whether they are those of a model that was seen."""
        return bool(self._names or self._slots)

    def name(self, module: nn.Module) -> None:
        """Know the parameters by name too."""
        self._names = {parameter: name for name, parameter in module.named_parameters() if parameter.requires_grad}

    def check(self, index: int, flat: Tensor, parameters: Sequence[Tensor]) -> None:
        """Raises ValueError for a bucket that cannot be averaged, or that has a parameter of another model."""
        if flat.dtype not in DTYPES or flat.device.type not in ("cpu", "cuda"):
            names = [f"'{self._names[one]}'" if one in self._names else f"{list(one.shape)}" for one in parameters]
            more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
            raise ValueError(
                f"ddp_hook: bucket {index} ({', '.join(names[:NAMED])}{more}) is {flat.dtype} on {flat.device}; "
                f"expected one of {', '.join(map(str, DTYPES))} on the CPU or CUDA"
            )
        if self.knows_any and not all(one in (self._slots or self._names) for one in parameters):
            raise ValueError("ddp_hook: this hook belongs to another model\nHINT: make one for each model.")

    def register(self, engine: Engine, step: Sequence[Bucket]) -> Lane:
        """Agree with all ranks on the gradients in the buckets of the first step. Raises MismatchError on all ranks."""
        dtypes = {parameter: values.dtype for bucket in step for parameter, values in bucket.runs()}
        # DDP's buckets begin at the model's end, but within one parameters stand in the model's order.
        listed = [parameter for bucket in reversed(step) for parameter in bucket.parameters]
        names = self._names or {parameter: f"parameter {index}" for index, parameter in enumerate(listed)}
        named = [(name, parameter) for parameter, name in names.items() if parameter in dtypes]
        policy = Policy(self._codec) if self._codec.encodes else None  # a cast is for all
        codecs, numbers = policy.choose(named) if policy else ([self._codec], [0] * len(named))
        slots = [
            Slot(name, _shape(parameter), dtypes[parameter], number)
            for (name, parameter), number in zip(named, numbers, strict=True)
        ]
        self.lane = engine.register_plan("ddp_hook", slots, op=ReduceOp.AVERAGE, codecs=codecs)
        assert self.lane is not None, "a rank has joined in a session of the hook's own"
        self._slots = {parameter: slot for slot, (_, parameter) in enumerate(named)}
        self._shapes = [list(slot.shape) for slot in slots]
        return self.lane

    def hand_over(self, lane: Lane, bucket: Bucket) -> None:
        """Let the gradients of a bucket be averaged: small ones in the lane's memory, the others where they lie."""
        for parameter, values in bucket.runs():
            slot = self._slots[parameter]
            small = lane.small(slot)
            if small is not None:
                small[...] = values
            lane.ready(slot, offer_of(values) if small is None else FILLED)

    def give_back(self, lane: Lane, bucket: Bucket) -> None:
        """Bring the small ones back into the bucket."""
        for parameter, values in bucket.runs():
            small = lane.small(self._slots[parameter])
            if small is not None:
                values[...] = small

    @property
    def _keys(self) -> list[str]:
        """The keys of parameters in a state: their places, since a model may be known without names."""
        return [str(index) for index in range(len(self._shapes))]

    def can_be_saved(self, has_failed: bool) -> bool:
        """Whether codecs keep what they kept after the last complete step. ``has_failed``: nothing runs any more."""
        if self.lane is None or not self.lane.reducer.residuals.keeps_anything:
            return True
        return not (self.lane.reducer.residuals.is_in_use if has_failed else self.lane.in_flight)

    def under_way(self) -> str:
        """What is reduced now, for errors."""
        if self.lane is None or not self.lane.reducer.residuals.is_in_use:
            return ""
        return f"\nIt was at {self.lane.waiting_for().partition(', ')[2].removesuffix(' ()')}."

    def saved(self, rank: int, size: int) -> dict[str, Any]:
        """What codecs keep, as ``DDPHook.state_dict`` says it."""
        kept = None if self.lane is None else compression_state.saved(self.lane, self._keys)
        return {
            "codec": self._codec.summary,
            "rank": rank,
            "size": size,
            # Of these all ranks have the same, whatever each one keeps.
            "turn": 0 if self.lane is None else self._earlier + self.lane.steps,
            "shapes": self._shapes,
            "kept": [kept] if kept else [],
        }

    def load(self, lane: Lane, states: Sequence[Mapping[str, Any]]) -> None:
        """Go on from what one or several ranks saved. Raises ValueError if it is of another model."""
        theirs, kept = states[0]["shapes"], [one for state in states for one in state["kept"]]
        if theirs and theirs != self._shapes:
            pairs = zip_longest(theirs, self._shapes)
            index, was, has = next((index, *map(_dims, pair)) for index, pair in enumerate(pairs) if pair[0] != pair[1])
            raise ValueError(
                f"the state_dict is of another model: parameter {index} was {was} there, and is {has} here"
            )
        kept = compression_state.check(kept, compression_state.shapes_of(lane, self._keys))
        lane.reducer.reset()
        compression_state.resume(lane, kept, self._keys)
        self._earlier = states[0]["turn"] - lane.steps


def _dims(shape: Sequence[int] | None) -> str:
    return "missing" if shape is None else " x ".join(map(str, shape))


def _elements(parameter: Tensor) -> int:
    return parameter.numel() * (2 if parameter.is_complex() else 1)  # DDP views them as pairs of real numbers


def _shape(parameter: Tensor) -> tuple[int, ...]:
    """A gradient's as it lies in a bucket, which is as its parameter lies in memory."""
    real = torch.view_as_real(parameter.detach()) if parameter.is_complex() else parameter
    return tuple(real.shape[axis] for axis in memory_order(real) or range(real.dim()))


def checked(saved: Any) -> list[Mapping[str, Any]]:
    """The states that a user gave.

    Raises TypeError for what is no state_dict of a hook and no list of them, ValueError for states that are not of one
    moment of one job.
    """
    states = [saved] if isinstance(saved, Mapping) else saved
    if not isinstance(states, Sequence) or isinstance(states, str):
        raise TypeError(f"{LOADING}: expected a state_dict or a list of those of all ranks, got {type(saved).__name__}")
    if not states:
        raise ValueError(f"{LOADING}: expected the state_dicts of all ranks, got none")
    for number, state in enumerate(states):
        if not isinstance(state, Mapping) or not state.keys() >= KEYS:
            got = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
            raise TypeError(f"{LOADING}: expected the state_dict of a ddp_hook, got {got} as number {number}")
        for key, what in ALIKE.items():
            if state[key] != states[0][key]:
                raise ValueError(
                    f"{LOADING}: the state_dicts are not of one moment of one job: number {number} has another {what} "
                    "than number 0\nHINT: load those that all ranks saved after the same step."
                )
        if any(state["rank"] == other["rank"] for other in states[:number]):
            raise ValueError(
                f"{LOADING}: number {number} is another state_dict of rank {state['rank']}\n"
                "HINT: load that of each rank once."
            )
    return list(states)


def share_of(states: Sequence[Mapping[str, Any]], rank: int, size: int) -> dict[str, Any]:
    """What rank ``rank`` of ``size`` goes on from, of what one or several ranks saved."""
    kept = [one for state in states for one in state["kept"] if one["rank"] % size == rank]
    return {**states[0], "rank": rank, "size": size, "kept": kept}
