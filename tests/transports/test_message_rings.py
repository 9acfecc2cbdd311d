"""Messages between the ranks of a node arrive whole, under their tags and in order, whatever their sizes."""

from __future__ import annotations

import gc
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.arrays import Array
from tests.transports.shared import (
    LINE,
    answer,
    bells_in,
    bytes_by_rank,
    message_rings,
    native,
    needs_memory_files,
    needs_native,
    new_window,
    program,
    settle,
)

pytestmark = [needs_native, needs_memory_files]

RING = 256  # as message_rings() has it


@pytest.mark.parametrize("ring", [64, RING])
@pytest.mark.parametrize("received_first", [True, False])
@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, "ring - 17", "ring - 16", "ring - 15", "ring", "3 * ring"])
def test_a_message_of_any_size_arrives_whole(size, received_first, ring):
    nbytes = size if isinstance(size, int) else eval(size, {"ring": ring})  # noqa: S307
    one, other = message_rings(2, ring)
    for shift in range(ring // 16):  # from every place on the ring
        sent, into = bytes_by_rank(0, shift, nbytes), np.empty(nbytes, np.uint8)
        if received_first:
            receive = other.receive(0, 5, into)
            assert not receive.done()
            send = one.send(1, 5, sent)
        else:
            send = one.send(1, 5, sent)
            other.progress()
            receive = other.receive(0, 5, into)
        settle([one, other])
        assert send.done()
        assert receive.done()
        np.testing.assert_array_equal(into, sent)
        one.send(1, 6, sent[:0])  # 16 bytes further
        other.receive(0, 6, into[:0])
        settle([one, other])


def test_messages_of_any_shape_and_dtype_are_their_bytes():
    one, other = message_rings(2)
    sent, into = np.arange(60, dtype=np.float64).reshape(3, 4, 5), bytearray(480)
    one.send(1, 1, sent)
    other.receive(0, 1, into)
    settle([one, other])
    assert into == sent.tobytes()
    with pytest.raises(BufferError, match="not writable"):
        other.receive(0, 1, b"read only")


def test_whoever_can_go_on_is_rung_and_nobody_else():
    window = new_window(3 * LINE + native.MessageRings.bytes_needed(3, RING, RING))
    bells = bells_in(window, 3)
    one, other, _ = [native.MessageRings(window, 3 * LINE, 3, me, RING, RING, bells) for me in range(3)]

    def rung(action: Callable[[], object]) -> list[bool]:
        before = [bell.count() for bell in bells]
        action()
        return [bell.count() != count for bell, count in zip(bells, before, strict=True)]

    nobody = [False, False, False]
    assert rung(lambda: one.send(1, 1, np.zeros(10, np.uint8))) == [False, True, False]
    assert rung(lambda: one.send_control(1, b"here")) == [False, True, False]
    assert rung(other.progress) == nobody  # the sender has nothing to wait for
    assert rung(lambda: one.send(1, 1, np.zeros(2 * RING, np.uint8))) == [False, True, False]
    assert rung(one.progress) == nobody  # no room yet
    assert rung(other.progress) == [True, False, False]  # there is room now
    assert rung(one.progress) == [False, True, False]
    assert rung(other.receive(0, 2, np.zeros(10, np.uint8)).done) == nobody


# One action: (whose, what, with whom, tag, size).
actions = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.sampled_from(["send", "receive", "control", "progress", "progress"]),
        st.integers(0, 3),
        st.integers(0, 1),
        st.one_of(st.integers(0, 70), st.sampled_from([127, 128, 129, 400, 3000])),
    ),
    max_size=50,
)


@settings(max_examples=300, deadline=None)
@given(actions=actions, ranks=st.integers(2, 4), ring=st.sampled_from([64, 128]), early=st.booleans())
def test_any_schedule_delivers_what_a_dictionary_of_queues_would(actions, ranks, ring, early):
    party = message_rings(ranks, ring, 64)
    sizes: dict[Any, list[int]] = defaultdict(list)  # by (sender, receiver, tag): of the first message, the second...
    sent: dict[Any, list[Array]] = defaultdict(list)
    received: dict[Any, list[Array]] = defaultdict(list)
    announced: dict[Any, list[bytes]] = defaultdict(list)
    heard: dict[Any, list[bytes]] = defaultdict(list)
    waits = []

    def size_of(line: tuple[int, int, int], number: int, drawn: int) -> int:
        if number == len(sizes[line]):
            sizes[line].append(drawn)
        return sizes[line][number]

    def send(line: tuple[int, int, int], drawn: int) -> None:
        nbytes = size_of(line, len(sent[line]), drawn)
        sent[line].append(bytes_by_rank(line[0], 100 * line[2] + len(sent[line]), nbytes))
        waits.append(party[line[0]].send(line[1], line[2], sent[line][-1]))

    def receive(line: tuple[int, int, int], drawn: int) -> None:
        received[line].append(np.full(size_of(line, len(received[line]), drawn), 255, np.uint8))
        waits.append(party[line[1]].receive(line[0], line[2], received[line][-1]))

    for index, (who, what, shift, tag, drawn) in enumerate(actions):
        me = who % ranks
        peer = (me + 1 + shift % (ranks - 1)) % ranks
        if what == "send":
            send((me, peer, tag), drawn)
        elif what == "receive":
            receive((peer, me, tag), drawn)
        elif what == "control":
            announced[me, peer].append(bytes_by_rank(me, index, drawn).tobytes())
            party[me].send_control(peer, announced[me, peer][-1])
        else:
            party[me].progress()
    for line in list(sizes):  # the other half of what was posted on one side only
        while len(sent[line]) < len(sizes[line]):
            send(line, 0)
    if early:
        settle(party)
    for line in list(sizes):
        while len(received[line]) < len(sizes[line]):
            receive(line, 0)
    settle(party)
    for me, post in enumerate(party):
        for peer, payload in post.take_control():
            heard[peer, me].append(payload)
    assert all(message.done() for message in waits)
    assert heard == announced
    for line, buffers in received.items():
        for got, expected in zip(buffers, sent[line], strict=True):
            np.testing.assert_array_equal(got, expected)


