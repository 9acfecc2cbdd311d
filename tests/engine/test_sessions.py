"""Jobs whose ranks are threads: what the engine, its coordinator and its lanes do, on thousands of made-up programs."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from functools import reduce
from time import sleep
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdkit.engine.loop import negotiation
from hvdkit.engine.ops.requests import Call, ReduceRequest
from hvdkit.engine.ordered.group import OrderedGroup, _again
from hvdkit.engine.ranks import assignments
from hvdkit.engine.session import session as sessions
from hvdkit.engine.session.session import Session
from hvdkit.engine.steps import registration
from hvdkit.engine.steps.plan import Slot
from hvdkit.errors import HorovodInternalError, MismatchError, PayloadError, PeerLostError
from hvdkit.kernels import ReduceOp
from hvdkit.transports.base import Bytes, Transfer
from tests.network import MemoryTransport
from tests.threads import Dies, allreduce, hand_over, on_threads
from tests.told import told
from tests.transports.shared import grown, held

made_up = settings(max_examples=100, deadline=None)
fewer = settings(max_examples=20, deadline=None)  # whose ends take a part of a second
sizes = st.integers(1, 5)
per_nodes = st.sampled_from([None, 1, 2])


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    before = held()
    yield
    assert not grown(before, held())


REDUCTIONS = {
    "sum": (ReduceOp.SUM, np.add),
    "min": (ReduceOp.MIN, np.minimum),
    "max": (ReduceOp.MAX, np.maximum),
    "product": (ReduceOp.PRODUCT, np.multiply),
}
steps = st.fixed_dictionaries(
    {
        "kind": st.sampled_from([*REDUCTIONS, "allgather", "broadcast", "alltoall", "reducescatter", "barrier"]),
        "shape": st.lists(st.integers(0, 12), min_size=1, max_size=3),
        "dtype": st.sampled_from(["float32", "float64", "int32", "int64", "uint8", "float16"]),
        "root": st.integers(0, 4),
        "set": st.integers(0, 1),
    }
)


def values(index: int, rank: int, step: dict[str, Any]) -> np.ndarray:
    """Small whole numbers, so that every order of summation gives the same."""
    return np.random.default_rng([index, rank]).integers(-2, 3, size=step["shape"]).astype(step["dtype"])


def submit(session: Session, step: dict[str, Any], index: int) -> Any:
    engine, rank = session.engine, session.engine.topology.rank
    own, call, kind = values(index, rank, step), Call(f"step{index}", step["set"], wake=False), step["kind"]
    if kind == "barrier":
        return engine.named.submit("barrier", [], {}, call)
    if kind == "broadcast":
        members = engine.groups.ranks[step["set"]]
        return engine.named.broadcast([own], members[step["root"] % len(members)], call)
    if kind == "allgather":
        return engine.named.allgather([own], call)
    if kind == "alltoall":
        return engine.named.alltoall(own, None, call)
    if kind == "reducescatter":
        return engine.named.reducescatter([own], ReduceRequest(ReduceOp.SUM), call)
    return engine.named.allreduce([own], ReduceRequest(REDUCTIONS[kind][0]), call)


def expected(step: dict[str, Any], index: int, rank: int, members: list[int]) -> np.ndarray | None:
    everyones, kind, me = [values(index, one, step) for one in members], step["kind"], members.index(rank)
    if kind == "barrier":
        return None
    if kind == "broadcast":
        return everyones[step["root"] % len(members)]
    if kind == "allgather":
        return np.concatenate(everyones)
    if kind == "alltoall":
        rows = step["shape"][0] // len(members)
        return np.concatenate([one[me * rows : (me + 1) * rows] for one in everyones])
    if kind == "reducescatter":
        return np.array_split(reduce(np.add, everyones), len(members))[me]
    return reduce(REDUCTIONS[kind][1], everyones)


def sum_ones(session: Session, times: int) -> None:
    for number in range(times):
        own = np.ones(2000)
        allreduce(session, own, f"sum{number}")
        assert own[0] == session.engine.topology.size


@given(size=sizes, program=st.lists(steps, min_size=1, max_size=30), seed=st.integers(0, 1000), data=st.data())
@made_up
def test_operations_in_any_order_give_what_numpy_gives(size, program, seed, data):
    part, per_node = sorted(data.draw(st.sets(st.integers(0, size - 1), min_size=1))), data.draw(per_nodes)
    sets = [part] if len(part) < size else []
    for step in program:
        step["set"] = min(step["set"], len(sets))
        if step["kind"] == "alltoall":
            step["shape"][0] *= 60  # which all numbers of ranks divide

    def run(session: Session) -> None:
        engine = session.engine
        rank, members = engine.topology.rank, engine.groups.ranks
        indices = [index for index, step in enumerate(program) if rank in members[step["set"]]]
        shuffled = random.Random(seed * 10 + rank)
        shuffled.shuffle(indices)
        handles = {index: submit(session, program[index], index) for index in indices}
        shuffled.shuffle(indices)
        for index in indices:
            result, step = handles[index].wait(), program[index]
            came = result[0] if isinstance(result, (list, tuple)) else result
            wanted = expected(step, index, rank, members[step["set"]])
            if wanted is not None:
                np.testing.assert_array_equal(came, wanted, err_msg=str(step), strict=True)
        engine.named.barrier(0).wait()  # ranks that have no part in a set would leave

    on_threads(size, run, sets, per_node=per_node)


@given(size=st.integers(2, 5), data=st.data())
@made_up
def test_what_differs_on_one_rank_is_told_to_all_and_the_job_goes_on(size, data):
    odd = data.draw(st.integers(0, size - 1))
    what, per_node = data.draw(st.sampled_from(["shape", "dtype", "op", "kind"])), data.draw(per_nodes)

    def run(session: Session) -> None:
        engine = session.engine
        is_odd = engine.topology.rank == odd
        array = np.ones(4 if is_odd and what == "shape" else 3, np.int32 if is_odd and what == "dtype" else np.float32)
        request = ReduceRequest(ReduceOp.MAX if is_odd and what == "op" else ReduceOp.SUM)
        for attempt in range(2):
            if is_odd and what == "kind":
                handle = engine.named.allgather([array], Call("odd"))
            else:
                handle = engine.named.allreduce([array], request, Call("odd"))
            with pytest.raises(MismatchError, match=rf"rank {odd}.* sent"):
                handle.wait()
            allreduce(session, total := np.ones(3), f"even{attempt}")
            assert total.tolist() == [size] * 3

    on_threads(size, run, per_node=per_node)


@given(batches=st.lists(st.integers(0, 6), min_size=1, max_size=5), per_node=per_nodes)
@made_up
def test_ranks_that_have_joined_give_zeros(batches, per_node):
    def run(session: Session) -> int:
        engine = session.engine
        rank = engine.topology.rank
        for epoch in range(2):
            for batch in range(batches[rank]):
                own = np.full(5, 10.0**rank)
                allreduce(session, own, f"{epoch}.{batch}")
                assert own.tolist() == [sum(10.0**one for one, count in enumerate(batches) if count > batch)] * 5
            last = engine.join().wait()
            assert batches[last] == max(batches)
        return last

    assert len(set(on_threads(len(batches), run, per_node=per_node))) == 1


shapes = st.lists(st.lists(st.integers(1, 40), min_size=0, max_size=2), min_size=1, max_size=12)


@given(
    size=sizes, layers=shapes, threshold=st.sampled_from([1, 512, 1 << 20]), seed=st.integers(0, 1000), data=st.data()
)
@made_up
def test_a_lane_sums_whatever_the_order_in_which_gradients_are_ready(size, layers, threshold, seed, data):
    dtypes = [np.dtype(data.draw(st.sampled_from(["float32", "float64"]))) for _ in layers]
    slots = [
        Slot(f"layer{number}", tuple(shape), dtype)
        for number, (shape, dtype) in enumerate(zip(layers, dtypes, strict=True))
    ]

    def gradient(step: int, slot: int, rank: int) -> np.ndarray | None:
        generator = np.random.default_rng([seed, step, slot, rank])
        if generator.random() < 0.1:
            return None
        return generator.standard_normal(slots[slot].elements).astype(dtypes[slot])

    def run(session: Session) -> None:
        rank = session.engine.topology.rank
        lane = session.engine.register_plan("net", slots, op=ReduceOp.SUM)
        for step in range(4):
            order = list(range(len(slots)))
            random.Random(seed + step * size + rank).shuffle(order)
            results: dict[int, np.ndarray | None] = {}
            for slot in order:
                results[slot] = hand_over(lane, slot, gradient(step, slot, rank))
            lane.finish()
            for slot, came in results.items():
                if came is not None:
                    everyones = [gradient(step, slot, other) for other in range(size)]
                    np.testing.assert_array_equal(came, reduce(np.add, [one for one in everyones if one is not None]))
        lane.close()

    on_threads(size, run, fusion_threshold=threshold)


class Addresses(MemoryTransport):
    """Keeps where the large messages of a rank are sent from and received."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seen: list[tuple[int, int]] = []

    def isend(self, buffer: Bytes, peer: int, tag: int) -> Transfer:
        self._see(buffer)
        return super().isend(buffer, peer, tag)

    def irecv(self, buffer: Bytes, peer: int, tag: int) -> Transfer:
        self._see(buffer)
        return super().irecv(buffer, peer, tag)

    def _see(self, buffer: Bytes) -> None:
        if buffer.nbytes > 1 << 16:
            begin = buffer.__array_interface__["data"][0]
            self.seen.append((begin, begin + buffer.nbytes))


