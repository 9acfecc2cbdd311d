"""How a negotiated operation is carried out: the arrays of one or more requests, as the steps of a collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from typing import Any, cast

import numpy as np

from hvdkit import kernels
from hvdkit.collectives.adasum import adasum
from hvdkit.collectives.broadcast import broadcast
from hvdkit.collectives.compressed import allreduce_encoded, compressed_reduce_scatter
from hvdkit.collectives.exchange import allgather, alltoall, reduce_scatter
from hvdkit.collectives.group import Array, Group, Steps, partition
from hvdkit.collectives.hierarchical import choose_pieces, layout_allreduce, nodes_of
from hvdkit.collectives.scratch import SCRATCH
from hvdkit.compression import CASTS, Codec, Memory, PayloadCodec, Tally
from hvdkit.engine.handle import Handle
from hvdkit.engine.requests import Key, Signature
from hvdkit.kernels import ReduceOp, Scale

TAGS_PER_OPERATION = 8


@dataclass
class Submission:
    """What this rank has announced under a key: its own arrays and the handle that waits."""

    key: Key
    signature: Signature
    arrays: list[Any]  # numpy arrays, or DeviceArrays
    detail: Any
    handle: Handle
    # For each array, where its values are if not in the array itself, which then only takes the result.
    sources: list[Any] | None = None
    codec: Codec = CASTS["none"]
    tally: Tally = field(default_factory=Tally)
    turn: int = 0  # a number for what a codec draws at random: the same on all ranks and in each run

    def gather_sources(self) -> None:
        """Bring the values into the arrays, for what works in place."""
        for array, source in zip(self.arrays, self.sources or [], strict=False):
            array[...] = source
        self.sources = None


def effective(op: ReduceOp, postscale: float, size: int) -> tuple[ReduceOp, Scale]:
    """AVERAGE is SUM, divided."""
    return (ReduceOp.SUM, Scale(postscale, size)) if op == ReduceOp.AVERAGE else (op, Scale(postscale))


def zeros_for(signature: Signature) -> list[Array]:
    """What a rank that has joined contributes."""
    return [
        np.zeros(shape, dtype=kernels.DTYPES[name])
        for shape, name in zip(signature["shape"], signature["dtype"], strict=True)
    ]


def execute(
    group: Group,
    kind: str,
    submissions: Sequence[Submission],
    extras: Sequence[Any],
    root: int,
    tag: int,
    trace: Callable[[str], None] = lambda activity: None,
) -> Steps[list[Any]]:
    """Run one batch; returns a result for each submission. Only allreduces come in batches of several.

    ``trace`` is told what is done from now on, for the timeline.
    """
    if kind == "allreduce":
        yield from _allreduce(group, submissions, tag, trace)
        return [submission.arrays for submission in submissions]
    (submission,) = submissions
    if kind == "broadcast":
        for array in submission.arrays:
            yield from broadcast(group, array.reshape(-1), root, tag)
        return [submission.arrays]
    if kind == "allgather":
        return [(yield from _allgather(group, submission.arrays, extras[0], tag))]
    if kind == "alltoall":
        return [(yield from _alltoall(group, submission.arrays[0], extras[0], tag))]
    if kind == "reducescatter":
        return [(yield from _reducescatter(group, submission, tag))]
    # Everyone has asked, which is all that a barrier, a plan or a change of process sets waits for.
    return [extras[0]]


def is_single(submissions: Sequence[Submission]) -> bool:
    """Whether a batch of allreduces is of one array, which is reduced where it is."""
    return len(submissions) == 1 and len(submissions[0].arrays) == 1 and submissions[0].signature["prescale"] == 1.0


def pieces_of(group: Group, submissions: Sequence[Submission]) -> list[tuple[int, int]]:
    """The elements (begin, end) of a large allreduce that travel each on their own; none if it travels as a whole."""
    signature = submissions[0].signature
    encoded = submissions[0].codec.encodes
    if not is_single(submissions) or encoded or signature["op"] == ReduceOp.ADASUM:
        return []
    array = submissions[0].arrays[0]
    count, _ = choose_pieces(array.nbytes, nodes_of(group), group.choice.asked)
    return partition(array.size, count, array.itemsize) if count > 1 else []


def allreduce_piece(group: Group, submission: Submission, piece: tuple[int, int], tag: int) -> Steps[list[Any]]:
    """Reduce a part of the only array of an allreduce, which is returned. Uses ``tag`` and ``tag + 1``."""
    signature, part = submission.signature, slice(*piece)
    op, scale = effective(ReduceOp(signature["op"]), signature["postscale"], group.size)
    flat = submission.arrays[0].reshape(-1)[part]
    source = submission.sources[0].reshape(-1)[part] if submission.sources else None
    yield from _reduce_whole(group, flat, op, scale, submission, tag, _draw(group, submission.codec), source)
    return [submission.arrays]


def _draw(group: Group, codec: Codec) -> tuple[int, int]:
    """The turns of an allreduce in the node's staging, if it goes there."""
    return (0, 0) if group.layout is None or codec.everywhere else group.layout.draw()


