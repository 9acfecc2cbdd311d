"""The exchange at init by which the ranks of each node share memory, or log once why they do not."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

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

# How long handing over the memory may take. A rank that cannot get it must not keep the others at init.
OBTAIN_SECONDS = 10.0


def share_memory(transport: Transport, topology: Topology, settings: Settings, exchange: Exchange) -> Transport:
    """Return the transport of this job: ``transport`` itself, or with the node's memory before it. Collective.

    ``exchange`` returns the bytes of all ranks. A problem on one rank of a node holds for all its ranks.
    """
    if all(len(node) == 1 for node in topology.nodes):
        return transport
    # All ranks are connected, so none comes late, and others wait for the outcome with a deadline.
    rank, seconds = topology.rank, min(settings.start_timeout_seconds, settings.timeout_seconds / 4, OBTAIN_SECONDS)
    node = next(list(members) for members in topology.nodes if rank in members)
    reason = _reason_not_to_share(settings)
    invitation: Invitation | None = None
    offer = {}
    if rank == node[0] and len(node) > 1 and not reason:
        invitation, reason = _invite()
        if invitation is not None:
            offer = {"address": invitation.address, "secret": invitation.secret}
    reports = [json.loads(blob) for blob in exchange(json.dumps({"reason": reason, **offer}).encode())]
    reason = next((reports[member]["reason"] for member in node if reports[member]["reason"]), "")
    obtained: tuple[NodeMemory, Window, dict[int, Window]] | None = None
    if len(node) > 1 and not reason:
        arena = ARENA.open(settings.arena)
        obtained, reason = _obtain(invitation, reports[node[0]], node, rank, transport.size, seconds, arena)
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
    problem = _why_not_in_place(node, arenas, blobs)
    if problem is not None and rank == node[0]:
        logger.warning(NOT_SERVED, *problem)
    return NodeTransport(transport, memory, rings, arenas)


def _why_not_in_place(
    node: Sequence[int], arenas: Sequence[Window | None], outcomes: Sequence[dict[str, Any]]
) -> tuple[str, str] | None:
    """Return the ranks whose gradients cannot be reduced in place, and the reason, unless a setting asks for that."""
    missing = [owner for owner, arena in enumerate(arenas) if arena is None]
    reasons = [f"{reason} on rank {node[owner]}" for owner in missing if (reason := outcomes[node[owner]]["no_arena"])]
    is_mapped = any(owner in outcomes[member]["arenas"] for owner in missing for member in node)
    if is_mapped:
        reasons.append("not all ranks of this host can map their memory")
    if not reasons:
        return None
    return f"the ranks {[node[owner] for owner in missing]}", reasons[0]


def _reason_not_to_share(settings: Settings) -> str:
    if not settings.node_memory:
        return "HVDKIT_NODE_MEMORY is 0"
    if kernels.backend() != "native":
        return (
            "the native kernels were not built when hvdkit was installed (no C++ compiler was found, or this is a copy "
            "that was not installed: python setup.py build_ext --inplace builds them in it)"
        )
    return ""


def _invite() -> tuple[Invitation | None, str]:
    from hvdkit.transports.node.memory import Invitation

    try:
        return Invitation(), ""
    except (OSError, AttributeError) as error:  # AttributeError: Python was built for a system without memfd_create
        return None, f"no memory file can be made here ({error})"


def _obtain(
    invitation: Invitation | None,
    offer: dict[str, str],
    node: Sequence[int],
    rank: int,
    size: int,
    seconds: float,
    arena: int,
) -> tuple[tuple[NodeMemory, Window, dict[int, Window]] | None, str]:
    from hvdkit.transports.node.memory import NodeMemory, fetch, map_arenas
    from hvdkit.transports.node.transport import window_bytes

    descriptor, memory = -1, None
    try:
        if invitation is not None:
            descriptor, arenas = invitation.serve(len(node) - 1, seconds, arena)
        else:
            descriptor, arenas = fetch(offer["address"], offer["secret"], seconds, node.index(rank), arena)
        windows = map_arenas(arenas)
        memory = NodeMemory(descriptor, node.index(rank), len(node))
        # Segments that every job needs are mapped while the ranks can still agree to do without.
        memory.map_in_advance(staging_segment(0), group_bytes(len(node)))
        return (memory, memory.window(0, window_bytes(len(node), size)), windows), ""
    except OSError as error:
        if memory is not None:
            memory.close()
        elif descriptor >= 0:
            os.close(descriptor)
        return None, f"rank {rank} could not get the memory that rank {node[0]} made ({error})"
