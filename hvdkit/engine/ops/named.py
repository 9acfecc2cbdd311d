"""The named operations that adapters call: each becomes arrays, a signature that all ranks must share, and a detail."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from hvdkit.collectives.group import Array
from hvdkit.compression import CASTS, Codec
from hvdkit.engine.ops.device_operations import DeviceArray
from hvdkit.engine.ops.handle import Handle
from hvdkit.engine.ops.requests import Call, ReduceRequest, Signature
from hvdkit.engine.ranks.groups import Groups
from hvdkit.kernels import NAMES


class NamedOperations(ABC):
    """What an engine offers by name.

    Arrays are numpy arrays, C-contiguous. Where allreduce, broadcast and allgather take DeviceArrays, the result's
    arrays are tensors of the device or, if these ranks have no collectives of it, numpy arrays.
    """

    groups: Groups

    @abstractmethod
    def submit(
        self,
        kind: str,
        arrays: Sequence[Array | DeviceArray],
        fields: Signature,
        call: Call,
        detail: Any = None,
        sources: Sequence[Array] | None = None,
        codec: Codec = CASTS["none"],
    ) -> Handle:
        """Announce an operation, of a kind in ``ops``, to all ranks of a process set.

        ``fields`` must match on all ranks; ``detail`` is told to the coordinator and may differ.
        """

    def allreduce(
        self,
        arrays: Sequence[Array | DeviceArray],
        request: ReduceRequest,
        call: Call,
        sources: Sequence[Array] | None = None,
    ) -> Handle:
        """Reduce each array in place over the ranks of a process set; several arrays are one operation.

        ``sources``: arrays of the same shapes that hold the values, where the arrays only take the results. They must
        not change until the operation is done.
        """
        fields = {**_described(arrays), **request.signature(), **_where(arrays, call)}
        return self.submit("allreduce", arrays, fields, call, None, sources, request.codec)

    def allgather(self, arrays: Sequence[Array | DeviceArray], call: Call) -> Handle:
        """Concatenate each array over the ranks along its first dimension; the result is a list of new arrays."""
        fields = {
            "dtype": [_dtype_name(array) for array in arrays],
            "shape": [["*", *array.shape[1:]] for array in arrays],
            **_where(arrays, call),
        }
        return self.submit("allgather", arrays, fields, call, [array.shape[0] for array in arrays])

    def broadcast(self, arrays: Sequence[Array | DeviceArray], root_rank: int, call: Call) -> Handle:
        """Replace each array in place by that of ``root_rank`` (a global rank)."""
        fields = {**_described(arrays), "root": int(root_rank), **_where(arrays, call)}
        return self.submit("broadcast", arrays, fields, call)

    def alltoall(self, array: Array, splits: list[int] | str | None, call: Call) -> Handle:
        """Send ``splits[p]`` rows to rank p; the result is (what came in, rows that came from each rank).

        ``splits`` may say in words what is wrong with those of the user: this rank cannot take part, and the operation
        fails on all ranks at once.
        """
        fields = {"dtype": [_dtype_name(array)], "shape": [["*", *array.shape[1:]]], "device": call.device}
        detail = splits if isinstance(splits, str) else [array.shape[0], splits]
        return self.submit("alltoall", [array], fields, call, detail)

    def reducescatter(self, arrays: Sequence[Array], request: ReduceRequest, call: Call) -> Handle:
        """Reduce each array (its contents are used up); the result is this rank's rows of each."""
        fields = {**_described(arrays), **request.signature(), "device": call.device}
        return self.submit("reducescatter", arrays, fields, call, codec=request.codec)

    def barrier(self, process_set_id: int) -> Handle:
        """Done when every rank of the process set has called it."""
        return self.submit("barrier", [], {}, Call(None, process_set_id, wake=False))

    def gather_details(self, detail: Any, call: Call) -> tuple[bool, list[Any]]:
        """Return whether no rank has joined, and what the others tell, any JSON, in rank order. Blocks."""
        is_complete, told = self.submit("details", [], {}, call, detail).wait()
        return bool(is_complete), told

    def add_process_set(self, ranks: Sequence[int]) -> int | None:
        """Collective over all ranks. The new id, or None where a set of these ranks exists."""
        handle = self.submit("add_process_set", [], {"ranks": list(ranks)}, Call(None, wake=False))
        result: int | None = handle.wait()
        return result

    def remove_process_set(self, process_set_id: int) -> bool:
        """Collective over all ranks. Whether there was such a set."""
        handle = self.submit("remove_process_set", [], {"id": process_set_id}, Call(None, wake=False))
        return bool(handle.wait())


def _described(arrays: Sequence[Array | DeviceArray]) -> Signature:
    dtypes, shapes = [], []
    for array in arrays:
        dtypes.append(_dtype_name(array))
        shapes.append(list(array.shape))
    return {"dtype": dtypes, "shape": shapes}


def _dtype_name(array: Array | DeviceArray) -> str:
    return array.dtype if isinstance(array.dtype, str) else NAMES[array.dtype]


def _where(arrays: Sequence[Array | DeviceArray], call: Call) -> Signature:
    """The device, and whether the tensors stay there."""
    return {"device": call.device, **({"direct": True} if isinstance(arrays[0], DeviceArray) else {})}
