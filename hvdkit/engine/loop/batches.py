"""Carries out what the coordinator decided: a batch of named operations, under one sequence number on all ranks."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable
from typing import Any

from hvdkit.collectives.group import Steps
from hvdkit.compression import Tally, codec_with_summary
from hvdkit.engine.loop.mailbox import Mailbox
from hvdkit.engine.loop.messages import LEFT, MISMATCH, STALLED, Reject, Run
from hvdkit.engine.loop.operation import Operation
from hvdkit.engine.loop.tags import named_tag
from hvdkit.engine.ops import KINDS, Batch, Submission
from hvdkit.engine.ops.device_operations import staged, zeros_on_device
from hvdkit.engine.ops.handle import Handle
from hvdkit.engine.ops.requests import Key, Signature, automatic_number
from hvdkit.engine.ops.submissions import Submissions
from hvdkit.engine.ranks.groups import Groups
from hvdkit.engine.telemetry.telemetry import Telemetry
from hvdkit.errors import HorovodInternalError, MismatchError, PeerLostError, StallError

# How many names of operations with a codec are remembered of a process set, to count how often each has come.
KEYS_COUNTED = 10_000
# By the coordinator's word for what went wrong.
REJECTED: dict[str, type[HorovodInternalError]] = {MISMATCH: MismatchError, LEFT: PeerLostError, STALLED: StallError}


class Batches:
    """Starts batches; each ends in the handles of its submissions."""

    def __init__(
        self,
        mailbox: Mailbox,
        groups: Groups,
        submissions: Submissions,
        operations: list[Operation],
        telemetry: Telemetry,
    ) -> None:
        self._mailbox, self._groups, self._telemetry = mailbox, groups, telemetry
        self._submissions, self._operations = submissions, operations
        self._waiting: deque[Run] = deque()  # for tags; what comes after these waits too, in the order of all ranks
        self._open: set[int] = set()  # the first tags of batches that are open
        self._turns: dict[int, dict[Key, int]] = {}  # by process set, whose ranks so remember the same names
        mailbox.handlers.update({Run: self._run, Reject: self._reject})

    def _reject(self, sender: int, message: Reject) -> None:
        """The coordinator found an error; this rank's request ends with it."""
        key, kind = Key(message.process_set, message.kind, message.name), REJECTED[message.cause]
        submission = self._submissions.pop(key, None)
        if key.process_set in self._groups.repetitions:
            self._groups.repetitions[key.process_set].forget(key.name if automatic_number(key) is None else None)
        if submission is not None:
            self._telemetry.failed(key)
            error = PeerLostError(message.text, message.left) if message.cause == LEFT else kind(message.text)
            submission.handle.fail(error)

    def _run(self, sender: int, message: Run) -> None:
        """Start a batch that all ranks run under the same sequence number, once its tags are free."""
        if self._mailbox.failed:
            return  # everyone is learning of it
        tag = named_tag(message.sequence)
        if tag in self._open or (self._waiting and self._waiting[0] is not message):
            self._waiting.append(message)
            return
        telemetry = self._telemetry
        process_set_id, kind, signatures = message.process_set, message.kind, message.signatures
        group = self._groups.group(process_set_id)  # may fail, so before anything is taken from who waits
        submissions, extras, row = [], [], KINDS[kind]
        for index, (name, extra) in enumerate(message.names):
            key = Key(process_set_id, kind, name)
            submission = self._submissions.pop(key, None)
            submissions.append(submission or self._zeros(key, signatures, index))
            extras.append(extra)
            if row.begun is not None:
                row.begun(self._groups, submissions[-1], extra)
        on_device = submissions[0].signature.get("direct")

        # It must not know the batch, which knows it: a cycle keeps arrays until Python looks for cycles.
        def trace(activity: str, about: Batch | None = None) -> None:
            if telemetry.timeline is None:
                return
            reason = {}
            if about is not None and row.why is not None and not on_device:
                reason = {"reason": row.why(about), "operations": len(submissions)}
            for submission in submissions:
                telemetry.end(submission.key)
                telemetry.begin(submission.key, activity, **reason)

        def completed(results: list[Any]) -> None:
            if row.ended is not None:
                row.ended(self._groups, batch.signature, results[0])
            tally = submissions[0].tally
            if tally is not None and tally.bytes_after:
                telemetry.statistics.encoded(batch.codec.summary, tally)
            for submission, result in zip(submissions, results, strict=True):
                telemetry.end(submission.key)
                submission.handle.finish(result)

        def failed(error: HorovodInternalError) -> None:
            for submission in submissions:
                telemetry.end(submission.key)
                submission.handle.fail(error)

        batch = Batch(group, submissions, extras, tag, trace=trace)
        if batch.codec.encodes:
            submissions[0].turn, submissions[0].tally = self._turn(submissions[0].key), Tally()
        if telemetry.timeline is not None:
            for submission in submissions:
                telemetry.record_wait(submission.key)
            trace(kind.upper(), batch)
        self._open.add(tag)
        steps = [self._on_device(batch, process_set_id)] if on_device else row.run(batch)
        unfinished = len(steps)

        def finished(results: list[Any]) -> None:
            nonlocal unfinished
            unfinished -= 1
            if not unfinished:
                self._open.discard(tag)
                completed(results)
                if self._waiting:
                    self._start_waiting()

        for one in steps:
            self._operations.append(Operation(batch, one, group.transport, finished, group.members, failed))

    def _start_waiting(self) -> None:
        while self._waiting and named_tag(self._waiting[0].sequence) not in self._open:
            self._run(0, self._waiting[0])
            self._waiting.popleft()

    def _zeros(self, key: Key, signatures: list[Signature] | None, index: int) -> Submission:
        """What this rank contributes to what it did not submit, because it has joined."""
        assert signatures, f"{key} runs, but this rank neither asked for it nor joined"
        signature, joined = signatures[index], KINDS[key.kind].joined
        assert joined is not None, f"{key} runs on a rank that has joined"
        arrays = [] if signature.get("direct") else joined(signature)
        codec = codec_with_summary(signature.get("codec", "none"))
        return Submission(key, signature, arrays, None, Handle(key, None, _nobody_waits), codec=codec)

    def _turn(self, key: Key) -> int:
        """A number for the next operation under a key: the same on all ranks, those that have joined too."""
        turns = self._turns.setdefault(key.process_set, {})
        count = turns[key] = turns.pop(key, -1) + 1
        while len(turns) > KEYS_COUNTED:
            del turns[next(iter(turns))]
        return zlib.crc32(key.name.encode()) + count

    def _on_device(self, batch: Batch, process_set_id: int) -> Steps[list[Any]]:
        """The steps of a batch of DeviceArrays. The first one opens the device's collectives, where all ranks meet.

        The order in which collectives are launched is that of the batches, on all ranks: a new operation is advanced
        after all older ones, and launches everything before it first yields.
        """
        row, signature = KINDS[batch.submissions[0].key.kind], batch.signature
        collectives = self._groups.device_collectives(process_set_id, signature["device"])
        for submission in batch.submissions:
            if not submission.arrays and row.joined is not None:  # this rank has joined
                asked = submission.signature
                submission.arrays = row.joined(asked) if collectives is None else zeros_on_device(collectives, asked)
        if collectives is not None:
            assert row.run_on_device is not None, f"{row.name} of tensors on {signature['device']}"
            return (yield from row.run_on_device(collectives, batch))
        batch.submissions = [staged(submission) for submission in batch.submissions]
        batch.side_by_side = False  # it is one operation already
        (steps,) = row.run(batch)
        return (yield from steps)


def _nobody_waits(handle: Handle, finished: Callable[[], bool]) -> None:
    raise AssertionError(f"{handle.what} was not submitted here")
