"""The coordinator's decisions, as messages in and messages out."""

import pytest

from hvdkit.engine.loop.coordinator import Coordinator
from hvdkit.engine.loop.messages import (
    STALLED,
    Ask,
    Join,
    JoinDone,
    Joined,
    JoinFailed,
    NewSignature,
    Reject,
    Run,
    Waits,
)
from hvdkit.engine.ops.requests import Key


def allreduce(shape=(4,), dtype="float32", op=1, process_set=0, device="cpu"):
    return {
        "kind": "allreduce", "ps": process_set, "dtype": [dtype], "shape": [list(shape)], "op": op,
        "prescale": 1.0, "postscale": 1.0, "device": device,
    }  # fmt: skip


GATHER = {"kind": "allgather", "ps": 0, "dtype": ["float32"], "shape": [["*"]], "device": "cpu"}
ALLTOALL = {**GATHER, "kind": "alltoall"}


def ask(coordinator, signature, *ranks, name="x", detail=None, at=0.0):
    for rank in ranks:
        coordinator.receive(rank, Ask(signature, name, detail), at)


def taken(coordinator):
    return [(rank, message) for ranks, message in coordinator.take_outgoing() for rank in ranks]


def sent_to(outgoing, rank):
    return [message for target, message in outgoing if target == rank]


def test_an_operation_runs_on_all_ranks_once_all_have_asked():
    coordinator = Coordinator(3, 1 << 20)
    ask(coordinator, allreduce(), 2, 0)
    assert taken(coordinator) == []
    ask(coordinator, allreduce(), 1)
    outgoing = taken(coordinator)
    assert [rank for rank, _ in outgoing] == [0, 1, 2]
    assert all(message == Run(1, 0, "allreduce", [["x", None]], None) for _, message in outgoing)


def test_a_signature_travels_once():
    coordinator = Coordinator(2, 1 << 20)
    for rank in range(2):
        coordinator.receive(rank, NewSignature(7, allreduce()), 0.0)
    for name in ("a", "b"):
        ask(coordinator, 7, 0, 1, name=name)
        assert sent_to(taken(coordinator), 0)[0].names == [[name, None]]
    with pytest.raises(ValueError, match="unknown signature"):
        ask(coordinator, 8, 0, name="c")


def test_ready_allreduces_that_match_are_batched_up_to_the_threshold():
    coordinator = Coordinator(2, 8 * 4 * 2)
    for rank in range(2):
        for name in ("a", "b", "c"):
            ask(coordinator, allreduce(), rank, name=name)
        ask(coordinator, allreduce(dtype="float64"), rank, name="d")
    batches = [[name for name, _ in message.names] for message in sent_to(taken(coordinator), 1)]
    assert batches == [["a", "b"], ["c"], ["d"]]


WRONG_SPLITS = (
    "Mismatched splits for alltoall 'x': rank 1 sent splits {} for a first dimension of 4 and 2 ranks.\n"
    "HINT: pass one number of rows for each rank; each is 0 or more, their sum at most the first dimension."
)


@pytest.mark.parametrize(
    ("detail", "said"),
    [
        ("splits must not be negative", "splits for alltoall 'x': rank 1"),
        *(([4, splits], WRONG_SPLITS.format(splits)) for splits in ([1], [-1, 2], [3, 3])),
        ([3, None], "splits for alltoall 'x': rank 1"),
    ],
)
@pytest.mark.parametrize("is_first", [True, False])
def test_wrong_splits_of_one_rank_fail_on_each_rank_at_once(detail, said, is_first):
    coordinator = Coordinator(2, 1 << 20)
    details = {0: [4, [2, 2]], 1: detail}
    order = (1, 0) if is_first else (0, 1)
    ask(coordinator, ALLTOALL, order[0], detail=details[order[0]])
    first = taken(coordinator)
    ask(coordinator, ALLTOALL, order[1], detail=details[order[1]])
    outgoing = [*first, *taken(coordinator)]
    assert [rank for rank, _ in first] == ([1] if is_first else [])
    assert sorted(rank for rank, _ in outgoing) == [0, 1]
    texts = {message.text for _, message in outgoing}
    assert len(texts) == 1
    assert said in texts.pop()
    ask(coordinator, ALLTOALL, 0, 1, detail=details[0])
    assert all(isinstance(message, Run) for _, message in taken(coordinator))


def test_a_slow_rank_hears_of_each_failure_under_a_name_however_many_there_were():
    coordinator = Coordinator(3, 1 << 20)
    for text in ("first", "second"):
        ask(coordinator, ALLTOALL, 2, detail=text)
        ask(coordinator, ALLTOALL, 0, detail=[3, None])
    for _ in range(2):
        ask(coordinator, ALLTOALL, 1, detail=[3, None])
    told = taken(coordinator)
    for rank in range(3):
        assert [message.text.split()[-1] for message in sent_to(told, rank)] == ["first", "second"]
    ask(coordinator, ALLTOALL, 0, 1, 2, detail=[3, None])
    assert [type(message) for _, message in taken(coordinator)] == [Run] * 3


