"""Makes groups of ordered operations: where the memory of a group lies, and which ways its calls take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hvdkit.collectives.group import Group
from hvdkit.engine.ordered.group import OrderedGroup
from hvdkit.engine.ordered.ways import NodeWays, Ways
from hvdkit.engine.ordered.wide import WideWays
from hvdkit.engine.ranks.groups import layout_of, ordered_segment, turns_of

if TYPE_CHECKING:
    from hvdkit.engine.session.core import Engine


def make_group(engine: Engine, members: Sequence[int], number: int, name: str, seconds: float) -> OrderedGroup:
    """Return a group of the ranks ``members``; see Engine.ordered_group."""
    group = Group(engine.transport, members, engine.groups.choice)
    spin_seconds = engine.groups.pass_spin_seconds
    group.layout = layout_of(group, ordered_segment(number), spin_seconds)
    turns = turns_of(group)
    ways: Ways = WideWays(group, number)
    if turns is not None:
        from hvdkit.transports.node.transport import NodeTransport

        assert isinstance(engine.transport, NodeTransport)
        ways = NodeWays(group, number, turns, engine.transport.arenas_of(group.members))
    return OrderedGroup(engine, group, ways, number, name, seconds, spin_seconds > 0.0)
