"""Pure decisions of the engine: layout of plans, who is lost, who shares a node, what a control message is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdkit.api.gradients.compression import Compressions as Compression
from hvdkit.compression import CASTS
from hvdkit.config import Settings
from hvdkit.engine.loop.messages import Ask, decode, encode
from hvdkit.engine.loop.operation import Operation
from hvdkit.engine.ranks.topology import topology_of
from hvdkit.engine.session.watch import Watch
from hvdkit.engine.steps.plan import Slot, first_order, lay_out, observed_order
from hvdkit.engine.steps.registration import idle_codecs
from hvdkit.engine.telemetry.liveness import Liveness, Loss
from hvdkit.errors import PeerLostError

DTYPES = [np.dtype(np.float32), np.dtype(np.float16), np.dtype(np.float64)]
slot_lists = st.lists(
    st.builds(
        lambda size, dtype: Slot("p", (size,), dtype), st.integers(0, 5000), st.sampled_from(DTYPES)
    ),
    min_size=1, max_size=40,
)  # fmt: skip


@given(slot_lists, st.integers(0, 20_000), st.randoms())
@settings(deadline=None)
def test_every_slot_lies_in_one_bucket_of_its_dtype_aligned_and_apart_from_the_others(slots, threshold, shuffler):
    order = first_order(len(slots))
    shuffler.shuffle(order)
    buckets = lay_out(slots, order, threshold)
    assert sorted(slot for bucket in buckets for slot in bucket.slots) == list(range(len(slots)))
    for bucket in buckets:
        assert len(bucket.slots) == 1 or bucket.nbytes <= threshold
        end = 0
        for slot, offset in zip(bucket.slots, bucket.offsets, strict=True):
            assert slots[slot].dtype == bucket.dtype
            assert offset >= end
            assert offset * bucket.dtype.itemsize % 64 == 0
            end = offset + slots[slot].elements
        assert end <= bucket.elements


@given(slot_lists, st.integers(0, 20_000))
@settings(deadline=None)
def test_buckets_stand_in_the_order_in_which_they_are_complete(slots, threshold):
    order = observed_order([1] if len(slots) > 1 else [], len(slots))
    index_of = {slot: position for position, slot in enumerate(order)}
    complete = [max(index_of[slot] for slot in bucket.slots) for bucket in lay_out(slots, order, threshold)]
    assert complete == sorted(complete)


def test_the_slots_of_a_group_share_a_bucket_whatever_its_size():
    slots = [Slot(str(number), (100,), np.dtype(np.float32)) for number in range(6)]
    buckets = lay_out(slots, first_order(6), 448, [[0, 3, 5]])
    assert any(set(bucket.slots) >= {0, 3, 5} for bucket in buckets)


@given(slot_lists, st.integers(0, 20_000), st.integers(0, 20_000))
@settings(deadline=None)
def test_large_slots_have_a_bucket_of_their_own_with_nothing_behind_them(slots, threshold, alone):
    buckets = lay_out(slots, first_order(len(slots)), threshold, alone=alone)
    assert sorted(slot for bucket in buckets for slot in bucket.slots) == list(range(len(slots)))
    for bucket in buckets:
        if any(slots[slot].elements * bucket.dtype.itemsize >= alone for slot in bucket.slots):
            assert len(bucket.slots) == 1
        if len(bucket.slots) == 1:
            assert bucket.elements == slots[bucket.slots[0]].elements


def test_a_large_slot_of_a_group_stays_with_it():
    slots = [Slot(str(number), (100,), np.dtype(np.float32)) for number in range(3)]
    buckets = lay_out(slots, first_order(3), 448, [[0, 2]], alone=1)
    assert sorted(sorted(bucket.slots) for bucket in buckets) == [[0, 2], [1]]


def test_the_first_order_is_the_reverse_of_registration_and_unseen_slots_come_last():
    assert first_order(3) == [2, 1, 0]
    assert observed_order([1, 3], 4) == [1, 3, 2, 0]


SILENT_1, SILENT_2, HANGS_1 = Loss(1, beats=False), Loss(2, beats=False), Loss(1, beats=True)


def test_a_silent_rank_is_asked_and_then_lost_and_any_message_is_a_sign_of_life():
    liveness = Liveness(20.0, 200.0)
    assert liveness.check([1, 2], 0.0) == ([], [])
    assert liveness.check([1, 2], 5.0) == ([1, 2], [])
    assert liveness.check([1, 2], 6.0) == ([], []), "not asked again at once"
    liveness.heard(1, 7.0)
    assert liveness.check([1, 2], 10.0) == ([2], [])
    assert liveness.check([1, 2], 20.0)[1] == [SILENT_2]
    assert liveness.check([], 21.0) == ([], [])
    assert liveness.check([2], 100.0) == ([], []), "waiting anew begins anew"


def looked_at(liveness, seconds, beats):
    """What is known of rank 1 at the end, with a look in each second until then; ``beats(second)`` are counted."""
    found = []
    for second in range(seconds + 1):
        liveness.looks(float(second))
        liveness.counted(1, beats(second), float(second))
        found = liveness.check([1], float(second))[1]
    return found


def test_a_rank_that_beats_is_lost_only_when_it_has_not_answered_for_the_longer_timeout():
    assert looked_at(Liveness(20.0, 200.0), 199, lambda second: second) == []
    assert looked_at(Liveness(20.0, 200.0), 200, lambda second: second) == [HANGS_1]


def test_a_rank_that_stops_beating_is_lost_after_the_timeout_and_its_old_beats_say_nothing():
    assert looked_at(Liveness(20.0, 200.0), 49, lambda second: min(second, 30)) == []
    assert looked_at(Liveness(20.0, 200.0), 50, lambda second: min(second, 30)) == [SILENT_1]
    assert looked_at(Liveness(20.0, 200.0), 19, lambda second: 7) == []
    assert looked_at(Liveness(20.0, 200.0), 20, lambda second: 7) == [SILENT_1]


def test_who_did_not_look_blames_nobody_for_the_silence_meanwhile():
    for beats in (0, 7):
        liveness = Liveness(20.0, 200.0)
        assert looked_at(liveness, 2, lambda second: beats) == []  # noqa: B023 (called here)
        liveness.looks(100.0)  # it was stopped, or kept the lock itself
        assert liveness.check([1], 100.0) == ([1], [])
        for second in range(101, 121):
            liveness.looks(float(second))
        # Beats that are seen in the node's memory are seen again soon; an answer may take the whole timeout.
        assert liveness.check([1], 104.0)[1] == []
        assert liveness.check([1], 106.0)[1] == ([SILENT_1] if beats else [])
        assert liveness.check([1], 120.0)[1] == [SILENT_1]


class Pending:
    """A transfer that is not done. That of a broken connection tells it once, as MPI does, and is done ever after."""

    def __init__(self, peer, broken=False):
        self.peer, self._broken = peer, broken
        self.asked = 0

    def done(self):
        self.asked += 1
        if self._broken and self.asked == 1:
            raise PeerLostError(f"the connection to rank {self.peer} broke", self.peer)
        return self._broken


def test_a_connection_that_broke_fails_the_operation_also_where_others_saw_it_first():
    def steps():
        yield [Pending(1, broken=True), Pending(2)]

    transport = SimpleNamespace(watch=lambda transfers: None)
    operation = Operation("an allreduce", steps(), transport, lambda result: None)
    assert operation.advance() is False
    assert operation.awaited_peers() == {1, 2}
    for _ in range(2):
        with pytest.raises(PeerLostError, match="the connection to rank 1 broke"):
            operation.advance()


def test_who_leaves_blames_nobody_for_the_silence_while_the_whole_machine_was_paused():
    heartbeat, engine = SimpleNamespace(count=lambda rank: 7), MagicMock(settings=Settings(timeout_seconds=20.0))
    engine.mailbox.liveness = Liveness(20.0, 200.0)
    watch = Watch(engine, heartbeat)
    assert [watch.lost_since([1], 0.0, at) for at in (1.0, 2.0, 100.0, 104.0)] == [[], [], [], []]
    assert watch.lost_since([1], 0.0, 106.0) == [SILENT_1]


def report(
    host, local_rank=None, local_size=None, cross_rank=None, cross_size=None, cores=(0, 1, 2, 3, 4, 5, 6, 7), threads=1
):
    return {
        "host": host, "local_rank": local_rank, "local_size": local_size,
        "cross_rank": cross_rank, "cross_size": cross_size, "cores": cores, "threads": threads,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("ranks", "is_full"),
    [
        ([report("a", cores=[0, 1]), report("a", cores=[0, 1])], True),
        ([report("a", cores=[0, 1, 2]), report("a", cores=[0, 1, 2])], False),
        ([report("a", cores=[0, 1]), report("a", cores=[2, 3])], False),  # bound to sockets
        ([report("a", cores=[0, 1], threads=2), report("a", cores=[2, 3], threads=2)], True),
        ([report("a", cores=[0, 1, 2, 3], threads=3), report("a", cores=[0, 1, 2, 3])], True),
        ([report("a", cores=[0, 1]), report("a", cores=[0, 1]), report("b", cores=[0, 1])], False),
        ([report("a", cores=[0]), report("b", cores=[0])], True),
    ],
)
def test_a_job_is_full_where_every_ranks_threads_have_all_cores_of_its_node(ranks, is_full):
    assert [topology_of(rank, ranks).is_full for rank in range(len(ranks))] == [is_full] * len(ranks)


def test_ranks_are_grouped_by_host_where_the_launcher_does_not_say():
    topology = topology_of(2, [report("a"), report("b"), report("a")])
    assert (topology.local_rank, topology.local_size) == (1, 2)
    assert (topology.cross_rank, topology.cross_size) == (0, 1)
    assert not topology.is_homogeneous
    assert topology_of(1, [report("a"), report("b"), report("a")]).cross_rank == 1


def test_the_launchers_word_wins_over_host_names():
    # Two nodes whose containers have the same name, two ranks each.
    ranks = [report("box", 0, 2), report("box", 1, 2), report("box", 0, 2), report("box", 1, 2)]
    topology = topology_of(3, ranks)
    assert (topology.local_rank, topology.local_size) == (1, 2)
    assert (topology.cross_rank, topology.cross_size) == (1, 2)
    assert topology.is_homogeneous


def test_local_ranks_may_have_another_order_than_ranks():
    # As mpirun maps ranks by package.
    ranks = [report("box", 0, 3), report("box", 2, 3), report("box", 1, 3)]
    for rank, one in enumerate(ranks):
        topology = topology_of(rank, ranks)
        assert topology.nodes == ((0, 1, 2),)
        assert topology.local_rank == one["local_rank"]
        assert (topology.cross_rank, topology.cross_size) == (0, 1)


def test_nodes_of_one_name_and_different_sizes_are_told_apart():
    ranks = [report("box", 0, 2), report("box", 1, 2), report("box", 0, 3), report("box", 1, 3), report("box", 2, 3)]
    topology = topology_of(4, ranks)
    assert topology.nodes == ((0, 1), (2, 3, 4))
    assert (topology.local_rank, topology.cross_rank, topology.cross_size) == (2, 0, 1)


def test_control_messages_survive_the_wire_and_nothing_else_is_taken():
    message = Ask(3, "näme", [[1, 2], None])
    assert decode(encode(message)) == message
    for garbage in (
        b"",
        b"{}",
        b"[]",
        b'["request"]',
        b'["ping", 1]',
        b"[[]]",
        b'["unknown", 1]',
        b"\x80\x04K\x01.",
        b"[" * 10_000,
    ):
        with pytest.raises(ValueError, match=r"control message|Expecting|codec|delimiter"):
            decode(garbage)


@pytest.mark.parametrize(
    ("nodes", "members", "layout", "idle"),
    [
        ([[0, 1]], [0, 1], "memory", ["int8", "topk"]),
        ([[0, 1], [2]], [0, 1, 2], "memory", []),
        ([[0, 1], [2]], [0, 1], "memory", ["int8", "topk"]),  # a process set on one of two nodes
        ([[0, 1]], [0, 1], None, []),  # no memory that they share: what goes between ranks is encoded
        ([[0]], [0], "memory", []),
    ],
)
def test_codecs_that_encode_nothing_are_told(nodes, members, layout, idle):
    group: Any = SimpleNamespace(members=members, size=len(members), layout=layout)
    codecs = [*CASTS.values(), Compression.int8(), Compression.topk(0.1)]
    codecs += [Compression.onebit(compress="everywhere"), Compression.dgc(0.1)]
    assert idle_codecs(codecs, nodes, group) == idle
