"""The operations that ranks negotiate, by name: a new one is a row here and the module that it stands in."""

from hvdkit.engine.ops.agreements import ADD_PROCESS_SET, BARRIER, DETAILS, PLAN, REMOVE_PROCESS_SET
from hvdkit.engine.ops.allgather import ALLGATHER
from hvdkit.engine.ops.allreduce import ALLREDUCE
from hvdkit.engine.ops.alltoall import ALLTOALL
from hvdkit.engine.ops.batch import Batch, Submission, effective
from hvdkit.engine.ops.broadcast import BROADCAST
from hvdkit.engine.ops.kind import Kind
from hvdkit.engine.ops.reducescatter import REDUCESCATTER

KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        ALLREDUCE,
        ALLGATHER,
        BROADCAST,
        ALLTOALL,
        REDUCESCATTER,
        BARRIER,
        DETAILS,
        PLAN,
        ADD_PROCESS_SET,
        REMOVE_PROCESS_SET,
    )
}


def tensor_kinds() -> list[str]:
    """The kinds of which a name can be in flight for one only."""
    return [kind.name for kind in KINDS.values() if kind.carries_tensors]


__all__ = ["KINDS", "Batch", "Kind", "Submission", "effective", "tensor_kinds"]
