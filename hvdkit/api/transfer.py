"""The transfer of a state from the rank that has the newest to those that lack it."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

import cloudpickle
import numpy as np
import numpy.typing as npt

from hvdkit.engine.ops.requests import Call
from hvdkit.engine.session import runtime

_NAME = "hvdkit.elastic.state"
PIECE, ALIGNMENT = 32 << 20, 64  # bytes
Array = npt.NDArray[Any]


def send_state(content: Any, root: int, receivers: Sequence[int]) -> Any:
    """Return the ``content`` of rank ``root`` on the ``receivers``, None elsewhere. All ranks of the job call this.

    Arrays and tensors are neither copied nor pickled: on receivers they lie in the memory into which they came.
    """
    named, rank, members = runtime.engine().named, runtime.topology().rank, sorted({root, *receivers})
    added = named.add_process_set(members)
    number = next(key for key, ranks in runtime.process_sets().items() if ranks == members) if added is None else added
    received = _broadcast(content, root, number) if rank in members else None
    if added is not None:
        named.remove_process_set(added)
    return received


def _broadcast(content: Any, root: int, process_set_id: int) -> Any:
    """Return the content of the root on the other ranks of a process set, None on the root."""
    named, is_root = runtime.engine().named, runtime.topology().rank == root
    parts = _pickled(content) if is_root else []
    count = np.array([len(parts)])
    named.broadcast([count], root, Call(f"{_NAME}.count", process_set_id, wake=False)).wait()
    lengths = np.array([part.size for part in parts]) if is_root else np.empty(int(count[0]), np.int64)
    named.broadcast([lengths], root, Call(f"{_NAME}.lengths", process_set_id, wake=False)).wait()
    if not is_root:
        parts = _memory_of([int(length) for length in lengths])
    named.broadcast(parts, root, Call(f"{_NAME}.data", process_set_id, wake=False)).wait()
    return None if is_root else pickle.loads(parts[0].data, buffers=parts[1:])  # noqa: S301 (its sender is proven)


def _memory_of(lengths: Sequence[int]) -> list[Array]:
    """Return arrays of bytes, neighbours in one piece of memory: fresh memory is populated by large pages there."""
    arrays: list[Array] = []
    piece = np.empty(0, np.uint8)
    end = 0
    for length in lengths:
        begin = -(-end // ALIGNMENT) * ALIGNMENT
        if begin + length > piece.size:
            piece, begin = np.empty(max(PIECE, length), np.uint8), 0
        end = begin + length
        arrays.append(piece[begin:end])
    return arrays


def _pickled(content: Any) -> list[Array]:
    """Return the pickle of an object as bytes, and behind it the bytes of its arrays, which are not copied."""
    file, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    StatePickler(file, protocol=5, buffer_callback=buffers.append).dump(content)
    return [np.frombuffer(part, np.uint8) for part in (file.getbuffer(), *(buffer.raw() for buffer in buffers))]


class StatePickler(cloudpickle.Pickler):  # type: ignore[misc]
    """A pickler of states. Adapters add to ``dispatch_table`` how their tensors are made of NumPy's arrays."""

    dispatch_table = cloudpickle.Pickler.dispatch_table.new_child({})
