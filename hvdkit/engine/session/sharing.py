"""The exchange at init by which the ranks of each node share memory, or log once why they do not."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hvdkit import kernels
from hvdkit.arena import ARENA, NOT_SERVED
from hvdkit.config import Settings
from hvdkit.engine.ranks.groups import group_bytes, staging_segment
from hvdkit.engine.ranks.topology import Topology, nodes_that_share
from hvdkit.transports.base import Exchange, Transport

if TYPE_CHECKING:
    from hvdkit.kernels._native import Window
    from hvdkit.transports.node.memory import Invitation, NodeMemory

logger = logging.getLogger("hvdkit")

OBTAIN_SECONDS = 10.0  # to hand over the memory; a rank that cannot get it must not keep the others at init
NOT_BUILT = (
    "the native kernels were not built when hvdkit was installed (no C++ compiler was found, or this is a source tree "
    "that was not installed: build them in it with python setup.py build_ext --inplace)"
)


def share_memory(transport: Transport, topology: Topology, settings: Settings, exchange: Exchange) -> Transport:
    """Return the transport of this job: ``transport`` itself, or with the node's memory before it. Collective.

    A problem on one rank of a node holds for all its ranks.
    """
    if all(len(node) == 1 for node in topology.nodes):
        return transport
    # All ranks are connected, so none comes late, and others wait for the outcome with a deadline.
    rank, seconds = topology.rank, min(settings.start_timeout_seconds, settings.timeout_seconds / 4, OBTAIN_SECONDS)
    node = next(list(members) for members in topology.nodes if rank in members)
    reason = NOT_BUILT if kernels.backend() != "native" else ""
    reason = reason if settings.node_memory else "HVDKIT_NODE_MEMORY is 0"
    invitation: Invitation | None = None
    offer = {}
    if rank == node[0] and len(node) > 1 and not reason:
        from hvdkit.transports.node.memory import Invitation  # which needs the native kernels

        try:
            invitation = Invitation()
            offer = {"address": invitation.address, "secret": invitation.secret}
        except (OSError, AttributeError) as error:  # AttributeError: Python was built for a system without memfd_create
            reason = f"no memory file can be made here ({error})"
    reports = [json.loads(blob) for blob in exchange(json.dumps({"reason": reason, **offer}).encode())]
    reason = next((reports[member]["reason"] for member in node if reports[member]["reason"]), "")
    obtained: tuple[NodeMemory, Window, dict[int, Window]] | None = None
    if len(node) > 1 and not reason:
        arena = ARENA.open(settings.arena)
        obtained, reason = _obtain(invitation, reports[node[0]], node, transport, seconds, arena)
    elif invitation is not None:
        invitation.withdraw()
    # One rank alone may have failed to get it. An arena is used by a node's ranks if all of them have mapped it.
    mapped = sorted(obtained[2]) if obtained is not None else []
    try:
        outcome = {"reason": reason, "arenas": mapped, "no_arena": ARENA.reason if settings.arena else ""}
        blobs = [json.loads(blob) for blob in exchange(json.dumps(outcome).encode())]
    except BaseException:
        if obtained is not None:
            obtained[0].close()
        raise
    outcomes = [blob["reason"] for blob in blobs]
    transport.nodes = nodes_that_share(topology.nodes, [member for member, text in enumerate(outcomes) if text])
    reason = next((outcomes[member] for member in node if outcomes[member]), "")
    if reason and obtained is not None:
        obtained[0].close()
    if reason and rank == node[0] and settings.node_memory:
        logger.warning(
            "the ranks %s on %s share no memory and talk over %s, which is slower: %s",
            node, topology.hosts[rank], transport.carrier, reason,
        )  # fmt: skip
    if reason or obtained is None:
        return transport
    from hvdkit.transports.node.transport import NodeTransport

    memory, rings, windows = obtained
    arenas = [
        windows[owner] if all(owner in blobs[member]["arenas"] for member in node) else None
        for owner in range(len(node))
    ]
    missing = [owner for owner, arena in enumerate(arenas) if arena is None]
    reasons = [f"{reason} on rank {node[owner]}" for owner in missing if (reason := blobs[node[owner]]["no_arena"])]
    if any(owner in blobs[member]["arenas"] for owner in missing for member in node):
        reasons.append("not all ranks of this host can map their memory")
    if reasons and rank == node[0]:  # gradients of these ranks cannot be reduced in place, and no setting asks for that
        logger.warning(NOT_SERVED, f"the ranks {[node[owner] for owner in missing]}", reasons[0])
    return NodeTransport(transport, memory, rings, arenas)


def _obtain(
    invitation: Invitation | None,
    offer: dict[str, str],
    node: Sequence[int],
    transport: Transport,
    seconds: float,
    arena: int,
) -> tuple[tuple[NodeMemory, Window, dict[int, Window]] | None, str]:
    """Return the node's memory, its window for messages and the ranks' arenas by place; or None, and the reason."""
    from hvdkit.transports.node.memory import NodeMemory, fetch, map_arenas
    from hvdkit.transports.node.transport import window_bytes

    rank, descriptor, memory = transport.rank, -1, None
    try:
        if invitation is not None:
            descriptor, arenas = invitation.serve(
                len(node) - 1, seconds, arena, lambda: not transport.lost_peers().keys().isdisjoint(node)
            )
        else:
            descriptor, arenas = fetch(offer["address"], offer["secret"], seconds, node.index(rank), arena)
        windows = map_arenas(arenas)
        memory = NodeMemory(descriptor, node.index(rank), len(node))
        # Segments that every job needs are mapped while the ranks can still agree to do without.
        memory.map_in_advance(staging_segment(0), group_bytes(len(node)))
        return (memory, memory.window(0, window_bytes(len(node), transport.size)), windows), ""
    except OSError as error:
        if memory is not None:
            memory.close()
        elif descriptor >= 0:
            os.close(descriptor)
        return None, f"rank {rank} could not get the memory that rank {node[0]} made ({error})"
