"""Runs the batches of named operations that the coordinator decided, each under one sequence number on all ranks."""

from __future__ import annotations

import zlib
from collections import deque
from math import prod
from typing import TYPE_CHECKING, Any

from hvdkit.collectives.group import Steps
from hvdkit.compression import Tally, codec_with_summary
from hvdkit.engine.loop.messages import LEFT, MISMATCH, STALLED, Reject, Run
from hvdkit.engine.loop.negotiation import Mailbox
from hvdkit.engine.loop.operation import Operation
from hvdkit.engine.ops import KINDS
from hvdkit.engine.ops.batch import Batch, DeviceArray, Handle, Submission
from hvdkit.engine.ops.requests import Key, Signature
from hvdkit.engine.ranks.assignments import named_tag
from hvdkit.engine.ranks.groups import Groups
from hvdkit.engine.telemetry.telemetry import Telemetry
from hvdkit.errors import HorovodInternalError, MismatchError, PeerLostError, StallError

if TYPE_CHECKING:
    from hvdkit.transports.gpu.device import DeviceCollectives

KEYS_COUNTED = 10_000  # operations with a codec that a process set remembers, to count how often each has come
ERRORS: dict[str, type[HorovodInternalError]] = {MISMATCH: MismatchError, LEFT: PeerLostError, STALLED: StallError}


class Batches:
    """The batches of this rank. Each starts as Operations, and ends in the handles of its submissions."""

    def __init__(
        self,
        mailbox: Mailbox,
        groups: Groups,
        submissions: dict[Key, Submission],
        operations: list[Operation],
        telemetry: Telemetry,
    ) -> None:
        self._mailbox, self._groups, self._telemetry = mailbox, groups, telemetry
        self._submissions, self._operations = submissions, operations
        # Batches that wait for tags. Batches behind the first of them wait too, since the order is that of all ranks.
        self._waiting: deque[Run] = deque()
        self._open: set[int] = set()  # the first tags of batches that are open
        self._turns: dict[int, dict[Key, int]] = {}  # by process set, so that its ranks remember the same names

    def reject(self, message: Reject) -> None:
        """End this rank's request with the error that the coordinator sent."""
        key, cls = Key(message.process_set, message.kind, message.name), ERRORS[message.cause]
        submission = self._submissions.pop(key, None)
        if submission is not None:
            self._telemetry.failed(key)
            error = PeerLostError(message.text, message.left) if message.cause == LEFT else cls(message.text)
            submission.handle.fail(error)

    def run(self, message: Run) -> None:
        """Start a batch, once its tags are free."""
        if self._mailbox.error is not None:
            return  # all ranks are learning of it
        tag = named_tag(message.sequence)
        if tag in self._open or (self._waiting and self._waiting[0] is not message):
            self._waiting.append(message)
            return
        telemetry, process_set_id, row = self._telemetry, message.process_set, KINDS[message.kind]
        group = self._groups.group(process_set_id)  # may fail, so before any submission is taken
        submissions, extras = [], []
        for index, (name, extra) in enumerate(message.names):
            key = Key(process_set_id, row.name, name)
            submission = self._submissions.pop(key, None) or self._zeros(key, message.signatures, index)
            submissions.append(submission)
            extras.append(extra)
            if row.begun is not None:
                row.begun(self._groups, submission, extra)
        on_device, unfinished = submissions[0].signature.get("direct"), 0

        # No reference to the batch, which refers to this: a cycle keeps arrays until Python collects cycles.
        def trace(activity: str, about: Batch | None = None) -> None:
            if telemetry.timeline is None:
                return
            reason = {}
            if about is not None and row.why is not None and not on_device:
                reason = {"reason": row.why(about), "operations": len(submissions)}
            for submission in submissions:
                telemetry.end(submission.key)
                telemetry.begin(submission.key, activity, **reason)

        def finished(results: list[Any]) -> None:
            nonlocal unfinished
            unfinished -= 1
            if unfinished:
                return
            self._open.discard(tag)
            if row.ended is not None:
                row.ended(self._groups, batch.signature, results[0])
            tally = submissions[0].tally
            if tally is not None and tally.bytes_after:
                telemetry.statistics.encoded(batch.codec.summary, tally)
            for submission, result in zip(submissions, results, strict=True):
                telemetry.end(submission.key)
                submission.handle.finish(result)
            while self._waiting and named_tag(self._waiting[0].sequence) not in self._open:
                self.run(self._waiting[0])
                self._waiting.popleft()

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
            trace(row.name.upper(), batch)
        self._open.add(tag)
        steps = [self._on_device(batch, process_set_id)] if on_device else row.run(batch)
        unfinished = len(steps)
        for part in steps:
            self._operations.append(Operation(batch, part, group.transport, finished, group.members, failed))

    def _zeros(self, key: Key, signatures: list[Signature] | None, index: int) -> Submission:
        """Return this rank's contribution to an operation that it did not submit because it has joined."""
        assert signatures, f"{key} runs, but this rank neither asked for it nor joined"
        signature, joined = signatures[index], KINDS[key.kind].joined
        assert joined is not None, f"{key} runs on a rank that has joined"
        arrays, codec = [] if signature.get("direct") else joined(signature), signature.get("codec", "none")
        return Submission(key, signature, arrays, None, Handle(key, None, None), codec=codec_with_summary(codec))

    def _turn(self, key: Key) -> int:
        """Return a number for the next operation under a key, the same on all ranks, also those that have joined."""
        turns = self._turns.setdefault(key.process_set, {})
        count = turns[key] = turns.pop(key, -1) + 1
        while len(turns) > KEYS_COUNTED:
            del turns[next(iter(turns))]
        return zlib.crc32(key.name.encode()) + count

    def _on_device(self, batch: Batch, process_set_id: int) -> Steps[list[Any]]:
        """Run a batch of DeviceArrays. The first batch opens the device's collectives, collectively.

        A new operation is advanced after all older ones, and launches all before it first yields: ranks keep one order.
        """
        row, signature = KINDS[batch.submissions[0].key.kind], batch.signature
        collectives = self._groups.device_collectives(process_set_id, signature["device"])
        for submission in batch.submissions:
            if not submission.arrays and row.joined is not None:  # this rank has joined
                here = submission.signature
                submission.arrays = row.joined(here) if collectives is None else _zeros_on_device(collectives, here)
        if collectives is not None:
            assert row.run_on_device is not None, f"{row.name} of tensors on {signature['device']}"
            return (yield from row.run_on_device(collectives, batch))
        for submission in batch.submissions:  # ranks without collectives of the device copy its tensors
            submission.arrays = [
                each.to_host() if isinstance(each, DeviceArray) else each for each in submission.arrays
            ]
        batch.side_by_side = False  # it runs inside of this operation
        (steps,) = row.run(batch)
        return (yield from steps)


def _zeros_on_device(collectives: DeviceCollectives, signature: Signature) -> list[DeviceArray]:
    """Return the contribution of a rank that has joined, on a device."""
    zeros = []
    for shape, dtype in zip(signature["shape"], signature["dtype"], strict=True):
        tensor = collectives.allocate(prod(shape), dtype)
        zeros.append(DeviceArray(tensor, tuple(shape), dtype, "", collectives.mark(), lambda: None))  # type: ignore[arg-type,return-value]
    return zeros
