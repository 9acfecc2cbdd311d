"""The gradients of a DistributedDataParallel: which are averaged together and when, and the state that codecs keep.

The order of parameters, the same on all ranks, decides. DDP's new layout of its buckets after the first step changes
nothing: each parameter is a slot, and a bucket of slots begins when DDP has handed over all of them.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from hvdkit.api.gradients.compression import Policy
from hvdkit.collectives.group import Group, Steps
from hvdkit.collectives.hierarchical import sent_share
from hvdkit.compression import Codec
from hvdkit.engine.ordered.calls import NO_ARRAY, Collective, CollectiveKind, Description
from hvdkit.engine.ordered.facts import agree
from hvdkit.engine.steps.device_reducer import CopiedReducer
from hvdkit.engine.steps.host_reducer import HostReducer
from hvdkit.engine.steps.offers import FILLED, Offer, offer_of
from hvdkit.engine.steps.plan import UNSEEN, Arrangement, Reduction, Slot, arrange
from hvdkit.engine.steps.registration import copies_opener
from hvdkit.engine.steps.schedule import Piece
from hvdkit.errors import abridged
from hvdkit.kernels import ReduceOp
from hvdkit.torch.data_parallel.bucket import HookBucket
from hvdkit.torch.data_parallel.group import NAME, HookGroup
from hvdkit.torch.gradients import compression_state
from hvdkit.torch.gradients.layout import memory_order
from hvdkit.torch.ops.framework import as_array

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LOADING = "ddp_hook.load_state_dict"
# The keys of a state_dict whose values are the same on all ranks, with their words for errors; and all keys.
ALIKE = {"size": "size", "turn": "turn", "codec": "codec", "shapes": "list of parameters"}
KEYS = {*ALIKE, "rank", "kept"}


class ModelGradients:
    """The gradients of one model. ``is_registered`` after its first step, in which ranks agree on them."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._names: dict[Tensor, str] = {}  # in the model's order; empty unless the hook was registered with a model
        self._slots: dict[Tensor, int] = {}
        self._shapes: list[list[int]] = []
        self._lock = threading.Lock()  # DDP hands buckets over while the engine's driver ends others
        self.step: list[HookBucket] = []  # the buckets of this step that are not averaged yet
        self.turn = 0  # complete steps, also earlier jobs'
        self.in_flight = False  # a bucket of this step was handed over
        self.is_registered = False
        # The rest is of the first step on.
        self.slots: list[Slot] = []
        self.group: Group
        self.reducer: HostReducer
        self._description = ""  # of the slots, the same on all ranks
        self._arrangement: Arrangement
        self._marks: dict[int, list[Any]] = {}  # by bucket of slots: of the thread's work on a device
        self._missing: list[int] = []  # by bucket of slots: slots not handed over
        self._open: list[int] = []  # by bucket of slots: pieces not averaged
        self._begun = 0  # pieces

    @property
    def have_model(self) -> bool:
        """True after a model was registered or its first step was complete."""
        return bool(self._names or self._slots)

    def name(self, module: nn.Module) -> None:
        """Take the names of the parameters from a model."""
        self._names = {parameter: name for name, parameter in module.named_parameters() if parameter.requires_grad}

    def check(self, index: int, flat: Tensor, parameters: Sequence[Tensor]) -> None:
        """Raise ValueError for a bucket that cannot be averaged, or that has a parameter of another model."""
        if flat.dtype not in DTYPES or flat.device.type not in ("cpu", "cuda"):
            names = [self._names.get(parameter) or str([*parameter.shape]) for parameter in parameters]
            raise ValueError(
                f"ddp_hook: bucket {index} ({abridged(names)}) is {flat.dtype} on {flat.device}; "
                f"expected one of {', '.join(map(str, DTYPES))} on the CPU or CUDA"
            )
        if self.step and flat.device != self.step[0].flat.device:
            raise ValueError(
                f"ddp_hook: bucket {index} is on {flat.device}, and another is on {self.step[0].flat.device}\n"
                "HINT: keep all parameters of the model on one device."
            )
        if self.have_model and not all(parameter in (self._slots or self._names) for parameter in parameters):
            raise ValueError("ddp_hook: this hook belongs to another model\nHINT: make a hook for each model.")

    def register(self, group: HookGroup) -> None:
        """Agree with all ranks on the gradients in this step's buckets. Raises MismatchError on all ranks."""
        step = self.step
        dtypes = {parameter: bucket.flat.dtype for bucket in step for parameter in bucket.parameters}
        # DDP's buckets begin at the model's end, but within a bucket parameters stand in the model's order.
        listed = [parameter for bucket in reversed(step) for parameter in bucket.parameters]
        names = self._names or {parameter: f"parameter {index}" for index, parameter in enumerate(listed)}
        present = [(name, parameter) for parameter, name in names.items() if parameter in dtypes]
        codecs, numbers = [self._codec], [0] * len(present)  # a cast is for all gradients
        if self._codec.encodes:
            codecs, numbers = Policy(self._codec).choose(present)
        self.slots = []
        for (name, parameter), number in zip(present, numbers, strict=True):
            real = torch.view_as_real(parameter.detach()) if parameter.is_complex() else parameter
            shape = tuple(real.shape[axis] for axis in memory_order(real) or range(real.dim()))  # as it lies in memory
            dtype = as_array(torch.empty(0, dtype=dtypes[parameter])).dtype
            self.slots.append(Slot(name, shape, dtype, number))
        described = [[slot.name, list(slot.shape), str(slot.dtype), codecs[slot.codec].summary] for slot in self.slots]
        device = step[0].flat.device
        agree(group.ordered, NAME, {"slots": described, "earlier": self.turn, "device": device.type})
        self._description = repr(described)
        self._slots = {parameter: slot for slot, (_, parameter) in enumerate(present)}
        self._shapes = [list(slot.shape) for slot in self.slots]
        self._build(group, Reduction(ReduceOp.AVERAGE, 1.0, 1.0, tuple(codecs)), str(device))
        self.is_registered = True

    def _build(self, group: HookGroup, reduction: Reduction, device: str) -> None:
        """Make the reducer, and lay the slots out in buckets."""
        self.group = group.ordered.group
        opener, lanes = copies_opener(device), group.engine.lanes
        self.reducer = HostReducer(self.group, reduction, None, self.slots)
        if opener is not None:
            self.reducer = CopiedReducer(self.group, reduction, None, self.slots, None, opener)
        sizes, share = self.reducer.sizes(lanes.sizes), sent_share(self.group.size, None)
        unseen, cuts = [UNSEEN] * len(self.slots), not self.reducer.on_device
        self._arrangement = arrange(self.slots, unseen, (), sizes, lanes.network, share, cuts, reduction.codecs)
        self.reducer.lay_out(self._arrangement)
        self._begin_step()

    def _begin_step(self) -> None:
        self._marks, self._begun, self.in_flight = {}, 0, False
        self._missing = self._arrangement.slots_of.copy()
        self._open = [0] * len(self._missing)
        for piece in self._arrangement.pieces:
            self._open[piece.bucket] += 1

    def take(self, bucket: HookBucket) -> None:
        """Note that DDP has handed over a bucket."""
        with self._lock:
            self.step.append(bucket)
            self.in_flight = True

    def drop(self) -> list[HookBucket]:
        """Forget this step's buckets, and return them."""
        with self._lock:
            step, self.step = self.step, []
        return step

    def hand_over(self, bucket: HookBucket) -> Sequence[int]:
        """Offer the gradients of a bucket. Return the pieces that begin now, which ``call`` makes."""
        arrangement, waits = self._arrangement, set()
        for parameter, values in bucket.gradients():
            slot = self._slots[parameter]
            number = arrangement.bucket_of[slot]
            waits.add(number)
            self.reducer.offer([slot], [self._offer(slot, values)])
            self._missing[number] -= 1
        mark = self.reducer.mark()
        for number in waits:
            self._marks.setdefault(number, []).append(mark)
        bucket.waits = waits
        first, pieces = self._begun, arrangement.pieces
        while self._begun < len(pieces) and not self._missing[pieces[self._begun].bucket]:
            self._begun += 1
        return range(first, self._begun)

    def _offer(self, slot: int, values: Tensor) -> Offer:
        if self.reducer.on_device:
            return Offer(0, lambda: values)
        small = self.reducer.small(slot)
        if small is None:
            return offer_of(as_array(values))
        small[...] = as_array(values)
        return FILLED

    def call(self, index: int) -> Collective:
        """Return the call that averages a piece. Ranks compare plans and numbers of steps by the first of a step."""
        piece: Piece = self._arrangement.pieces[index]
        number = zlib.crc32(f"{self._description} {self.turn} {index}".encode())
        dtype, elements = str(self._arrangement.buckets[piece.bucket].dtype), piece.end - piece.begin
        description = Description(CollectiveKind.ALL_REDUCE, dtype, elements, "avg", codec=number)
        steps = partial(self._steps, piece)
        return Collective(description, NO_ARRAY, NO_ARRAY, steps=steps, is_agreed=index > 0)

    def _steps(self, piece: Piece, tag: int) -> Steps[None]:
        return self.reducer.reduce(piece, False, self._marks[piece.bucket], tag, None)

    def piece_ended(self, index: int) -> list[HookBucket]:
        """Note that a piece is averaged. Return the buckets of DDP that hold averages now."""
        piece: Piece = self._arrangement.pieces[index]
        if self.reducer.residuals.codec(piece.bucket).lossy:
            self.reducer.residuals.finished(piece)
        with self._lock:
            self._open[piece.bucket] -= 1
            if self._open[piece.bucket]:
                return []
            for bucket in self.step:
                if bucket.waits is not None:
                    bucket.waits.discard(piece.bucket)
            over = [bucket for bucket in self.step if bucket.waits == set()]
        for bucket in over:
            self._give_back(bucket)
        if not any(self._open):
            self.reducer.end_step()
            self.turn += 1
            self._begin_step()
        with self._lock:  # not before: an error up to here ends all of the step's buckets
            self.step = [bucket for bucket in self.step if bucket not in over]
        return over

    def _give_back(self, bucket: HookBucket) -> None:
        """Copy the small gradients back into the bucket."""
        for parameter, values in bucket.gradients():
            if not self.reducer.on_device and (small := self.reducer.small(self._slots[parameter])) is not None:
                as_array(values)[...] = small

    def names_in(self, index: int) -> str:
        """Return the names of the parameters in a piece, for errors."""
        bucket = self._arrangement.buckets[self._arrangement.pieces[index].bucket]
        return abridged([self.slots[slot].name for slot in bucket.slots])

    @property
    def _keys(self) -> list[str]:
        """The keys of parameters in a state: their places, since a model may be known without names."""
        return [str(index) for index in range(len(self._shapes))]

    def can_be_saved(self, has_failed: bool) -> bool:
        """True if the codecs' state is that after the last complete step. ``has_failed``: nothing runs any more."""
        if not self.is_registered or not self.reducer.residuals.keeps_anything:
            return True
        return not (self.reducer.residuals.is_in_use if has_failed else self.in_flight)

    def saved(self, rank: int, size: int) -> dict[str, Any]:
        """Return the codecs' state in the form of ``DDPHook.state_dict``."""
        kept = compression_state.saved(self, self._keys) if self.is_registered else None
        return {
            "codec": self._codec.summary,
            "rank": rank,
            "size": size,
            "turn": self.turn,
            "shapes": self._shapes,
            "kept": [kept] if kept else [],
        }

    def load(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Go on from the states of one or several ranks. Raises ValueError for states of another model."""
        shapes, kept = states[0]["shapes"], [entry for state in states for entry in state["kept"]]
        if shapes and shapes != self._shapes:
            pairs = enumerate(zip_longest(shapes, self._shapes))
            index, pair = next((index, pair) for index, pair in pairs if pair[0] != pair[1])
            was, has = ("missing" if shape is None else f"of shape {list(shape)}" for shape in pair)
            raise ValueError(
                f"the state_dict is of another model: parameter {index} is {has} here, but was {was} there.\n"
                "HINT: load a state that a hook of this model saved."
            )
        self.reducer.reset()
        compression_state.resume(self, kept, self._keys)
        self.turn = states[0]["turn"]


def checked(saved: Any) -> list[Mapping[str, Any]]:
    """Return a user's states as a list. Raises TypeError unless they are a hook's, ValueError if they do not fit."""
    states = [saved] if isinstance(saved, Mapping) else saved
    if not isinstance(states, Sequence) or isinstance(states, str):
        raise TypeError(f"{LOADING}: expected a state_dict or a list of one for each rank, got {type(saved).__name__}")
    if not states:
        raise ValueError(f"{LOADING}: expected the state_dicts of all ranks, got none")
    for number, state in enumerate(states):
        if not isinstance(state, Mapping) or not state.keys() >= KEYS:
            got = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
            raise TypeError(f"{LOADING}: expected the state_dict of a ddp_hook, got {got} as number {number}")
        for key, what in ALIKE.items():
            if state[key] != states[0][key]:
                raise ValueError(
                    f"{LOADING}: the state_dicts are not of the same step of the same job: number {number} has"
                    f" another {what} than number 0\nHINT: load the states that all ranks saved after the same step."
                )
        if any(state["rank"] == other["rank"] for other in states[:number]):
            raise ValueError(
                f"{LOADING}: number {number} is another state_dict of rank {state['rank']}\n"
                "HINT: load one state_dict of each rank."
            )
    return list(states)
