"""What ranks are told to do where they do not ask for the same, and that none is without a hint."""

from __future__ import annotations

import pytest

from hvdkit.engine.loop.coordinator import Coordinator
from hvdkit.engine.loop.messages import Ask, Join, LaneFailed, Reject, Waits
from hvdkit.engine.ops.hints import for_stall
from hvdkit.engine.ops.requests import Key, Request, mismatch
from tests.engine.test_coordinator import GATHER, allreduce


def rejected(coordinator: Coordinator) -> list[str]:
    return [one.text for _, one in coordinator.take_outgoing() if isinstance(one, Reject | LaneFailed)]


BROADCAST = "HINT: build the same model on every rank; a broadcast tensor has the same shape on all ranks."
REDUCED = (
    "HINT: reduce tensors of the same shape on all ranks, also in the last batch of uneven data; hvd.allgather takes "
    "different numbers of rows."
)
COUNT = "HINT: give the same number of tensors on every rank: build or load the same model and optimizer on all ranks."


@pytest.mark.parametrize(
    ("kind", "field", "value", "hint"),
    [
        ("broadcast", "shape", [[5]], BROADCAST),
        ("allreduce", "shape", [[5]], REDUCED),
        ("allgather", "shape", [["*", 5]], "HINT: only the first dimension may differ between ranks."),
        ("shift", "shape", [[5]], "HINT: give tensors of the same shape on every rank."),
        ("broadcast", "dtype", ["float32", "float32"], COUNT),
        (
            "allreduce",
            "dtype",
            ["int64"],
            "HINT: give tensors of the same type on every rank, e.g. by tensor.to(torch.float32).",
        ),
        ("allreduce", "op", 2, "HINT: pass the same op on every rank."),
        ("allreduce", "root", 1, "HINT: pass the same root_rank on every rank."),
        ("allreduce", "prescale", 2.0, "HINT: pass the same prescale_factor on every rank."),
        ("allreduce", "postscale", 2.0, "HINT: pass the same postscale_factor on every rank."),
        ("allreduce", "device", "cuda", "HINT: put the tensor on the same kind of device on every rank."),
        (
            "allreduce",
            "direct",
            True,
            "HINT: give each rank a GPU and a PyTorch with NCCL; or set HVDKIT_TRANSPORT=mpi on all ranks, so that "
            "tensors of GPUs travel through host memory.",
        ),
        ("allreduce", "codec", "int8", "HINT: pass the same compression, with the same settings, on every rank."),
        (
            "allreduce",
            "earlier",
            3,
            "HINT: on all ranks or on none, load the state that each rank saved after the same step.",
        ),
        ("allreduce", "groups", [[0]], "HINT: pass the same groups on every rank."),
        ("allreduce", "ranks", [0], "HINT: make process sets of the same ranks, in the same order, on every rank."),
        ("allreduce", "id", 3, "HINT: remove the same process sets, in the same order, on every rank."),
    ],
)
def test_every_mismatch_says_what_to_do(kind, field, value, hint):
    signatures = {**allreduce(), "kind": kind}, {**allreduce(), "kind": kind, field: value}
    text = mismatch(Key(0, kind, "x"), {rank: Request(signature) for rank, signature in enumerate(signatures)})
    assert text is not None
    fact, *hints = text.split("\n")
    assert fact.startswith("Mismatched ")
    assert "rank 0 " in fact
    assert hints == [hint]


STATISTICS = (
    " SyncBatchNorm averages over the batches of all ranks, and a rank that has joined has no batch.\n"
    "HINT: give all ranks the same number of batches, or use BatchNorm."
)
SLICES = (
    " It is a sparse gradient, such as that of Embedding(sparse=True), and all ranks gather it.\n"
    "HINT: pass sparse_as_dense=True to the optimizer, or give all ranks the same number of batches."
)
OTHERS = (
    "\nHINT: once a rank has joined, operations of all ranks may only be allreduce (as in an optimizer's step) and "
    "barrier; make all other calls before, on all ranks."
)


