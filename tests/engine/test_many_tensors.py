"""Work grows with the number of tensors, and not with its square: instructions and comparisons are counted."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest

import hvdkit
from hvdkit.compression import CASTS, Int8
from hvdkit.engine.loop.coordinator import Coordinator
from hvdkit.engine.loop.messages import Ask
from hvdkit.engine.ops.requests import Call, ReduceRequest
from hvdkit.engine.session.session import Session
from hvdkit.engine.steps.offers import FILLED
from hvdkit.engine.steps.plan import Bucket, Slot
from hvdkit.engine.steps.residuals import Residuals
from hvdkit.engine.steps.schedule import Network, cut, send_order
from hvdkit.kernels import ReduceOp
from tests.engine.test_coordinator import allreduce
from tests.threads import on_threads

HVDKIT = os.path.dirname(hvdkit.__file__) + os.sep
FEW, MANY = 60, 240
FLOAT = np.dtype(np.float32)


def slots(count: int, codec: int = 0) -> list[Slot]:
    return [Slot(f"parameter{number}", (4,), FLOAT, codec) for number in range(count)]


class Compared(int):
    """A number that counts how often numbers like it were compared."""

    times = 0

    def __eq__(self, other: object) -> bool:
        Compared.times += 1
        return int(self) == other

    __hash__ = int.__hash__


def compared(action: Callable[[int], Any], count: int) -> int:
    Compared.times = 0
    action(count)
    return Compared.times


def instructions(action: Callable[[int], Any], count: int) -> int:
    """How many instructions of hvdkit's functions this thread has run."""
    ran = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal ran
        if not frame.f_code.co_filename.startswith(HVDKIT):
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        ran += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action(count)
    finally:
        sys.settrace(before)
    return ran


def grows_no_faster(count: Callable[[Callable[[int], Any], int], int], action: Callable[[int], Any]) -> None:
    few, many = count(action, FEW), count(action, MANY)
    assert many <= 2 * MANY / FEW * few, (few, many)


@pytest.mark.parametrize("codec", [CASTS["none"], Int8()], ids=["dense", "int8"])
def test_what_codecs_keep_of_a_tensor_is_found_without_a_search(codec):
    def lay_out_twice(count: int) -> None:
        residuals = Residuals(slots(count), [codec])
        for order in (range(count), reversed(range(count))):
            members = tuple(map(Compared, order))
            offsets = tuple(16 * place for place in range(count))
            residuals.lay_out([Bucket(FLOAT, members, offsets, 16 * count)])
            for slot in map(Compared, range(0, count, 7)):
                if codec.lossy:
                    residuals.owe(slot, np.ones(4, np.float32), 1.0)
        keys, units = range(count), [{"owed": 1.0}]
        residuals.restore(residuals.checkpoint("", units, keys), "another", units, keys)
        residuals.reports()

    grows_no_faster(compared, lay_out_twice)
    grows_no_faster(instructions, lay_out_twice)


def test_a_lane_calls_functions_for_each_tensor_and_none_for_each_pair():
    def run(session: Session) -> None:
        def two_steps(count: int) -> None:
            lane = session.engine.register_plan(f"net{count}", slots(count), op=ReduceOp.SUM)
            for _step in range(2):
                for slot in range(count):
                    lane.small(slot)[...] = 1
                    lane.ready(slot, FILLED)
                lane.finish()
            lane.close()

        grows_no_faster(instructions, two_steps)

    on_threads(1, run)


def test_operations_by_name_call_functions_for_each_and_none_for_each_pair():
    def run(session: Session) -> None:
        def reduce_all(count: int) -> None:
            engine = session.engine
            handles = [
                engine.named.allreduce([np.ones(4, np.float32)], ReduceRequest(ReduceOp.SUM), Call(f"{count}.{number}"))
                for number in range(count)
            ]
            for handle in handles:
                handle.wait()

        grows_no_faster(instructions, reduce_all)

    on_threads(1, run)


def test_the_order_of_many_pieces_is_found_by_few_comparisons():
    def order(count: int) -> None:
        pieces = cut([100] * count, [4] * count, [0] * count)
        needed = [Compared(number * 7 % count) for number in range(count)]
        send_order(pieces, [0.0] * count, needed, [400] * count, Network(1e-5, 1e-9))

    grows_no_faster(instructions, order)
    grows_no_faster(compared, order)


def test_a_coordinator_forgets_each_failure_and_does_not_look_at_all():
    def fail(count: int) -> None:
        coordinator = Coordinator(3, 1 << 20)
        signature = {"ps": 0, "dtype": ["float32"], "shape": [[1]], "root": 0, "device": "cpu"}
        for rank, kind in enumerate(("broadcast", "allgather", "broadcast")):  # the third rank is told when it asks
            for number in range(count):
                coordinator.receive(rank, Ask({"kind": kind, **signature}, f"tensor{number}", [1]), 0.0)
        assert len(coordinator.take_outgoing()) == 3 * count

    grows_no_faster(instructions, fail)


def requests(*signatures: dict[str, Any]) -> Callable[[int], None]:
    """Two ranks ask for so many operations, each under a name of its own, with these signatures in turn."""

    def coordinate(count: int) -> None:
        coordinator = Coordinator(2, 1 << 20)
        for rank in range(2):
            for number in range(count):
                coordinator.receive(rank, Ask(signatures[number % len(signatures)], f"tensor{number}", None), 0.0)
        names = [name for _, run in coordinator.take_outgoing() for name, _ in run.names]
        assert sorted(names) == sorted(f"tensor{number}" for number in range(count))

    return coordinate


def request_of_many_ranks(count: int) -> None:
    coordinator = Coordinator(count, 1 << 20)
    for rank in range(count):
        coordinator.receive(rank, Ask({"kind": "barrier", "ps": 0}, "barrier", None), 0.0)
    ((ranks, _),) = coordinator.take_outgoing()  # one message, encoded once
    assert ranks == list(range(count))


WORK = {
    "barriers": requests({"kind": "barrier", "ps": 0}),
    "of one type": requests(allreduce()),
    "of two types": requests(allreduce(dtype="float16"), allreduce()),
    "of many ranks": request_of_many_ranks,
}


@pytest.mark.parametrize("work", WORK)
def test_a_coordinator_looks_at_each_request_and_not_at_all_that_wait(work):
    grows_no_faster(instructions, WORK[work])
