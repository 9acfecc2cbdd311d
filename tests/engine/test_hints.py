"""What ranks are told to do where they do not ask for the same: whole texts, and that none is without one."""

from __future__ import annotations

import pytest

from hvdkit.engine.loop.coordinator import Coordinator
from hvdkit.engine.loop.messages import Ask, Join, LaneFailed, Reject, Waits
from hvdkit.engine.ops.requests import Key, Request, mismatch

SIGNATURE = {
    "kind": "allreduce", "ps": 0, "dtype": ["float32"], "shape": [[4]], "op": 1, "prescale": 1.0, "postscale": 1.0,
    "device": "cpu",
}  # fmt: skip
UNEVEN = (
    "HINT: the ranks most likely have different numbers of batches: give fit() the same number on all of them, "
    "steps_per_epoch=min over the ranks, or drop the rest of the data. Else their callbacks differ: the same ones in "
    "the same order on all ranks, and EarlyStopping, or what else ends an epoch or the training, after "
    "MetricAverageCallback, so that all see the same metrics."
)


def rejected(coordinator: Coordinator) -> list[str]:
    return [one.text for _, one in coordinator.take_outgoing() if isinstance(one, Reject | LaneFailed)]


def different(kind: str, **fields: object) -> str:
    mine, theirs = {**SIGNATURE, "kind": kind}, {**SIGNATURE, "kind": kind, **fields}
    text = mismatch(Key(0, kind, "x"), {0: Request(mine), 1: Request(theirs)})
    assert text is not None
    return text


def test_different_shapes_say_what_may_differ():
    assert different("broadcast", shape=[[5]]) == (
        "Mismatched shapes for broadcast 'x': rank 0 sent [4]; rank 1 sent [5].\n"
        "HINT: build the same model on every rank; what is broadcast has one shape."
    )
    assert different("allreduce", shape=[[5]]) == (
        "Mismatched shapes for allreduce 'x': rank 0 sent [4]; rank 1 sent [5].\n"
        "HINT: reduce tensors of one shape, with the last batch of uneven data too; hvd.allgather takes different "
        "numbers of rows."
    )
    assert different("allgather", shape=[["*", 5]]).endswith(
        "\nHINT: only the first dimension may differ between ranks."
    )
    assert different("shift", shape=[[5]]).endswith("\nHINT: give tensors of the same shape on every rank.")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtype", ["int64"]), ("op", 2), ("root", 1), ("prescale", 2.0), ("postscale", 2.0), ("device", "cuda"),
        ("direct", True), ("codec", "int8"), ("earlier", 3), ("groups", [[0]]), ("ranks", [0]), ("id", 3),
    ],
)  # fmt: skip
def test_every_mismatch_says_what_to_do(field: str, value: object):
    fact, hint = different("allreduce", **{field: value}).split("\n")
    assert fact.startswith("Mismatched ")
    assert hint.startswith("HINT: ")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "sync_batch_norm.statistics",
            " It is of SyncBatchNorm, which averages over all ranks' batches, and who has joined has none.\n"
            "HINT: give all ranks as many batches, or use BatchNorm.",
        ),
        (
            "SGD.0.embedding.weight.slices",
            " It is a sparse gradient, as of Embedding(sparse=True), which all ranks gather.\n"
            "HINT: pass sparse_as_dense=True to the optimizer, or give all ranks as many batches.",
        ),
        (
            "x",
            "\nHINT: after hvd.join() others may call allreduce and barrier; make all other calls before it, on all "
            "ranks.",
        ),
    ],
)
def test_what_cannot_go_on_without_who_has_joined_says_who_asked(name: str, text: str):
    coordinator = Coordinator(2, 0)
    coordinator.receive(1, Join(), 0.0)
    gather = {"kind": "allgather", "ps": 0, "dtype": ["float32"], "shape": [["*"]], "device": "cpu"}
    coordinator.receive(0, Ask(gather, name, [3]), 0.0)
    assert rejected(coordinator) == [
        f"allgather '{name}': allgather is not supported with Join at this time; rank [1] has joined.{text}"
    ]


def waiting(*waits: Waits) -> str:
    coordinator = Coordinator(2, 0)
    for at in range(3):
        for rank, one in enumerate(waits):
            coordinator.receive(rank, one, float(at))
    (text,) = set(rejected(coordinator))
    return text


def test_uneven_data_and_callbacks_are_told_as_such():
    lanes = [
        Waits(number, [other], f"optimizer '{name}', operation 0 of 1 (dense/bias)", name)
        for number, other, name in ((0, 1, "SGD.0"), (1, 0, "Adam.0"))
    ]
    assert waiting(*lanes) == (
        "Mismatched operations: rank 0 waits in optimizer 'SGD.0', operation 0 of 1 (dense/bias), rank 1 waits in "
        "optimizer 'Adam.0', operation 0 of 1 (dense/bias); each waits for the other.\n"
        "HINT: let every rank make the same calls with the same process set: none under 'if hvd.rank() == 0' alone, "
        "and as many batches on each, or hvd.join() where data are uneven; in Keras EarlyStopping comes after "
        "MetricAverageCallback, so that all ranks stop together."
    )
    metrics = "allgather 'MetricAverageCallback.names.size'"
    assert waiting(lanes[0], Waits(1, [0], metrics, None)) == (
        "Mismatched operations: rank 0 waits in optimizer 'SGD.0', operation 0 of 1 (dense/bias), rank 1 waits in "
        f"{metrics}; each waits for the other.\n{UNEVEN}"
    )


def test_who_left_early_is_told_with_what_all_must_do():
    coordinator = Coordinator(2, 0)
    coordinator.receive(0, Ask(SIGNATURE, "x", None), 0.0)
    coordinator.depart(1, "it called sys.exit(3)")
    assert rejected(coordinator) == [
        "allreduce 'x' waits for rank 1, which has left the job: it called sys.exit(3).\n"
        "HINT: see what rank 1 printed. All ranks must make the same calls: none under 'if hvd.rank() == 0' alone, "
        "as many batches on each (or hvd.join() where data are uneven), no exit or exception on one alone; in Keras "
        "EarlyStopping comes after MetricAverageCallback, so that all ranks stop together."
    ]


def test_of_lists_the_lengths_are_told_before_what_is_in_them() -> None:
    requests = {
        rank: Request({"kind": "broadcast", "ps": 0, "dtype": ["float32"] * count, "shape": [[2]] * count, "root": 0})
        for rank, count in enumerate((10, 26))
    }
    assert mismatch(Key(0, "broadcast", "weights"), requests) == (
        "Mismatched numbers of tensors for broadcast 'weights': rank 0 sent 10; rank 1 sent 26.\n"
        "HINT: give as many tensors on every rank: of the same model, built or loaded with its optimizer on all."
    )
