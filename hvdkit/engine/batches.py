"""Carries out what the coordinator decided: a batch of named operations, under one sequence number on all ranks."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hvdkit.collectives.group import Group, Steps
from hvdkit.collectives.hierarchical import why_allreduce
from hvdkit.compression import codec_told
from hvdkit.engine.direct import execute_direct, execute_staged, zeros_on_device
from hvdkit.engine.execution import TAGS_PER_OPERATION, Submission, allreduce_piece, execute, pieces_of, zeros_for
from hvdkit.engine.handle import Handle
from hvdkit.engine.messages import Message
from hvdkit.engine.operation import Operation
from hvdkit.engine.requests import Key, Signature
from hvdkit.errors import HorovodInternalError

if TYPE_CHECKING:
    from hvdkit.engine.core import Engine

# Named operations count their tags below those of lanes; see lane.LANE_TAG.
NAMED_SEQUENCES = (1 << 21) // TAGS_PER_OPERATION
# How many names of operations with a codec are remembered, to count how often each has come.
KEYS_COUNTED = 10_000


class Batches:
    """Starts batches; each ends in the handles of its submissions."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._turns: dict[Key, int] = {}

    def run(self, message: Message) -> None:
        """Start a batch that all ranks run under the same sequence number."""
        engine = self._engine
        if engine.error is not None:
            return  # everyone is learning of it
        _, sequence, process_set_id, kind, names, signatures = message
        group = engine.groups.group(process_set_id)  # may fail, so before anything is taken from who waits
        submissions = [
            self._submission(Key(process_set_id, kind, name), signatures[index] if signatures else None)
            for index, (name, _) in enumerate(names)
        ]
        direct = submissions[0].signature.get("direct")
        root = group.members.index(submissions[0].signature.get("root", group.members[0]))
        extras = [extra for _, extra in names]
        tag = sequence % NAMED_SEQUENCES * TAGS_PER_OPERATION

        pieces = pieces_of(group, submissions) if kind == "allreduce" and not direct else []

        def trace(activity: str) -> None:
            if engine.timeline is None:
                return
            reason = {}
            if activity == "ALLREDUCE" and not direct:
                nbytes = sum(array.nbytes for submission in submissions for array in submission.arrays)
                reason = {
                    "reason": why_allreduce(group, nbytes, max(1, len(pieces)), submissions[0].codec),
                    "operations": len(submissions),
                }
            for submission in submissions:
                engine.timeline_end(submission.key)
                engine.timeline_begin(submission.key, activity, **reason)

        def completed(results: list[Any]) -> None:
            engine.groups.change(kind, submissions[0].signature, results[0])
            if submissions[0].codec.encodes and submissions[0].tally.bytes_after:
                engine.statistics.encoded(submissions[0].codec.told, submissions[0].tally)
            for submission, result in zip(submissions, results, strict=True):
                engine.timeline_end(submission.key)
                submission.handle.finish(result)

        def failed(error: HorovodInternalError) -> None:
            for submission in submissions:
                engine.timeline_end(submission.key)
                submission.handle.fail(error)

        if submissions[0].codec.encodes:
            submissions[0].turn = self._turn(submissions[0].key)
        trace(kind.upper())
        steps: list[Steps[Any]]
        if pieces:
            steps = [
                allreduce_piece(group, submissions[0], piece, tag + 2 * number) for number, piece in enumerate(pieces)
            ]
        elif direct:
            steps = [self._direct(group, process_set_id, kind, submissions, extras, root, tag)]
        else:
            steps = [execute(group, kind, submissions, extras, root, tag, trace)]
        unfinished = len(steps)

        def finished(results: list[Any]) -> None:
            nonlocal unfinished
            unfinished -= 1
            if not unfinished:
                completed(results)

        what = submissions[0].handle.what + (f" and {len(submissions) - 1} more" if len(submissions) > 1 else "")
        for one in steps:
            engine.operations.append(Operation(what, one, engine.transport, finished, group.members, failed))

    def _submission(self, key: Key, signature: Signature | None) -> Submission:
        """What this rank submitted; zeros where it did not because it has joined."""
        submission = self._engine.submissions.pop(key, None)
        if submission is None:
            assert signature is not None, f"{key} runs, but this rank neither asked for it nor joined"
            on_host = key.kind == "allreduce" and not signature.get("direct")
            arrays = zeros_for(signature) if on_host else []
            codec = codec_told(signature.get("codec", "none"))
            submission = Submission(key, signature, arrays, None, Handle(key, None, self._engine.drive), codec=codec)
        return submission

    def _turn(self, key: Key) -> int:
        """A number for the next operation under a key: the same on all ranks, those that have joined too."""
        count = self._turns[key] = self._turns.pop(key, -1) + 1
        while len(self._turns) > KEYS_COUNTED:
            del self._turns[next(iter(self._turns))]
        return zlib.crc32(key.name.encode()) + count

    def _direct(
        self,
        group: Group,
        process_set_id: int,
        kind: str,
        submissions: Sequence[Submission],
        extras: Sequence[Any],
        root: int,
        tag: int,
    ) -> Steps[list[Any]]:
        """The steps of a batch of DeviceArrays. The first one opens the device's collectives, where all ranks meet.

        The order in which collectives are launched is that of the batches, on all ranks: a new operation is advanced
        after all older ones, and launches everything before it first yields.
        """
        collectives = self._engine.groups.device_collectives(
            process_set_id, submissions[0].signature["device"], self._engine.place
        )
        for submission in submissions:
            if not submission.arrays:  # this rank has joined
                signature = submission.signature
                submission.arrays = zeros_on_device(collectives, signature) if collectives else zeros_for(signature)
        if collectives is None:
            return (yield from execute_staged(group, kind, submissions, extras, root, tag))
        return (yield from execute_direct(collectives, group, kind, submissions, extras, root))