def test_a_mismatch_is_told_to_every_rank_with_what_each_sent():
    coordinator = Coordinator(3, 1 << 20)
    ask(coordinator, allreduce(), 0, 1)
    ask(coordinator, allreduce(shape=(5,)), 2)
    outgoing = taken(coordinator)
    assert [rank for rank, _ in outgoing] == [0, 1, 2]
    for _, message in outgoing:
        assert (message.process_set, message.kind, message.name) == (0, "allreduce", "x")
        assert "shapes for allreduce 'x': rank 0, 1 sent [4]; rank 2 sent [5]" in message.text
    # and the name can be used again
    ask(coordinator, allreduce(), 0, 1, 2, at=1.0)
    assert len(taken(coordinator)) == 3


def test_a_rank_that_has_joined_is_counted_in_and_gets_the_signature():
    coordinator = Coordinator(3, 1 << 20)
    coordinator.receive(1, Join(), 0.0)
    assert all(message == Joined(1) for _, message in taken(coordinator))
    ask(coordinator, allreduce(), 0, 2)
    outgoing = taken(coordinator)
    assert sent_to(outgoing, 0)[0].signatures is None
    assert sent_to(outgoing, 1)[0].signatures == [allreduce()]
    coordinator.receive(2, Join(), 0.0)
    coordinator.receive(0, Join(), 0.0)
    done = [message for _, message in taken(coordinator) if isinstance(message, JoinDone)]
    assert done == [JoinDone(0)] * 3


def test_process_sets_run_among_their_members_and_are_numbered():
    coordinator = Coordinator(4, 0)
    ask(coordinator, {"kind": "add_process_set", "ps": 0, "ranks": [1, 3]}, 0, 1, 2, 3, name="p")
    assert sent_to(taken(coordinator), 2)[0].names == [["p", 1]]
    ask(coordinator, {"kind": "add_process_set", "ps": 0, "ranks": [1, 3]}, 0, 1, 2, 3, name="q")
    assert sent_to(taken(coordinator), 0)[0].names == [["q", None]], "a duplicate has no new number"
    ask(coordinator, allreduce(process_set=1), 1, 3)
    assert [rank for rank, _ in taken(coordinator)] == [1, 3]


def test_the_same_name_in_two_process_sets_is_two_operations():
    coordinator = Coordinator(4, 0, static_process_sets=[[0, 1], [2, 3]])
    ask(coordinator, allreduce(process_set=1), 0, 1)
    ask(coordinator, allreduce(process_set=2), 2, 3)
    assert sorted(rank for rank, _ in taken(coordinator)) == [0, 1, 2, 3]


def blocked(process_set, kind="allreduce", name="x"):
    return Waits([process_set, kind, name], [], f"{kind} '{name}' in process set {process_set}", name)


def test_ranks_that_wait_for_each_other_in_different_process_sets_get_an_error():
    coordinator = Coordinator(3, 0, static_process_sets=[[0, 1]])
    ask(coordinator, allreduce(), 0)
    ask(coordinator, allreduce(process_set=1), 1)
    coordinator.receive(0, blocked(0), 0.2)
    coordinator.receive(1, blocked(1), 0.3)
    coordinator.receive(0, blocked(0), 0.4)
    assert taken(coordinator) == [], "what rank 1 said may be over by now"
    coordinator.receive(1, blocked(1), 0.5)
    outgoing = taken(coordinator)
    assert {rank for rank, _ in outgoing} == {0, 1}
    assert all("rank 0 waits in" in message.text and "rank 1 waits in" in message.text for _, message in outgoing)
    ask(coordinator, allreduce(), 2, at=0.5)
    assert [rank for rank, _ in taken(coordinator)] == [2], "a rank that comes late is told too"


def test_one_name_for_different_operations_is_an_error_on_every_rank_at_once():
    coordinator = Coordinator(3, 0)
    broadcast = {"kind": "broadcast", "ps": 0, "dtype": ["float32"], "shape": [[4]], "root": 0, "device": "cpu"}
    ask(coordinator, allreduce(), 0)
    ask(coordinator, broadcast, 1)
    outgoing = taken(coordinator)
    assert {rank for rank, _ in outgoing} == {0, 1}
    assert all("rank 0 sent allreduce; rank 1 sent broadcast" in message.text for _, message in outgoing)
    ask(coordinator, broadcast, 2, at=0.1)
    assert [message.kind for _, message in taken(coordinator)] == ["broadcast"], "a late rank is told, once"
    ask(coordinator, allreduce(), 0, 1, 2, at=1.0)
    assert [type(message) for _, message in taken(coordinator)] == [Run] * 3


