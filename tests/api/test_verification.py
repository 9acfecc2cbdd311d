"""What is said of ranks that hold other parameters, and when they are looked at."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hvdkit.api.gradients import verification
from hvdkit.api.gradients.verification import CHUNK, SKETCH, Statement, Verification, sketch
from hvdkit.api.machine import machine, processor, processor_of
from hvdkit.engine.telemetry.verifying import LaneVerification, is_due
from hvdkit.errors import ParametersDifferError

NAMES = ["conv.weight", "conv.bias", "out.weight"]
PRECISIONS = (1e-7, 1e-7, 8e-3)


class Meeting:
    """Ranks that are threads, and what they tell each other: only JSON."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.exchanges: list[str] = []
        self.warnings: dict[int, str] = {}
        self._details: dict[str, dict[int, Any]] = {}
        self._ranks, self._here = sorted(ranks), threading.Barrier(len(ranks))
        self._rank = threading.local()

    def gather(self, detail: Any, call: Any) -> tuple[bool, list[Any]]:
        told = self._details.setdefault(call.name, {})
        told[self._rank.number] = json.loads(json.dumps(detail))
        if self._here.wait(10) == 0:
            self.exchanges.append(call.name)
        return True, [told[rank] for rank in self._ranks]

    def run(self, rank: int, step: int, of_rank: Verification, statement: Statement) -> str | None:
        """Return the error of a rank."""
        self._rank.number = rank
        engine = SimpleNamespace(topology=SimpleNamespace(rank=rank), named=SimpleNamespace(gather_details=self.gather))
        if of_rank._compared_in is not None:
            of_rank._compared_in = engine
        try:
            of_rank.compare(engine, "SGD.0", 0, step, statement)
        except ParametersDifferError as error:
            return str(error)
        return None

    def warn(self, text: str, stacklevel: int) -> None:
        self.warnings[self._rank.number] = text


def compared(
    statements: dict[int, Statement], firsts: Sequence[bool] = (), step: int = 7, earlier: Sequence[Verification] = ()
) -> tuple[dict[int, str | None], dict[int, str], list[str]]:
    """Return the errors and warnings of ranks that compare their parameters, and in which exchanges they do so."""
    meeting = Meeting(list(statements))
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(len(statements)) as threads:
        patch.setattr(verification.warnings, "warn", meeting.warn)
        running = {}
        for index, (rank, statement) in enumerate(statements.items()):
            of_rank = earlier[index] if earlier else Verification("hvd.broadcast()")
            if not earlier:
                of_rank._compared_in = None if index < len(firsts) and firsts[index] else "an engine"
            running[rank] = threads.submit(meeting.run, rank, step, of_rank, statement)
        errors = {rank: each.result() for rank, each in running.items()}
    return errors, meeting.warnings, meeting.exchanges


def told(
    *values: list[int],
    machines: str = "aaaaaaaa",
    step: int = 7,
    first: bool = False,
    tensors: Any = None,
) -> tuple[str | None, bool]:
    """Return what ranks with parameters of these hashes, and values, are told, and True if it is an error."""
    statements = {}
    for rank, hashes in enumerate(values):
        sketches = None if tensors is None else [sketch_of(np.array(each)) for each in tensors[rank]]
        array = np.array(hashes, dtype=np.uint64)
        statements[rank] = Statement(machines[rank], NAMES[: len(hashes)], PRECISIONS[: len(hashes)], array, sketches)
    errors, warned, _ = compared(statements, [first] * len(values), step)
    if errors[0] is not None:
        assert set(errors.values()) == {errors[0]}, "all ranks are told the same"
        assert not warned
        return errors[0], True
    assert set(errors.values()) == {None}
    assert set(warned) in (set(), set(statements) if first else {0})
    return warned.get(0), False


CAUSES = (
    "gradients were changed on one rank unnoticed (in PyTorch through .data) between backward() and step(); ranks "
    "stepped differently (learning rates, random numbers in the update, a step that one rank left out, hvd.join() "
    "without a broadcast after it); or one rank alone loaded or changed values. HVDKIT_VERIFY=1 "
    "finds the first step after which they differ; 0 switches this comparison off."
)


def test_the_same_everywhere_is_nothing():
    assert told([1, 2, 3], [1, 2, 3]) == (None, False)
    assert told([1, 2, 3], [1, 2, 3], machines="ab") == (None, False)


