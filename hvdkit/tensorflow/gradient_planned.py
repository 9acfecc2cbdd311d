"""Dense gradients of variables, reduced together by a lane once a step.

The first step that runs registers the lane, since ranks need not be at the same line of the program while a graph is
traced. In a graph the gradients are handed over in parts of 4 MiB, the last variables first, each part as soon as it is
computed. One node, in the order of nodes (``ops/bridge``), then waits for all results. While it waits the engine knows
that the rank is blocked (``Watch.standing_for``), and ranks with different numbers of batches get an error.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import tensorflow as tf

from hvdkit.api import checks
from hvdkit.api.gradients.pairing import Pairing
from hvdkit.api.gradients.planning import form_groups
from hvdkit.api.gradients.settings import GradientSettings, is_variable
from hvdkit.api.operations import Invocation
from hvdkit.compression import Codec
from hvdkit.engine.ops.requests import Call, ReduceRequest
from hvdkit.engine.session import runtime
from hvdkit.engine.steps.offers import FILLED, offer_of
from hvdkit.engine.steps.plan import Slot
from hvdkit.errors import HorovodInternalError
from hvdkit.kernels.reduce_op import ReduceOp
from hvdkit.tensorflow.ops.bridge import allreduce_dense, as_written, differentiable, ordered_node
from hvdkit.tensorflow.ops.exceptions import RUNNING, raised_as_tensorflows
from hvdkit.tensorflow.ops.framework import as_array, as_tensor, copy_of, empty_like
from hvdkit.tensorflow.verification import BROADCAST, VariableVerification, Verified, hash_variables

# The least bytes of gradients that a graph hands over together. The cost of a part is then small beside its copy, and
# the first parts travel while the backward pass computes the last.
PART_BYTES = 4 << 20

_DTYPES = (tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.complex64, tf.complex128)


def can_be_planned(settings: GradientSettings, gradient: Any, source: Any) -> bool:
    """True if a lane can reduce the dense gradient of a source."""
    return (
        is_variable(source)
        and gradient.dtype in _DTYPES
        and gradient.shape.is_fully_defined()
        and settings.op is not ReduceOp.ADASUM
        and not settings.policy.whole_tensors
    )


def reduce_planned(
    settings: GradientSettings,
    verified: Sequence[Verified],
    gradients: Sequence[Any],
    sources: Sequence[Any],
    names: Sequence[str],
) -> list[Any]:
    """Return the reduced gradients of variables. Meanwhile the ranks compare the values of the ``verified`` variables.

    A complex gradient travels as real numbers, with one more axis for the two parts of an element.
    """
    plan = _plan_of(settings, gradients, sources, names)

    def reduce(inputs: Sequence[Any]) -> list[Any]:
        parts = [tf.bitcast(each, each.dtype.real_dtype) if each.dtype.is_complex else each for each in inputs]
        reduce_parts = _reduce_now if tf.executing_eagerly() else _reduce_in_graph
        results = reduce_parts(plan, parts, verified)
        return [
            tf.bitcast(result, tensor.dtype) if tensor.dtype.is_complex else result
            for result, tensor in zip(results, inputs, strict=True)
        ]

    invocation = Invocation("grouped_allreduce", None, settings.process_set, waits=True)
    request = ReduceRequest(settings.op, *settings.scales)
    with raised_as_tensorflows(), tf.device(settings.device_dense):
        return differentiable(gradients, reduce, lambda _, upstream: allreduce_dense(invocation, upstream, request))


def _reduce_now(plan: VariablePlan, gradients: Sequence[Any], verified: Sequence[Verified]) -> list[Any]:
    hash_variables(plan.verification, verified, plan.begin())
    for part in plan.parts():
        plan.hand_over(part, [gradients[index] for index in part])
    return [as_tensor(array) for array in plan.finish()]


@as_written
def _reduce_in_graph(plan: VariablePlan, gradients: Sequence[Any], verified: Sequence[Verified]) -> list[Any]:
    begun = []
    for number, part in enumerate(plan.parts()):

        def begin(*arrays: Any, part: Sequence[int] = part, is_first: bool = number == 0) -> Any:
            level = plan.begin() if is_first else 0
            plan.hand_over(part, arrays)
            return np.int64(level)

        inputs = [gradients[index] for index in part]
        begun.append(ordered_node(begin, inputs, tf.int64, "hvdkit_begin", first=number == 0, last=False))
    hashed = hash_variables(plan.verification, verified, begun[0])

    def end() -> list[Any]:
        # This graph hands over nothing more before, so the thread that runs the graph is stuck if the lane is.
        with runtime.engine().waiting.standing_for(RUNNING):
            return plan.finish()

    with tf.control_dependencies(hashed):
        results = ordered_node(end, [], [gradient.dtype for gradient in gradients], "hvdkit_end", first=False)
    for result, slot in zip(results, plan.slots, strict=True):
        result.set_shape(slot.shape)
    return [tf.identity(result) for result in results]  # on the device that the caller wants


@dataclass(eq=False)
class VariablePlan:
    """The slots of some variables' gradients, which a lane reduces together once a step.

    The next step gives up a step that an exception left unfinished. If another rank uses that step, or has used it,
    the lane fails on all ranks.
    """

    pairing: Pairing
    slots: Sequence[Slot]
    reduction: ReduceRequest
    process_set_id: int
    codecs: Sequence[Codec]
    groups: Sequence[Sequence[int]]

    def __post_init__(self) -> None:
        self.verification = VariableVerification(BROADCAST)
        self._engine: Any = None
        self._lane: Any = None  # None within a step: a rank has joined, and gradients go by name
        self._epoch = 0  # see Groups.end_join
        self._title = ""
        self._missing: set[int] = set()  # slots of this step that were not handed over yet
        self._results: dict[int, Any] = {}  # of this step, by slot: arrays that are not in the lane's memory

    def parts(self) -> list[list[int]]:
        """Return the slots in parts of PART_BYTES, the last slots first, as the backward pass computes them."""
        parts: list[list[int]] = []
        room = 0
        for index in reversed(range(len(self.slots))):
            if room <= 0:
                parts.append([])
                room = PART_BYTES
            parts[-1].append(index)
            room -= self.slots[index].elements * self.slots[index].dtype.itemsize
        return parts

    def begin(self) -> int:
        """Begin a step on a lane without a step under way, and return the level of verification of this step.

        Collective where there is no lane yet. Raise HorovodInternalError once for a lane that failed; the next step
        makes a new lane.
        """
        engine = runtime.engine()
        is_current = self._lane is not None and engine is self._engine and self._epoch == engine.groups.plan_epoch
        if is_current and not self._lane.abandonment.is_spent:
            with self._closing_failed_lane():
                if self._lane.error is not None:
                    raise self._lane.error
                self._lane.abandonment.begin()
                self._lane.abandonment.settle()
        if not is_current or self._lane.abandonment.is_spent:
            self.close()
            self._engine, self._epoch = engine, engine.groups.plan_epoch
            self._title = self.pairing.next_title(engine, self.process_set_id)
            op, prescale, postscale, _ = self.reduction
            self._lane = engine.register_plan(
                self._title,
                self.slots,
                op=op,
                prescale=prescale,
                postscale=postscale,
                codecs=self.codecs,
                process_set_id=self.process_set_id,
                groups=self.groups,
            )
            if self._lane is not None:
                self.verification.attach(self._lane, engine)
        self._missing, self._results = set(range(len(self.slots))), {}
        return self.verification.begin()

    def hand_over(self, indices: Sequence[int], gradients: Sequence[Any]) -> None:
        """Let the lane reduce gradients, eager tensors or arrays, whose memory is read and never written."""
        for index, gradient in zip(indices, gradients, strict=True):
            started = perf_counter()
            flat = np.reshape(as_array(gradient), -1)
            self._missing.discard(index)
            if self._lane is None:
                self._results[index] = copy_of(flat)
                continue
            if (small := self._lane.small(index)) is not None:
                small[...] = flat
                offer = FILLED
            else:
                result = self._results[index] = empty_like(flat)
                offer = offer_of(result, source=flat)
            self._lane.records.copied([index], started)
            self._lane.ready(index, offer)

    def finish(self) -> list[Any]:
        """Wait for the lane and return new arrays. Raise ParametersDifferError where ranks hold other variables."""
        if self._missing:
            raise HorovodInternalError(f"{self._title}: a step ended, but some of its gradients were never handed over")
        if self._lane is None:
            arrays = [self._results[index] for index in range(len(self.slots))]
            self._engine.named.allreduce(arrays, self.reduction, Call(self._title, self.process_set_id)).wait()
        else:
            self.verification.state_hashes()
            with self._closing_failed_lane():
                self._lane.finish()
            self.verification.finished()
            taken = self._results
            arrays = [taken[i] if i in taken else copy_of(self._lane.small(i)) for i in range(len(self.slots))]
        self._results = {}
        return [array.reshape(slot.shape) for array, slot in zip(arrays, self.slots, strict=True)]

    @contextmanager
    def _closing_failed_lane(self) -> Iterator[None]:
        """Close the lane after an error, which each rank raises once, so that all ranks agree anew."""
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


PLANS: dict[Any, VariablePlan] = {}  # of this process, by variables and settings


def _plan_of(
    settings: GradientSettings, gradients: Sequence[Any], sources: Sequence[Any], names: Sequence[str]
) -> VariablePlan:
    """Return the plan of these variables and settings, which is the same each time until a variable is gone."""
    codecs, codec_of = settings.policy.choose(list(zip(names, sources, strict=True)))
    slots = []
    for name, gradient, codec in zip(names, gradients, codec_of, strict=True):
        shape, suffix = tuple(gradient.shape), ""
        if gradient.dtype.is_complex:
            shape, suffix = (*shape, 2), " (complex)"
        dtype = np.dtype(gradient.dtype.real_dtype.as_numpy_dtype)
        slots.append(Slot(f"{name}{suffix}", shape, dtype, codec))
    index_of = {id(source): index for index, source in enumerate(sources)}
    groups = tuple(tuple(index_of[id(member)] for member in group) for group in form_groups(sources, settings.groups))
    process_set_id = checks.check_process_set(settings.title, settings.process_set)
    reduction = ReduceRequest(settings.op, *settings.scales)
    encodings = tuple(codec.summary for codec in codecs)
    key = (settings.title, process_set_id, reduction, encodings, tuple(map(id, sources)), tuple(slots), groups)
    if key not in PLANS:
        warn(settings, settings.policy.complaint(names))
        assert settings.pairing is not None, "what is planned has variables"
        PLANS[key] = VariablePlan(settings.pairing, slots, reduction, process_set_id, codecs, groups)
        for source in sources:
            weakref.finalize(source, _forget, key)
    return PLANS[key]


def _forget(key: Any) -> None:
    if plan := PLANS.pop(key, None):
        plan.close()


def warn(settings: GradientSettings, text: str | None) -> None:
    """Warn the user on rank 0, unless ``text`` is None."""
    if text is not None and runtime.topology().rank == 0:
        warnings.warn(f"{settings.title}: {text}", stacklevel=2)