def test_a_large_gradient_travels_from_where_it_lies_and_to_there():
    large, float32 = (1 << 18) + 3, np.dtype(np.float32)  # elements; no multiple of a cache line
    slots = [Slot("a", (100,), float32), Slot("b", (large,), float32), Slot("c", (9,), float32)]

    def run(session: Session) -> None:
        engine, transport = session.engine, session.engine.transport
        assert isinstance(transport, Addresses)
        lane = engine.register_plan("net", slots, op=ReduceOp.SUM)
        for step in range(3):
            transport.seen.clear()
            own = np.full(large, 1.0 + engine.topology.rank, np.float32)
            for slot, array in ((2, 1.0), (0, 1.0), (1, own)):
                hand_over(lane, slot, array)
            lane.finish()
            begin = own.__array_interface__["data"][0]
            inside = [begin <= first and last <= begin + own.nbytes for first, last in transport.seen]
            # Of two phases: what is sent, what the other half comes to and where the sum is sent from; but not where
            # the other rank's part of the sum comes first.
            assert sorted(inside) == [False, True, True, True], (step, inside)
            np.testing.assert_array_equal(own, np.full(large, 3.0, np.float32))
        lane.close()

    # Which is quicker depends on the network, as measured at the start: in one phase each sends all of it.
    on_threads(2, run, transport=Addresses, allreduce="two_phase")


