"""The coordinator's decisions, as messages in and messages out."""

from __future__ import annotations

import random

import pytest

from hvdkit.engine.loop import messages
from hvdkit.engine.loop.coordinator import Coordinator
from hvdkit.engine.loop.decisions import PendingOperation
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
    decode,
    encode,
)
from hvdkit.engine.ops.requests import Key


def test_what_ranks_say_in_the_same_words_is_read_once_and_not_kept_for_ever():
    said = encode(Ask(3, "gradient", [1, None]))
    assert decode(said) is decode(bytes(bytearray(said)))
    assert decode(said) == Ask(3, "gradient", [1, None])
    for number in range(messages.MOST_PARSED + 10):
        assert decode(encode(Ask(0, f"gradient.{number}", None))).name == f"gradient.{number}"
    assert len(messages._PARSED) <= messages.MOST_PARSED
    long = encode(Ask(0, "n" * messages.LONGEST_PARSED, None))
    assert decode(long) == decode(long)
    assert decode(long) is not decode(long)
    with pytest.raises(ValueError, match="not a control message"):
        decode(b'["request",0]')


def allreduce(shape=(4,), dtype="float32", op=1, process_set=0, device="cpu"):
    return {
        "kind": "allreduce", "ps": process_set, "dtype": [dtype], "shape": [list(shape)], "op": op,
        "prescale": 1.0, "postscale": 1.0, "device": device,
    }  # fmt: skip


def request(signature, name="x", detail=None):
    return Ask(signature, name, detail)


def taken(coordinator):
    return [(rank, message) for ranks, message in coordinator.take_outgoing() for rank in ranks]


def sent_to(outgoing, rank):
    return [message for target, message in outgoing if target == rank]


def test_an_operation_runs_on_all_ranks_once_all_have_asked():
    coordinator = Coordinator(3, 1 << 20)
    for rank in (2, 0):
        coordinator.receive(rank, request(allreduce()), 0.0)
        assert taken(coordinator) == []
    coordinator.receive(1, request(allreduce()), 0.0)
    outgoing = taken(coordinator)
    assert [rank for rank, _ in outgoing] == [0, 1, 2]
    assert all(message == Run(1, 0, "allreduce", [["x", None]], None) for _, message in outgoing)


class Members(list):
    """Counts how often somebody goes through them."""

    walks = 0

    def __iter__(self):
        self.walks += 1
        return super().__iter__()


def test_requests_are_counted_so_that_an_operation_costs_each_rank_the_same_however_many_there_are():
    coordinator = Coordinator(300, 1 << 20)
    members = coordinator.members[0] = Members(range(300))
    for rank in range(300):
        coordinator.receive(rank, request(allreduce()), 0.0)
    (told,) = coordinator.take_outgoing()
    assert told == (list(range(300)), Run(1, 0, "allreduce", [["x", None]], None)), "one message, encoded once"
    assert members.walks <= 2


def test_all_ranks_get_the_same_order_whatever_order_they_asked_in():
    coordinator = Coordinator(4, 0)
    names = [f"t{number}" for number in range(50)]
    asked = [(rank, name) for rank in range(4) for name in names]
    random.Random(0).shuffle(asked)
    ran = {rank: [] for rank in range(4)}
    for rank, name in asked:
        coordinator.receive(rank, request(allreduce(), name), 0.0)
        for target, message in taken(coordinator):
            ran[target] += [told[0] for told in message.names]
    assert sorted(ran[0]) == sorted(names)
    assert ran[0] == ran[1] == ran[2] == ran[3]


def test_a_signature_travels_once():
    coordinator = Coordinator(2, 1 << 20)
    for rank in range(2):
        coordinator.receive(rank, NewSignature(7, allreduce()), 0.0)
    for name in ("a", "b"):
        for rank in range(2):
            coordinator.receive(rank, request(7, name), 0.0)
        assert sent_to(taken(coordinator), 0)[0].names == [[name, None]]
    with pytest.raises(ValueError, match="unknown signature"):
        coordinator.receive(0, request(8, "c"), 0.0)


def test_ready_allreduces_that_match_are_batched_up_to_the_threshold():
    coordinator = Coordinator(2, 8 * 4 * 2)
    for rank in range(2):
        for name in ("a", "b", "c"):
            coordinator.receive(rank, request(allreduce(), name), 0.0)
        coordinator.receive(rank, request(allreduce(dtype="float64"), "d"), 0.0)
    batches = [[name for name, _ in message.names] for message in sent_to(taken(coordinator), 1)]
    assert batches == [["a", "b"], ["c"], ["d"]]


