"""Gradients of variables that a lane reduces: in a graph each part is handed over as soon as it is computed.

A tape's or an optimizer's gradients go by a lane (``gradient_planned``), kept by its variables and settings, and
registered by the first step that runs, not while a graph is traced, where ranks need not be at the same line, and
closed when one of the variables goes. Who takes part is decided when a graph is traced, and the graph looks each time
whether that holds. In a graph they are handed over in parts of 4 MiB, the last variables first, each as soon as it is
computed; what TensorFlow made is read and never written; one operation then waits for all and returns tensors of their
own. That wait has its place in the order too: steps that share a lane cannot overtake each other, and while it waits
the rank is known to be blocked (``Watch.standing_for``), so ranks with other numbers of batches get an error. A step
that an exception ended half way is given up when the next one begins (``engine/steps/abandoned``): the rank tells the
others before it fills up with zeros, and a rank that uses the step, or has used it, fails the lane on all. (Gradients
that go by name, sparse ones for example, tell nobody.) Sparse gradients are gathered; what is no variable, Adasum, and
a compression class of the user's go by name.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import tensorflow as tf

from hvdkit.api.gradients.pairing import Pairing
from hvdkit.compression import Codec
from hvdkit.engine.life import runtime
from hvdkit.engine.ops.requests import Call, ReduceRequest
from hvdkit.engine.steps.offers import FILLED, Offer, offer_of
from hvdkit.engine.steps.plan import Slot
from hvdkit.engine.steps.registration import HOST, lane_device
from hvdkit.errors import HorovodInternalError
from hvdkit.kernels.reduce_op import ReduceOp
from hvdkit.tensorflow.ops.arrays import as_array, as_tensor, copy_of, empty_like
from hvdkit.tensorflow.ops.bridge import call, check_functions, in_order
from hvdkit.tensorflow.ops.device import Device, device_for
from hvdkit.tensorflow.ops.exceptions import RUNNING, in_graph
from hvdkit.tensorflow.ops.unconverted import as_written
from hvdkit.tensorflow.verification import VariableVerification, Verified, hash_in_graph, hash_now

# Of a graph's gradients that are handed over together, in bytes: few enough parts that what a part costs is little
# beside its copy, enough that the first ones travel while the backward pass computes the last ones.
PART_BYTES = 4 << 20
# On a device each part waits for what TensorFlow has computed so far, so there are fewer.
DEVICE_PART_BYTES = 32 << 20


@dataclass(eq=False)
class PlannedGradients:
    """The slots of some variables' gradients, reduced together once a step.

    The lane is registered by the first step that runs, not while a graph is traced: there ranks need not be at the
    same line of the program. A step that an exception left unfinished is given up by the next one.
    Where other ranks use it, all ranks fail.
    """

    pairing: Pairing
    slots: Sequence[Slot]
    op: ReduceOp
    scales: tuple[float, float]
    codecs: Sequence[Codec]
    groups: Sequence[Sequence[int]]
    process_set_id: int

    def __post_init__(self) -> None:
        self._engine: Any = None
        self._lane: Any = None  # None within a step: a rank has joined, and gradients go by name
        self._epoch = 0  # see Groups.end_join
        self._title = ""
        self._device: Device | None = None  # that of the lane, if it may live on one
        self.verification = VariableVerification()
        self._left: set[int] = set()  # slots of this step that were not handed over yet
        self._results: dict[int, Any] = {}  # of this step, by slot: what is not copied into the lane's memory

    def device(self) -> Device | None:
        """The device on which these gradients can be reduced in the present job."""
        device = device_for(self.slots)
        if device is None:
            return None
        engine = runtime.engine()
        name = lane_device(engine.groups, engine.topology, device.torch_name, self.codecs, self.process_set_id)
        return None if name == HOST else device

    def parts(self) -> list[list[int]]:
        """The slots in parts of a few MB, the last ones first, as the backward pass computes them."""
        parts: list[list[int]] = []
        most = PART_BYTES if self.device() is None else DEVICE_PART_BYTES
        nbytes = most
        for index in range(len(self.slots) - 1, -1, -1):
            if nbytes >= most:
                parts.append([])
                nbytes = 0
            parts[-1].append(index)
            nbytes += self.slots[index].elements * self.slots[index].dtype.itemsize
        return parts

    def begin(self) -> int:
        """Have a lane in which no step is under way. Collective where there is none yet.

        Returns what shall be verified in this step.

        Raises HorovodInternalError once for a lane that failed since the last step; the next step makes a new one.
        """
        engine = runtime.engine()
        if engine is not self._engine or self._lane is None or self._epoch != engine.groups.plan_epoch:
            self.close()
            self._device = self.device()
            prescale, postscale = self.scales
            self._epoch, self._title = engine.groups.plan_epoch, self.pairing.next_title(engine, self.process_set_id)
            self._lane = engine.register_plan(
                self._title,
                self.slots,
                op=self.op,
                prescale=prescale,
                postscale=postscale,
                codecs=self.codecs,
                process_set_id=self.process_set_id,
                device=HOST if self._device is None else self._device.torch_name,
                groups=self.groups,
            )
            if self._lane is not None:
                self.verification.attach(self._lane, engine)
            self._engine = engine
        else:
            with self._closing_what_failed():
                if self._lane.error is not None:
                    raise self._lane.error
                self._lane.abandon()
        self._left, self._results = set(range(len(self.slots))), {}
        return self.verification.begin()

    def hand_over(self, indices: Sequence[int], gradients: Sequence[Any]) -> None:
        """Let gradients, eager tensors or arrays, be reduced: TensorFlow's own are read, and never written."""
        if self._lane is None:
            for index, gradient in zip(indices, gradients, strict=True):
                self._results[index] = copy_of(np.reshape(as_array(gradient), -1))
            self._left.difference_update(indices)
            return
        started = perf_counter()
        if self._on_device is not None:
            copies = self._on_device.copies(gradients)
            offers = [Offer(0, partial(copy.view, -1)) for copy in copies]
            self._results.update(zip(indices, copies, strict=True))
        else:
            offers = [
                self._offer(index, as_array(gradient)) for index, gradient in zip(indices, gradients, strict=True)
            ]
        for index, offer in zip(indices, offers, strict=True):
            self._lane.records.copied([index], started)
            self._left.discard(index)
            self._lane.ready(index, offer)

    def _offer(self, index: int, array: Any) -> Offer:
        small, flat = self._lane.small(index), np.reshape(array, -1)
        if small is not None:
            small[...] = flat
            return FILLED
        result = self._results[index] = empty_like(flat)
        return offer_of(result, source=flat)

    def finish(self) -> list[Any]:
        """Wait until all are reduced: eager tensors of the lane's device, or arrays, which are the caller's.

        Raises ParametersDifferError, on all ranks, where these held other variables than they do here.
        """
        if self._left:
            raise HorovodInternalError(f"{self._title}: a step was finished of which gradients were never handed over")
        if self._lane is None:
            return self._finish_by_name()
        with self._closing_what_failed():
            self._lane.finish()
        self.verification.finished()
        results, self._results = self._results, {}
        if self._on_device is not None:
            return self._on_device.give([results[index] for index in range(len(self.slots))])
        return [
            results[index].reshape(slot.shape)
            if index in results
            else copy_of(self._lane.small(index).reshape(slot.shape))
            for index, slot in enumerate(self.slots)
        ]

    def _finish_by_name(self) -> list[Any]:
        arrays = [self._results.pop(index) for index in range(len(self.slots))]
        self._engine.allreduce(
            arrays, ReduceRequest(self.op, *self.scales), Call(self._title, self.process_set_id)
        ).wait()
        return [array.reshape(slot.shape) for array, slot in zip(arrays, self.slots, strict=True)]

    @property
    def _on_device(self) -> Device | None:
        return self._device if self._lane is not None and self._lane.on_device else None

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