@given(size=st.integers(2, 5), data=st.data())
@fewer
def test_a_rank_that_dies_is_named_on_all_others(size, data):
    dead = data.draw(st.integers(0, size - 1))
    before, per_node = data.draw(st.integers(0, 3)), data.draw(per_nodes)

    def run(session: Session) -> str:
        engine = session.engine
        if engine.topology.rank == dead:
            with suppress(HorovodInternalError):
                sum_ones(session, before)
            raise Dies
        with pytest.raises(PeerLostError) as lost:  # perhaps before: it may have died before all had its part
            sum_ones(session, before + 1)
        assert lost.value.rank == dead
        return str(lost.value)

    texts = on_threads(size, run, per_node=per_node)
    assert all(f"rank {dead}" in str(text) for rank, text in enumerate(texts) if rank != dead), texts


def test_what_cannot_go_on_when_rank_0_has_left_says_who_left_first() -> None:
    def run(session: Session) -> None:
        if session.engine.topology.rank == 1:
            fact = ") cannot go on without rank 0, which has left the job; the first to leave was rank 0 ("
            hint = "HINT: let all ranks make the same calls and call hvd.shutdown() together."
            with told(PeerLostError, "allreduce 'x' on rank 1 (", fact, f".\n{hint}"):
                allreduce(session, np.ones(3), "x")

    on_threads(2, run)


@given(size=st.integers(2, 4), garbage=st.binary(max_size=40), data=st.data())
@fewer
def test_a_message_that_makes_no_sense_ends_waits_with_an_error(size, garbage, data):
    sender, per_node = data.draw(st.integers(0, size - 1)), data.draw(per_nodes)

    def run(session: Session) -> None:
        engine = session.engine
        if engine.topology.rank == sender:
            for peer in set(range(size)) - {sender}:
                engine.transport.send_control(peer, garbage)
        with pytest.raises(HorovodInternalError, match=f"rank {sender}"):
            sum_ones(session, 10_000)

    on_threads(size, run, per_node=per_node)


@pytest.mark.parametrize("leaver", [2, 3])
def test_who_leaves_early_does_not_cut_off_the_rest_of_its_node(leaver, monkeypatch):
    """Also where it was the one that passed on what they say."""
    monkeypatch.setattr(sessions, "GOODBYE_SECONDS", 1.0)
    monkeypatch.setattr(negotiation, "PASSING_ON_SECONDS", 0.3)
    stay = [rank for rank in range(2, 6) if rank != leaver]
    over = threading.Barrier(5)

    def run(session: Session) -> None:
        engine = session.engine
        sum_ones(session, 3)
        if engine.topology.rank in stay:
            for number in range(40):  # over a second and more, in which the way changes
                own = np.ones(10)
                allreduce(session, own, f"part{number}", 1)
                assert own[0] == 3
                sleep(0.05)
            assert leaver in engine.transport.lost_peers()
        if engine.topology.rank != leaver:
            over.wait(60)

    on_threads(6, run, [stay], per_node=2)