@pytest.mark.parametrize("detail", ["splits must not be negative", [4, [1]], [4, [-1, 2]], [4, [3, 3]], [3, None]])
@pytest.mark.parametrize("is_first", [True, False])
def test_wrong_splits_of_one_rank_fail_on_each_rank_at_once(detail, is_first):
    coordinator = Coordinator(2, 1 << 20)
    signature = {"kind": "alltoall", "ps": 0, "dtype": ["float32"], "shape": [["*"]], "device": "cpu"}
    good, bad = request(signature, detail=[4, [2, 2]]), request(signature, detail=detail)
    coordinator.receive(1 if is_first else 0, bad if is_first else good, 0.0)
    first = taken(coordinator)
    coordinator.receive(0 if is_first else 1, good if is_first else bad, 0.0)
    outgoing = [*first, *taken(coordinator)]
    assert [rank for rank, _ in first] == ([1] if is_first else [])
    assert sorted(rank for rank, _ in outgoing) == [0, 1]
    texts = {message.text for _, message in outgoing}
    assert len(texts) == 1
    assert "splits for alltoall 'x': rank 1" in texts.pop()
    coordinator.receive(0, good, 0.0)
    coordinator.receive(1, good, 0.0)
    assert all(isinstance(message, Run) for _, message in taken(coordinator))


def test_a_slow_rank_hears_of_each_failure_under_a_name_however_many_there_were():
    coordinator = Coordinator(3, 1 << 20)
    signature = {"kind": "alltoall", "ps": 0, "dtype": ["float32"], "shape": [["*"]], "device": "cpu"}
    for text in ("first", "second"):
        coordinator.receive(2, request(signature, detail=text), 0.0)
        coordinator.receive(0, request(signature, detail=[3, None]), 0.0)
    for _ in range(2):
        coordinator.receive(1, request(signature, detail=[3, None]), 0.0)
    told = taken(coordinator)
    for rank in range(3):
        assert [message.text.split()[-1] for message in sent_to(told, rank)] == ["first", "second"]
    for rank in range(3):
        coordinator.receive(rank, request(signature, detail=[3, None]), 0.0)
    assert [type(message) for _, message in taken(coordinator)] == [Run] * 3


@pytest.mark.parametrize("dtypes", [("float32",), ("float16", "float32")])
def test_how_often_ready_operations_are_looked_at_grows_with_their_number_alone(monkeypatch, dtypes):
    looked, signature = 0, PendingOperation.signature.fget

    def counted(entry):
        nonlocal looked
        looked += 1
        return signature(entry)

    monkeypatch.setattr(PendingOperation, "signature", property(counted))
    count = 400
    coordinator = Coordinator(2, 1 << 20)
    for rank in range(2):
        for number in range(count):
            coordinator.receive(rank, request(allreduce(dtype=dtypes[number % len(dtypes)]), f"t{number}"), 0.0)
    (*batches,) = sent_to(taken(coordinator), 0)
    assert [name for batch in batches for name, _ in batch.names] == [f"t{number}" for number in range(count)]
    assert looked <= 2 * count  # once in its own batch, once where the batch before it ends


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (allreduce(shape=(5,)), "shapes for allreduce 'x': rank 0, 1 sent [4]; rank 2 sent [5]"),
        (allreduce(dtype="int32"), "data types for allreduce 'x': rank 0, 1 sent float32; rank 2 sent int32"),
        (allreduce(op=3), "reduce operations for allreduce 'x': rank 0, 1 sent SUM; rank 2 sent MIN"),
        (allreduce(device="cuda"), "devices for allreduce 'x': rank 0, 1 sent cpu; rank 2 sent cuda"),
    ],
)
def test_a_mismatch_is_told_to_every_rank_with_what_each_sent(other, told):
    coordinator = Coordinator(3, 1 << 20)
    for rank, signature in enumerate((allreduce(), allreduce(), other)):
        coordinator.receive(rank, request(signature), 0.0)
    outgoing = taken(coordinator)
    assert [rank for rank, _ in outgoing] == [0, 1, 2]
    for _, message in outgoing:
        assert (message.process_set, message.kind, message.name) == (0, "allreduce", "x")
        assert told in message.text
    # and the name can be used again
    for rank in range(3):
        coordinator.receive(rank, request(allreduce()), 1.0)
    assert len(taken(coordinator)) == 3


