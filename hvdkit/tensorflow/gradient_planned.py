"""Gradients of variables in a lane's fusion buffers: in a graph each part is handed over as soon as it is computed."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import numpy as np
import tensorflow as tf

from hvdkit.api.planning import next_title
from hvdkit.compression import Codec
from hvdkit.engine import runtime
from hvdkit.engine.plan import Slot
from hvdkit.engine.plans import HOST, place_for
from hvdkit.errors import HorovodInternalError
from hvdkit.kernels.reduce_op import ReduceOp
from hvdkit.tensorflow.arrays import as_array, as_tensor, copy_of
from hvdkit.tensorflow.autograph import not_converted
from hvdkit.tensorflow.bridge import call, check_functions, in_order
from hvdkit.tensorflow.device import Device, device_of_job
from hvdkit.tensorflow.exceptions import RUNNING, mark

# Of a graph's gradients that are handed over together, in bytes: few enough parts that what a part costs is little
# beside its copy, enough that the first ones travel while the backward pass computes the last ones.
PART_BYTES = 4 << 20
# On a device each part waits for what TensorFlow has computed so far, so there are fewer.
DEVICE_PART_BYTES = 32 << 20


class PlannedGradients:
    """The slots of some variables' gradients, reduced together once a step.

    The lane is registered by the first step that runs, not while a graph is traced: there ranks need not be at the
    same line of the program. A step that an exception left unfinished is given up by the next one.
    Where other ranks use it, all ranks fail.
    """

    def __init__(
        self,
        title: str,
        slots: Sequence[Slot],
        op: ReduceOp,
        scales: tuple[float, float],
        codecs: Sequence[Codec],
        groups: Sequence[Sequence[int]],
        process_set_id: int,
    ) -> None:
        self.slots = list(slots)
        self._title = title
        self._op, self._scales, self._codecs, self._groups = op, scales, codecs, groups
        self._process_set_id = process_set_id
        self._engine: Any = None
        self._lane: Any = None
        self._device: Device | None = None  # that of the lane, if it may live on one
        self._left: set[int] = set()  # slots of this step that were not handed over yet

    def device(self) -> Device | None:
        """The device on which these gradients can be reduced in the present job."""
        device = device_of_job()
        if device is None or not all(device.holds(slot.dtype) for slot in self.slots):
            return None
        place = place_for(runtime.engine(), device.place, self._codecs, self._process_set_id)
        return None if place == HOST else device

    def parts(self) -> list[list[int]]:
        """The slots in parts of a few MB, the last ones first, as the backward pass computes them."""
        parts: list[list[int]] = []
        most = PART_BYTES if self.device() is None else DEVICE_PART_BYTES
        nbytes = most
        for place in range(len(self.slots) - 1, -1, -1):
            if nbytes >= most:
                parts.append([])
                nbytes = 0
            parts[-1].append(place)
            nbytes += self.slots[place].elements * self.slots[place].dtype.itemsize
        return parts

    def begin(self) -> None:
        """Have a lane in which no step is under way. Collective where there is none yet.

        Raises HorovodInternalError once for a lane that failed since the last step; the next step makes a new one.
        """
        engine = runtime.engine()
        if engine is not self._engine:
            self.close()
            self._device = self.device()
            prescale, postscale = self._scales
            self._lane = engine.register_plan(
                next_title(engine, self._process_set_id, self._title),
                self.slots,
                op=self._op,
                prescale=prescale,
                postscale=postscale,
                codecs=self._codecs,
                process_set_id=self._process_set_id,
                place=HOST if self._device is None else self._device.place,
                groups=self._groups,
            )
            self._engine = engine
        else:
            with self._closing_what_failed():
                if self._lane.error is not None:
                    raise self._lane.error
                self._lane.abandon()
        self._left = set(range(len(self.slots)))

    def hand_over(self, places: Sequence[int], gradients: Sequence[Any]) -> None:
        """Copy gradients, eager tensors or arrays, into their slots, and let them be reduced."""
        slots = [self._lane.slot_array(place) for place in places]
        started = perf_counter()
        if self._on_device is not None:
            self._on_device.fill(slots, gradients)
        for place, slot, gradient in zip(places, slots, gradients, strict=True):
            if self._on_device is None:
                started = perf_counter()
                slot[...] = np.reshape(as_array(gradient), -1)
            self._lane.copied(place, started)
            self._left.discard(place)
            self._lane.ready(place)

    def finish(self) -> list[Any]:
        """Wait until all are reduced; copies of the slots, since these are of the next step as soon as it begins.

        Eager tensors of the lane's device, or arrays.
        """
        if self._left:
            raise HorovodInternalError(f"{self._title}: a step was finished of which gradients were never handed over")
        with self._closing_what_failed():
            self._lane.finish()
        reduced = [self._lane.slot_array(place).reshape(slot.shape) for place, slot in enumerate(self.slots)]
        if self._on_device is not None:
            return self._on_device.give(reduced)
        return [copy_of(array) for array in reduced]

    @property
    def _on_device(self) -> Device | None:
        return self._device if self._lane.on_device else None

    @contextmanager
    def _closing_what_failed(self) -> Iterator[None]:
        """Have all ranks agree anew after an error, which each raises once."""
        try:
            yield
        except HorovodInternalError:
            self.close()
            raise

    def close(self) -> None:
        """Give the lane back."""
        if self._lane is not None:
            self._lane.close()
        self._engine = self._lane = None


@not_converted
def reduce_planned(plan: PlannedGradients, gradients: Sequence[Any]) -> list[Any]:
    """The reduced gradients, one for each slot of the plan, in eager execution or in a graph."""
    if tf.executing_eagerly():
        plan.begin()
        for part in plan.parts():
            plan.hand_over(part, [gradients[place] for place in part])
        return [as_tensor(one) if isinstance(one, np.ndarray) else tf.identity(one) for one in plan.finish()]
    check_functions()
    for number, part in enumerate(plan.parts()):
        hand_over = functools.partial(_hand_over, plan, part, number == 0, gradients)
        in_order(hand_over, first=number == 0, last=False)

    @not_converted
    def end() -> list[Any]:
        try:
            # Nothing more is handed over in this graph before, so whoever runs it is stuck if this is.
            with runtime.engine().watch.standing_for(RUNNING):
                return plan.finish()
        except Exception as error:
            raise mark(error) from None

    # The wait has its place in the order too: then steps that share a lane cannot overtake each other.
    dtypes = [gradient.dtype for gradient in gradients]
    results = in_order(lambda: call(plan.device(), end, [], dtypes, "hvdkit_end"), first=False)
    for result, slot in zip(results, plan.slots, strict=True):
        result.set_shape(slot.shape)
    return [tf.identity(result) for result in results]  # where the caller wants them


def _hand_over(plan: PlannedGradients, part: Sequence[int], is_first: bool, gradients: Sequence[Any]) -> Any:
    @not_converted
    def begin(*arrays: Any) -> Any:
        try:
            if is_first:
                plan.begin()
            plan.hand_over(part, arrays)
        except Exception as error:
            raise mark(error) from None
        return np.int64(0)

    return call(plan.device(), begin, [gradients[place] for place in part], tf.int64, "hvdkit_begin")


class Plans:
    """The plans of this process by what they reduce. A plan goes when one of its variables does."""

    def __init__(self) -> None:
        self._plans: dict[Any, PlannedGradients] = {}

    def get(self, key: Any, variables: Sequence[Any], make: Callable[[], PlannedGradients]) -> PlannedGradients:
        """The plan of ``key``, which has ids of ``variables``, made if there is none."""
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = make()
            for variable in variables:
                weakref.finalize(variable, self._forget, key)
        return plan

    def _forget(self, key: Any) -> None:
        plan = self._plans.pop(key, None)
        if plan is not None:
            plan.close()


PLANS = Plans()
