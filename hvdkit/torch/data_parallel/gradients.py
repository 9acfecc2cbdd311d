"""The gradients of a DistributedDataParallel in a lane, and the state that its codecs keep.

Each parameter is a slot. The lane decides which gradients travel together and when; DDP's new layout of its buckets
after the first step changes neither.
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

from hvdkit.api.gradients.compression import Policy
from hvdkit.compression import Codec
from hvdkit.engine.session.core import Engine
from hvdkit.engine.steps.lane import Lane
from hvdkit.engine.steps.offers import FILLED, offer_of
from hvdkit.engine.steps.plan import Slot
from hvdkit.kernels import ReduceOp
from hvdkit.kernels.dtypes import Array
from hvdkit.torch.gradients import compression_state
from hvdkit.torch.gradients.layout import memory_order
from hvdkit.torch.ops.framework import as_array

logger = logging.getLogger("hvdkit")

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LOADING = "ddp_hook.load_state_dict"
NAMED = 3  # parameters that an error names
# The keys of a state_dict whose values are the same on all ranks, with their words for errors; and all keys.
ALIKE = {"size": "size", "turn": "turn", "codec": "codec", "shapes": "list of parameters"}
KEYS = {*ALIKE, "rank", "kept"}


@dataclass(eq=False)
class HookBucket:
    """A bucket of DDP in one step: ``flat``, of which ``host`` is the host's copy or, on the CPU, the same tensor."""

    flat: Tensor
    parameters: list[Tensor]
    ready: Any  # the event after which ``flat`` has its values on a device, None on the CPU
    future: Future[Tensor]
    host: Tensor
    errors: list[BaseException] = field(default_factory=list)

    def result(self, done: Future[Tensor]) -> Tensor:
        """Return the average, as a callback of the Future, or raise the error that ended the step.

        DDP waits in C++, which gets an error that a callback raises, but not that of Future.set_exception.
        """
        if self.errors:
            raise self.errors[0]
        return done.value()

    def fail(self, error: BaseException) -> None:
        """End the Future with an error."""
        self.errors = [error]
        try:
            if not self.future.done():
                self.future.set_result(torch.empty(0))  # never used, and not on the device, which may have failed
        except Exception:  # the Futures of other buckets must end all the same
            logger.exception("ddp_hook: a bucket's Future could not be ended")

    def gradients(self) -> Iterator[tuple[Tensor, Array]]:
        """Yield each parameter with its gradient in host memory, flat."""
        values = as_array(self.host)
        for parameter in self.parameters:
            count = parameter.numel() * (2 if parameter.is_complex() else 1)  # DDP views complex numbers as real pairs
            yield parameter, values[:count]
            values = values[count:]
        assert not values.size, values.size


