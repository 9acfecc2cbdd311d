"""Decides, on rank 0, which named operations run and in which order: pure, with messages in and messages out."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from hvdkit.engine.loop import messages
from hvdkit.engine.loop.decisions import DeadLocks, PendingOperation, Rejection, Stall, batch_size
from hvdkit.engine.ops import KINDS, tensor_kinds
from hvdkit.engine.ops.hints import JOIN_LEFT, LEFT_EARLY, SAME_CALLS, for_joined
from hvdkit.engine.ops.requests import Key, Request, Signature
from hvdkit.engine.ranks.assignments import Assignments
from hvdkit.engine.telemetry.telemetry import Telemetry


class Coordinator:
    """Collects requests; ``take_outgoing`` returns (ranks, message) pairs to deliver, in order.

    Requests are counted: missing ranks are looked for only where a rank has joined, left or waits.
    """

    def __init__(
        self,
        size: int,
        threshold: int,
        telemetry: Telemetry | None = None,
        static_process_sets: Iterable[Sequence[int]] = (),
    ) -> None:
        self._threshold, self._telemetry = threshold, telemetry or Telemetry(0)
        self._assignments = Assignments(size, static_process_sets)
        self.members, self._joined = self._assignments.members, self._assignments.joined
        self._pending: dict[Key, PendingOperation] = {}
        self._rejections: dict[Key, list[Rejection]] = {}  # the oldest first: each rank gets them in that order
        self.ready: deque[tuple[Key, PendingOperation]] = deque()
        self.outgoing: list[tuple[Sequence[int], messages.Message]] = []
        self._signatures: dict[tuple[int, int], Signature] = {}
        self._departed: dict[int, str] = {}
        self._dead_locks = DeadLocks(self._missing_for)
        self._sequence = 0

    def receive(self, rank: int, message: messages.Message, now: float) -> None:
        """Take one message of a rank. Raises ValueError for one that no engine sends."""
        match message:
            case messages.Ask():
                reference = message.signature
                signature = reference if isinstance(reference, dict) else self._signatures.get((rank, reference))
                if signature is None or signature.get("kind") not in KINDS:
                    raise ValueError(f"rank {rank} sent a request with an unknown signature {reference!r}")
                key = Key(signature["ps"], signature["kind"], message.name)
                if not self._rejections or not self._repeat_rejection(rank, key):
                    self._request(rank, key, Request(signature, message.detail), now)
            case messages.NewSignature(number, signature):
                self._signatures[rank, number] = signature
            case messages.LaneClosed(lane, sequence):
                self._assignments.lane_numbers.closed(rank, lane, sequence)
            case messages.Join():
                self._join(rank)
            case messages.Waits():
                self._break_dead_lock(rank, message)
            case _:
                raise ValueError(f"rank {rank} sent {type(message).__name__}, which is not for the coordinator")

    def depart(self, rank: int, reason: str) -> None:
        """Note that a rank has left the job. Operations that wait for it fail, a join included."""
        self._departed[rank] = reason
        self._fail_join()
        for key, entry in list(self._pending.items()):
            if rank in self._missing(key, entry):
                self._fail_departed(key, rank)

    def give_up(self, key: Key, message: str) -> None:
        """Fail an operation that has stalled for too long, if it is still pending."""
        if key in self._pending:
            self._fail([key], message, messages.STALLED)

    def take_outgoing(self) -> list[tuple[Sequence[int], messages.Message]]:
        """Return the messages to deliver now."""
        self._run_ready()
        outgoing, self.outgoing = self.outgoing, []
        return outgoing

    def _run_ready(self) -> None:
        """Run the ready operations; those that may be fused share batches up to the threshold."""
        while self.ready:
            # Read only as far as the batch goes: thousands of tensors may be ready of which no two can be batched.
            signatures = ((key.process_set, entry.signature) for key, entry in self.ready)
            count = 1 if len(self.ready) == 1 else batch_size(signatures, self._threshold)
            self._run([self.ready.popleft() for _ in range(count)])

    def stalled(self, now: float, seconds: float, once: bool = False) -> list[Stall]:
        """Return the operations that have been pending for longer than ``seconds``; ``once``: each in one call only."""
        stalls = []
        for key, entry in self._pending.items():
            if now - entry.since > seconds and not (once and entry.warned):
                entry.warned |= once
                stalls.append(Stall(key, sorted(entry.requests), self._missing(key, entry), now - entry.since))
        return stalls

    def awaited_ranks(self) -> set[int]:
        """Return the ranks that some pending operation waits for."""
        awaited = {rank for key, entry in self._pending.items() for rank in self._missing(key, entry)}
        return awaited.union(set(self.members[0]).difference(self._joined) if self._joined else ())

    def _request(self, rank: int, key: Key, request: Request, now: float) -> None:
        entry = self._pending.get(key)
        is_new = entry is None
        if entry is None:
            entry = self._pending[key] = PendingOperation(now)
        entry.requests[rank] = request
        process_set, kind, _ = key
        members = self.members.get(process_set)
        if members is None:
            self._fail([key], f"{key}: there is no such process set; it was removed.")
            return
        if self._telemetry.timeline is not None and 0 in members:  # rank 0 alone records
            self._telemetry.record_request(key, rank)
        if self._departed and (gone := [each for each in self._missing(key, entry) if each in self._departed]):
            self._fail_departed(key, gone[0])
            return
        if is_new and len(self._pending) > 1:
            for rival in [Key(process_set, other, key.name) for other in tensor_kinds() if other != kind]:
                if rival in self._pending:
                    listed = "; ".join(
                        f"rank {', '.join(map(str, sorted(self._pending[k].requests)))} sent {k.kind}"
                        for k in (rival, key)
                    )
                    text = f"Mismatched operations for '{key.name}': {listed}.\n{SAME_CALLS}"
                    self._fail([key, rival], text)  # a mistake on one of the ranks
                    return
        wrong = KINDS[kind].wrong
        if wrong is not None and (problem := wrong(key, rank, request, len(members))) is not None:
            self._fail([key], problem)  # clear without the requests of other ranks
            return
        if len(entry.requests) + len(self._joined) >= len(members):
            self._check_complete(key)

    def _missing(self, key: Key, entry: PendingOperation) -> list[int]:
        """Return the members that have neither asked nor joined."""
        members, joined = self.members.get(key.process_set, []), self._joined if key.process_set == 0 else ()
        return [rank for rank in members if rank not in entry.requests and rank not in joined]

    def _missing_for(self, key: Key) -> list[int]:
        """Return the ranks that a pending operation waits for; none if it is not pending."""
        entry = self._pending.get(key)
        return [] if entry is None else self._missing(key, entry)

    def _break_dead_lock(self, rank: int, message: messages.Waits) -> None:
        dead_lock = self._dead_locks.report(rank, message)
        if dead_lock is not None:
            self._fail([key for key in dead_lock.keys if key in self._pending], dead_lock.text)
            for lane, stuck in dead_lock.lanes:
                self.outgoing.append((list(stuck), messages.LaneFailed(lane, dead_lock.text)))

    def _check_complete(self, key: Key) -> None:
        entry, members = self._pending[key], self.members[key.process_set]
        absent: list[int] = []
        if len(entry.requests) < len(members):
            if key.process_set != 0 or not self._joined or self._missing(key, entry):
                return
            absent = [rank for rank in members if rank not in entry.requests]
        problem = KINDS[key.kind].mismatch(key, entry.requests)
        if problem is None and absent and KINDS[key.kind].joined is None:
            fact = f"{key}: {key.kind} is not supported with Join at this time; rank {absent} has joined."
            problem = f"{fact}{for_joined(key.name)}"
        if problem is not None:
            self._fail([key], problem)
            return
        del self._pending[key]
        self.ready.append((key, entry))

    def _fail(self, keys: list[Key], text: str, cause: str = messages.MISMATCH, left: int | None = None) -> None:
        """Send the error to each rank that asked for one of the operations; to other members once, when they ask."""
        members = {rank for key in keys for rank in self.members.get(key.process_set, [])}
        requesters = {rank for key in keys for rank in self._pending[key].requests}
        joined = {rank for rank in self._joined if any(key.process_set == 0 for key in keys)}
        rejection = Rejection(text, cause, keys, members - requesters - set(self._departed) - joined, left)
        for key in keys:
            for rank in sorted(self._pending.pop(key).requests):
                self._reject(rank, key, rejection)
            if rejection.unnotified:
                self._rejections.setdefault(key, []).append(rejection)

    def _reject(self, rank: int, key: Key, rejection: Rejection) -> None:
        self.outgoing.append(([rank], messages.Reject(*key, rejection.text, rejection.cause, rejection.left)))

    def _repeat_rejection(self, rank: int, key: Key) -> bool:
        """Send a rank the error of an operation that failed before the rank asked for it. True if there is one."""
        rejection = next((each for each in self._rejections.get(key, []) if rank in each.unnotified), None)
        if rejection is None:
            return False
        self._reject(rank, key, rejection)
        rejection.unnotified.discard(rank)
        if not rejection.unnotified:
            for key in rejection.keys:
                if others := [each for each in self._rejections.pop(key, []) if each is not rejection]:
                    self._rejections[key] = others
        return True

    def _fail_departed(self, key: Key, rank: int) -> None:
        fact = f"{key} waits for rank {rank}, which has left the job: {self._departed[rank]}."
        self._fail([key], f"{fact}\n{LEFT_EARLY.format(rank=rank)}", messages.LEFT, rank)

    def _join(self, rank: int) -> None:
        self._joined[rank] = None
        self._fail_join()
        for key in [key for key in self._pending if key.process_set == 0]:
            self._check_complete(key)
        # Operations that waited for this rank run before the others learn of the join, or they would run after its end.
        self._run_ready()
        everyone = self.members[0]
        if len(self._joined) == len(everyone):
            self._joined.clear()
            self._forget_rejections(0)
            self.outgoing.append((everyone, messages.JoinDone(rank)))
        elif rank in self._joined:
            self.outgoing.append((everyone, messages.Joined(rank)))

    def _fail_join(self) -> None:
        """Fail the join if a rank has left: it can never end."""
        if self._departed:
            gone, reason = next(iter(self._departed.items()))
            failed = messages.JoinFailed(JOIN_LEFT.format(rank=gone, reason=reason))
            self.outgoing.append((list(self._joined), failed))
            for rank in [rank for rank in self._joined if rank not in self._departed]:
                del self._joined[rank]

    def _run(self, batch: list[tuple[Key, PendingOperation]]) -> None:
        """Send every member the order to run these operations under the next sequence number."""
        self._sequence += 1
        process_set, kind_name, _ = batch[0][0]
        kind, members = KINDS[kind_name], list(self.members[process_set])
        names, decide, all_asked = [], kind.decide, True
        for key, entry in batch:
            all_asked &= len(entry.requests) == len(members)
            names.append([key.name, None if decide is None else decide(self._assignments, key, entry.requests)])
            if kind.ends_process_set:
                self._remove(entry.signature["id"])
        run = (self._sequence, process_set, kind_name, names)
        if not all_asked:
            joined = [rank for rank in members if any(rank not in entry.requests for _, entry in batch)]
            members = [rank for rank in members if rank not in joined]
            # Ranks that have joined need the signatures to contribute zeros.
            self.outgoing.append((joined, messages.Run(*run, [entry.signature for _, entry in batch])))
        self.outgoing.append((members, messages.Run(*run, None)))

    def _remove(self, process_set: int) -> None:
        """Forget a process set. Operations that its members still asked for fail."""
        doomed = [entry for entry in self.ready if entry[0].process_set == process_set]
        self.ready = deque(entry for entry in self.ready if entry[0].process_set != process_set)
        self._pending.update(doomed)
        for key in [key for key in self._pending if key.process_set == process_set]:
            self._fail([key], f"{key}: the process set was removed while the operation was pending.")
        self._forget_rejections(process_set)
        self.members.pop(process_set, None)

    def _forget_rejections(self, process_set: int) -> None:
        for key in [key for key in self._rejections if key.process_set == process_set]:
            del self._rejections[key]
