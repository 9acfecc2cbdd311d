"""Allreduce: the arrays of one or more requests, reduced in place as they are, in pieces or fused."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from hvdkit import kernels
from hvdkit.collectives.algorithms import adasum
from hvdkit.collectives.compressed import allreduce_encoded
from hvdkit.collectives.group import Array, Steps, partition
from hvdkit.collectives.hierarchical import choose_pieces, layout_allreduce, nodes_of, why_allreduce
from hvdkit.collectives.scratch import SCRATCH
from hvdkit.compression import CodecState
from hvdkit.engine.ops.batch import Batch, Kind, Parts, Requests, Submission
from hvdkit.engine.ops.requests import Key, Signature
from hvdkit.engine.ranks.assignments import Assignments
from hvdkit.engine.ranks.groups import Groups
from hvdkit.engine.ranks.turns import LATEST_TURN
from hvdkit.kernels import ReduceOp, as_real

if TYPE_CHECKING:
    from hvdkit.transports.gpu.device import DeviceCollectives


def _zeros_for(signature: Signature) -> list[Array]:
    """Return the contribution of a rank that has joined."""
    return [
        np.zeros(shape, dtype=kernels.COMPLEX.get(name) or kernels.DTYPES[name])
        for shape, name in zip(signature["shape"], signature["dtype"], strict=True)
    ]


def _run(batch: Batch) -> Parts:
    """Reduce all arrays of the batch; a large array travels in pieces that run side by side."""
    pieces = _pieces_of(batch)
    if not pieces:
        return [_reduce_several(batch)]
    return [_reduce_piece(batch, slice(*piece), batch.tag + 2 * number) for number, piece in enumerate(pieces)]


def _run_on_device(collectives: DeviceCollectives, batch: Batch) -> Steps[list[Any]]:
    """Reduce all arrays in one call of the device's library."""
    arrays: list[Any] = [array for submission in batch.submissions for array in submission.arrays]
    tensors = [array.tensor for array in arrays]
    op, scale = batch.reduction()
    size = batch.group.size
    batch.group.bytes_sent += 2 * sum(tensor.nbytes for tensor in tensors) * (size - 1) // size
    marks = [array.mark for array in arrays]
    yield [collectives.allreduce(tensors, op, batch.signature["prescale"], scale, "none", marks)]
    return [[array.tensor for array in submission.arrays] for submission in batch.submissions]


def _why(batch: Batch) -> str:
    """Return the algorithm and the reason for it."""
    nbytes = sum(array.nbytes for submission in batch.submissions for array in submission.arrays)
    return why_allreduce(batch.group, nbytes, max(1, len(_pieces_of(batch))), batch.codec)


