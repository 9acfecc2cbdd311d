"""What is said of ranks that hold other parameters, and when they are looked at."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hvdkit.api.gradients.verification import compare
from hvdkit.api.machine import machine, processor, processor_of
from hvdkit.engine.telemetry.verifying import (
    CHUNK,
    SKETCH,
    Comparison,
    Conversation,
    LaneVerification,
    Statement,
    converse,
    is_due,
    sketch,
)

NAMES = ["conv.weight", "conv.bias", "out.weight"]


def told(
    *values: list[int],
    machines: str = "aaaaaaaa",
    names: Any = NAMES,
    step: int = 7,
    first: bool = False,
    distances: Any = None,
) -> tuple[str | None, bool]:
    ranks = range(len(values))
    comparison = Comparison(
        is_first=first,
        machines={rank: machines[rank] for rank in ranks},
        hashes={rank: np.array(values[rank], dtype=np.uint64) for rank in ranks},
        distances={} if distances is None else {rank: np.array(distances[rank]) for rank in ranks},
    )
    hashes = np.array(values[0], dtype=np.uint64)
    statement = Statement(machines[0], hashes, names=names, precisions=(1e-7, 1e-7, 8e-3))
    return compare("SGD.0", step, statement, comparison, "hvd.broadcast()")


def test_the_same_everywhere_is_nothing():
    assert told([1, 2, 3], [1, 2, 3]) == (None, False)
    assert told([1, 2, 3], [1, 2, 3], machines="ab") == (None, False)


def test_who_differs_in_what_is_named():
    text, is_error = told([1, 2, 3], [1, 5, 3], [1, 2, 3])
    assert is_error
    assert "of 'SGD.0' are not the same on all ranks after step 7: 'conv.bias' (of 3) differ. " in text
    assert "The values of rank 1 differ from those of ranks 0, 2.\nHINT: hvd.broadcast() brings them together" in text
    text, _ = told([1, 2, 3], [1, 2, 3], [1, 2, 4], [1, 2, 5], [1, 2, 5])
    assert "The values of ranks 3, 4 and of rank 2 differ from those of ranks 0, 1" in text
    text, _ = told([1, 2, 3], [4, 2, 3], [5, 2, 3])
    assert "Each of ranks 0, 1, 2 has other values" in text


def test_the_first_comparison_asks_for_a_broadcast():
    for machines in ("aa", "ab"):
        text, is_error = told([1, 2, 3], [4, 5, 6], step=1, first=True, machines=machines)
        assert "HINT: they most likely never were; have all ranks start from the same values: hvd.broadcast(). " in text
        assert "a broadcast may follow the first step" in text
        assert not is_error
    _, is_error = told([1, 2, 3], [4, 5, 6], step=2)
    assert is_error


def test_ranks_that_do_not_compute_alike_are_warned_about_unless_some_that_do_differ():
    text, is_error = told([1, 2, 3], [1, 2, 4], machines="ab")
    assert not is_error
    assert "do not compute alike (rank 0: a; rank 1: b)" in text
    assert told([1, 2, 3], [1, 2, 4], [1, 2, 3], machines="aba") == (text.replace("rank 0", "ranks 0, 2"), False)
    _, is_error = told([1, 2, 3], [1, 2, 4], [1, 2, 5], machines="abb")
    assert is_error
    text, is_error = told([1, 2, 3], [1, 2], machines="ab")
    assert is_error
    assert "rank 0 has 3 of them; rank 1 has 2 of them" in text


def test_what_rounding_does_not_explain_is_an_error_whatever_ranks_compute_on():
    values = [1, 2, 3], [4, 5, 6], [4, 5, 6]
    text, is_error = told(*values, machines="abc", distances=[[0, 0, 0], [9e-4, 1e-7, 7e-3], [0, 0, 0]])
    assert not is_error
    assert "do not compute alike" in text
    for distances in ([0, 1.1e-3, 0], [0, 1.1e-3, 7e-3], [1.05e-3, 1.1e-3, 0]):
        text, is_error = told(*values, machines="abc", distances=[[0, 0, 0], [1e-5, 0, 0], distances])
        assert is_error
        assert "the values of rank 2 differ from those of rank 0 by 0.0011 of the norm of 'conv.bias'" in text
    text, is_error = told(*values, machines="abc", distances=[[0, 0, 0], [0, 0, 9e-3], [0, 1e-3, 0]])
    assert is_error
    assert "by 0.009 of the norm of 'out.weight', more than 0.008" in text
    _, is_error = told(*values, machines="abc", distances=[[0, 0, 0], [0, np.inf, 0], [0, 0, 0]])
    assert is_error


def sketch_of(values: Any) -> Any:
    return sketch(len(values), lambda begin, end: values[begin:end])


def test_the_distance_of_sketches_is_that_of_tensors():
    random = np.random.default_rng(1)
    for elements in (1, 2, SKETCH, SKETCH + 1, 1000, CHUNK - 1, CHUNK, 2 * CHUNK + 7):
        values = random.standard_normal(elements)
        changes = {
            "rounding": 1e-6 * random.standard_normal(elements),
            "of one element": np.where(np.arange(elements) == elements // 2, 0.5, 0.0),
            "of all alike": np.full(elements, 1e-3),
            "a sign": -2 * values,
            "another model": random.standard_normal(elements),
        }
        for what, change in changes.items():
            distance, norm = np.linalg.norm(sketch_of(values + change) - sketch_of(values)), np.linalg.norm(change)
            exact = elements <= SKETCH or what == "of one element"
            assert abs(distance / norm - 1) < (1e-6 if exact else 0.5), (elements, what)
    assert not sketch_of(np.zeros(0)).any()
    apart = sketch_of(np.array([np.nan, np.inf, -np.inf, 1.0])) - sketch_of(np.array([0.0, 0.0, 0.0, 1.0]))
    assert (np.abs(apart[:3]) >= 1e100).all(), "rounding does not explain what is not finite"
    assert apart.tolist()[3:] == [0.0] * (SKETCH - 3)


def conversation_of(*statements: Statement | None) -> tuple[list[Comparison], int]:
    """Return what each rank learns, and in how many exchanges. A rank without a statement has joined."""
    members = range(len(statements))
    conversations: list[Conversation] = [converse(rank, members, each) for rank, each in enumerate(statements) if each]
    sent = [next(conversation) for conversation in conversations]
    for exchange in range(1, 9):
        (lengths,) = {tuple(lengths) for _, lengths in sent}
        words = [np.zeros(length, dtype=np.uint64) for length in lengths]
        for rank, (own, _) in zip([rank for rank, each in enumerate(statements) if each], sent, strict=True):
            assert len(own) == lengths[rank]
            words[rank] = own
        sent, comparisons = [], []
        for conversation in conversations:
            try:
                sent.append(conversation.send(words))
            except StopIteration as end:
                comparisons.append(end.value)
        if comparisons:
            assert not sent
            return comparisons, exchange
    raise AssertionError("the ranks never end")


def comparison_of(*statements: Statement | None) -> Comparison:
    return conversation_of(*statements)[0][0]


def test_it_is_the_first_comparison_for_all_where_it_is_for_one():
    seen, new = statement(1, 2), replace(statement(1, 3), is_first=True)
    assert all(comparison.is_first for comparison in conversation_of(seen, new)[0])
    assert not any(comparison.is_first for comparison in conversation_of(seen, None, seen)[0])


def sketched(*values: list[float], machine: str = "a") -> Statement:
    hashes = np.array([hash(tuple(one)) % 1000 for one in values], dtype=np.uint64)
    return Statement(machine, hashes, sketches=np.array([sketch_of(np.array(one)) for one in values]))


def test_ranks_say_as_much_as_they_must():
    same = sketched([1.0, 2.0], [3.0])
    assert conversation_of(same, None, same)[1] == 1
    assert conversation_of(statement(1, 2), statement(1, 3))[1] == 2
    comparisons, exchanges = conversation_of(
        None, same, sketched([1.0, 2.0], [3.3], machine="b"), None, sketched([0.0])
    )
    assert exchanges == 3
    for comparison in comparisons:
        assert list(comparison.machines) == list(comparison.hashes) == [1, 2, 4]
        assert np.allclose(comparison.distances[1], [0, 0])
        assert np.allclose(comparison.distances[2], [0, 0.1])
        assert comparison.distances[4].tolist() == [np.inf]
        assert comparison.machines == {1: "a", 2: "b", 4: "a"}
        assert len(comparison.hashes[4]) == 1
    comparisons, exchanges = conversation_of(same, statement(1, 2))  # which had joined when hashes differed first
    assert exchanges == 2
    assert comparisons[0].distances == {}
    assert comparisons[1].hashes[1].tolist() == [1, 2]


def test_a_subnormal_number_that_one_rank_flushes_is_no_difference():
    assert comparison_of(sketched([0.0]), sketched([1e-40])).distances[1][0] < 1e-6
    assert comparison_of(sketched([0.0]), sketched([1e-9])).distances[1][0] > 1


def test_steps_that_are_looked_at():
    assert [step for step in range(2100) if is_due(step, 1000)] == [1, 10, 100, 1000, 2000]
    assert [step for step in range(10) if is_due(step, 3)] == [1, 3, 6, 9]
    assert not any(is_due(step, 0) for step in range(2000))
    assert [step for step in range(2100) if is_due(step, 10, sparse=True)] == [1, 10, 100, 1000, 2000]
    assert not any(is_due(step, 0, sparse=True) for step in range(2000))


def statement(*hashes: int, machine: str = "a") -> Statement:
    return Statement(machine, np.array(hashes, dtype=np.uint64))


def test_only_ranks_that_take_part_are_compared():
    assert comparison_of(statement(1, 2), statement(1, 2)).hashes == {}
    assert comparison_of(statement(1, 2), statement(1, 3)).hashes
    assert comparison_of(statement(1, 2), statement(1, 2, machine="b")).hashes  # which compare() looks at
    assert comparison_of(statement(1, 2), None).hashes == {}
    joined = comparison_of(statement(1, 2), None, statement(1, 3))
    assert list(joined.hashes) == list(joined.machines) == [0, 2]
    assert joined.hashes[2].tolist() == [1, 3]
    assert joined.machines[2] == "a"


def test_processors_differ_by_what_they_can():
    one = (
        "processor : 0\nmodel name : AMD EPYC\ncpu family : 25\nflags : sse2 avx2\n\nprocessor : 1\nmodel name : other"
    )
    assert processor_of(one).startswith("AMD EPYC (")
    assert processor_of(one) == processor_of(one.replace("sse2 avx2", "avx2 sse2"))
    assert processor_of(one) != processor_of(one.replace("avx2", "avx2 avx512f"))
    assert processor_of(one) != processor_of(one.replace("25", "23"))
    assert machine("2 threads").startswith(processor())
    assert machine("2 threads").endswith("cores, 2 threads")


@pytest.mark.parametrize("every", [1, 2, 3, 7, 50, 100, 1000])
def test_the_next_step_with_an_exchange_is_the_first_that_is_due_or_follows_one(every):
    verification = LaneVerification(SimpleNamespace(size=2), every)
    due = [step for step in range(1, 2200) if is_due(step - 1, every) or is_due(step, every)]
    for step in range(1, 1100):
        assert verification.next_due(step) == next(at for at in due if at >= step)


def test_a_comparison_that_never_comes_takes_no_time_to_find():
    assert LaneVerification(SimpleNamespace(size=2), 10**12).next_due(102) == 10**12
    assert LaneVerification(SimpleNamespace(size=2), 0).next_due(1) == 0
