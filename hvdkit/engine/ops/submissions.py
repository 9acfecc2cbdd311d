"""What this rank has announced and waits for: one operation under a name, and numbers for those without one."""

from __future__ import annotations

import threading

from hvdkit.engine.ops import KINDS, Submission, tensor_kinds
from hvdkit.engine.ops.requests import Call, Key, automatic_key
from hvdkit.errors import DuplicateNameError, HorovodInternalError


def duplicate_name(kind: str, other: str, name: str) -> DuplicateNameError:
    """A name was used for an operation of one kind while one of another, or the same, is in flight under it."""
    return DuplicateNameError(
        f"Requested to {kind} a tensor with the same name as another tensor that is currently "
        f"being processed: {other} '{name}'.\n"
        "HINT: synchronize() the first one, or give each tensor a name of its own."
    )


class Submissions(dict[Key, Submission]):
    """By key. Any thread may enter; the driver alone takes out."""

    def __init__(self) -> None:
        super().__init__()
        self._automatic: dict[tuple[str, int], int] = {}
        self._lock = threading.Lock()

    def key_for(self, kind: str, call: Call) -> Key:
        """The key of an operation; one without a name gets a number, if the call has none."""
        if call.name is not None:
            return Key(call.process_set_id, kind, call.name)
        number = self.count(kind, call.process_set_id) if call.number is None else call.number
        return automatic_key(call.process_set_id, kind, number)

    def count(self, kind: str, process_set_id: int) -> int:
        """The number of a call without a name."""
        with self._lock:
            number = self._automatic[kind, process_set_id] = self._automatic.get((kind, process_set_id), -1) + 1
        return number

    def enter(self, submission: Submission) -> None:
        """Keep a submission. Raises DuplicateNameError where its name is in flight."""
        key = submission.key
        with self._lock:
            for other in () if not self else tensor_kinds() if KINDS[key.kind].carries_tensors else (key.kind,):
                if key._replace(kind=other) in self:
                    raise duplicate_name(key.kind, other, key.name)
            self[key] = submission

    def fail(self, error: HorovodInternalError) -> None:
        """All of them end with ``error``."""
        with self._lock:
            for submission in self.values():
                submission.handle.fail(error)
            self.clear()

    def count_names_anew(self) -> None:
        """After a join: ranks have made different numbers of calls without a name; now they count together again."""
        self._automatic = {counted: count for counted, count in self._automatic.items() if counted[1] != 0}
