"""Messages that others pass on: each arrives once, in order, over few ranks; also where ranks on the way are gone."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from hvdkit.engine.loop import relay as module
from hvdkit.engine.loop.relay import Relay
from tests.network import MemoryTransport, Wires
from tests.told import told

NODES = {
    "one node": [[0, 1, 2, 3]],
    "a rank each": [[0], [1], [2], [3]],
    "two each": [[0, 1], [2, 3], [4, 5]],
    "mixed": [[0, 3, 6], [1, 4], [2], [5, 7, 8, 9]],
}
all_nodes = pytest.mark.parametrize("nodes", NODES.values(), ids=NODES.keys())


def size_of(nodes: list[list[int]]) -> int:
    return sum(map(len, nodes))


class Counted(MemoryTransport):
    """Remembers to whom it said something itself."""

    def __init__(self, rank: int, size: int, wires: Wires) -> None:
        super().__init__(rank, size, wires)
        self.told: Counter[int] = Counter()

    def send_control(self, peer: int, payload: bytes) -> None:
        self.told[peer] += 1
        super().send_control(peer, payload)


def relays(nodes: list[list[int]]) -> tuple[list[Relay], list[Counted]]:
    wires = Wires(size_of(nodes))
    transports = [Counted(rank, size_of(nodes), wires) for rank in range(size_of(nodes))]
    return [Relay(one, nodes, []) for one in transports], transports


def delivered(all_relays: list[Relay], *dead: int) -> list[list[tuple[int, bytes]]]:
    """What comes to each, once nothing is on its way any more."""
    came: list[list[tuple[int, bytes]]] = [[] for _ in all_relays]
    for _ in range(8):  # more than any way has parts
        for rank, relay in enumerate(all_relays):
            if rank not in dead:
                came[rank] += relay.poll()
    return came


@all_nodes
def test_each_message_arrives_once_and_in_order_at_all_for_whom_it_is(nodes):
    drawn = random.Random(1)
    all_relays, transports = relays(nodes)
    size = len(all_relays)
    expected: list[dict[int, list[bytes]]] = [{rank: [] for rank in range(size)} for _ in range(size)]
    came = [[] for _ in range(size)]
    for number in range(300):
        origin = drawn.randrange(size)
        receivers = drawn.sample([one for one in range(size) if one != origin], drawn.randint(1, size - 1))
        words = b"[%d]" % number + bytes(drawn.randrange(200))
        all_relays[origin].send(receivers, words)
        for receiver in receivers:
            expected[receiver][origin].append(words)
        if number % 7 == 0:
            rank = drawn.randrange(size)
            came[rank] += all_relays[rank].poll()
    for rank, more in enumerate(delivered(all_relays)):
        came[rank] += more
        by_origin: dict[int, list[bytes]] = {one: [] for one in range(size)}
        for origin, words in came[rank]:
            by_origin[origin].append(words)
        assert by_origin == expected[rank]
    for rank, transport in enumerate(transports):
        assert set(transport.told) <= all_relays[rank].routes.neighbours()


def test_what_goes_over_one_rank_is_one_message():
    all_relays, transports = relays(NODES["two each"])
    all_relays[0].send([2, 3, 4, 5, 1], b"[to all]")
    assert transports[0].told == {1: 1, 2: 1, 4: 1}  # theirs, and what they pass on
    for asks in (b"[first]", b"[second]"):
        all_relays[3].send([0], asks)
    all_relays[2].poll()
    assert transports[2].told == {0: 1, 3: 1}
    assert [one for one in all_relays[0].poll() if one[0] == 3] == [(3, b"[first]"), (3, b"[second]")]


@all_nodes
@pytest.mark.parametrize("gone", [(0,), (1,), (2,), (0, 1), (2, 3)])
def test_where_ranks_are_gone_the_others_still_reach_each_other(nodes, gone):
    all_relays, _ = relays(nodes)
    left = [rank for rank in range(len(all_relays)) if rank not in gone]
    for rank in left:
        all_relays[rank].avoid(gone, 0.0)
    for rank in left:
        all_relays[rank].send([one for one in left if one != rank], b"[%d]" % rank)
    came = delivered(all_relays, *gone)
    for rank in left:
        assert sorted(came[rank]) == [(one, b"[%d]" % one) for one in left if one != rank]


def test_what_follows_on_another_way_does_not_overtake(monkeypatch):
    now = 100.0
    monkeypatch.setattr(module, "monotonic", lambda: now)
    all_relays, _ = relays(NODES["two each"])
    all_relays[3].send([0], b"[old way]")
    all_relays[3].avoid([2], settling_seconds=0.05)
    all_relays[3].send([0], b"[new way]")
    assert all_relays[3].held
    all_relays[3].poll()  # too early
    assert [words for _, words in delivered(all_relays[:3])[0]] == [b"[old way]"]
    now += 0.05
    all_relays[3].poll()
    assert all_relays[0].poll() == [(3, b"[new way]")]
    assert not all_relays[3].held


def test_where_no_way_changes_nothing_waits():
    """As where a rank leaves that passes on nothing: a goodbye that waited would be none."""
    for nodes in NODES.values():
        all_relays, _ = relays(nodes)
        last = nodes[-1][-1]
        all_relays[0].avoid([last], settling_seconds=60.0)
        all_relays[0].send([1], b"[here]")
        assert not all_relays[0].held
        assert delivered(all_relays, last)[1] == [(0, b"[here]")]


NONSENSE = [b"", b"x", bytes(11), b"\xff" * 12, b"\x09\0\0\0" + bytes(8), b"\0\0\0\0\1\0\0\0\0\0\0\0\xff"]


@pytest.mark.parametrize("nonsense", [b"\1" + rest for rest in NONSENSE])
def test_what_no_relay_sends_is_refused(nonsense):
    all_relays, transports = relays(NODES["two each"])
    transports[2].send_control(0, nonsense)
    with told(ValueError, f"rank 2 passed on {nonsense!r}, which is incomplete or for another job"):
        all_relays[0].poll()
