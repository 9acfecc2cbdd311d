"""Public names have docstrings that an API reference can be made of, and their examples run, on two real ranks."""

from __future__ import annotations

import functools
import json
import sys

import pytest

from tests.docstring_cases import failures
from tests.docstrings import ADAPTERS, Public
from tests.launch.launching import run_to_end
from tests.on_ranks import RankedCases

RUNNER = "tests.tensorflow.runner"
PRELOAD = ("tensorflow", "pytest", "hvdkit.tensorflow")
KERAS = {"preload": ("tensorflow", "keras", "pytest", "hvdkit.keras"), "KERAS_BACKEND": "tensorflow"}
EXAMPLES = {
    "hvdkit.torch": RankedCases("tests.docstring_cases", HOROVOD_DYNAMIC_PROCESS_SETS="1"),
    "hvdkit.tensorflow": RankedCases("tests.docstring_cases", runner=RUNNER, preload=PRELOAD),
    "hvdkit.keras": RankedCases("tests.docstring_cases", runner=RUNNER, **KERAS),
}


@functools.cache
def catalogue(adapter: str) -> list[Public]:
    """What is public in an adapter, asked of another process, which may import it."""
    quiet = {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1"}
    listed = run_to_end([sys.executable, "-m", "tests.docstrings", adapter], 300, **quiet)
    assert listed.status == 0, listed.stderr
    return [Public(**{**one, "parameters": tuple(one["parameters"])}) for one in json.loads(listed.stdout)]


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_public_names_are_documented(adapter: str) -> None:
    by_name = {f"{other}.{one.name}": one for other in ADAPTERS for one in catalogue(other)}
    by_name.update((one.name, one) for one in catalogue(adapter))
    problems = [problem for one in catalogue(adapter) for problem in one.problems(by_name)]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_examples_do_what_they_say_on_two_ranks(adapter: str) -> None:
    EXAMPLES[adapter].check("case_examples", 2, "mpi")


def example(rank: int) -> int:
    """Has an example.

    >>> 1 + rank  # which ends otherwise on rank 1: 2
    1
    """
    return 1 + rank


def test_an_example_that_prints_something_else_is_told_in_doctests_words() -> None:
    assert failures("example", example, {"rank": 0}, rank=0) == failures("example", example, {"rank": 1}, rank=1) == ""
    for rank in (0, 1):
        told = failures("example", example, {"rank": 5}, rank)
        assert (
            f"in example\nFailed example:\n    1 + rank  # which ends otherwise on rank 1: 2\nExpected:\n    {1 + rank}"
            in told
        )
        assert told.endswith("Got:\n    6\n")


GOOD = """Send a tensor.

Args:
    tensor: of any shape.
    name: of the operation.

Returns:
    A tensor.

Raises:
    ValueError: for a name of no letters.

Examples:
    >>> hvd.send(torch.ones(1), "x")
    tensor([1.])
"""


def send(doc: str, **others: object) -> Public:
    """The function of which GOOD says all that is wanted."""
    known: dict[str, object] = {"parameters": ("tensor", "name"), "returns": True, "arrays": True}
    return Public("send", doc, **{**known, **others})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("said", "instead", "problem"),
    [
        (GOOD, " ", "has no docstring"),
        ("    name: of", "    names: of", "does not name the argument name"),
        ("    name: of the", "    the name of the", "does not name the argument name"),
        ("Raises:\n    ValueError: for", "Not for", "lacks errors"),
        ("shape", "size", "lacks the shape"),
        (">>> ", "", "lacks an example"),
        ("Returns", "It is", "lacks what it returns"),
    ],
)
def test_what_a_docstring_lacks_is_told(said: str, instead: str, problem: str) -> None:
    doc = GOOD.replace(said, instead)
    assert doc != GOOD
    assert send(GOOD).problems({}) == []
    (told,) = send(doc).problems({})
    assert told.startswith(f"send: {problem}")


def test_what_another_docstring_says_need_not_be_said_again() -> None:
    doc = "Start it. Arguments and\nerrors are those of hvd.send().\n\nReturns:\n    A handle.\n\n>>> hvd.send_async()"
    referring = Public("send_async", doc, ("tensor", "name"), True, True)
    assert referring.problems({"send": send(GOOD)}) == []
    assert len(referring.problems({})) == 4
    assert referring.problems({"send": send("Nothing to be said.")}) == referring.problems({})