def _memory(submission: Submission, elements: int) -> Memory:
    """For one operation, from which nothing is kept."""
    memory = Memory(elements)
    memory.turn, memory.tally = submission.turn, submission.tally
    return memory


def _reduce_whole(
    group: Group,
    flat: Array,
    op: ReduceOp,
    scale: Scale,
    submission: Submission,
    tag: int,
    turns: tuple[int, int],
    source: Array | None = None,
) -> Steps[None]:
    """By way of nodes, if some ranks share one. A codec keeps nothing."""
    codec, memory = submission.codec, _memory(submission, flat.size)
    if group.layout is not None and not codec.everywhere:
        yield from layout_allreduce(group, group.layout, flat, op, scale, codec, tag, turns, source, memory)
        return
    if source is not None:
        flat[...] = source
    yield from allreduce_encoded(group, flat, op, scale, codec, tag, memory)


def _allreduce(group: Group, submissions: Sequence[Submission], tag: int, trace: Callable[[str], None]) -> Steps[None]:
    signature = submissions[0].signature
    if is_single(submissions) and submissions[0].arrays[0].size and signature["op"] != ReduceOp.ADASUM:
        yield from allreduce_piece(group, submissions[0], (0, submissions[0].arrays[0].size), tag)
        return
    op, scale = effective(ReduceOp(signature["op"]), signature["postscale"], group.size)
    first, staged = submissions[0], op != ReduceOp.ADASUM
    by_dtype: dict[Any, list[Array]] = {}
    for submission in submissions:
        submission.gather_sources()
        for array in submission.arrays:
            by_dtype.setdefault(array.dtype, []).append(array)
    all_turns = [
        _draw(group, first.codec) if staged and any(array.size for array in arrays) else (0, 0)
        for arrays in by_dtype.values()
    ]
    for arrays, turns in zip(by_dtype.values(), all_turns, strict=True):
        prescale = signature["prescale"]
        if len(arrays) == 1:
            flat = arrays[0].reshape(-1)
            if prescale != 1.0:
                kernels.scale_into(flat, flat, prescale)
            yield from _reduce_flat(group, flat, [flat.size], op, scale, first, tag, turns)
        else:
            yield from _reduce_fused(group, arrays, prescale, op, scale, first, tag, turns, trace)


def _reduce_flat(
    group: Group,
    flat: Array,
    lengths: Sequence[int],
    op: ReduceOp,
    scale: Scale,
    submission: Submission,
    tag: int,
    turns: tuple[int, int],
) -> Steps[None]:
    if op == ReduceOp.ADASUM:
        yield from adasum(group, flat, lengths, scale, tag)
    elif flat.size:
        yield from _reduce_whole(group, flat, op, scale, submission, tag, turns)