@pytest.mark.parametrize(
    ("name", "rest"),
    [("sync_batch_norm.statistics", STATISTICS), ("SGD.0.embedding.weight.slices", SLICES), ("x", OTHERS)],
)
def test_what_cannot_go_on_without_who_has_joined_says_who_asked(name, rest):
    coordinator = Coordinator(2, 0)
    coordinator.receive(1, Join(), 0.0)
    coordinator.receive(0, Ask(GATHER, name, [3]), 0.0)
    (text,) = rejected(coordinator)
    fact = f"allgather '{name}': allgather is not supported with Join at this time; rank [1] has joined."
    assert text == fact + rest


LANES = [
    Waits(number, [other], f"optimizer '{name}', operation 0 of 1 (dense/bias)", name)
    for number, other, name in ((0, 1, "SGD.0"), (1, 0, "Adam.0"))
]
METRICS = Waits(1, [0], "allgather 'MetricAverageCallback.names.size'", None)
APART = (
    "HINT: let every rank make the same calls with the same process set: no call under 'if hvd.rank() == 0' alone, and "
    "the same number of batches on all ranks, or hvd.join() if data are uneven; in Keras put EarlyStopping after "
    "MetricAverageCallback, so that all ranks stop together."
)
UNEVEN = (
    "HINT: the ranks most likely have different numbers of batches: give fit() the same number on all ranks, "
    "for example the smallest as steps_per_epoch, or drop the rest of the data. Otherwise the callbacks differ: use "
    "the same callbacks in the same order on all ranks, except callbacks that wait for no other rank, and put "
    "EarlyStopping, or any other callback that ends an "
    "epoch or the training, after MetricAverageCallback, so that all ranks see the same metrics."
)


KINDS = Waits(1, [0], "details 'SGD.0#1.kinds'", None)
TRAINS_OTHERS = (
    "HINT: a rank trains other parameters than before, or has a new optimizer: change requires_grad and the parameter "
    "groups at the same step on all ranks. Otherwise the ranks have different numbers of batches."
)
CLOSURE = Waits(1, [0], "allreduce 'before_closure.LBFGS.0'", None)
OTHER_STEPS = (
    "HINT: the ranks most likely call step(closure) a different number of times, or the optimizer calls the closure a "
    "different number of times: give it the same settings on all ranks (LBFGS: max_iter, max_eval, tolerances), and "
    "the same number of batches."
)


@pytest.mark.parametrize(
    ("other", "hint"), [(LANES[1], APART), (METRICS, UNEVEN), (KINDS, TRAINS_OTHERS), (CLOSURE, OTHER_STEPS)]
)
def test_uneven_data_and_callbacks_are_told_as_such(other, hint):
    coordinator = Coordinator(2, 0)
    for at in range(3):
        for rank, waits in enumerate((LANES[0], other)):
            coordinator.receive(rank, waits, float(at))
    (text,) = set(rejected(coordinator))
    fact = f"Mismatched operations: rank 0 waits in {LANES[0].subject}, rank 1 waits in {other.subject}"
    assert text == f"{fact}; each waits for the other.\n{hint}"


def test_a_callback_that_one_rank_lacks_is_told_as_such():
    callbacks = (
        "HINT: see what the late ranks are doing (py-spy dump --pid): they are slower, for example while they load "
        "data or save a checkpoint, or fit() has other callbacks there. Give MetricAverageCallback, "
        "BroadcastGlobalVariablesCallback and every callback that waits for other ranks to all ranks, in the same "
        "order, and the same number of batches."
    )
    late = "HINT: see what the late ranks are doing (py-spy dump --pid): they are slower, "
    assert for_stall("allgather 'BroadcastGlobalVariablesCallback.built.size'") == callbacks
    assert for_stall("allreduce 'MetricAverageCallback.loss'") == callbacks
    assert for_stall("allreduce 'x'").startswith(late)
