"""Messages from rank to rank under tags of a group, which do not wait for collective calls.

Within a node they go through the rings of the ranks' memory, which match them. Between nodes the sender offers its
message by a control message; the receiver takes the bytes once it wants them, so that it can wait for any rank.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from hvdkit.collectives.group import Array, Steps
from hvdkit.engine.loop.completion import Completion
from hvdkit.engine.loop.messages import MessageOffer
from hvdkit.engine.loop.negotiation import DEPARTED_SECONDS
from hvdkit.engine.loop.operation import Operation
from hvdkit.engine.ops.hints import LEFT_EARLY
from hvdkit.engine.ranks.assignments import message_tag
from hvdkit.errors import HorovodInternalError, MismatchError, PeerLostError, StallError

if TYPE_CHECKING:
    from hvdkit.engine.ordered.group import OrderedGroup
    from hvdkit.engine.session.core import Engine
    from hvdkit.transports.base import Transfer

_GROUP_SHIFT, _ANY_GROUP = 32, 1 << 63  # of a tag within a node, above those of all collectives
_TAGS = (1 << 32) - 1


class Message(Completion):
    """A send or a receive in flight. ``peers``: the ranks of the job that it may be for, or come from.

    ``source``: the rank in the group from which a message came, -1 before.
    """

    def __init__(
        self, engine: Engine, group: OrderedGroup, action: str, array: Array, peers: Sequence[int], tag: int
    ) -> None:
        super().__init__(engine.waiting)
        self._me, self._action = engine.mailbox.me(), action
        self.group, self.array, self.peers, self.tag = group, array, list(peers), tag
        self.source = -1
        self.local: Any = None  # the transfer within the node
        self.remote: Transfer | None = None  # that between nodes

    def __str__(self) -> str:
        size = f"{self.array.nbytes} bytes with tag {self.tag}"
        return f"{self._action} ranks {self.peers}: {size} in group '{self.group.name}'"

    def stalled(self, seconds: float) -> str:
        return (
            f"{self._me} waited {seconds:g} s in {self}: timed out.\n"
            "HINT: check that the other rank makes the matching call, with the same tag; if that call may come later, "
            "give the group a longer timeout."
        )

    def awaited(self) -> list[int]:
        """Return the peer in a list; an empty list while several peers may send the message."""
        return self.peers if len(self.peers) == 1 else []


class _Arrival:
    """A wait, like a transfer, until a message has come or gone."""

    def __init__(self, message: Message) -> None:
        self._message, self.peer = message, -1

    def awaited(self) -> list[int]:
        return self._message.awaited()

    def done(self) -> bool:
        local, remote = self._message.local, self._message.remote
        if local is not None and local.wrong_bytes() >= 0:
            return True  # ended with an error of this message alone
        return bool((local is not None and local.done()) or (remote is not None and remote.done()))


class Messages:
    """The messages of all groups of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        rank = engine.topology.rank
        self._node = next((node for node in engine.transport.nodes if rank in node), [])  # the ranks of this node
        self._in_flight: dict[Message, Operation] = {}
        self._counts: defaultdict[int, int] = defaultdict(int)  # of messages sent to each rank of another node
        # By group number and tag: offers from ranks of other nodes, and receives that wait for such offers.
        self._offers: defaultdict[tuple[int, int], deque[tuple[int, MessageOffer]]] = defaultdict(deque)
        self._receives: defaultdict[tuple[int, int], list[Message]] = defaultdict(list)

    def send(self, group: OrderedGroup, array: Array, to: int, tag: int) -> Message:
        """Send a flat array to a rank of a group."""
        group.check_process()
        message = Message(self._engine, group, "send to", array, [group.group.members[to]], tag)
        rings = self._rings(message.peers)
        if rings:
            message.local = self._engine.transport.isend(array.view("u1"), message.peers[0], _local_tag(group, tag))
        self._engine.driver.inbox.append(partial(self._begin_send, message))
        self._engine.driver.wake()
        return message

    def receive(self, group: OrderedGroup, array: Array, source: int | None, tag: int) -> Message:
        """Receive into a flat array from a rank of a group, or from any."""
        group.check_process()
        members = group.group.members
        others = [member for member in members if member != self._engine.topology.rank]
        message = Message(
            self._engine, group, "receive from", array, others if source is None else [members[source]], tag
        )
        rings, transport = self._rings(message.peers), self._engine.transport
        if rings and len(message.peers) == 1:
            message.local = transport.irecv(array.view("u1"), message.peers[0], _local_tag(group, tag))
        elif rings:
            message.local = transport.receive_any(array.view("u1"), rings, _local_tag(group, tag))  # type: ignore[attr-defined]
        self._engine.driver.inbox.append(partial(self._begin_receive, message))
        self._engine.driver.wake()
        return message

    def offered(self, sender: int, offer: MessageOffer) -> None:
        """Record the offer of a message by a rank of another node. Raises ValueError for numbers of no message."""
        if not all(isinstance(number, int) for number in offer) or not 0 <= offer.nbytes < 1 << 48:
            raise ValueError(f"no message: {offer}")
        self._offers[offer.group, offer.tag].append((sender, offer))
        self._match(offer.group, offer.tag)

    def look(self, now: float) -> None:
        """End messages that have taken longer than their groups' timeouts, or whose senders have all left."""
        departed_at = self._engine.mailbox.departed_at
        for message in list(self._in_flight):
            if now - message.since > message.group.seconds:
                self._drop(message, StallError(message.stalled(message.group.seconds)))
            elif len(message.peers) > 1 and departed_at.keys() >= set(message.peers):
                last = max(message.peers, key=departed_at.__getitem__)
                if now - max(message.since, departed_at[last]) > DEPARTED_SECONDS:
                    text = f"{message} on {self._engine.mailbox.me()}: all senders have left the job, rank {last} last."
                    self._drop(message, PeerLostError(f"{text}\n{LEFT_EARLY.format(rank=last)}", last))

    def fail(self, error: HorovodInternalError, group: OrderedGroup | None = None) -> None:
        """End the messages of a group, or of all, with an error."""
        for key in [key for key in self._offers if group is None or key[0] == group.number]:
            del self._offers[key]
        for message in [each for each in list(self._in_flight) if group is None or each.group is group]:
            self._drop(message, error)

    def _rings(self, peers: Sequence[int]) -> list[int]:
        """Return the ranks among ``peers`` that share memory with this rank."""
        return [peer for peer in peers if peer in self._node]

    def _begin_send(self, message: Message) -> None:
        peer = message.peers[0]
        if message.local is None:
            count = self._counts[peer] = self._counts[peer] + 1
            offer = MessageOffer(message.group.number, message.tag, message.array.nbytes, message_tag(count))
            self._engine.mailbox.tell([peer], offer)
            message.remote = self._engine.transport.isend(message.array.view("u1"), peer, offer.data_tag)
        self._run(message)

    def _begin_receive(self, message: Message) -> None:
        if len(self._rings(message.peers)) < len(message.peers):
            self._receives[message.group.number, message.tag].append(message)
        self._run(message)
        self._match(message.group.number, message.tag)

    def _run(self, message: Message) -> None:
        if (error := self._engine.mailbox.error) is not None:
            message.end(error)
            return
        if message.is_over:
            return
        operation = Operation(
            message, self._steps(message), self._engine.transport, self._ended, message.peers, message.end
        )
        self._in_flight[message] = operation
        self._engine.operations.append(operation)

    def _steps(self, message: Message) -> Steps[Message]:
        yield [message.remote if message.remote is not None else _Arrival(message)]
        return message

    def _ended(self, message: Message) -> None:
        self._in_flight.pop(message, None)
        members, error = message.group.group.members, None
        if message.remote is not None:
            message.source = members.index(message.remote.peer)
        elif message.local.source() >= 0:
            sender = self._node[message.local.source()]
            message.source = members.index(sender)
            if (nbytes := message.local.wrong_bytes()) >= 0:
                error = MismatchError(self._wrong_length(message, sender, nbytes))
        waiting = self._receives.get((message.group.number, message.tag), [])
        if message in waiting:
            waiting.remove(message)
        message.end(error)

    def _match(self, group: int, tag: int) -> None:
        """Take the messages of other nodes for which receives wait."""
        offers, receives = self._offers[group, tag], self._receives[group, tag]
        for message in list(receives):
            match = next((each for each in offers if each[0] in message.peers), None)
            if match is None:
                continue
            if message.local is not None and not self._engine.transport.withdraw(message.local):  # type: ignore[attr-defined]
                continue  # a message of this node has come
            message.local = None
            offers.remove(match)
            receives.remove(message)
            sender, offer = match
            if offer.nbytes != message.array.nbytes:
                discarded = self._engine.transport.irecv(np.empty(offer.nbytes, np.uint8), sender, offer.data_tag)
                steps = _wait_for([discarded])
                self._engine.operations.append(Operation("a message", steps, self._engine.transport, lambda _: None))
                self._drop(message, MismatchError(self._wrong_length(message, sender, offer.nbytes)))
                continue
            message.remote = self._engine.transport.irecv(message.array.view("u1"), sender, offer.data_tag)
            self._engine.transport.watch([message.remote])
        for table in (self._offers, self._receives):
            if not table[group, tag]:
                del table[group, tag]

    def _wrong_length(self, message: Message, sender: int, nbytes: int) -> str:
        return (
            f"{message} on {self._engine.mailbox.me()}: rank {sender} sent {nbytes} bytes.\n"
            "HINT: give both calls tensors of the same shape and dtype."
        )

    def _drop(self, message: Message, error: HorovodInternalError) -> None:
        operation = self._in_flight.pop(message, None)
        waiting = self._receives.get((message.group.number, message.tag), [])
        if message in waiting:
            waiting.remove(message)
        if operation in self._engine.operations:
            self._engine.operations.remove(operation)
        if message.local is not None and message.local.source() < 0:
            self._engine.transport.withdraw(message.local)  # type: ignore[attr-defined]
        message.end(error)


def _wait_for(transfers: list[Transfer]) -> Steps[None]:
    """Wait for transfers."""
    yield transfers


def _local_tag(group: OrderedGroup, tag: int) -> int:
    return _ANY_GROUP | group.number << _GROUP_SHIFT | (tag & _TAGS)