def _reduce_fused(
    group: Group,
    arrays: Sequence[Array],
    prescale: float,
    op: ReduceOp,
    scale: Scale,
    submission: Submission,
    tag: int,
    turns: tuple[int, int],
    trace: Callable[[str], None],
) -> Steps[None]:
    trace("MEMCPY_IN_FUSION_BUFFER")
    lengths = [array.size for array in arrays]
    scratch = SCRATCH.take(sum(array.nbytes for array in arrays))
    fused = scratch[: sum(array.nbytes for array in arrays)].view(arrays[0].dtype)
    ends = list(accumulate(lengths))
    for array, end in zip(arrays, ends, strict=True):
        fused[end - array.size : end] = array.reshape(-1)
    if prescale != 1.0:
        kernels.scale_into(fused, fused, prescale)  # not the arrays, among which one may be twice
    trace("ALLREDUCE")
    yield from _reduce_flat(group, fused, lengths, op, scale, submission, tag, turns)
    trace("MEMCPY_OUT_FUSION_BUFFER")
    for array, end in zip(arrays, ends, strict=True):
        array.reshape(-1)[...] = fused[end - array.size : end]
    SCRATCH.give_back(scratch)


def _allgather(group: Group, arrays: Sequence[Array], rows_of_ranks: Any, tag: int) -> Steps[list[Array]]:
    """``rows_of_ranks[p][i]`` is the first dimension of rank p's array i."""
    results = []
    for index, array in enumerate(arrays):
        rows = [int(rank_rows[index]) for rank_rows in rows_of_ranks]
        out = np.empty((sum(rows), *array.shape[1:]), dtype=array.dtype)
        ends = list(accumulate(rows))
        segments = [out[end - count : end].reshape(-1) for end, count in zip(ends, rows, strict=True)]
        yield from allgather(group, array.reshape(-1), segments, tag)
        results.append(out)
    return results


def _alltoall(group: Group, array: Array, details: Any, tag: int) -> Steps[tuple[Array, list[int]]]:
    """``details[p]`` is (first dimension, splits or None) of rank p."""
    splits = [splits or [rows // group.size] * group.size for rows, splits in details]
    received = [int(rank_splits[group.rank]) for rank_splits in splits]
    out = np.empty((sum(received), *array.shape[1:]), dtype=array.dtype)
    yield from alltoall(group, _rows(array, splits[group.rank]), _rows(out, received), tag)
    return out, received


def _rows(array: Array, counts: Sequence[int]) -> list[Array]:
    return [array[end - count : end].reshape(-1) for end, count in zip(accumulate(counts), counts, strict=True)]


def scatter_rows(rows: int, size: int) -> list[int]:
    """Rows of each rank after a reduce-scatter: the first ``rows % size`` ranks hold one more (as Horovod does it)."""
    each, longer = divmod(rows, size)
    return [each + (rank < longer) for rank in range(size)]


def _reducescatter(group: Group, submission: Submission, tag: int) -> Steps[list[Array]]:
    signature = submission.signature
    op, scale = effective(ReduceOp(signature["op"]), signature["postscale"], group.size)
    results = []
    for array in submission.arrays:
        flat = array.reshape(-1)
        if signature["prescale"] != 1.0:
            kernels.scale_into(flat, flat, signature["prescale"])
        rows = scatter_rows(array.shape[0], group.size)
        width = prod(array.shape[1:])
        bounds = [((end - count) * width, end * width) for end, count in zip(accumulate(rows), rows, strict=True)]
        if submission.codec.encodes and (submission.codec.everywhere or nodes_of(group) > 1):
            codec, memory = cast("PayloadCodec", submission.codec), _memory(submission, flat.size)
            summed = yield from compressed_reduce_scatter(group, flat, bounds, scale, codec, tag, memory)
            own = flat[slice(*bounds[group.rank])]
            kernels.convert_into(own, summed)
        else:
            own = yield from reduce_scatter(group, flat, bounds, op, scale, tag)
        results.append(own.reshape(rows[group.rank], *array.shape[1:]).copy())
    return results
