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


def option(name: str) -> Callable[[Any], Any]:
    return lambda wrong: optimizer(**{name: wrong})


SOME_CODEC = "compression must be one of hvd.Compression"
PASSES = "backward_passes_per_step must be"
OPTIMIZER = "DistributedOptimizer"
# A call of one wrong value, these values, the kind of the error, and parts of its message.
TABLE: list[tuple[Callable[[Any], Any], list[Any], type[Exception], tuple[str, ...]]] = [
    (hvd.DistributedOptimizer, [MODEL], TypeError, (OPTIMIZER, "optimizer", "Linear")),
    (option("op"), [99, "sum", None], ValueError, (OPTIMIZER, "op must be one of hvd.Average")),
    (option("process_set"), [[0]], TypeError, (OPTIMIZER, "process_set must be a hvd.ProcessSet, got list")),
    (option("process_set"), [hvd.ProcessSet([0])], ValueError, ("process_set must be registered", "[0]", "HINT")),
    (option("compression"), [3, [], None, hvd.Compression, HalfCompressor], TypeError, (OPTIMIZER, SOME_CODEC)),
    (option("backward_passes_per_step"), ["2", 1.5, True, None], TypeError, (OPTIMIZER, f"{PASSES} an integer")),
    (option("backward_passes_per_step"), [0, -1], ValueError, (OPTIMIZER, f"{PASSES} > 0")),
    (option("groups"), [True, -1, 0, 1.5, "two", [3], [ONE], ([ONE],)], ValueError, (OPTIMIZER, GROUPS, "groups")),
    (option("groups"), [[["name"]]], ValueError, ("groups must consist of torch.Tensor.", "got 'name' in groups[0]")),
    (option("groups"), [[[ONE], [ONE]]], ValueError, ("A parameter can only appear once in groups.", "groups[1]")),
    (option("named_parameters"), [3], TypeError, (OPTIMIZER, PAIRS, "HINT")),
    (option("named_parameters"), [["weight"], [("a", ONE, 3)], [(3, ONE)]], ValueError, (PAIRS, "at index 0", "HINT")),
    (option("named_parameters"), [[("a", MODEL.weight), ("a", MODEL.bias)]], ValueError, ("Found duplicates: a",)),
    (option("named_parameters"), [[("a", MODEL.weight)]], ValueError, ("one or more model parameters were not named",)),
    (option("gradient_predivide_factor"), ["x"], TypeError, ("gradient_predivide_factor must be a number",)),
    (option("gradient_predivide_factor"), [0, float("nan")], ValueError, ("gradient_predivide_factor must be > 0",)),
    (
        lambda factor: optimizer(gradient_predivide_factor=factor, op=hvd.Sum),
        [2.0],
        ValueError,
        ("gradient_predivide_factor not supported with op != Average", "gradient_predivide_factor=2.0 and op=hvd.Sum"),
    ),
    (
        lambda passes: optimizer().set_backward_passes_per_step(passes),
        [0, -2],
        ValueError,
        (f"{PASSES} > 0", "set_backward_passes_per_step: got"),
    ),
    (lambda passes: optimizer().set_backward_passes_per_step(passes), ["1"], TypeError, (f"{PASSES} an integer",)),
    (lambda codec: hvd.allreduce(ONE, compression=codec), [3, []], TypeError, (f"allreduce: {SOME_CODEC}",)),
    (lambda codec: hvd.grouped_allreduce([ONE], compression=codec), [3], TypeError, (f"allreduce: {SOME_CODEC}",)),
    (lambda codec: hvd.reducescatter(ONE, compression=codec), [3, []], TypeError, (f"reducescatter: {SOME_CODEC}",)),
    (lambda codec: hvd.grouped_reducescatter([ONE], compression=codec), [3], TypeError, (SOME_CODEC,)),
    (lambda comm: hvd.init(comm=comm), [3, "0", 1.5, [True], ["0"], object], ValueError, (COMM, "init: comm: got")),
    (lambda sets: hvd.init(None, sets), [5, 1.5, True, [[0]]], TypeError, (SETS,)),
    (lambda sets: hvd.init(None, sets), ["static"], ValueError, (SETS,)),
    (hvd.add_process_set, [3], ValueError, ("ProcessSet should be initialized with", "got int")),
    (hvd.remove_process_set, [3, [0], None], TypeError, ("remove_process_set: process_set must be a hvd.ProcessSet",)),
    (hvd.poll, [[], "1", None, 1.0], TypeError, ("poll: handle must be an integer",)),
    (hvd.synchronize, [[]], TypeError, ("synchronize: handle must be an integer", "got []")),
    (hvd.start_timeline, [3.5, 3, None, b"trace"], TypeError, ("start_timeline: file_path must be a string",)),
    (
        hvd.SyncBatchNorm.convert_sync_batchnorm,
        [3],
        TypeError,
        ("convert_sync_batchnorm: module must be a torch.nn.Module, got 3",),
    ),
]
ROWS = [(call, wrong, kind, texts) for call, wrongs, kind, texts in TABLE for wrong in wrongs]


@pytest.mark.parametrize(("call", "wrong", "kind", "texts"), ROWS, ids=[str(number) for number in range(len(ROWS))])
def test_wrong_arguments_are_told(
    call: Callable[[Any], Any], wrong: Any, kind: type[Exception], texts: tuple[str, ...]
) -> None:
    with told(kind, *texts) as caught:
        call(wrong)
    assert type(caught.value) is kind
    if isinstance(wrong, (float, str)):
        assert f"{wrong!r}" in str(caught.value)


@pytest.mark.parametrize(
    ("argument", "wrong", "sentence"),
    [
        ("groups", -1, GROUPS),
        ("backward_passes_per_step", 0, f"{PASSES} > 0"),
        ("named_parameters", ["weight"], PAIRS),
    ],
)
def test_horovods_sentences_come_first(argument: str, wrong: Any, sentence: str) -> None:
    with told(ValueError) as caught:
        optimizer(**{argument: wrong})
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
