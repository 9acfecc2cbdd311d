"""Registering plans: all ranks agree on tensors that are reduced together in each step, and on their device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from hvdkit.collectives.group import Array, Group
from hvdkit.compression import Codec
from hvdkit.config import Settings
from hvdkit.engine.loop.named import NamedOperations
from hvdkit.engine.ops.requests import Call, ReduceRequest
from hvdkit.engine.ranks.assignments import LANES
from hvdkit.engine.ranks.topology import Topology
from hvdkit.engine.steps.device_reducer import CopiedReducer, DeviceReducer, count_nodes, stays_on_device
from hvdkit.engine.steps.host_reducer import HostReducer
from hvdkit.engine.steps.lane import Lane
from hvdkit.engine.steps.lanes import Lanes
from hvdkit.engine.steps.node_pass import node_pass
from hvdkit.engine.steps.plan import Plan
from hvdkit.engine.steps.reducer import Reducer
from hvdkit.errors import HorovodInternalError
from hvdkit.kernels import ReduceOp

if TYPE_CHECKING:
    from hvdkit.transports.gpu.streams import HostCopies

logger = logging.getLogger("hvdkit")

# In memory of the host, wherever gradients are.
HOST = "host"
IDLE = (
    "compression %s encodes nothing here: all ranks are on one node, where gradients are summed uncompressed, and "
    "nothing travels between nodes.\n"
    'HINT: to try the compression on one node, pass compress="everywhere" to it; on several nodes, leave it as it is.'
)

NO_NUMBER = (
    "{name} cannot be planned on {rank}: {count} optimizers or tapes are in use, and the messages of one more could "
    "not be told apart from theirs.\n"
    "HINT: delete optimizers that are no longer used; after errors, call hvd.shutdown() and hvd.init()."
)


def idle_codecs(codecs: Sequence[Codec], nodes: Sequence[Sequence[int]], group: Group) -> list[str]:
    """Return the names of codecs that encode nothing here; of those with a momentum adapters warn."""
    idle = {codec.name for codec in codecs if codec.encodes and not codec.everywhere and not codec.has_momentum}
    is_one_node = count_nodes(nodes, group.members) == 1
    return sorted(idle) if group.layout is not None and is_one_node and group.size > 1 else []


def register(named: NamedOperations, topology: Topology, settings: Settings, lanes: Lanes, plan: Plan) -> Lane | None:
    """Agree on a plan with all ranks of its process set, or raise. Blocks. Return None where a rank has joined."""
    groups, reduction = named.groups, plan.reduction
    transport, group = groups.transport, groups.group(plan.process_set_id)
    encodes = plan.device.partition(":")[0] not in transport.host_types
    device = plan.device if stays_on_device(reduction.codecs, topology.nodes, group.members, encodes) else HOST
    device_type = device.partition(":")[0]
    summaries = [codec.summary for codec in reduction.codecs]
    signature = {
        "slots": [[slot.name, list(slot.shape), str(slot.dtype), summaries[slot.codec]] for slot in plan.slots],
        "op": int(reduction.op),
        "prescale": reduction.prescale,
        "postscale": reduction.postscale,
        "groups": [list(group) for group in plan.groups],
        "device": device_type if device_type in transport.device_types else "cpu",
    }
    agreed = named.submit("plan", [], signature, Call(plan.name, plan.process_set_id, wake=False)).wait()
    if agreed is None:
        return None
    lane_id, number = agreed
    if number is None:
        raise HorovodInternalError(NO_NUMBER.format(name=plan.name, rank=topology.describe(topology.rank), count=LANES))
    is_served = device_type in transport.device_types
    collectives = transport.collectives_for(device, group.members, f"lane{lane_id}") if is_served else None
    reducer: Reducer
    if collectives is not None:
        reducer = DeviceReducer(group, reduction, collectives, plan.slots, topology.nodes)
    else:
        # Sums take turns with a computation that has every core, unless the user's bucket size says otherwise.
        in_turns = topology.is_full and settings.fusion_threshold is None
        reducer = _host_reducer(named, topology, in_turns, plan, lane_id)
    if group.rank == 0:
        for name in set(idle_codecs(reduction.codecs, topology.nodes, group)) - lanes.warned_idle:
            lanes.warned_idle.add(name)
            logger.warning(IDLE, name)
    return Lane(lanes, lane_id, number, plan, group, reducer, settings.verify)


def copies_opener(device: str) -> Callable[[Array], HostCopies] | None:
    """Return what opens copies between a device and a block of host memory; None where gradients are not on CUDA."""
    if device.partition(":")[0] != "cuda":
        return None
    from hvdkit.transports.gpu.streams import open_copies

    return partial(open_copies, device)


def _host_reducer(named: NamedOperations, topology: Topology, in_turns: bool, plan: Plan, lane_id: int) -> Reducer:
    """Return a lane's reducer on the host; it uses the node's memory if no rank of the lane is short of it."""
    group, opener = named.groups.group(plan.process_set_id), copies_opener(plan.device)
    layout, node, takes_turns = group.layout, None, False
    if layout is not None:
        node, problem = node_pass(group, lane_id, plan.slots, holds_all=opener is not None)
        # The first rank that is short of memory, whether all compute where they sum, and whether all copy, or none.
        short = topology.rank if problem else topology.size
        agreed = np.array([short, plan.device in ("cpu", HOST), opener is not None, opener is None])
        named.allreduce([agreed], ReduceRequest(ReduceOp.MIN), Call(f"{plan.name}.memory", plan.process_set_id)).wait()
        short, all_on_host, are_alike = int(agreed[0]), bool(agreed[1]), bool(agreed[2] or agreed[3])
        if short == topology.rank or (group.rank == 0 and not are_alike):
            problem = problem or "they are on a GPU on some ranks and not on others"
            text = "%s: the gradients of '%s' are not in shared memory, which is slower: %s"
            logger.warning(text, topology.describe(topology.rank), plan.name, problem)
        takes_turns = in_turns and all_on_host and node is not None and len(layout.nodes) == 1
        if short < topology.size or not are_alike:
            if node is not None:
                node.discard()
            layout, node, takes_turns = None, None, False
    if opener is not None:
        return CopiedReducer(group, plan.reduction, layout, plan.slots, node, opener)
    return HostReducer(group, plan.reduction, layout, plan.slots, node, takes_turns)