def test_who_differs_in_what_is_named():
    text, is_error = told([1, 2, 3], [1, 5, 3], [1, 2, 3])
    assert is_error
    assert "of 'SGD.0' are not the same on all ranks after step 7: 'conv.bias' (of 3) differ. " in text
    hint = f"HINT: to make them equal, use hvd.broadcast(); find out why they differ: {CAUSES}"
    assert text.endswith(f"The values of rank 1 differ from those of ranks 0, 2.\n{hint}")
    text, _ = told([1, 2, 3], [1, 2, 3], [1, 2, 4], [1, 2, 5], [1, 2, 5])
    assert "The values of ranks 3, 4 and of rank 2 differ from those of ranks 0, 1" in text
    text, _ = told([1, 2, 3], [4, 2, 3], [5, 2, 3])
    assert "Each of ranks 0, 1, 2 has other values" in text


def test_the_first_comparison_asks_for_a_broadcast():
    for machines in ("aa", "ab"):
        text, is_error = told([1, 2, 3], [4, 5, 6], step=1, first=True, machines=machines)
        hint = (
            "HINT: they most likely never were the same; have all ranks start from the same values: hvd.broadcast(). "
            "This is a warning because a broadcast may follow the first step; if the parameters still differ at the "
            "next comparison, after step 10 at the latest, it is an error. If they were the same at the start: "
        )
        assert text.endswith(f"\n{hint}{CAUSES}")
        assert not is_error
    _, is_error = told([1, 2, 3], [4, 5, 6], step=2)
    assert is_error


def test_an_error_says_if_parameters_have_differed_since_the_first_comparison():
    values = [1, 2, 3], [1, 2, 4]
    one, other = (Statement("a", NAMES, PRECISIONS, np.array(each, np.uint64), None) for each in values)
    never = (
        "HINT: they differed in the first comparison already, so they most likely never were the same; have all ranks "
        "start from the same values: hvd.broadcast(). If they were the same at the start: "
    )
    later = "HINT: to make them equal, use hvd.broadcast(); find out why they differ: "
    for second, hint in ((other, never), (one, later)):
        ranks = [Verification("hvd.broadcast()") for _ in range(2)]
        compared({0: one, 1: other}, step=1, earlier=ranks)
        if second is one:  # a broadcast has made them equal meanwhile
            compared({0: one, 1: one}, step=10, earlier=ranks)
        errors, _, _ = compared({0: one, 1: other}, step=100, earlier=ranks)
        assert str(errors[0]).endswith(f"\n{hint}{CAUSES}")


def test_ranks_that_do_not_compute_alike_are_warned_about_unless_some_that_do_differ():
    text, is_error = told([1, 2, 3], [1, 2, 4], machines="ab")
    assert not is_error
    fact = (
        "The ranks that differ do not compute alike (rank 0: a; rank 1: b), so the same update may have been rounded "
        "differently. Later differences of this kind are not reported; a difference that rounding does not explain is "
        "an error."
    )
    assert fact in text
    assert told([1, 2, 3], [1, 2, 4], [1, 2, 3], machines="aba") == (text.replace("rank 0", "ranks 0, 2"), False)
    _, is_error = told([1, 2, 3], [1, 2, 4], [1, 2, 5], machines="abb")
    assert is_error
    text, is_error = told([1, 2, 3], [1, 2], machines="ab")
    assert is_error
    assert "rank 0 has 3 of them; rank 1 has 2 of them" in text


def near(*distances: float) -> list[list[float]]:
    """Return parameters at these distances from vectors of norm 1."""
    return [[1.0, distance] for distance in distances]


def test_what_rounding_does_not_explain_is_an_error_whatever_ranks_compute_on():
    values = [1, 2, 3], [4, 5, 6], [4, 5, 6]
    origin = near(0, 0, 0)
    text, is_error = told(*values, machines="abc", tensors=[origin, near(9e-4, 1e-7, 7e-3), origin])
    assert not is_error
    assert "do not compute alike" in text
    for distances in ([0, 1.1e-3, 0], [0, 1.1e-3, 7e-3], [1.05e-3, 1.1e-3, 0]):
        text, is_error = told(*values, machines="abc", tensors=[origin, near(1e-5, 0, 0), near(*distances)])
        assert is_error
        assert "the values of rank 2 differ from those of rank 0 by 0.0011 of the norm of 'conv.bias'" in text
    text, is_error = told(*values, machines="abc", tensors=[origin, near(0, 0, 9e-3), near(0, 1e-3, 0)])
    assert is_error
    assert "by 0.009 of the norm of 'out.weight', more than 0.008" in text
    _, is_error = told(*values, machines="abc", tensors=[origin, near(0, np.inf, 0), origin])
    assert is_error