def _pieces_of(batch: Batch) -> list[tuple[int, int]]:
    """Return the ranges of the only array of a batch to reduce in place; none if it is not simply reduced."""
    arrays, signature = batch.submissions[0].arrays, batch.signature
    if len(batch.submissions) > 1 or len(arrays) != 1 or not arrays[0].size:
        return []
    if signature["prescale"] != 1.0 or signature["op"] == ReduceOp.ADASUM:
        return []
    array, count = arrays[0], 1
    if batch.side_by_side and not batch.codec.encodes:
        count, _ = choose_pieces(array.nbytes, nodes_of(batch.group), batch.group.choice.algorithm)
    parts = 2 if array.dtype.kind == "c" else 1  # numbers of an element
    numbers = array.size * parts
    return partition(numbers, count, array.itemsize // parts) if count > 1 else [(0, numbers)]


def _reduce_piece(batch: Batch, part: slice, tag: int) -> Steps[list[Any]]:
    """Reduce a range of the only array of an allreduce, and return the array. Uses ``tag`` and ``tag + 1``."""
    submission = batch.submissions[0]
    flat = as_real(submission.arrays[0].reshape(-1))[part]
    source = as_real(submission.sources[0].reshape(-1))[part] if submission.sources else None
    yield from _reduce_whole(batch, flat, tag, _draw(batch), source)
    return [submission.arrays]


def _draw(batch: Batch) -> tuple[int, int]:
    """Return the turns of an allreduce in the node's staging, (0, 0) if it does not go there."""
    layout = batch.group.layout
    return (0, 0) if layout is None or batch.codec.everywhere else layout.draw()


def state_for(submission: Submission, elements: int) -> CodecState:
    """Return a codec's state for one operation, from which nothing is kept."""
    memory = CodecState(elements)
    memory.turn = submission.turn
    if submission.tally is not None:
        memory.tally = submission.tally
    return memory


def _reduce_whole(
    batch: Batch, flat: Array, tag: int, turns: tuple[int, int], source: Array | None = None
) -> Steps[None]:
    """Reduce an array, in the memory of nodes if some ranks share one. A codec keeps nothing."""
    group, codec, (op, scale) = batch.group, batch.codec, batch.reduction()
    memory = state_for(batch.submissions[0], flat.size) if codec.encodes else None
    if group.layout is not None and not codec.everywhere:
        return layout_allreduce(group, group.layout, flat, op, scale, codec, tag, turns, source, memory)
    if source is not None:
        flat[...] = source
    return allreduce_encoded(group, flat, op, scale, codec, tag, memory)


def _reduce_several(batch: Batch) -> Steps[list[Any]]:
    """Reduce the arrays of each dtype: a single array in place, several fused."""
    staged = batch.signature["op"] != ReduceOp.ADASUM
    by_dtype: dict[Any, list[Array]] = {}
    for submission in batch.submissions:
        for array, source in zip(submission.arrays, submission.sources or [], strict=False):
            array[...] = source  # all that follows works in place
        for array in submission.arrays:
            flat = as_real(array.reshape(-1))
            by_dtype.setdefault(flat.dtype, []).append(flat)
    all_turns = [_draw(batch) if staged and any(flat.size for flat in flats) else (0, 0) for flats in by_dtype.values()]
    for flats, turns in zip(by_dtype.values(), all_turns, strict=True):
        prescale = batch.signature["prescale"]
        if len(flats) == 1:
            if prescale != 1.0:
                kernels.scale_into(flats[0], flats[0], prescale)
            yield from _reduce_flat(batch, flats[0], [flats[0].size], turns)
        else:
            yield from _reduce_fused(batch, flats, turns)
    return [submission.arrays for submission in batch.submissions]


def _reduce_flat(batch: Batch, flat: Array, lengths: Sequence[int], turns: tuple[int, int]) -> Steps[None]:
    if batch.signature["op"] == ReduceOp.ADASUM:
        yield from adasum(batch.group, flat, lengths, batch.reduction()[1], batch.tag)
    elif flat.size:
        yield from _reduce_whole(batch, flat, batch.tag, turns)


def _reduce_fused(batch: Batch, flats: Sequence[Array], turns: tuple[int, int]) -> Steps[None]:
    prescale, trace = batch.signature["prescale"], batch.trace
    trace("MEMCPY_IN_FUSION_BUFFER")
    lengths = [flat.size for flat in flats]
    nbytes = sum(flat.nbytes for flat in flats)
    scratch = SCRATCH.take(nbytes)
    fused = scratch[:nbytes].view(flats[0].dtype)
    ends = list(accumulate(lengths))
    for flat, end in zip(flats, ends, strict=True):
        fused[end - flat.size : end] = flat
    if prescale != 1.0:
        kernels.scale_into(fused, fused, prescale)  # not the arrays, among which one may be twice
    trace("ALLREDUCE", batch)
    yield from _reduce_flat(batch, fused, lengths, turns)
    trace("MEMCPY_OUT_FUSION_BUFFER")
    for flat, end in zip(flats, ends, strict=True):
        flat[...] = fused[end - flat.size : end]
    SCRATCH.give_back(scratch)


def latest_turn(assignments: Assignments, key: Key, requests: Requests) -> int | None:
    """Return the latest turn of any rank where the ranks of a small allreduce have come to different ones."""
    turns = {request.detail for request in requests.values() if isinstance(request.detail, int)}
    return max(turns) if len(turns) > 1 and 0 < min(turns) <= max(turns) <= LATEST_TURN else None


def _catch_up(groups: Groups, submission: Submission, turn: int | None) -> None:
    """Go on from the latest turn of any rank."""
    small = groups.small_reductions.get(submission.key.process_set)
    if turn is not None and small is not None:
        small.catch_up(turn)


ALLREDUCE = Kind(
    "allreduce",
    fuses=True,
    decide=latest_turn,
    begun=_catch_up,
    joined=_zeros_for,
    run=_run,
    run_on_device=_run_on_device,
    why=_why,
)
