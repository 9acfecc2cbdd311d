"""What ranks are told to do where they do not ask for the same, and that none is without a hint."""

from __future__ import annotations

import pytest

from hvdkit.engine.loop.coordinator import Coordinator
from hvdkit.engine.loop.messages import Ask, Join, LaneFailed, Reject, Waits
from hvdkit.engine.ops.requests import Key, Request, mismatch
from tests.engine.test_coordinator import GATHER, allreduce


def rejected(coordinator: Coordinator) -> list[str]:
    return [one.text for _, one in coordinator.take_outgoing() if isinstance(one, Reject | LaneFailed)]


@pytest.mark.parametrize(
    ("kind", "field", "value", "hint"),
    [
        ("broadcast", "shape", [[5]], "build the same model on every rank; a broadcast tensor has the same shape "),
        ("allreduce", "shape", [[5]], "reduce tensors of the same shape on all ranks, also in the last batch of "),
        ("allgather", "shape", [["*", 5]], "only the first dimension may differ between ranks."),
        ("shift", "shape", [[5]], "give tensors of the same shape on every rank."),
        ("broadcast", "dtype", ["float32", "float32"], "give the same number of tensors on every rank: build "),
        ("allreduce", "dtype", ["int64"], ""),
        ("allreduce", "op", 2, ""),
        ("allreduce", "root", 1, ""),
        ("allreduce", "prescale", 2.0, ""),
        ("allreduce", "postscale", 2.0, ""),
        ("allreduce", "device", "cuda", ""),
        ("allreduce", "direct", True, ""),
        ("allreduce", "codec", "int8", ""),
        ("allreduce", "earlier", 3, ""),
        ("allreduce", "groups", [[0]], ""),
        ("allreduce", "ranks", [0], ""),
        ("allreduce", "id", 3, ""),
    ],
)
def test_every_mismatch_says_what_to_do(kind, field, value, hint):
    signatures = {**allreduce(), "kind": kind}, {**allreduce(), "kind": kind, field: value}
    text = mismatch(Key(0, kind, "x"), {rank: Request(signature) for rank, signature in enumerate(signatures)})
    assert text is not None
    fact, *hints = text.split("\n")
    assert fact.startswith("Mismatched ")
    assert "rank 0 " in fact
    assert len(hints) == 1
    assert hints[0].startswith(f"HINT: {hint}")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("sync_batch_norm.statistics", "give all ranks the same number of batches, or use BatchNorm."),
        ("SGD.0.embedding.weight.slices", "pass sparse_as_dense=True to the optimizer, or give all ranks the same "),
        ("x", "once a rank has joined, operations of all ranks may only be allreduce (as in an optimizer's "),
    ],
)
def test_what_cannot_go_on_without_who_has_joined_says_who_asked(name, hint):
    coordinator = Coordinator(2, 0)
    coordinator.receive(1, Join(), 0.0)
    coordinator.receive(0, Ask(GATHER, name, [3]), 0.0)
    (text,) = rejected(coordinator)
    assert text.startswith(
        f"allgather '{name}': allgather is not supported with Join at this time; rank [1] has joined."
    )
    assert f"\nHINT: {hint}" in text


LANES = [
    Waits(number, [other], f"optimizer '{name}', operation 0 of 1 (dense/bias)", name)
    for number, other, name in ((0, 1, "SGD.0"), (1, 0, "Adam.0"))
]
METRICS = Waits(1, [0], "allgather 'MetricAverageCallback.names.size'", None)


@pytest.mark.parametrize(
    ("other", "hint"),
    [
        (LANES[1], "let every rank make the same calls with the same process set: no call under 'if hvd.rank() == "),
        (METRICS, "the ranks most likely have different numbers of batches: give fit() the same number on all ranks"),
    ],
)
def test_uneven_data_and_callbacks_are_told_as_such(other, hint):
    coordinator = Coordinator(2, 0)
    for at in range(3):
        for rank, waits in enumerate((LANES[0], other)):
            coordinator.receive(rank, waits, float(at))
    (text,) = set(rejected(coordinator))
    fact = f"Mismatched operations: rank 0 waits in {LANES[0].subject}, rank 1 waits in {other.subject}"
    assert text.startswith(f"{fact}; each waits for the other.\nHINT: {hint}")
