"""Tags of data messages: a number is not given again while an earlier use of it is open, however few there are."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdkit.compression import RandomK
from hvdkit.engine.loop import batches
from hvdkit.engine.ops.requests import Call, ReduceRequest
from hvdkit.engine.ranks import assignments
from hvdkit.engine.ranks.assignments import LaneNumbers, lane_tag, message_tag, named_tag, ordered_tag
from hvdkit.engine.ranks.groups import lane_segment, ordered_segment, staging_segment
from hvdkit.engine.ranks.turns import LATEST_TURN
from hvdkit.engine.session.session import Session
from hvdkit.engine.steps import node_pass
from hvdkit.engine.steps.offers import FILLED, offer_of
from hvdkit.engine.steps.plan import Slot
from hvdkit.errors import HorovodInternalError
from hvdkit.kernels import ReduceOp
from hvdkit.transports.gloo import PROOF_TAG
from hvdkit.transports.mpi import LARGEST_TAG
from hvdkit.transports.node import SEGMENTS
from tests.on_ranks import on_ranks
from tests.threads import on_threads

STEPS, PARAMETERS = 24, 30
FEW = 4  # lanes: two optimizers, of which one agrees anew before it lets go


@on_ranks(2, name="messages", HVDKIT_NODE_MEMORY="0", HVDKIT_FUSION_THRESHOLD="1000")
@on_ranks(2, name="node memory", HVDKIT_FUSION_THRESHOLD="1000")
def test_an_optimizer_that_agrees_anew_never_meets_one_that_is_open(hvd):
    """Both get their gradients from one backward pass; the ranks step them in one order, so both are in flight."""
    saved, assignments.LANES = assignments.LANES, FEW
    try:
        kept, changing = ([torch.nn.Parameter(torch.zeros(200)) for _ in range(PARAMETERS)] for _ in range(2))
        optimizers = [
            hvd.DistributedOptimizer(
                torch.optim.SGD(parameters, 0.0), [(str(i), one) for i, one in enumerate(parameters)], op=hvd.Sum
            )
            for parameters in (kept, changing)
        ]
        everyones = hvd.size() * (hvd.size() + 1) // 2
        for step in range(STEPS):
            changing[0].requires_grad_(step % 2 == 0)
            for optimizer in optimizers:
                optimizer.zero_grad()
            factors = [
                (parameter, place + (hvd.rank() + 1) * (step + 1) * (number + 1))
                for place, parameters in ((0, kept), (1000, changing))
                for number, parameter in enumerate(parameters)
                if parameter.requires_grad
            ]
            torch.stack([(parameter * factor).sum() for parameter, factor in factors]).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
            for place, parameters in ((0, kept), (1000, changing)):
                for number, parameter in enumerate(parameters):
                    if parameter.requires_grad:
                        expected = place * hvd.size() + everyones * (step + 1) * (number + 1)
                        assert parameter.grad.unique().tolist() == [expected], (step, place, number)
    finally:
        assignments.LANES = saved


def test_tags_of_operations_that_may_be_open_at_once_are_apart_and_within_every_mpis() -> None:
    named = {named_tag(sequence) + one for sequence in (0, 1, assignments.NAMED_SEQUENCES - 1) for one in range(8)}
    lanes = {
        lane_tag(lane, 1000 + place) + phase
        for lane in (0, 1, assignments.LANES - 1)
        for place in range(2 * assignments.SPAN)
        for phase in range(assignments.PHASES)
    }
    assert len(named) == 3 * 8
    assert len(lanes) == 3 * 2 * assignments.SPAN * assignments.PHASES
    assert max(named) < assignments.LANE_TAG <= min(lanes)
    assert max(lanes) < LARGEST_TAG
    assert node_pass.CELLS >= 2 * assignments.SPAN


@given(size=st.integers(1, 3), count=st.integers(1, 4), data=st.data())
@settings(max_examples=200, deadline=None)
def test_a_lanes_number_is_free_when_all_ranks_closed_it_at_the_same_operation(
    size: int, count: int, data: Any
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assignments, "LANES", count)
        numbers = LaneNumbers()
        taken: dict[int, int] = {}
        closed: dict[int, dict[int, int]] = {}
        for lane in range(12):
            number = numbers.take(lane, range(size))
            assert (number is None) == (len(taken) == count)
            if number is not None:
                assert number not in taken.values()
                taken[lane], closed[lane] = number, {}
            for _ in range(data.draw(st.integers(0, 2 * size))):
                one = data.draw(st.integers(0, lane))  # also one that is closed already
                rank, sequence = data.draw(st.integers(0, size - 1)), data.draw(st.integers(7, 8))
                numbers.closed(rank, one, sequence)
                if one in taken:
                    closed[one][rank] = sequence
                    if list(closed[one].values()) in ([7] * size, [8] * size):
                        del taken[one]


def test_lanes_that_are_agreed_on_anew_go_beside_one_that_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assignments, "LANES", 3)
    slots = [Slot(f"p{number}", (500 + number,), np.dtype(np.float32)) for number in range(8)]

    def run(session: Session) -> None:
        engine = session.engine
        rank, size = engine.topology.rank, engine.topology.size
        old = engine.register_plan("old", slots, op=ReduceOp.SUM)
        for step in range(12):
            new = engine.register_plan(f"new{step}", slots, op=ReduceOp.SUM)
            work = [(old, 1, slot) for slot in range(8)] + [(new, 1000, slot) for slot in range(8)]
            random.Random(step * size + rank).shuffle(work)
            for lane, factor, slot in work:
                lane.small(slot)[...] = factor * (rank + 1) * (slot + 1)
                lane.ready(slot, FILLED)
            for lane, factor in ((old, 1), (new, 1000)):
                lane.finish()
                for slot in range(8):
                    assert (lane.small(slot) == factor * size * (size + 1) // 2 * (slot + 1)).all(), (step, slot)
            new.close()

    on_threads(3, run, fusion_threshold=0)


def test_more_lanes_than_there_are_numbers_are_an_error_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assignments, "LANES", 2)
    monkeypatch.setattr("hvdkit.engine.steps.registration.LANES", 2)
    slots = [Slot("p", (100_000,), np.dtype(np.float32))]

    def run(session: Session) -> None:
        engine = session.engine
        lanes = [engine.register_plan(f"lane{number}", slots, op=ReduceOp.SUM) for number in range(2)]
        with pytest.raises(HorovodInternalError, match=r"lane2 .* rank \d.* 2 optimizers .*\nHINT"):
            engine.register_plan("lane2", slots, op=ReduceOp.SUM)
        lanes[0].close()
        lane = engine.register_plan("lane3", slots, op=ReduceOp.SUM)
        own = np.ones(100_000, np.float32)
        lane.ready(0, offer_of(own))
        lane.finish()
        assert (own == 2).all()

    on_threads(2, run)


@pytest.mark.parametrize("sequences", [1, 2])
def test_operations_of_one_tag_go_one_after_the_other(sequences: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assignments, "NAMED_SEQUENCES", sequences)
    count = 12

    def run(session: Session) -> None:
        engine, rank = session.engine, session.engine.topology.rank
        for step in range(5):
            order = list(range(count))
            random.Random(step * 3 + rank).shuffle(order)
            arrays = {number: np.full(1000 + 100 * number, float((rank + 1) * (number + 1))) for number in order}
            handles = [
                engine.named.allreduce([arrays[number]], ReduceRequest(ReduceOp.SUM), Call(f"sum{number}", number % 2))
                for number in order
                if number % 2 == 0 or rank > 0
            ]
            for handle in handles:
                handle.wait()
            for number, array in arrays.items():
                if number % 2 == 0 or rank > 0:
                    assert (array == (6 if number % 2 == 0 else 5) * (number + 1)).all(), (step, number)

    on_threads(3, run, process_sets=[[1, 2]], fusion_threshold=0, allreduce="two_phase")


def test_ranks_draw_alike_whatever_else_some_of_them_did_in_another_process_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batches, "KEYS_COUNTED", 2)
    codec = RandomK(0.1, compress="everywhere")

    def run(session: Session) -> list[bytes]:
        engine, seen = session.engine, []

        def reduce(name: str, process_set: int) -> bytes:
            own = np.arange(1000, dtype=np.float32)
            engine.named.allreduce([own], ReduceRequest(ReduceOp.SUM, codec=codec), Call(name, process_set)).wait()
            sent = np.flatnonzero(own)
            assert (own[sent] == len(engine.groups.ranks[process_set]) * sent).all()  # all ranks sent the same ones
            return own.tobytes()

        for step in range(3):
            seen.append(reduce("everyones", 0))
            for number in range(3) if engine.topology.rank else ():
                reduce(f"other{number}.{step}", 1)
        engine.named.barrier(0).wait()
        return seen

    first, *others = on_threads(3, run, process_sets=[[1, 2]])
    assert all(seen == first for seen in others)
    assert first is not None
    assert len(set(first)) == 3  # each time other elements


def test_segments_of_a_nodes_memory_are_of_one_lane_process_set_or_group() -> None:
    of = staging_segment, lane_segment, ordered_segment
    used = [0, *(segment(number) for segment in of for number in range(1, 1000))]
    assert len(set(used)) == len(used)
    assert max(used) < SEGMENTS


def test_tags_of_ordered_operations_and_messages_are_those_of_nothing_else() -> None:
    last_of_lanes = lane_tag(assignments.LANES - 1, assignments.SEQUENCE - 1) + assignments.PHASES - 1
    ordered = [
        ordered_tag(group, number) + phase
        for group in (0, 1, 2, assignments.ORDERED_GROUPS - 1)
        for number in range(assignments.ORDERED_NUMBERS)
        for phase in range(assignments.TAGS_PER_OPERATION)
    ]
    assert len(set(ordered)) == len(ordered)
    messages = [message_tag(count) for count in range(assignments.MESSAGES)]
    assert last_of_lanes < min(ordered)
    assert max(ordered) < min(messages)
    assert max(messages) < PROOF_TAG


def test_turns_fit_into_the_memory_of_ranks() -> None:
    assert LATEST_TURN < 1 << 48