def test_a_rank_that_has_joined_is_counted_in_and_gets_the_signature():
    coordinator = Coordinator(3, 1 << 20)
    coordinator.receive(1, Join(), 0.0)
    assert all(message == Joined(1) for _, message in taken(coordinator))
    for rank in (0, 2):
        coordinator.receive(rank, request(allreduce()), 0.0)
    outgoing = taken(coordinator)
    assert sent_to(outgoing, 0)[0].signatures is None
    assert sent_to(outgoing, 1)[0].signatures == [allreduce()]
    coordinator.receive(2, Join(), 0.0)
    coordinator.receive(0, Join(), 0.0)
    done = [message for _, message in taken(coordinator) if isinstance(message, JoinDone)]
    assert done == [JoinDone(0)] * 3


def test_a_gather_is_refused_while_a_rank_has_joined():
    coordinator = Coordinator(2, 0)
    coordinator.receive(1, Join(), 0.0)
    taken(coordinator)
    gather = {"kind": "allgather", "ps": 0, "dtype": ["float32"], "shape": [["*"]], "device": "cpu"}
    coordinator.receive(0, request(gather, "g", [3]), 0.0)
    ((rank, message),) = taken(coordinator)
    assert rank == 0
    assert "not supported with Join" in message.text


def test_each_rank_learns_the_first_dimensions_of_all():
    coordinator = Coordinator(2, 0)
    gather = {"kind": "allgather", "ps": 0, "dtype": ["float32"], "shape": [["*", 2]], "device": "cpu"}
    for rank, rows in ((0, 3), (1, 5)):
        coordinator.receive(rank, request(gather, "g", [rows]), 0.0)
    assert sent_to(taken(coordinator), 1)[0].names == [["g", [[3], [5]]]]


def test_process_sets_run_among_their_members_and_are_numbered():
    coordinator = Coordinator(4, 0)
    for rank in range(4):
        coordinator.receive(rank, request({"kind": "add_process_set", "ps": 0, "ranks": [1, 3]}, "p"), 0.0)
    assert sent_to(taken(coordinator), 2)[0].names == [["p", 1]]
    for rank in range(4):
        coordinator.receive(rank, request({"kind": "add_process_set", "ps": 0, "ranks": [1, 3]}, "q"), 0.0)
    assert sent_to(taken(coordinator), 0)[0].names == [["q", None]], "a duplicate has no new number"
    for rank in (1, 3):
        coordinator.receive(rank, request(allreduce(process_set=1)), 0.0)
    assert [rank for rank, _ in taken(coordinator)] == [1, 3]