@pytest.mark.thorough
def test_a_step_that_goes_on_is_not_stalled():
    """However long it takes in all: what counts is how long nothing moves."""
    slots = [Slot(name, (4,), np.dtype(np.float32)) for name in ("one", "other")]

    def run(session: Session) -> None:
        rank = session.engine.topology.rank
        lane = session.engine.register_plan("net", slots, op=ReduceOp.SUM)
        for slot in (1, 0):
            if rank == 1:
                sleep(2.0)
            hand_over(lane, slot, 1)
        lane.finish()
        assert lane.small(0)[0] == lane.small(1)[0] == 2

    on_threads(2, run, fusion_threshold=0, stall_shutdown_seconds=3.0)


def test_a_rank_that_abandons_a_step_raises_the_refusal_that_came_before_it_waits() -> None:
    """The answer of the rank that uses the step may come before the other rank begins to wait for it."""
    slots = [Slot(name, (4,), np.dtype(np.float32)) for name in ("one", "other")]

    def run(session: Session) -> str:
        lane = session.engine.register_plan("net", slots, op=ReduceOp.SUM)
        hand_over(lane, 1, 1)
        if session.engine.topology.rank == 1:
            lane.abandonment.begin()
            while lane.error is None:
                sleep(0.001)
            refused = lane.abandonment.settle
        else:
            hand_over(lane, 0, 1)
            refused = lane.finish
        fact = ") gave up a step of optimizer 'net' after some of its gradients were handed over, but rank 0 ("
        rest = (
            ") did not. Ranks that made the step have different weights now.\n"
            "HINT: an exception ended the step, or load_state_dict() was called in the middle of it. Let the exception "
            "end the job, or bring all ranks back to the same state."
        )
        with told(MismatchError, "rank 1 (", fact, rest) as raised:
            refused()
        return str(raised.value)

    first, second = on_threads(2, run, fusion_threshold=0)
    assert first == second


def test_a_later_call_raises_the_error_of_an_earlier_one_with_its_class_and_rank() -> None:
    for error in (PayloadError(2, "its end is missing"), PeerLostError("rank 2 is lost", 2), MismatchError("differ")):
        again = _again(error)
        assert type(again) is type(error)
        assert str(again) == f"an earlier operation of this group failed: {error}"
        assert getattr(again, "rank", 2) == 2


def test_an_optimizer_that_is_one_too_many_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (assignments, registration):
        monkeypatch.setattr(module, "LANES", 1)
    slots = [Slot("one", (4,), np.dtype(np.float32))]

    def run(session: Session) -> None:
        session.engine.register_plan("net", slots, op=ReduceOp.SUM)
        rest = (
            "1 optimizers or tapes are in use, and the messages of one more could not be told apart from theirs.\n"
            "HINT: delete optimizers that are no longer used; after errors, call hvd.shutdown() and hvd.init()."
        )
        with told(HorovodInternalError, f"other cannot be planned on rank {session.engine.topology.rank} (", rest):
            session.engine.register_plan("other", slots, op=ReduceOp.SUM)

    on_threads(2, run)


def test_a_codec_that_encodes_nothing_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(registration, "idle_codecs", lambda *arguments: ["int8"])
    slots = [Slot("one", (4,), np.dtype(np.float32))]

    def run(session: Session) -> None:
        for name in ("net", "other"):
            session.engine.register_plan(name, slots, op=ReduceOp.SUM)

    on_threads(2, run)
    fact = (
        "compression int8 encodes nothing here: all ranks are on one node, where gradients are summed uncompressed, "
        "and nothing travels between nodes."
    )
    hint = (
        'HINT: to try the compression on one node, pass compress="everywhere" to it; on several nodes, leave it as it '
        "is."
    )
    assert [record.getMessage() for record in caplog.records] == [f"{fact}\n{hint}"]


def test_a_result_that_cannot_be_written_is_an_error_here_alone() -> None:
    operation = MagicMock(__str__=lambda _: "operation 3 of group '0'")
    operation.call.finished.side_effect = ValueError("it is read-only")
    assert str(OrderedGroup._finish(MagicMock(), operation)) == (
        "operation 3 of group '0': the result could not be written to its destination: ValueError: it is read-only"
    )


def test_a_library_that_does_not_return_is_told(caplog: pytest.LogCaptureFixture) -> None:
    def run(session: Session) -> None:
        session.engine.driver.halted = lambda seconds: nullcontext(False)  # type: ignore[assignment,return-value]

    on_threads(1, run)
    (text,) = caplog.messages
    assert text.startswith("rank 0 (")
    assert text.endswith("): a library that the engine called has not returned; its thread is left behind")
