"""Pure decisions of the engine: layout of plans, who is lost, who shares a node, what a control message is."""

from __future__ import annotations

import multiprocessing
import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdkit.api.gradients.compression import Compressions as Compression
from hvdkit.collectives.group import AUTO
from hvdkit.compression import CASTS
from hvdkit.config import Settings
from hvdkit.engine.loop import messages
from hvdkit.engine.loop.messages import Ask, decode, encode
from hvdkit.engine.loop.operation import Operation
from hvdkit.engine.ranks import groups
from hvdkit.engine.ranks.topology import topology_of
from hvdkit.engine.session.watch import Watch
from hvdkit.engine.steps.plan import Slot, first_order, lay_out, observed_order
from hvdkit.engine.steps.registration import idle_codecs
from hvdkit.engine.telemetry.compression_report import CodecStatistics, CompressionStatistics
from hvdkit.engine.telemetry.liveness import Liveness, Loss
from hvdkit.errors import NotInitializedError, PeerLostError, abridged
from tests.network import MemoryTransport, Wires
from tests.transports.shared import in_thread

DTYPES = [np.dtype(np.float32), np.dtype(np.float16), np.dtype(np.float64)]
slot_lists = st.lists(
    st.builds(
        lambda size, dtype: Slot("p", (size,), dtype), st.integers(0, 5000), st.sampled_from(DTYPES)
    ),
    min_size=1, max_size=40,
)  # fmt: skip


@given(slot_lists, st.integers(0, 20_000), st.one_of(st.none(), st.integers(0, 20_000)), st.randoms())
@settings(deadline=None)
def test_every_slot_lies_in_one_bucket_of_its_dtype_aligned_and_apart_from_others(slots, threshold, alone, shuffler):
    order = first_order(len(slots))
    shuffler.shuffle(order)
    buckets = lay_out(slots, order, threshold, alone=alone)
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
        if alone is not None:  # a large slot has a bucket of its own with nothing behind it
            largest = max(slots[slot].elements * bucket.dtype.itemsize for slot in bucket.slots)
            assert largest < alone or len(bucket.slots) == 1
            assert len(bucket.slots) > 1 or bucket.elements == slots[bucket.slots[0]].elements
    if alone is None:  # buckets stand in the order in which they are complete
        complete = [max(order.index(slot) for slot in bucket.slots) for bucket in buckets]
        assert complete == sorted(complete)


@pytest.mark.parametrize("alone", [None, 1])
def test_the_slots_of_a_group_share_a_bucket_whatever_its_size(alone):
    slots = [Slot(str(number), (100,), np.dtype(np.float32)) for number in range(6)]
    buckets = lay_out(slots, first_order(6), 448, [[0, 3, 5]], alone=alone)
    assert any(set(bucket.slots) >= {0, 3, 5} for bucket in buckets)


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


def test_a_child_that_does_not_know_its_rank_is_told_so(monkeypatch):
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: "a rank")
    assert str(NotInitializedError()) == (
        "Horovod has not been initialized; use hvd.init().\n"
        "HINT: call hvd.init() once in every process before any other hvd function. Do not call it in the child "
        "processes of a rank: children that multiprocessing starts anew (spawn, forkserver) do not know the rank; give "
        "them hvd.rank() as an argument, or start them by fork."
    )


def test_a_rank_that_lives_and_does_not_answer_is_told_as_such():
    engine = MagicMock(settings=Settings(timeout_seconds=20.0))
    engine.mailbox.topology.describe.return_value, engine.mailbox.me.return_value = "rank 1 (a)", "rank 0 (b)"
    assert Watch(engine, None).loss_text(HANGS_1) == (
        "rank 1 (a) is alive, but its Python interpreter gave rank 0 (b) no answer for 200 s "
        "(HVDKIT_UNRESPONSIVE_TIMEOUT_SECONDS).\n"
        "HINT: see what the rank is doing (py-spy dump): a library keeps Python's lock (GIL), or threads wait for each "
        "other; raise the variable if such a call may take longer."
    )


def report(host, local_rank=None, local_size=None, cores=(0, 1, 2, 3, 4, 5, 6, 7), threads=1):
    return {"host": host, "local_rank": local_rank, "local_size": local_size, "cores": cores, "threads": threads}


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


def placed(topology):
    return topology.local_rank, topology.local_size, topology.cross_rank, topology.cross_size


def test_ranks_are_grouped_by_host_where_the_launcher_does_not_say():
    ranks = [report("a"), report("b"), report("a")]
    assert placed(topology_of(2, ranks)) == (1, 2, 0, 1)
    assert not topology_of(2, ranks).is_homogeneous
    assert topology_of(1, ranks).cross_rank == 1


