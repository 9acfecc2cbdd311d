"""What is said of ranks that hold other parameters, and when they are looked at."""

from __future__ import annotations

from typing import Any

import numpy as np

from hvdkit.api.gradients.verification import MOST_NAMES, compare
from hvdkit.api.machine import machine, processor, processor_of
from hvdkit.engine.telemetry.verifying import Heard, Statement, is_due, is_due_for_sparse

NAMES = ["conv.weight", "conv.bias", "out.weight"]


def told(*values: list[int], machines: str = "aaaaaaaa", names: Any = NAMES, step: int = 7) -> tuple[str | None, bool]:
    hashes = {rank: np.array(one, dtype=np.uint64) for rank, one in enumerate(values)}
    return compare("SGD.0", step, names, hashes, dict(enumerate(machines)), "hvd.broadcast()")


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


def test_the_first_step_asks_for_a_broadcast():
    text, _ = told([1, 2, 3], [4, 5, 6], step=1)
    assert (
        "HINT: they most likely never were; have all ranks start from the same values: hvd.broadcast(). Else " in text
    )


def test_many_names_are_cut_short_and_other_numbers_of_parameters_told():
    many = list(range(100))
    text, _ = told(many, [one + 1 for one in many], names=[str(one) for one in many])
    assert f"'{MOST_NAMES - 1}' and {100 - MOST_NAMES} more (of 100) differ" in text
    text, is_error = told([1, 2, 3], [1, 2])
    assert is_error
    assert "rank 0 has 3 of them; rank 1 has 2 of them" in text


def test_ranks_that_do_not_compute_alike_are_warned_about_unless_some_that_do_differ():
    text, is_error = told([1, 2, 3], [1, 2, 4], machines="ab")
    assert not is_error
    assert "do not compute alike (rank 0: a; rank 1: b)" in text
    assert told([1, 2, 3], [1, 2, 4], [1, 2, 3], machines="aba") == (text.replace("rank 0", "ranks 0, 2"), False)
    _, is_error = told([1, 2, 3], [1, 2, 4], [1, 2, 5], machines="abb")
    assert is_error


def test_steps_that_are_looked_at():
    assert [step for step in range(2100) if is_due(step, 1000)] == [1, 10, 100, 1000, 2000]
    assert [step for step in range(10) if is_due(step, 3)] == [1, 3, 6, 9]
    assert not any(is_due(step, 0) for step in range(2000))
    assert [step for step in range(2100) if is_due_for_sparse(step, 10)] == [1, 10, 100, 1000, 2000]
    assert not any(is_due_for_sparse(step, 0) for step in range(2000))


def heard(*statements: Statement | None) -> Heard:
    rows = [np.zeros(5, dtype=np.uint64) if one is None else one.row() for one in statements]
    return Heard(np.stack(rows), [np.zeros(0) if one is None else one.details() for one in statements])


def statement(*hashes: int, machine: str = "a", updates: bool = False) -> Statement:
    return Statement(machine, np.array(hashes, dtype=np.uint64), updates)


def test_only_what_all_ranks_that_take_part_have_hashed_is_compared():
    assert not heard(statement(1, 2), statement(1, 2)).differs
    assert heard(statement(1, 2), statement(1, 3)).differs
    assert heard(statement(1, 2), statement(1, 2, machine="b")).differs  # which compare() looks at
    assert not heard(statement(1, 2), Statement()).differs
    assert not heard(statement(1, 2), None).differs
    joined = heard(statement(1, 2), None, statement(1, 3))
    assert joined.differs
    assert joined.present == [0, 2]
    assert joined.hashes(2).tolist() == [1, 3]
    assert joined.machine(2) == "a"


def test_all_ranks_update_only_where_none_has_joined():
    assert heard(Statement(updates=True), statement(1, updates=True)).all_update
    assert not heard(Statement(updates=True), Statement()).all_update
    assert not heard(Statement(updates=True), None).all_update


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
