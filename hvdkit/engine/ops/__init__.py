"""The operations that ranks negotiate, by kind. A new operation is a row here."""

from hvdkit.engine.ops.agreements import ADD_PROCESS_SET, BARRIER, DETAILS, PLAN, REMOVE_PROCESS_SET
from hvdkit.engine.ops.allreduce import ALLREDUCE
from hvdkit.engine.ops.batch import Batch, Kind
from hvdkit.engine.ops.exchanges import ALLGATHER, ALLTOALL, BROADCAST, REDUCESCATTER
from hvdkit.engine.ranks.turns import effective

_TENSORS = ALLREDUCE, ALLGATHER, BROADCAST, ALLTOALL, REDUCESCATTER
_AGREEMENTS = BARRIER, DETAILS, PLAN, ADD_PROCESS_SET, REMOVE_PROCESS_SET
KINDS: dict[str, Kind] = {kind.name: kind for kind in (*_TENSORS, *_AGREEMENTS)}


def tensor_kinds() -> list[str]:
    """Return the kinds that share names: a name is in flight for one of them at a time."""
    return [kind.name for kind in KINDS.values() if kind.carries_tensors]


__all__ = ["KINDS", "Batch", "Kind", "effective", "tensor_kinds"]