def test_the_launchers_word_wins_over_host_names():
    # Two nodes whose containers have the same name, two ranks each.
    topology = topology_of(3, [report("box", 0, 2), report("box", 1, 2)] * 2)
    assert placed(topology) == (1, 2, 1, 2)
    assert topology.is_homogeneous


def test_local_ranks_may_have_another_order_than_ranks():
    # As mpirun maps ranks by package.
    local_ranks = [0, 2, 1]
    ranks = [report("box", local_rank, 3) for local_rank in local_ranks]
    for rank, local_rank in enumerate(local_ranks):
        assert topology_of(rank, ranks).nodes == ((0, 1, 2),)
        assert placed(topology_of(rank, ranks)) == (local_rank, 3, 0, 1)


def test_nodes_of_one_name_and_different_sizes_are_told_apart():
    topology = topology_of(4, [report("box", index, size) for size in (2, 3) for index in range(size)])
    assert topology.nodes == ((0, 1), (2, 3, 4))
    assert placed(topology) == (2, 3, 0, 1)


def test_control_messages_survive_the_wire_and_nothing_else_is_taken():
    message = Ask(3, "näme", [[1, 2], None])
    assert decode(encode(message)) == message
    texts = ["", "{}", "[]", '["request"]', '["request",0]', '["ping", 1]', "[[]]", '["unknown", 1]', "[" * 10_000]
    for garbage in (*(text.encode() for text in texts), b"\x80\x04K\x01."):
        with pytest.raises(ValueError, match=r"control message|Expecting|codec|delimiter"):
            decode(garbage)
    for number in range(messages.MOST_PARSED + 10):
        decode(encode(Ask(0, f"gradient.{number}", None)))
    assert len(messages._PARSED) <= messages.MOST_PARSED, "what was read is kept for ever"


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


def test_threads_that_ask_at_once_get_one_group(monkeypatch):
    made = []

    def slowly(group, *_):
        time.sleep(0.05)
        made.append(group)

    monkeypatch.setattr(groups, "layout_of", slowly)
    everyone = groups.Groups(MemoryTransport(0, 1, Wires(1)), [], AUTO, 0.0)
    got = [outcome.result(60) for outcome in [in_thread(everyone.group, 0) for _ in range(3)]]
    assert got == [made[0]] * 3
    assert len(made) == 1


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (100, 1, "100 bytes sent as 1 byte (100.0 x less)"),
        (1000, 999, "1.0 kB sent as 999 bytes (1.0 x less)"),
        (12_800, 3_260, "12.8 kB sent as 3.3 kB (3.9 x less)"),
        (999_950, 999_949, "1.0 MB sent as 999.9 kB (1.0 x less)"),
        (4_000_000_000, 8_000_000_000, "4000.0 MB sent as 8000.0 MB (2.0 x more)"),
    ],
)
def test_bytes_have_a_unit_in_which_they_are_no_zero(before, after, words):
    assert str(CodecStatistics("fp16", before, after, 0.0, 0.0, 0.0)) == f"fp16: {words}"


def test_a_codec_that_keeps_something_tells_its_seconds_and_its_residual():
    told = CodecStatistics("topk(0.01)", 2_000_000, 40_000, 0.014, 0.25, 12.3456)
    line = "topk(0.01): 2.0 MB sent as 40.0 kB (50.0 x less), encode 0.01 s, decode 0.25 s, "
    assert str(CompressionStatistics({"topk(0.01)": told}, {})) == f"{line}pays below 59.4 Mb/s, residual 12.3"


@pytest.mark.parametrize(
    ("after", "seconds", "words"),
    [
        (20_000_000, 0.15, "pays below 4.3 Gb/s"),
        (99_000_000, 8.0, "pays below 1 Mb/s"),
        (200_000_000, 0.1, "pays on no network"),
    ],
)
def test_a_codec_tells_the_bandwidth_below_which_it_pays(after, seconds, words):
    told = CodecStatistics("int8", 100_000_000, after, seconds / 2, seconds / 2, 1.0)
    assert f", {words}, residual 1" in str(told)
    assert CodecStatistics("fp16", 2, 1, 0.0, 0.0, 0.0).pays_below is None


def test_of_many_names_the_first_are_listed_and_the_rest_counted():
    names = [f"layers.{number}" for number in range(11)]
    assert abridged(names[:3]) == "layers.0, layers.1, layers.2"
    assert abridged(names) == "layers.0, layers.1, layers.2 and 8 more"
    assert abridged(names, 8).endswith(", layers.7 and 3 more")