def sketch_of(values: Any) -> Any:
    return sketch(values[begin : begin + CHUNK] for begin in range(0, len(values), CHUNK))


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


def statement(*hashes: int, machine: str = "a", sketches: Any = None) -> Statement:
    names = [f"p{index}" for index in range(len(hashes))]
    return Statement(machine, names, [0.0] * len(hashes), np.array(hashes, dtype=np.uint64), sketches)


def sketched(*values: list[float], machine: str = "a") -> Statement:
    hashes = [hash(tuple(one)) % 1000 for one in values]
    return statement(*hashes, machine=machine, sketches=[sketch_of(np.array(one)) for one in values])


def test_it_is_the_first_comparison_for_all_where_it_is_for_one():
    errors, warned, _ = compared({0: statement(1, 2), 1: statement(1, 3)}, [False, True])
    assert set(errors.values()) == {None}
    assert set(warned) == {0, 1}


def test_ranks_say_as_much_as_they_must():
    same = sketched([1.0, 2.0], [3.0])
    assert len(compared({0: same, 2: same})[2]) == 1
    assert len(compared({0: same, 2: sketched([1.0, 2.0], [3.0], machine="b")})[2]) == 1
    assert len(compared({0: statement(1, 2), 1: statement(1, 3)})[2]) == 2
    errors, _, exchanges = compared({1: same, 2: sketched([1.0, 2.0], [3.3], machine="b"), 4: same})
    assert len(exchanges) == 4
    assert all("rank 2 differ from those of rank 1 by 0.1 of the norm of 'p1'" in str(text) for text in errors.values())
    errors, warned, exchanges = compared({0: same, 3: statement(1, 2, machine="b")})  # had joined when it met others
    assert len(exchanges) == 2
    assert set(errors.values()) == {None}
    assert set(warned) == {0}


def test_sketches_are_wanted_once_ranks_have_met_that_do_not_compute_alike():
    for machines, wants in (("aa", False), ("ab", True)):
        ranks = [Verification("hvd.broadcast()") for _ in machines]
        meeting = Meeting([0, 1])
        with ThreadPoolExecutor(2) as threads:
            runs = [
                threads.submit(meeting.run, rank, 1, ranks[rank], statement(1, machine=name))
                for rank, name in enumerate(machines)
            ]
        assert not any(run.exception() for run in runs)
        assert [each.wants_sketches for each in ranks] == [wants, wants]


def test_a_subnormal_number_that_one_rank_flushes_is_no_difference():
    _, warned, _ = compared({0: sketched([0.0]), 1: sketched([1e-40], machine="b")})
    assert "do not compute alike" in warned[0]
    errors, _, _ = compared({0: sketched([0.0]), 1: sketched([1e-9], machine="b")})
    assert "rounding does not explain this" in str(errors[0])


def test_steps_that_are_looked_at():
    assert [step for step in range(2100) if is_due(step, 1000)] == [1, 10, 100, 1000, 2000]
    assert [step for step in range(10) if is_due(step, 3)] == [1, 3, 6, 9]
    assert not any(is_due(step, 0) for step in range(2000))
    assert [step for step in range(2100) if is_due(step, 10, sparse=True)] == [1, 10, 100, 1000, 2000]
    assert not any(is_due(step, 0, sparse=True) for step in range(2000))


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
def test_ranks_exchange_words_in_steps_that_are_due_or_follow_one(every):
    verification = LaneVerification(SimpleNamespace(size=2), every)
    for steps in range(1100):
        assert verification.begin_step(steps) == (is_due(steps, every) or is_due(steps + 1, every))
        assert verification.is_due == is_due(steps, every)


def test_a_rank_alone_and_ranks_that_never_compare_exchange_no_words():
    for size, every in ((1, 1), (2, 0)):
        verification = LaneVerification(SimpleNamespace(size=size), every)
        assert not any(verification.begin_step(steps) for steps in range(200))