def test_the_same_name_in_two_process_sets_is_two_operations():
    coordinator = Coordinator(4, 0, static_process_sets=[[0, 1], [2, 3]])
    for rank in range(4):
        coordinator.receive(rank, request(allreduce(process_set=1 + rank // 2)), 0.0)
    assert sorted(rank for rank, _ in taken(coordinator)) == [0, 1, 2, 3]


def blocked(process_set, kind="allreduce", name="x"):
    return Waits([process_set, kind, name], [], f"{kind} '{name}' in process set {process_set}", name)


def test_ranks_that_wait_for_each_other_in_different_process_sets_get_an_error():
    coordinator = Coordinator(3, 0, static_process_sets=[[0, 1]])
    coordinator.receive(0, request(allreduce()), 0.0)
    coordinator.receive(1, request(allreduce(process_set=1)), 0.0)
    coordinator.receive(0, blocked(0), 0.2)
    coordinator.receive(1, blocked(1), 0.3)
    coordinator.receive(0, blocked(0), 0.4)
    assert taken(coordinator) == [], "what rank 1 said may be over by now"
    coordinator.receive(1, blocked(1), 0.5)
    outgoing = taken(coordinator)
    assert {rank for rank, _ in outgoing} == {0, 1}
    assert all("rank 0 waits in" in message.text and "rank 1 waits in" in message.text for _, message in outgoing)
    coordinator.receive(2, request(allreduce()), 0.5)
    assert [rank for rank, _ in taken(coordinator)] == [2], "a rank that comes late is told too"


def test_one_name_for_different_operations_is_an_error_on_every_rank_at_once():
    coordinator = Coordinator(3, 0)
    broadcast = {"kind": "broadcast", "ps": 0, "dtype": ["float32"], "shape": [[4]], "root": 0, "device": "cpu"}
    coordinator.receive(0, request(allreduce()), 0.0)
    coordinator.receive(1, request(broadcast), 0.0)
    outgoing = taken(coordinator)
    assert {rank for rank, _ in outgoing} == {0, 1}
    assert all("rank 0 sent allreduce; rank 1 sent broadcast" in message.text for _, message in outgoing)
    coordinator.receive(2, request(broadcast), 0.1)
    assert [message.kind for _, message in taken(coordinator)] == ["broadcast"], "a late rank is told, once"
    for rank in range(3):
        coordinator.receive(rank, request(allreduce()), 1.0)
    assert [type(message) for _, message in taken(coordinator)] == [Run] * 3


def test_operations_of_all_kinds_may_be_ready_in_the_same_round():
    coordinator = Coordinator(2, 1 << 20)
    for rank in range(2):
        coordinator.receive(rank, request(allreduce(), "a"), 0.0)
        coordinator.receive(rank, request({"kind": "barrier", "ps": 0}, "b"), 0.0)
        coordinator.receive(rank, request({"kind": "plan", "ps": 0, "slots": []}, "p"), 0.0)
        coordinator.receive(rank, request(allreduce(), "c"), 0.0)
    kinds = [message.kind for message in sent_to(taken(coordinator), 1)]
    assert kinds == ["allreduce", "barrier", "plan", "allreduce"]


def test_what_waited_for_the_last_rank_to_join_runs_before_the_join_ends():
    coordinator = Coordinator(2, 0)
    coordinator.receive(0, request(allreduce()), 0.0)
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
    assert all("rank 2, which has left the job: it raised" in text for _, text in errors)


def test_a_rank_that_joined_is_not_told_of_an_error_it_had_no_part_in():
    coordinator = Coordinator(2, 0)
    gather = {"kind": "allgather", "ps": 0, "dtype": ["float32"], "shape": [["*"]], "device": "cpu"}
    coordinator.receive(1, Join(), 0.0)
    coordinator.receive(0, request(gather, "g", [3]), 0.0)
    coordinator.receive(0, Join(), 0.0)
    taken(coordinator)
    for rank in range(2):
        coordinator.receive(rank, request(gather, "g", [3]), 1.0)
    assert [type(message) for _, message in taken(coordinator)] == [Run, Run]


def test_removing_a_process_set_ends_what_waits_in_it():
    coordinator = Coordinator(2, 0, static_process_sets=[[0, 1], [0]])
    coordinator.receive(0, request(allreduce(process_set=1)), 0.0)
    for rank in range(2):
        coordinator.receive(rank, request({"kind": "remove_process_set", "ps": 0, "id": 1}, "r"), 0.0)
    messages = sent_to(taken(coordinator), 0)
    assert {type(message) for message in messages} == {Reject, Run}
    assert len(messages) == 2


def test_a_rank_that_goes_on_is_not_in_a_dead_lock():
    coordinator = Coordinator(2, 0, static_process_sets=[[0, 1]])
    coordinator.receive(0, request(allreduce()), 0.0)
    coordinator.receive(1, request(allreduce(process_set=1)), 0.0)
    coordinator.receive(0, blocked(0), 0.3)
    coordinator.receive(0, Waits(None, [], "", None), 0.35)
    coordinator.receive(1, blocked(1), 0.4)
    assert taken(coordinator) == []


def test_an_operation_that_waits_for_a_rank_that_left_fails_on_the_others():
    coordinator = Coordinator(3, 0)
    coordinator.receive(0, request(allreduce()), 0.0)
    coordinator.depart(2, "it called hvd.shutdown()")
    coordinator.receive(1, request(allreduce()), 0.1)
    outgoing = taken(coordinator)
    assert [rank for rank, _ in outgoing] == [0, 1]
    assert all("rank 2, which has left the job: it called hvd.shutdown()" in message.text for _, message in outgoing)


def test_a_stall_names_who_submitted_and_who_did_not_and_is_warned_about_once():
    coordinator = Coordinator(3, 0)
    coordinator.receive(1, request(allreduce()), 10.0)
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
        coordinator.receive(0, request(plan(weights, ("b", [3], "float32", "none")), "opt"), 0.0)
        coordinator.receive(1, request(plan(weights, other), "opt"), 0.0)
        outgoing = taken(coordinator)
        assert len(outgoing) == 2
        for _, message in outgoing:
            assert told in message.text