def test_control_messages_overtake_data_that_nobody_receives():
    one, other = message_rings(2)
    one.send(1, 1, np.zeros(100 * RING, np.uint8))
    one.send_control(1, b"here")
    other.progress()
    assert other.take_control() == [(0, b"here")]


WRONG_LENGTH = "local rank 0 sent 1000 bytes where another number was expected"


@pytest.mark.parametrize("expected", [0, 999, 1001, 5000])
@pytest.mark.parametrize("when", ["posted before", "posted halfway", "posted after"])
def test_a_message_of_another_length_is_an_error_of_its_receive_alone(when, expected):
    one, other = message_rings(2)
    into = np.full(expected, 3, np.uint8)
    if when == "posted before":
        receive = other.receive(0, 7, into)
    one.send(1, 7, np.zeros(1000, np.uint8))
    if when != "posted before":
        other.progress()
        if when == "posted after":
            settle([one, other])
        receive = other.receive(0, 7, into)
    settle([one, other])
    with pytest.raises(RuntimeError, match=WRONG_LENGTH):
        receive.done()
    assert receive.wrong_bytes() == 1000
    assert (into == 3).all()
    # What comes after it still arrives.
    one.send(1, 8, np.full(300, 5, np.uint8))
    one.send_control(1, b"goodbye")
    later = np.empty(300, np.uint8)
    receive = other.receive(0, 8, later)
    settle([one, other])
    assert other.take_control() == [(0, b"goodbye")]
    assert receive.done()
    assert (later == 5).all()


def test_giving_buffers_back_does_not_lock_other_threads_out():
    with program("give_back_buffers", 2000) as process:
        assert answer(process) == "done"


@pytest.mark.parametrize("kept", ["message kept", "message dropped"])
def test_buffers_live_until_their_messages_are_over_and_no_longer(kept):
    one, other = message_rings(2)
    sent, into = bytes_by_rank(0, 0, 3 * RING), np.empty(3 * RING, np.uint8)
    expected, memory = sent.copy(), into[:]
    owners = [weakref.ref(sent), weakref.ref(memory)]
    messages = [one.send(1, 1, sent), other.receive(0, 1, memory)]
    if kept == "message dropped":
        messages.clear()
    del sent, memory
    gc.collect()
    assert all(owner() is not None for owner in owners)
    other.progress()  # a ring full of it
    assert all(owner() is not None for owner in owners)
    settle([one, other])
    np.testing.assert_array_equal(into, expected)
    if kept == "message dropped":
        assert [owner() for owner in owners] == [None, None]
    else:
        assert all(message.done() for message in messages)
    # Those of messages that never end go with the post.
    never = np.zeros(3 * RING, np.uint8)
    owner = weakref.ref(never)
    one.send(1, 1, never)
    del never
    one.progress()
    assert owner() is not None
    del one, other
    assert owner() is None


def test_a_receive_from_any_peer_gets_the_first_message_under_its_tag_and_no_other():
    three = message_rings(3)
    tag = 1 << 63 | 5  # of 64 bits
    into = np.zeros(4, np.uint8)
    receive = three[0].receive_any([1, 2], tag, into)
    three[2].send(0, tag + 1, np.full(4, 9, np.uint8))  # another tag
    settle(three)
    assert not receive.done()
    assert receive.source() == -1
    three[2].send(0, tag, np.full(4, 2, np.uint8))
    settle(three)
    assert receive.done()
    assert (receive.source(), into.tolist()) == (2, [2] * 4)
    # The message of the other peer waits for the next receive, whether from it or from any.
    three[1].send(0, tag, np.full(4, 1, np.uint8))
    settle(three)
    second = three[0].receive_any([2, 1], tag, into)
    assert second.done()
    assert (second.source(), into.tolist()) == (1, [1] * 4)


def test_a_receive_that_is_withdrawn_takes_no_message():
    one, other = message_rings(2)
    into, later = np.zeros(4, np.uint8), np.zeros(4, np.uint8)
    receive = other.receive(0, 7, into)
    assert other.withdraw(receive)
    next_receive = other.receive(0, 7, later)
    one.send(1, 7, np.full(4, 3, np.uint8))
    settle([one, other])
    assert next_receive.done()
    assert not other.withdraw(next_receive)
    assert (into.tolist(), later.tolist()) == ([0] * 4, [3] * 4)
