"""Allreduce over nodes: the node's sum in shared memory, an allreduce of each share between nodes, one pass back.

Each of a node's ranks carries its own share to its counterparts on the other nodes, over its own connections: in two
phases 2 n / L (K - 1) / K bytes between K nodes of L ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

from hvdkit.collectives.allreduce import choose_allreduce
from hvdkit.collectives.compressed import allreduce_encoded
from hvdkit.collectives.exchange import scale_in_place
from hvdkit.collectives.group import Array, Group, Runs, Steps, partition, two_phase_bytes
from hvdkit.collectives.staging import Mode, Staging, choose_pass
from hvdkit.compression import Codec, CodecState, LossyCodec
from hvdkit.kernels import HALVES, ONE, ReduceOp, Scale
from hvdkit.transports.base import Transfer

# A piece of this size takes many times the latency of any wire. Each has two of an operation's eight tags.
PIECE_BYTES = 4 * 1024 * 1024
MOST_PIECES = 4


@dataclass(frozen=True)
class Layout:
    """The nodes of a group's members: ``nodes`` has the transport's ranks, ascending in each node."""

    nodes: Sequence[Sequence[int]]
    staging: Staging | None  # None on a node with one member

    @property
    def carriers(self) -> int:
        """The number of ranks of each node that have a share."""
        return min(len(node) for node in self.nodes)

    def draw(self) -> tuple[int, int]:
        """Return the tickets of one allreduce in this node's areas. Ranks draw in one order, when operations start."""
        if self.staging is None:
            return 0, 0
        first, second = self.staging.queues
        return first.draw(), second.draw() if len(self.nodes) > 1 else 0


def counterparts(group: Group, layout: Layout) -> Group | None:
    """Return the ranks that carry the same share as this one, in the order of nodes; None if this rank carries none."""
    rank = group.members[group.rank]
    node = next(node for node in layout.nodes if rank in node)
    index = list(node).index(rank)
    if index >= layout.carriers:
        return None
    return Group(group.transport, [node[index] for node in layout.nodes], group.choice)


def node_shares(count: int, itemsize: int, layout: Layout, ranks: int) -> list[tuple[int, int]]:
    """Return the elements that each of a node's ranks carries, the same on every node."""
    return partition(count, layout.carriers, itemsize) + [(count, count)] * (ranks - layout.carriers)


def whole_shares(begins: Sequence[int], count: int, layout: Layout, ranks: int) -> list[tuple[int, int]]:
    """Return shares as ``node_shares`` does, cut only where tensors begin, as near to equal parts as possible."""
    cuts = [0]
    for carrier in range(1, layout.carriers):
        wanted = count * carrier // layout.carriers
        cuts.append(max(cuts[-1], min([*begins, count], key=lambda begin: abs(begin - wanted))))
    cuts += [count] * (1 + ranks - layout.carriers)
    return list(itertools.pairwise(cuts))


def split_scale(flat: Array, op: ReduceOp, scale: Scale, codec: Codec) -> tuple[Scale, Scale]:
    """Return the scales of the sum of a node and of the sum of nodes: a node's sum could be too large for fp16."""
    narrow = flat.dtype in HALVES or codec.wire_itemsize(flat.dtype) < flat.itemsize
    return (scale, ONE) if narrow and op == ReduceOp.SUM else (ONE, scale)


def nodes_of(group: Group) -> int:
    """Return the number of nodes, or of ranks that share no memory, between which an allreduce in ``group`` goes."""
    return group.size if group.layout is None else len(group.layout.nodes)


def sent_share(ranks: int, layout: Layout | None) -> float:
    """Return the part of a tensor that a rank of ``ranks`` sends in each of two phases, or hands over on one node."""
    if layout is None or len(layout.nodes) == 1:
        return (ranks - 1) / ranks
    return (len(layout.nodes) - 1) / (len(layout.nodes) * layout.carriers)


