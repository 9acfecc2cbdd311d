"""The named operations that adapters call: each becomes arrays, a signature that all ranks must share, and a detail."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from hvdkit.collectives.group import Array
from hvdkit.compression import CASTS, Codec
from hvdkit.engine.direct import DeviceArray
from hvdkit.engine.handle import Handle
from hvdkit.engine.requests import Signature
from hvdkit.kernels import NAMES, ReduceOp


class NamedOperations(ABC):
    """What an engine offers by name. ``wake=False`` leaves the driving to a caller who waits at once.

    Arrays are numpy arrays, C-contiguous. Where allreduce, broadcast and allgather take DeviceArrays, the result's
    arrays are tensors of the device or, if these ranks have no collectives of it, numpy arrays.
    """

    @abstractmethod
    def _submit(
        self,
        kind: str,
        arrays: Sequence[Array | DeviceArray],
        fields: Signature,
        detail: Any,
        name: str | None,
        process_set_id: int,
        wake: bool,
        sources: Sequence[Array] | None = None,
        codec: Codec = CASTS["none"],
    ) -> Handle:
        """Announce an operation to all ranks of a process set."""

    def allreduce(
        self,
        arrays: Sequence[Array | DeviceArray],
        *,
        name: str | None,
        op: ReduceOp,
        prescale: float,
        postscale: float,
        process_set_id: int,
        device: str = "cpu",
        wake: bool = True,
        sources: Sequence[Array] | None = None,
        codec: Codec = CASTS["none"],
    ) -> Handle:
        """Reduce each array in place over the ranks of a process set; several arrays are one operation.

        ``sources``: arrays of the same shapes that hold the values, where the arrays only take the results. They must
        not change until the operation is done. ``codec``: a payload codec encodes sums and averages of floating types
        for the wire; it keeps nothing from one operation to the next.
        """
        signature = {
            **_described(arrays),
            "op": int(op),
            "prescale": float(prescale),
            "postscale": float(postscale),
            "device": device,
            **_way(arrays),
            **_encoding(codec),
        }
        return self._submit("allreduce", arrays, signature, None, name, process_set_id, wake, sources, codec)

    def allgather(
        self,
        arrays: Sequence[Array | DeviceArray],
        *,
        name: str | None,
        process_set_id: int,
        device: str = "cpu",
        wake: bool = True,
    ) -> Handle:
        """Concatenate each array over the ranks along its first dimension; the result is a list of new arrays."""
        signature = {
            "dtype": [_dtype_name(array) for array in arrays],
            "shape": [["*", *array.shape[1:]] for array in arrays],
            "device": device,
            **_way(arrays),
        }
        rows = [array.shape[0] for array in arrays]
        return self._submit("allgather", arrays, signature, rows, name, process_set_id, wake)

    def broadcast(
        self,
        arrays: Sequence[Array | DeviceArray],
        *,
        root_rank: int,
        name: str | None,
        process_set_id: int,
        device: str = "cpu",
        wake: bool = True,
    ) -> Handle:
        """Replace each array in place by that of ``root_rank`` (a global rank)."""
        signature = {**_described(arrays), "root": int(root_rank), "device": device, **_way(arrays)}
        return self._submit("broadcast", arrays, signature, None, name, process_set_id, wake)

    def alltoall(
        self,
        array: Array,
        *,
        splits: list[int] | str | None,
        name: str | None,
        process_set_id: int,
        device: str = "cpu",
        wake: bool = True,
    ) -> Handle:
        """Send ``splits[p]`` rows to rank p; the result is (what came in, rows that came from each rank).

        ``splits`` may say in words what is wrong with those of the user: this rank cannot take part, and the operation
        fails on all ranks at once.
        """
        signature = {"dtype": [_dtype_name(array)], "shape": [["*", *array.shape[1:]]], "device": device}
        detail = splits if isinstance(splits, str) else [array.shape[0], splits]
        return self._submit("alltoall", [array], signature, detail, name, process_set_id, wake)

    def reducescatter(
        self,
        arrays: Sequence[Array],
        *,
        op: ReduceOp,
        prescale: float,
        postscale: float,
        name: str | None,
        process_set_id: int,
        device: str = "cpu",
        wake: bool = True,
        codec: Codec = CASTS["none"],
    ) -> Handle:
        """Reduce each array (its contents are used up); the result is this rank's rows of each."""
        signature = {
            **_described(arrays),
            "op": int(op),
            "prescale": float(prescale),
            "postscale": float(postscale),
            "device": device,
            **_encoding(codec),
        }
        return self._submit("reducescatter", arrays, signature, None, name, process_set_id, wake, codec=codec)

    def barrier(self, process_set_id: int) -> Handle:
        """Done when every rank of the process set has called it."""
        return self._submit("barrier", [], {}, None, None, process_set_id, False)

    def add_process_set(self, ranks: Sequence[int]) -> int | None:
        """Collective over all ranks. The new id, or None where a set of these ranks exists."""
        handle = self._submit("add_process_set", [], {"ranks": list(ranks)}, None, None, 0, False)
        result: int | None = handle.wait()
        return result

    def remove_process_set(self, process_set_id: int) -> bool:
        """Collective over all ranks. Whether there was such a set."""
        handle = self._submit("remove_process_set", [], {"id": process_set_id}, None, None, 0, False)
        return bool(handle.wait())


def _described(arrays: Sequence[Array | DeviceArray]) -> Signature:
    return {"dtype": [_dtype_name(array) for array in arrays], "shape": [list(array.shape) for array in arrays]}


def _dtype_name(array: Array | DeviceArray) -> str:
    return array.dtype if isinstance(array.dtype, str) else NAMES[array.dtype]


def _way(arrays: Sequence[Array | DeviceArray]) -> Signature:
    return {"direct": True} if isinstance(arrays[0], DeviceArray) else {}


def _encoding(codec: Codec) -> Signature:
    return {"codec": codec.told} if codec.encodes else {}