PLANS: dict[Any, PlannedGradients] = {}  # of this process, by what they reduce


@as_written
def reduce_planned(plan: PlannedGradients, gradients: Sequence[Any], variables: Sequence[Verified] = ()) -> list[Any]:
    """The reduced gradients, one for each slot of the plan, in eager execution or in a graph.

    ``variables`` are looked at meanwhile: whether all ranks hold the same.
    """
    if tf.executing_eagerly():
        hash_now(plan.verification, variables, plan.begin())
        for part in plan.parts():
            plan.hand_over(part, [gradients[index] for index in part])
        return [as_tensor(one) if isinstance(one, np.ndarray) else tf.identity(one) for one in plan.finish()]
    check_functions()
    handed_over = []
    for number, part in enumerate(plan.parts()):
        hand_over = partial(_hand_over, plan, part, number == 0, gradients)
        handed_over.append(in_order(hand_over, first=number == 0, last=False))
    hashed = hash_in_graph(plan.verification, variables, handed_over[0])

    @in_graph
    def end() -> list[Any]:
        # Nothing more is handed over in this graph before, so whoever runs it is stuck if this is.
        with runtime.engine().watch.standing_for(RUNNING):
            return plan.finish()

    # The wait has its place in the order too: then steps that share a lane cannot overtake each other.
    dtypes = [gradient.dtype for gradient in gradients]
    with tf.control_dependencies(hashed):
        results = in_order(lambda: call(plan.device(), end, [], dtypes, "hvdkit_end"), first=False)
    for result, slot in zip(results, plan.slots, strict=True):
        result.set_shape(slot.shape)
    return [tf.identity(result) for result in results]  # where the caller wants them


def _hand_over(plan: PlannedGradients, part: Sequence[int], is_first: bool, gradients: Sequence[Any]) -> Any:
    @in_graph
    def begin(*arrays: Any) -> Any:
        wanted = plan.begin() if is_first else 0
        plan.hand_over(part, arrays)
        return np.int64(wanted)

    return call(plan.device(), begin, [gradients[index] for index in part], tf.int64, "hvdkit_begin")


def plan_of(key: Any, variables: Sequence[Any], make: Callable[[], PlannedGradients]) -> PlannedGradients:
    """The plan of ``key``, which has ids of ``variables``, made if there is none. It goes when one of them does."""
    plan = PLANS.get(key)
    if plan is None:
        plan = PLANS[key] = make()
        for variable in variables:
            weakref.finalize(variable, _forget, key)
    return plan


def _forget(key: Any) -> None:
    plan = PLANS.pop(key, None)
    if plan is not None:
        plan.close()