def test_what_waited_for_the_last_rank_to_join_runs_before_the_join_ends():
    coordinator = Coordinator(2, 0)
    ask(coordinator, allreduce(), 0)
    coordinator.receive(0, Join(), 0.0)
    coordinator.receive(1, Join(), 0.0)
    assert [type(message) for message in sent_to(taken(coordinator), 0)] == [Joined, Run, JoinDone]


def test_a_join_fails_when_a_rank_leaves():
    coordinator = Coordinator(3, 0)
    coordinator.receive(0, Join(), 0.0)
    coordinator.depart(2, "it raised")
    coordinator.receive(1, Join(), 0.0)
    errors = [(rank, message.text) for rank, message in taken(coordinator) if isinstance(message, JoinFailed)]
    assert [rank for rank, _ in errors] == [0, 1]
    fact = "hvd.join() waits for rank 2, which has left the job: it raised.\n"
    hint = "HINT: call hvd.join() on all ranks, and leave the job only after that; see what rank 2 printed."
    assert all(text == fact + hint for _, text in errors)


def test_a_rank_that_joined_is_not_told_of_an_error_it_had_no_part_in():
    coordinator = Coordinator(2, 0)
    coordinator.receive(1, Join(), 0.0)
    ask(coordinator, GATHER, 0, name="g", detail=[3])
    coordinator.receive(0, Join(), 0.0)
    taken(coordinator)
    ask(coordinator, GATHER, 0, 1, name="g", detail=[3], at=1.0)
    assert [type(message) for _, message in taken(coordinator)] == [Run, Run]


def test_removing_a_process_set_ends_what_waits_in_it():
    coordinator = Coordinator(2, 0, static_process_sets=[[0, 1], [0]])
    ask(coordinator, allreduce(process_set=1), 0)
    ask(coordinator, {"kind": "remove_process_set", "ps": 0, "id": 1}, 0, 1, name="r")
    messages = sent_to(taken(coordinator), 0)
    assert {type(message) for message in messages} == {Reject, Run}
    assert len(messages) == 2


def test_a_rank_that_goes_on_is_not_in_a_dead_lock():
    coordinator = Coordinator(2, 0, static_process_sets=[[0, 1]])
    ask(coordinator, allreduce(), 0)
    ask(coordinator, allreduce(process_set=1), 1)
    coordinator.receive(0, blocked(0), 0.3)
    coordinator.receive(0, Waits(None, [], "", None), 0.35)
    coordinator.receive(1, blocked(1), 0.4)
    assert taken(coordinator) == []


def test_an_operation_that_waits_for_a_rank_that_left_fails_on_the_others():
    coordinator = Coordinator(3, 0)
    ask(coordinator, allreduce(), 0)
    coordinator.depart(2, "it called hvd.shutdown()")
    ask(coordinator, allreduce(), 1, at=0.1)
    outgoing = taken(coordinator)
    assert [rank for rank, _ in outgoing] == [0, 1]
    fact = "allreduce 'x' waits for rank 2, which has left the job: it called hvd.shutdown().\n"
    hint = (
        "HINT: see what rank 2 printed. All ranks must make the same calls: no call under 'if hvd.rank() == 0' alone, "
        "the same number of batches on all ranks (or hvd.join() if data are uneven), no exit or exception on one rank "
        "alone; in Keras put EarlyStopping after MetricAverageCallback, so that all ranks stop together."
    )
    assert all(message.text == fact + hint for _, message in outgoing)


def test_a_stall_names_who_submitted_and_who_did_not_and_is_warned_about_once():
    coordinator = Coordinator(3, 0)
    ask(coordinator, allreduce(), 1, at=10.0)
    assert coordinator.stalled(60.0, 60.0, once=True) == []
    (stall,) = coordinator.stalled(71.0, 60.0, once=True)
    assert (stall.key, stall.submitted, stall.missing) == (Key(0, "allreduce", "x"), [1], [0, 2])
    assert coordinator.stalled(72.0, 60.0, once=True) == []
    coordinator.give_up(stall.key, "too late")
    assert taken(coordinator) == [(1, Reject(0, "allreduce", "x", "too late", STALLED))]


def test_plans_are_compared_parameter_by_parameter():
    coordinator = Coordinator(2, 0)

    def plan(*slots):
        return {"kind": "plan", "ps": 0, "slots": [list(slot) for slot in slots], "op": 0}

    weights = ("w", [2], "float32", "none")
    for other, told in (
        (("b", [4], "float32", "none"), "parameter number 1: rank 0 has 'b' float32[3]; rank 1 has 'b' float32[4]"),
        (("b", [3], "float32", "int8()"), "compressions for plan 'opt', parameter 'b' float32[3]: rank 0 sent none; "),
    ):
        ask(coordinator, plan(weights, ("b", [3], "float32", "none")), 0, name="opt")
        ask(coordinator, plan(weights, other), 1, name="opt")
        outgoing = taken(coordinator)
        assert len(outgoing) == 2
        for _, message in outgoing:
            assert told in message.text