def choose_pieces(nbytes: int, nodes: int, algorithm: str = "auto") -> tuple[int, str]:
    """Return the number of pieces in which a tensor of ``nbytes`` bytes travels between ``nodes`` nodes, and why."""
    if nbytes < 2 * PIECE_BYTES:
        return 1, "too small to be cut"
    if nodes == 1:
        return 1, "nothing goes between nodes"
    if algorithm not in ("auto", "two_phase"):
        return 1, "in the order that HVDKIT_ALLREDUCE asks for"
    count = min(MOST_PIECES, nbytes // PIECE_BYTES)
    return count, f"in {count} pieces of at least {PIECE_BYTES} bytes"


def why_allreduce(group: Group, nbytes: int, pieces: int = 1, codec: Codec | None = None) -> str:
    """Return the way of an allreduce of ``nbytes`` bytes in ``pieces`` pieces and why, for people."""
    layout, choice, nodes = group.layout, group.choice, nodes_of(group)
    if codec is not None and codec.encodes and (codec.everywhere or layout is None or nodes > 1):
        layout = None if codec.everywhere else layout
        ranks, carriers = (group.size, 1) if layout is None else (nodes, layout.carriers)
        name, reason = cast("LossyCodec", codec).way(nbytes // 4 // carriers, ranks)
        text = f"{name} of {codec.summary}: {reason}"
        return text if layout is None else f"the sum of each node, then {text} between nodes"
    if layout is not None and nodes == 1:
        assert layout.staging is not None
        mode, reason = choose_pass(nbytes)
        return reason if mode == Mode.WHOLE else f"{reason}; {layout.staging.why_handover(nbytes)}"
    share = nbytes // pieces // (1 if layout is None else layout.carriers)
    name, reason = choose_allreduce(share, nodes, choice)
    text = f"{name}: {reason}" if layout is None else f"the sum of each node, then {name}: {reason} between nodes"
    if pieces > 1:
        text += f", {choose_pieces(nbytes, nodes, choice.algorithm)[1]}"
    staging = None if layout is None else layout.staging
    return text if staging is None else f"{text}; {staging.why_handover(nbytes // pieces)}"


def allreduce_share(
    group: Group,
    layout: Layout,
    share: Array,
    gather: Iterable[list[Transfer]],
    spread: Iterable[list[Transfer]],
    op: ReduceOp,
    scale: Scale,
    codec: Codec,
    tag: int,
    state: CodecState | None,
) -> Steps[None]:
    """Replace this rank's ``share`` (flat) of a tensor by ``scale * (op over all nodes)``.

    The steps ``gather`` reduce it within the node before, ``spread`` hand it to the node's ranks afterwards.
    """
    yield from gather
    across = counterparts(group, layout)
    if across is not None and share.size:
        yield from allreduce_encoded(across, share, op, scale, codec, tag, state)
        group.bytes_sent += across.bytes_sent
    yield from spread


def layout_allreduce(
    group: Group,
    layout: Layout,
    flat: Array,
    op: ReduceOp,
    scale: Scale,
    codec: Codec,
    tag: int,
    turns: tuple[int, int],
    source: Array | None = None,
    state: CodecState | None = None,
    shares: Runs | None = None,
) -> Steps[None]:
    """Replace ``flat`` by ``scale * (op over all ranks)``, in the order of ranks in a node, then of nodes.

    Uses ``tag`` and ``tag + 1``; lossy codecs four tags. ``turns`` are the tickets of ``Layout.draw``; ``source`` is
    this rank's contribution, if not in ``flat``; ``state`` is a codec's, of all of ``flat``; ``shares`` are the
    elements that each of this node's ranks carries, if not equal parts. Within a node nothing is encoded.
    """
    staging = layout.staging
    if len(layout.nodes) == 1:
        assert staging is not None
        whole = partition(flat.size, group.size, flat.itemsize)
        yield from staging.run(0, turns[0], choose_pass(flat.nbytes)[0], flat, whole, op, scale, source)
        group.bytes_sent += two_phase_bytes(flat.nbytes, group.size)
        return
    if source is not None:
        flat[...] = source
    me, ranks = (0, 1) if staging is None else (staging.me, len(staging.members))
    shares = shares or node_shares(flat.size, flat.itemsize, layout, ranks)
    node_scale, wire_scale = split_scale(flat, op, scale, codec)
    gather: Iterable[list[Transfer]] = ()
    spread: Iterable[list[Transfer]] = ()
    if staging is None:
        scale_in_place(flat, node_scale)
    else:
        gather = staging.run(0, turns[0], Mode.REDUCE_SCATTER, flat, shares, op, node_scale)
        spread = staging.run(1, turns[1], Mode.ALLGATHER, flat, shares, op, ONE)
    part = None if state is None else state.part(*shares[me])
    yield from allreduce_share(
        group, layout, flat[slice(*shares[me])], gather, spread, op, wire_scale, codec, tag, part
    )
    if staging is not None:
        group.bytes_sent += two_phase_bytes(flat.nbytes, ranks)