class PinnedCopies:
    """Page-locked host memory for buckets on devices, and the streams that fill it and copy results back."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}
        self._memory: dict[int, Tensor] = {}  # by index of the bucket

    def bucket(self, index: int, flat: Tensor, parameters: list[Tensor]) -> HookBucket:
        """Return a bucket, with memory of the host if it is on a device; no value is copied yet."""
        if flat.device.type != "cuda":
            return HookBucket(flat, parameters, None, Future(), flat)
        # The last step's copy back ends before the next fill, because both are on the device's stream.
        host = self._memory.get(index)
        if host is None or host.shape != flat.shape or host.dtype != flat.dtype:
            host = self._memory[index] = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
        ready = torch.cuda.current_stream(flat.device).record_event()
        return HookBucket(flat, parameters, ready, Future(devices=[flat.device]), host)

    def fill(self, bucket: HookBucket) -> None:
        """Copy a bucket to the host and wait for the copy."""
        stream = self._stream(bucket)
        with torch.cuda.stream(stream):
            stream.wait_event(bucket.ready)
            bucket.host.copy_(bucket.flat, non_blocking=True)
            stream.synchronize()

    def finish(self, bucket: HookBucket) -> None:
        """End the bucket's Future, after the copy back to a device. DDP's wait for the Future includes the copy."""
        if bucket.ready is None:
            bucket.future.set_result(bucket.flat)
            return
        with torch.cuda.stream(self._stream(bucket)):
            bucket.flat.copy_(bucket.host, non_blocking=True)
            bucket.future.set_result(bucket.flat)

    def _stream(self, bucket: HookBucket) -> Any:
        device, stream = bucket.flat.device, self._streams.get(bucket.flat.device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return stream


class ModelGradients:
    """The gradients of one model. ``lane`` is None before the first step is complete, by which ranks agree on it."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._names: dict[Tensor, str] = {}  # in the model's order; empty unless the hook was registered with a model
        self._slots: dict[Tensor, int] = {}
        self._shapes: list[list[int]] = []
        self._earlier = 0  # steps before the lane's
        self.lane: Lane | None = None

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
            more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
            raise ValueError(
                f"ddp_hook: bucket {index} ({', '.join(names[:NAMED])}{more}) is {flat.dtype} on {flat.device}; "
                f"expected one of {', '.join(map(str, DTYPES))} on the CPU or CUDA"
            )
        if self.have_model and not all(parameter in (self._slots or self._names) for parameter in parameters):
            raise ValueError("ddp_hook: this hook belongs to another model\nHINT: make one for each model.")

    def register(self, engine: Engine, step: Sequence[HookBucket]) -> Lane:
        """Agree with all ranks on the gradients in the buckets of the first step. Raises MismatchError on all ranks."""
        dtypes = {parameter: values.dtype for bucket in step for parameter, values in bucket.gradients()}
        # DDP's buckets begin at the model's end, but within a bucket parameters stand in the model's order.
        listed = [parameter for bucket in reversed(step) for parameter in bucket.parameters]
        names = self._names or {parameter: f"parameter {index}" for index, parameter in enumerate(listed)}
        named = [(name, parameter) for parameter, name in names.items() if parameter in dtypes]
        codecs, numbers = [self._codec], [0] * len(named)  # a cast is for all gradients
        if self._codec.encodes:
            codecs, numbers = Policy(self._codec).choose(named)
        slots = []
        for (name, parameter), number in zip(named, numbers, strict=True):
            real = torch.view_as_real(parameter.detach()) if parameter.is_complex() else parameter
            shape = tuple(real.shape[axis] for axis in memory_order(real) or range(real.dim()))  # as it lies in memory
            slots.append(Slot(name, shape, dtypes[parameter], number))
        self.lane = engine.register_plan("ddp_hook", slots, op=ReduceOp.AVERAGE, codecs=codecs)
        assert self.lane is not None, "a rank has joined in a session of the hook's own"
        self._slots = {parameter: slot for slot, (_, parameter) in enumerate(named)}
        self._shapes = [list(slot.shape) for slot in slots]
        return self.lane

    def hand_over(self, lane: Lane, bucket: HookBucket) -> None:
        """Start to average the gradients of a bucket: small gradients in the lane's memory, large ones in place."""
        for parameter, values in bucket.gradients():
            slot = self._slots[parameter]
            small = lane.small(slot)
            if small is not None:
                small[...] = values
            lane.ready(slot, offer_of(values) if small is None else FILLED)

    def give_back(self, lane: Lane, bucket: HookBucket) -> None:
        """Copy the small gradients back into the bucket."""
        for parameter, values in bucket.gradients():
            if (small := lane.small(self._slots[parameter])) is not None:
                values[...] = small

    @property
    def _keys(self) -> list[str]:
        """The keys of parameters in a state: their places, since a model may be known without names."""
        return [str(index) for index in range(len(self._shapes))]

    def can_be_saved(self, has_failed: bool) -> bool:
        """True if the codecs' state is that after the last complete step. ``has_failed``: nothing runs any more."""
        if self.lane is None or not self.lane.reducer.residuals.keeps_anything:
            return True
        return not (self.lane.reducer.residuals.is_in_use if has_failed else self.lane.in_flight)

    def under_way(self) -> str:
        """Return words about the reduction in progress, for errors."""
        if self.lane is None or not self.lane.reducer.residuals.is_in_use:
            return ""
        return f"\nIt was at {self.lane.waiting_for().partition(', ')[2].removesuffix(' ()')}."

    def saved(self, rank: int, size: int) -> dict[str, Any]:
        """Return the codecs' state in the form of ``DDPHook.state_dict``."""
        kept = None if self.lane is None else compression_state.saved(self.lane, self._keys)
        return {
            "codec": self._codec.summary,
            "rank": rank,
            "size": size,
            "turn": 0 if self.lane is None else self._earlier + self.lane.steps,
            "shapes": self._shapes,
            "kept": [kept] if kept else [],
        }

    def load(self, lane: Lane, states: Sequence[Mapping[str, Any]]) -> None:
        """Go on from the states of one or several ranks. Raises ValueError for states of another model."""
        shapes, kept = states[0]["shapes"], [entry for state in states for entry in state["kept"]]
        if shapes and shapes != self._shapes:
            pairs = enumerate(zip_longest(shapes, self._shapes))
            index, pair = next((index, pair) for index, pair in pairs if pair[0] != pair[1])
            was, has = ("nothing" if shape is None else " x ".join(map(str, shape)) or "a number" for shape in pair)
            raise ValueError(
                f"the state_dict is of another model: parameter {index} was {was} there, and is {has} here"
            )
        lane.reducer.reset()
        compression_state.resume(lane, kept, self._keys)
        self._earlier = states[0]["turn"] - lane.steps


def checked(saved: Any) -> list[Mapping[str, Any]]:
    """Return a user's states as a list. Raises TypeError unless they are a hook's, ValueError if they do not fit."""
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
