"""Hints for users whose ranks differ, chosen by the differing field and by the names that adapters give."""

from __future__ import annotations

from collections.abc import Sequence

# Ends and beginnings of the names that adapters give to certain operations.
SPARSE, STATISTICS = ".slices", ".statistics"
PARAMETERS, BEFORE_CLOSURE = ".kinds'", "'before_closure."
CALLBACKS = "'MetricAverageCallback", "'BroadcastGlobalVariablesCallback"

SAME_MODEL = "HINT: build the same model and freeze the same parameters on every rank."
SAME_CALLS = "HINT: let every rank make the same calls with the same process set."
APART = (
    "HINT: let every rank make the same calls with the same process set: no call under 'if hvd.rank() == 0' alone, and "
    "the same number of batches on all ranks, or hvd.join() if data are uneven; in Keras put EarlyStopping after "
    "MetricAverageCallback, so that all ranks stop together."
)
UNEVEN_FIT = (
    "HINT: the ranks most likely have different numbers of batches: give fit() the same number on all ranks, "
    "for example the smallest as steps_per_epoch, or drop the rest of the data. Otherwise the callbacks differ: use "
    "the same callbacks in the same order on all ranks, except callbacks that wait for no other rank, and put "
    "EarlyStopping, or any other callback that ends an epoch or the training, after MetricAverageCallback, so that all "
    "ranks see the same metrics."
)
OTHER_PARAMETERS = (
    "HINT: a rank trains other parameters than before, or has a new optimizer: change requires_grad and the parameter "
    "groups at the same step on all ranks. Otherwise the ranks have different numbers of batches."
)
OTHER_STEPS = (
    "HINT: the ranks most likely call step(closure) a different number of times, or the optimizer calls the closure a "
    "different number of times: give it the same settings on all ranks (LBFGS: max_iter, max_eval, tolerances), and "
    "the same number of batches."
)
LEFT_EARLY = (
    "HINT: see what rank {rank} printed. All ranks must make the same calls: no call under 'if hvd.rank() == 0' alone, "
    "the same number of batches on all ranks (or hvd.join() if data are uneven), no exit or exception on one rank "
    "alone; in Keras put EarlyStopping after MetricAverageCallback, so that all ranks stop together."
)
JOIN_LEFT = (
    "hvd.join() waits for rank {rank}, which has left the job: {reason}.\n"
    "HINT: call hvd.join() on all ranks, and leave the job only after that; see what rank {rank} printed."
)
STALLED = (
    "HINT: see what the late ranks are doing (py-spy dump --pid): they are slower, for example with more data or a "
    "slower disk, or take another path through the script, for example under 'if hvd.rank() == 0'."
)
OTHER_CALLBACKS = (
    "HINT: see what the late ranks are doing (py-spy dump --pid): they are slower, for example while they load data or "
    "save a checkpoint, or fit() has other callbacks there. Give MetricAverageCallback, "
    "BroadcastGlobalVariablesCallback and every callback that waits for other ranks to all ranks, in the same order, "
    "and the same number of batches."
)

# By field of a signature: the noun of its values, and the hint where they differ between ranks.
FIELDS = {
    "count": (
        "numbers of tensors",
        "HINT: give the same number of tensors on every rank: build or load the same model and optimizer on all ranks.",
    ),
    "dtype": ("data types", "HINT: give tensors of the same type on every rank, e.g. by tensor.to(torch.float32)."),
    "shape": ("shapes", "HINT: give tensors of the same shape on every rank."),
    "op": ("reduce operations", "HINT: pass the same op on every rank."),
    "root": ("root ranks", "HINT: pass the same root_rank on every rank."),
    "prescale": ("prescale factors", "HINT: pass the same prescale_factor on every rank."),
    "postscale": ("postscale factors", "HINT: pass the same postscale_factor on every rank."),
    "device": ("devices", "HINT: put the tensor on the same kind of device on every rank."),
    "direct": (
        "routes (device to device: True)",
        "HINT: give each rank a GPU and a PyTorch with NCCL; or set HVDKIT_TRANSPORT=mpi on all ranks, so that tensors "
        "of GPUs travel through host memory.",
    ),
    "codec": ("compressions", "HINT: pass the same compression, with the same settings, on every rank."),
    "earlier": (
        "numbers of earlier steps",
        "HINT: on all ranks or on none, load the state that each rank saved after the same step.",
    ),
    "groups": ("groups", "HINT: pass the same groups on every rank."),
    "ranks": ("process sets", "HINT: make process sets of the same ranks, in the same order, on every rank."),
    "id": ("process set ids", "HINT: remove the same process sets, in the same order, on every rank."),
}
_REDUCED = (
    "HINT: reduce tensors of the same shape on all ranks, also in the last batch of uneven data; hvd.allgather takes "
    "different numbers of rows."
)
_SHAPES_BY_KIND = {
    "allreduce": _REDUCED,
    "reducescatter": _REDUCED,
    "broadcast": "HINT: build the same model on every rank; a broadcast tensor has the same shape on all ranks.",
    "allgather": "HINT: only the first dimension may differ between ranks.",
    "alltoall": "HINT: only the first dimension may differ between ranks.",
    "plan": SAME_MODEL,
}


def for_mismatch(kind: str, field: str) -> str:
    """Return the hint for ranks whose signatures of an operation differ in a field."""
    return _SHAPES_BY_KIND.get(kind, FIELDS[field][1]) if field == "shape" else FIELDS[field][1]


def for_joined(name: str) -> str:
    """Return the caller of an operation that cannot go on without a rank that has joined, and the hint."""
    if name.endswith(STATISTICS):
        return (
            " SyncBatchNorm averages over the batches of all ranks, and a rank that has joined has no batch.\n"
            "HINT: give all ranks the same number of batches, or use BatchNorm."
        )
    if name.endswith(SPARSE):
        return (
            " It is a sparse gradient, such as that of Embedding(sparse=True), and all ranks gather it.\n"
            "HINT: pass sparse_as_dense=True to the optimizer, or give all ranks the same number of batches."
        )
    return (
        "\nHINT: once a rank has joined, operations of all ranks may only be allreduce (as in an optimizer's step) and "
        "barrier; make all other calls before, on all ranks."
    )


def for_stall(operation: str) -> str:
    """Return the hint for ranks that did not submit an operation which others wait for."""
    return OTHER_CALLBACKS if any(name in operation for name in CALLBACKS) else STALLED


def for_dead_lock(waits: Sequence[str]) -> str:
    """Return the hint for ranks that wait for each other in these operations."""
    operations = "\n".join(waits)
    if any(name in operations for name in CALLBACKS):
        return UNEVEN_FIT
    if PARAMETERS in operations:
        return OTHER_PARAMETERS
    return OTHER_STEPS if BEFORE_CLOSURE in operations else APART
