"""Decides, on rank 0, which named operations run and in which order: a state machine of messages in, messages out.

It has no clock and no connection of its own, so that every decision can be tested without a process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from hvdkit.engine.loop.dead_locks import DeadLocks
from hvdkit.engine.loop.fusing import batch_size
from hvdkit.engine.loop.messages import (
    LEFT,
    MISMATCH,
    STALLED,
    Ask,
    Join,
    JoinDone,
    Joined,
    JoinFailed,
    LaneClosed,
    LaneFailed,
    Message,
    NewSignature,
    Reject,
    Run,
    Waits,
)
from hvdkit.engine.loop.pending import Entry, Failure, Stall
from hvdkit.engine.loop.recurring import Recurring
from hvdkit.engine.loop.tags import LaneNumbers
from hvdkit.engine.ops import KINDS, tensor_kinds
from hvdkit.engine.ops.hints import LEFT_EARLY, SAME_CALLS, for_joined
from hvdkit.engine.ops.requests import Key, Request, Signature
from hvdkit.engine.telemetry.telemetry import Telemetry


class Coordinator:
    """Collects requests; ``take_outgoing`` gives (ranks, message) pairs to deliver, in order.

    What a repeated operation costs grows with its ranks: requests are counted, and who is missing is looked for only
    where a rank has joined, left or waits. ``telemetry`` is told of each while it records.
    """

    def __init__(self, size: int, fusion_threshold: int, telemetry: Telemetry | None = None) -> None:
        self._threshold = fusion_threshold
        self.members: dict[int, list[int]] = {0: list(range(size))}
        self._pending: dict[Key, Entry] = {}
        self._failed: dict[Key, list[Failure]] = {}  # the oldest first: each rank is told of them in that order
        self._ready: deque[tuple[Key, Entry]] = deque()
        self._signatures: dict[tuple[int, int], Signature] = {}
        self._joined: dict[int, None] = {}  # in the order of their words
        self._departed: dict[int, str] = {}
        self._dead_locks = DeadLocks(self._missing_from)
        self._outgoing: list[tuple[Sequence[int], Message]] = []
        self._sequence = 0
        self._lanes = 0
        self._lane_numbers = LaneNumbers()
        self._process_sets = 0
        self._recurring = Recurring()
        self._telemetry = telemetry or Telemetry(0)
        self._last_asked: tuple[Ask, Signature, tuple[Key, Request]] | None = None

    # -- what comes in ------------------------------------------------------------------------------------------------

    def receive(self, rank: int, message: Message, now: float) -> None:
        """Take one message of a rank. Raises ValueError for one that no engine sends."""
        match message:
            case Ask():
                key, request = self._understood(rank, message)
                if not self._failed or not self._tell_earlier_failure(rank, key):
                    self._request(rank, key, request, now)
            case NewSignature(number, signature):
                self._signatures[rank, number] = signature
            case LaneClosed(lane, sequence):
                self._lane_numbers.closed(rank, lane, sequence)
            case Join():
                self._join(rank)
            case Waits():
                self._break_dead_lock(rank, message)
            case _:
                raise ValueError(f"rank {rank} sent {type(message).__name__}, which is not for the coordinator")

    def _understood(self, rank: int, message: Ask) -> tuple[Key, Request]:
        """What a rank asks for. Many say the same, one after the other, and are understood at once."""
        asked = message.signature
        known = asked if isinstance(asked, dict) else self._signatures.get((rank, asked))
        last = self._last_asked
        if last is not None and message is last[0] and known is last[1]:
            return last[2]
        if known is None or known.get("kind") not in KINDS:
            raise ValueError(f"rank {rank} sent a request with an unknown signature {asked!r}")
        understood = Key(known["ps"], known["kind"], message.name), Request(known, message.detail)
        self._last_asked = message, known, understood
        return understood

    def add_static_process_sets(self, sets: Iterable[list[int]]) -> None:
        """The process sets that every rank passed to init, numbered from 1."""
        for ranks in sets:
            self._process_sets += 1
            self.members[self._process_sets] = list(ranks)

    def add_process_set(self, ranks: Sequence[int]) -> int | None:
        """The number of a new set of these ranks; None where there is one."""
        if list(ranks) in self.members.values():
            return None
        self._process_sets += 1
        self.members[self._process_sets] = list(ranks)
        return self._process_sets

    def next_lane(self, process_set: int) -> tuple[int, int | None]:
        """Return an id that no lane has had, and a number that no lane has that is open, None if all are taken."""
        self._lanes += 1
        return self._lanes, self._lane_numbers.take(self._lanes, self.members[process_set])

    def next_region(self, what: object, signature: Signature) -> int | None:
        """A number that no operation has had, for one that comes for the second time as it was; None at other times.

        Where all ranks take part themselves: one that has joined does not count how often it came.
        """
        return None if self._joined else self._recurring.number(what, signature)

    def depart(self, rank: int, reason: str) -> None:
        """A rank has left the job: what waits for it fails, a join included."""
        self._departed[rank] = reason
        self._fail_join()
        for key, entry in list(self._pending.items()):
            if rank in self._missing(key, entry):
                self._fail([key], self._departed_text(key, rank), LEFT, rank)

    def give_up(self, key: Key, message: str) -> None:
        """Fail an operation that has stalled for too long, if it is still pending."""
        if key in self._pending:
            self._fail([key], message, STALLED)

    # -- what goes out ------------------------------------------------------------------------------------------------

    def take_outgoing(self) -> list[tuple[Sequence[int], Message]]:
        """Messages to deliver now. Ready operations that may be fused are batched up to the fusion threshold."""
        if self._ready:
            self._run_ready()
        outgoing, self._outgoing = self._outgoing, []
        return outgoing

    def _run_ready(self) -> None:
        while len(self._ready) > 1:
            # Read only as far as the batch goes: thousands of tensors may be ready of which no two can be batched.
            asked = ((key.process_set, entry.signature) for key, entry in self._ready)
            count = batch_size(asked, self._threshold)
            self._run([self._ready.popleft() for _ in range(count)])
        if self._ready:
            self._run([self._ready.popleft()])

    def stalled(self, now: float, seconds: float) -> list[Stall]:
        """Operations pending for longer than ``seconds``."""
        return [
            Stall(key, sorted(entry.requests), self._missing(key, entry), now - entry.since)
            for key, entry in self._pending.items()
            if now - entry.since > seconds
        ]

    def new_stalls(self, now: float, seconds: float) -> list[Stall]:
        """Like ``stalled``, each operation only once."""
        found = [stall for stall in self.stalled(now, seconds) if not self._pending[stall.key].warned]
        for stall in found:
            self._pending[stall.key].warned = True
        return found

    def awaited_ranks(self) -> set[int]:
        """The ranks that some pending operation waits for."""
        awaited = {rank for key, entry in self._pending.items() for rank in self._missing(key, entry)}
        return awaited.union(set(self.members[0]).difference(self._joined) if self._joined else ())

    # -- inside -------------------------------------------------------------------------------------------------------

    def _request(self, rank: int, key: Key, request: Request, now: float) -> None:
        entry = self._pending.get(key)
        is_new = entry is None
        if entry is None:
            entry = self._pending[key] = Entry(now)
        entry.requests[rank] = request
        process_set, kind, _ = key
        members = self.members.get(process_set)
        if members is None:
            self._fail([key], f"{key}: there is no such process set; it was removed.")
            return
        if self._telemetry.timeline is not None and 0 in members:  # rank 0 alone records
            self._telemetry.record_request(key, rank)
        if self._departed:
            gone = [member for member in self._missing(key, entry) if member in self._departed]
            if gone:
                self._fail([key], self._departed_text(key, gone[0]), LEFT, gone[0])
                return
        if is_new and len(self._pending) > 1:
            for rival in [Key(process_set, other, key.name) for other in tensor_kinds() if other != kind]:
                if rival in self._pending:
                    self._fail([key, rival], self._other_kind_text(key, rival))
                    return
        wrong = KINDS[kind].wrong
        problem = None if wrong is None else wrong(key, rank, request, len(members))
        if problem is not None:  # nobody needs to wait for the others to know
            self._fail([key], problem)
            return
        if len(entry.requests) + len(self._joined) >= len(members):
            self._check_complete(key)

    def _other_kind_text(self, key: Key, rival: Key) -> str:
        """A name is one operation at a time, so two kinds under it are a mistake on one of the ranks."""
        listed = "; ".join(
            f"rank {', '.join(map(str, sorted(self._pending[one].requests)))} sent {one.kind}" for one in (rival, key)
        )
        return f"Mismatched operations for '{key.name}': {listed}.\n{SAME_CALLS}"

    def _missing(self, key: Key, entry: Entry) -> list[int]:
        """Members that have neither asked nor joined."""
        members = self.members.get(key.process_set, [])
        return [rank for rank in members if rank not in entry.requests and not self._is_joined(key, rank)]

    def _missing_from(self, key: Key) -> list[int]:
        entry = self._pending.get(key)
        return [] if entry is None else self._missing(key, entry)

    def _break_dead_lock(self, rank: int, message: Waits) -> None:
        found = self._dead_locks.report(rank, message)
        if found is not None:
            self._fail([key for key in found.keys if key in self._pending], found.text)
            for lane, stuck in found.lanes:
                self._outgoing.append((list(stuck), LaneFailed(lane, found.text)))

    def _is_joined(self, key: Key, rank: int) -> bool:
        return key.process_set == 0 and rank in self._joined

    def _check_complete(self, key: Key) -> None:
        entry, members = self._pending[key], self.members[key.process_set]
        absent: list[int] = []
        if len(entry.requests) < len(members):
            if key.process_set != 0 or not self._joined or self._missing(key, entry):
                return
            absent = [rank for rank in members if rank not in entry.requests]
        problem = KINDS[key.kind].mismatch(key, entry.requests)
        if problem is None and absent and KINDS[key.kind].joined is None:
            problem = (
                f"{key}: {key.kind} is not supported with Join at this time; rank {absent} has joined."
                f"{for_joined(key.name)}"
            )
        if problem is not None:
            self._fail([key], problem)
            return
        del self._pending[key]
        self._ready.append((key, entry))

    def _fail(self, keys: list[Key], message: str, cause: str = MISMATCH, left: int | None = None) -> None:
        """Tell every rank that asked for one of these, and every member that will still ask, once."""
        self._recurring.forget()  # as they do who hear of it
        members = {rank for key in keys for rank in self.members.get(key.process_set, [])}
        asked = {rank for key in keys for rank in self._pending[key].requests}
        joined = {rank for rank in self._joined if any(key.process_set == 0 for key in keys)}
        failure = Failure(message, cause, keys, members - asked - set(self._departed) - joined, left)
        for key in keys:
            entry = self._pending.pop(key)
            for rank in sorted(entry.requests):
                self._tell_failure(rank, key, failure)
            if failure.untold:
                self._failed.setdefault(key, []).append(failure)

    def _tell_earlier_failure(self, rank: int, key: Key) -> bool:
        """Whether a rank asks for what has failed already, as it learns now."""
        failure = next((one for one in self._failed.get(key, []) if rank in one.untold), None)
        if failure is None:
            return False
        self._tell_failure(rank, key, failure)
        failure.untold.discard(rank)
        if not failure.untold:
            self._forget(failure)
        return True

    def _tell_failure(self, rank: int, key: Key, failure: Failure) -> None:
        self._outgoing.append(([rank], Reject(*key, failure.text, failure.cause, failure.left)))

    def _forget(self, failure: Failure) -> None:
        """All members have been told."""
        for key in failure.keys:
            if others := [one for one in self._failed.pop(key, []) if one is not failure]:
                self._failed[key] = others

    def _departed_text(self, key: Key, rank: int) -> str:
        return (
            f"{key} waits for rank {rank}, which has left the job: {self._departed[rank]}.\n"
            f"{LEFT_EARLY.format(rank=rank)}"
        )

    def _join(self, rank: int) -> None:
        self._joined[rank] = None
        self._recurring.forget()
        self._fail_join()
        everyone = self.members[0]
        for key in [key for key in self._pending if key.process_set == 0]:
            self._check_complete(key)
        # What was waiting for this rank runs before anybody learns of the join, or it would run after its end.
        self._run_ready()
        if len(self._joined) == len(everyone):
            self._joined = {}
            self._failed = {key: failures for key, failures in self._failed.items() if key.process_set != 0}
            self._outgoing.append((everyone, JoinDone(rank)))
        elif rank in self._joined:
            self._outgoing.append((everyone, Joined(rank)))

    def _fail_join(self) -> None:
        """No join can end once a rank has left."""
        if self._departed:
            gone, reason = next(iter(self._departed.items()))
            text = (
                f"hvd.join() waits for rank {gone}, which has left the job: {reason}.\n"
                f"HINT: call hvd.join() on all ranks, and leave the job after it; see what rank {gone} printed."
            )
            self._outgoing.append((list(self._joined), JoinFailed(text)))
            self._joined = {rank: None for rank in self._joined if rank in self._departed}

    def _run(self, batch: list[tuple[Key, Entry]]) -> None:
        """Tell every member: run these now, under this sequence number."""
        self._sequence += 1
        first_key = batch[0][0]
        kind, members = KINDS[first_key.kind], list(self.members[first_key.process_set])
        names, decide = [], kind.decide
        for key, entry in batch:
            names.append([key.name, None if decide is None else decide(self, key, entry.requests)])
            if kind.ends_process_set:
                self._remove(entry.signature["id"])
        run = (self._sequence, first_key.process_set, first_key.kind, names)
        if any(len(entry.requests) < len(members) for _, entry in batch):
            joined = [rank for rank in members if any(rank not in entry.requests for _, entry in batch)]
            members = [rank for rank in members if rank not in joined]
            # They need the signatures to contribute zeros.
            self._outgoing.append((joined, Run(*run, [entry.signature for _, entry in batch])))
        self._outgoing.append((members, Run(*run, None)))

    def _remove(self, process_set: int) -> None:
        """Forget a process set; what its members still asked for fails."""
        doomed = [entry for entry in self._ready if entry[0].process_set == process_set]
        self._ready = deque(entry for entry in self._ready if entry[0].process_set != process_set)
        self._pending.update(doomed)
        for key in [key for key in self._pending if key.process_set == process_set]:
            self._fail([key], f"{key}: the process set was removed while the operation was pending.")
        self._failed = {key: failures for key, failures in self._failed.items() if key.process_set != process_set}
        self.members.pop(process_set, None)
