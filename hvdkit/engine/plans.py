"""Registering plans: all ranks agree on tensors that are reduced together step after step, and on where they live."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hvdkit.compression import Codec
from hvdkit.engine.buckets import Buckets, Reduction
from hvdkit.engine.device_buckets import DeviceBuckets, stays_on_device
from hvdkit.engine.host_buckets import HostBuckets
from hvdkit.engine.lane import Lane
from hvdkit.engine.places import node_pass
from hvdkit.engine.plan import Slot
from hvdkit.engine.requests import Call, ReduceRequest
from hvdkit.kernels import ReduceOp

if TYPE_CHECKING:
    from hvdkit.engine.core import Engine

logger = logging.getLogger("hvdkit")

# In memory of the host, wherever gradients are.
HOST = "host"
# How many closed plans are remembered, for zeros while this rank has joined and others go on.
CLOSED_LANES = 64
# How many of them keep their communicator of a device, which takes the device's memory.
CLOSED_DEVICE_LANES = 4


@dataclass(frozen=True)
class Plan:
    """What an optimizer asks for. ``place`` is the device on which its slots shall live, or HOST."""

    name: str
    slots: Sequence[Slot]
    reduction: Reduction
    process_set_id: int
    groups: Sequence[Sequence[int]]
    place: str


def place_for(engine: Engine, place: str, codecs: Sequence[Codec], process_set_id: int) -> str:
    """Where slots live that ask for ``place``: there, if all codecs can do their work there, else HOST."""
    members = engine.groups.group(process_set_id).members
    encodes = place.partition(":")[0] not in engine.transport.host_types
    return place if stays_on_device(codecs, engine.topology.nodes, members, encodes) else HOST


def register(engine: Engine, plan: Plan) -> Lane:
    """Agree on a plan with all ranks of its process set. Blocks; raises HorovodInternalError where they differ."""
    transport, reduction = engine.transport, plan.reduction
    group = engine.groups.group(plan.process_set_id)
    nodes = engine.topology.nodes
    place = place_for(engine, plan.place, reduction.codecs, plan.process_set_id)
    device = place.partition(":")[0]
    signature = {
        "slots": [
            [slot.name, list(slot.shape), str(slot.dtype), reduction.codecs[slot.codec].told] for slot in plan.slots
        ],
        "op": int(reduction.op),
        "prescale": reduction.prescale,
        "postscale": reduction.postscale,
        "groups": [list(group) for group in plan.groups],
        "device": device if device in transport.device_types else "cpu",
    }
    lane_id = engine.submit("plan", [], signature, Call(plan.name, plan.process_set_id, wake=False)).wait()
    collectives = None
    if device in transport.device_types:
        collectives = transport.collectives_for(place, group.members, f"lane{lane_id}")
    home: Buckets
    if collectives is not None:
        home = DeviceBuckets(group, reduction, collectives, plan.slots, nodes)
    else:
        home = _host_buckets(engine, plan, lane_id)
    return Lane(engine, lane_id, plan.name, plan.slots, group, home, reduction.codecs, plan.groups)


def _host_buckets(engine: Engine, plan: Plan, lane_id: int) -> Buckets:
    """What reduces a lane's gradients on the host: in the node's memory if no rank of the lane is short of it."""
    group = engine.groups.group(plan.process_set_id)
    if group.layout is None:
        return HostBuckets(group, plan.reduction, None, plan.slots)
    node, problem = node_pass(group, lane_id, plan.slots)
    everyone = engine.transport.size
    # The first rank that is short of memory, and whether all compute where they sum.
    told = np.array([engine.topology.rank if problem else everyone, plan.place in ("cpu", HOST)])
    engine.allreduce([told], ReduceRequest(ReduceOp.MIN), Call(f"{plan.name}.memory", plan.process_set_id)).wait()
    short, all_on_host = int(told[0]), bool(told[1])
    if short == engine.topology.rank:
        logger.warning(
            "%s: the gradients of '%s' are not in shared memory, which is slower: %s",
            engine.told(), plan.name, problem,
        )  # fmt: skip
    if short < everyone:
        if node is not None:
            node.discard()
        return HostBuckets(group, plan.reduction, None, plan.slots)
    wanted = engine.topology.is_full and engine.settings.fusion_threshold is None
    takes_turns = wanted and all_on_host and node is not None and len(group.layout.nodes) == 1
    return HostBuckets(group, plan.reduction, group.layout, plan.slots, node, takes_turns)


def keep_closed(closed: dict[int, Lane], lane: Lane) -> None:
    """Remember a closed lane, and forget what is too old."""
    closed[lane.lane_id] = lane
    for old in [one for one in closed.values() if one.on_device][:-CLOSED_DEVICE_LANES]:
        old.home.close()
        del closed[old.lane_id]
    while len(closed) > CLOSED_LANES:
        closed.pop(next(iter(closed)))
