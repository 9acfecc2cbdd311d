"""Arguments that make no sense, one row each: the function, the argument, what was expected and what came are told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import hvdkit.torch as hvd
from tests.told import told

PAIRS = (
    "named_parameters should be a sequence of tuples (name, parameter), usually produced by model.named_parameters()"
)
GROUPS = "groups should be a non-negative integer or a list of list of torch.Tensor."
COMM = "Invalid type of argument comm. Expected list of rank integers or mpi4py.MPI.Comm object."
SETS = 'init: process_sets must be None, "dynamic" or a list of hvd.ProcessSet'
MODEL = nn.Linear(2, 2)
ONE = torch.ones(1)


@pytest.fixture(scope="module", autouse=True)
def job() -> Iterator[None]:
    """A job of one rank in this process."""
    hvd.init()
    assert hvd.size() == 1
    yield
    hvd.shutdown()


def optimizer(**options: Any) -> Any:
    return hvd.DistributedOptimizer(torch.optim.SGD(MODEL.parameters(), lr=0.1), **options)


class HalfCompressor:
    compress = staticmethod(hvd.Compression.fp16.compress)


ROWS: dict[str, tuple[Callable[[], Any], type[Exception], tuple[str, ...]]] = {}


def row(name: str, call: Callable[[], Any], kind: type[Exception], *texts: str) -> None:
    ROWS[name] = call, kind, texts


def optimizer_row(kind: type[Exception], argument: str, value: Any, *texts: str) -> None:
    row(f"{argument}={str(value)[:30]}", lambda: optimizer(**{argument: value}), kind, "DistributedOptimizer", *texts)


row("optimizer", lambda: hvd.DistributedOptimizer(MODEL), TypeError, "DistributedOptimizer", "optimizer", "Linear")
for argument, wrongs, kind, texts in (
    ("op", (99, "sum", None), ValueError, ("op must be one of hvd.Average",)),
    ("process_set", ([0], None), TypeError, ("process_set must be a hvd.ProcessSet",)),
    ("process_set", (hvd.ProcessSet([0]),), ValueError, ("process_set must be registered", "[0]", "HINT")),
    (
        "compression",
        (3, [], None, hvd.Compression, HalfCompressor),
        TypeError,
        ("compression must be one of hvd.Compression",),
    ),
    ("backward_passes_per_step", ("2", 1.5, True, None), TypeError, ("backward_passes_per_step must be an integer",)),
    ("backward_passes_per_step", (0, -1), ValueError, ("backward_passes_per_step must be > 0",)),
    ("groups", (True, -1, 0, 1.5, "two", [3], [ONE], ([ONE],)), ValueError, (GROUPS, "groups")),
    ("groups", ([["name"]],), ValueError, ("groups must consist of torch.Tensor.", "'name' in groups[0]")),
    ("groups", ([[ONE], [ONE]],), ValueError, ("A parameter can only appear once in groups.", "groups[1]")),
    ("named_parameters", (3,), TypeError, (PAIRS, "HINT")),
    (
        "named_parameters",
        (["weight"], [("a", ONE, 3)], [(3, ONE)], [("a", 3)]),
        ValueError,
        (PAIRS, "at index 0", "HINT"),
    ),
    ("named_parameters", ([("a", MODEL.weight), ("a", MODEL.bias)],), ValueError, ("unique. Found duplicates: a",)),
    ("named_parameters", ([("a", MODEL.weight)],), ValueError, ("one or more model parameters were not named",)),
    ("gradient_predivide_factor", ("x",), TypeError, ("gradient_predivide_factor must be a number",)),
    ("gradient_predivide_factor", (0, float("nan")), ValueError, ("gradient_predivide_factor must be > 0",)),
):
    for wrong in wrongs:
        came = [f"got {wrong!r}"] if isinstance(wrong, (int, float, str)) else []
        optimizer_row(kind, argument, wrong, *texts, *came)
row(
    "gradient_predivide_factor with Sum",
    lambda: optimizer(gradient_predivide_factor=2.0, op=hvd.Sum),
    ValueError,
    "gradient_predivide_factor not supported with op != Average",
    "DistributedOptimizer",
    "got gradient_predivide_factor=2.0 and op=hvd.Sum",
)
for wrong in (0, -2):
    row(
        f"set_backward_passes_per_step({wrong})",
        lambda wrong=wrong: optimizer().set_backward_passes_per_step(wrong),  # type: ignore[misc]
        ValueError,
        "backward_passes_per_step must be > 0",
        f"set_backward_passes_per_step: got {wrong}",
    )
row(
    "set_backward_passes_per_step('1')",
    lambda: optimizer().set_backward_passes_per_step("1"),
    TypeError,
    "set_backward_passes_per_step: backward_passes_per_step must be an integer, got '1'",
)
for name, call in {
    "allreduce": hvd.allreduce,
    "grouped_allreduce": lambda tensor, **options: hvd.grouped_allreduce([tensor], **options),
    "reducescatter": hvd.reducescatter,
    "grouped_reducescatter": lambda tensor, **options: hvd.grouped_reducescatter([tensor], **options),
}.items():
    for wrong in (3, []):
        row(
            f"{name}(compression={wrong})",
            lambda call=call, wrong=wrong: call(ONE, compression=wrong),  # type: ignore[misc]
            TypeError,
            f"{name}: compression must be one of hvd.Compression",
            f"got {wrong}",
        )
for wrong in (3, "0", 1.5, [True], ["0"], object):
    row(f"init(comm={wrong})", lambda wrong=wrong: hvd.init(comm=wrong), ValueError, COMM, f"init: comm: got {wrong!r}")  # type: ignore[misc]
for wrong in (5, 1.5, True):
    row(f"init(process_sets={wrong})", lambda wrong=wrong: hvd.init(None, wrong), TypeError, SETS, f"got {wrong}")  # type: ignore[misc]
row("init(process_sets=[[0]])", lambda: hvd.init(process_sets=[[0]]), TypeError, SETS, "got [0] at index 0")
row("init(process_sets='static')", lambda: hvd.init(process_sets="static"), ValueError, SETS, "got 'static'")
row(
    "add_process_set(3)", lambda: hvd.add_process_set(3), ValueError, "ProcessSet should be initialized with", "got int"
)
for wrong in (3, [0], None):
    text = f"remove_process_set: process_set must be a hvd.ProcessSet, got {wrong}"
    row(f"remove_process_set({wrong})", lambda wrong=wrong: hvd.remove_process_set(wrong), TypeError, text)  # type: ignore[misc]
for wrong in ([], "1", None, 1.0):
    text = "poll: handle must be an integer"
    row(f"poll({wrong!r})", lambda wrong=wrong: hvd.poll(wrong), TypeError, text, f"got {wrong!r}")  # type: ignore[misc]
row("synchronize([])", lambda: hvd.synchronize([]), TypeError, "synchronize: handle must be an integer", "got []")
for wrong in (3.5, 3, None, b"trace"):
    text = f"start_timeline: file_path must be a string or a path, got {wrong!r}"
    row(f"start_timeline({wrong})", lambda wrong=wrong: hvd.start_timeline(wrong), TypeError, text)  # type: ignore[misc]
row(
    "convert_sync_batchnorm(3)",
    lambda: hvd.SyncBatchNorm.convert_sync_batchnorm(3),
    TypeError,
    "convert_sync_batchnorm: module must be a torch.nn.Module, got 3",
)


@pytest.mark.parametrize("name", ROWS)
def test_wrong_arguments_are_told(name: str) -> None:
    call, kind, texts = ROWS[name]
    with told(kind, *texts) as caught:
        call()
    assert type(caught.value) is kind


@pytest.mark.parametrize("argument", ["groups", "backward_passes_per_step", "named_parameters"])
def test_horovods_sentences_come_first(argument: str) -> None:
    wrong: dict[str, Any] = {"groups": -1, "backward_passes_per_step": 0, "named_parameters": ["weight"]}
    sentence = {"groups": GROUPS, "backward_passes_per_step": "backward_passes_per_step must be > 0"}.get(
        argument, PAIRS
    )
    with told(ValueError) as caught:
        optimizer(**{argument: wrong[argument]})
    assert str(caught.value).startswith(sentence)


def test_a_good_optimizer_can_be_made_after_all_that() -> None:
    groups = (group for group in [MODEL.parameters()])
    made = optimizer(groups=[list(group) for group in groups], backward_passes_per_step=2, op=0)
    assert (made.op, made.backward_passes_per_step) == (hvd.Average, 2)
    assert hvd.synchronize(None) is None


@pytest.mark.parametrize("spelling", ["dynamic", "DYNAMIC", "Dynamic"])
def test_process_sets_may_be_dynamic_in_any_spelling(spelling: str) -> None:
    hvd.shutdown()
    hvd.init(process_sets=spelling)
    assert hvd.remove_process_set(hvd.global_process_set) is False
    with told(ValueError, "duplicate process set"):  # not: "Set HOROVOD_DYNAMIC_PROCESS_SETS=1"
        hvd.add_process_set([0])
