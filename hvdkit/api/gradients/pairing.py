"""Which optimizers of the ranks belong together: those of one title, in the order in which each rank made them."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from collections import Counter
from typing import Any

MADE_IN_THREADS = (
    "{function}: '{title}' was made in the threads '{first}' and '{second}' of this process. Threads may make "
    "optimizers in another order on each rank, and gradients of different models would then be reduced together.\n"
    "HINT: give each one a name of its own, the same on all ranks: {function}(..., name='critic')."
)

_ORDER = itertools.count()
_LOCK = threading.RLock()  # collecting garbage runs finalizers


class _Titled:
    """The pairings of one title in one process set of a job."""

    def __init__(self) -> None:
        self.count = 0
        self.alive: weakref.WeakSet[Pairing] = weakref.WeakSet()

    def made_elsewhere(self, thread: threading.Thread) -> list[Pairing]:
        """Return the living ones that other threads made."""
        return [pairing for pairing in self.alive if pairing._thread is not thread]


class _Job:
    """The pairings of one engine."""

    def __init__(self) -> None:
        self.titled: dict[tuple[int, str], _Titled] = {}
        self.agreements: Counter[tuple[str, int]] = Counter()


_MADE: dict[str, weakref.WeakSet[Pairing]] = {}  # of this process, by title
_JOBS: weakref.WeakKeyDictionary[Any, _Job] = weakref.WeakKeyDictionary()


class Pairing:
    """The identity of an optimizer in a job: its title and how many of that title were made before it.

    A copy, and what was unpickled, is an optimizer of its own; it gets its number when it is first used.
    """

    def __init__(self, function: str, title: str, is_copy: bool = False) -> None:
        self._function, self.title = function, title
        self._engine: weakref.ref[Any] | None = None
        self._process_set_id: int | None = None  # once that is known
        self._number = 0
        self._thread = threading.current_thread()
        self._error: str | None = None  # why its place in the order is unknown
        self._is_copy = is_copy
        with _LOCK:
            self._order = next(_ORDER)
            _MADE.setdefault(title, weakref.WeakSet()).add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return Pairing, (self._function, self.title, True)

    def label(self, engine: Any, process_set_id: int) -> str:
        """Return the name that this optimizer has on all ranks of its process set; call it there in the same order.

        Raises:
            ValueError: optimizers of this title were made in several threads.
        """
        with _LOCK:
            if self._engine is None or self._engine() is not engine:
                self._join(engine, process_set_id)
            self.check()
        return f"{self.title}.{self._number}" + (f".process_set{process_set_id}" if process_set_id else "")

    def check(self) -> None:
        """Raise ValueError if it and another optimizer of this title were made in different threads."""
        if self._error is not None:
            raise ValueError(self._error)

    def next_title(self, engine: Any, process_set_id: int) -> str:
        """Return a name for this optimizer's next agreement, the same on all ranks of the process set.

        A rank that has joined misses agreements, so ranks count anew after a join in which there were some.
        """
        label, epoch = self.label(engine, process_set_id), engine.groups.plan_epoch
        with _LOCK:
            agreements = _JOBS[engine].agreements
            number = agreements[label, epoch]
            agreements[label, epoch] += 1
        return label + (f"#join{epoch}" if epoch else "") + (f"#{number}" if number else "")

    def _join(self, engine: Any, process_set_id: int) -> None:
        titled = _JOBS.setdefault(engine, _Job()).titled.setdefault((process_set_id, self.title), _Titled())
        if titled.made_elsewhere(self._thread) or not titled.count:
            gc.collect()  # what nobody uses any more is no reason, and must be none on some ranks only
        if not titled.count:  # those of an earlier job, or made before hvd.init(), in the order in which they were made
            earlier = [one for one in _MADE[self.title] if not one._is_copy and one._order < self._order]
            for one in sorted(earlier, key=lambda one: one._order):
                if one._process_set_id in (None, process_set_id):
                    one._take_number(engine, process_set_id, titled)
        if self._is_copy and not isinstance(threading.current_thread(), threading._DummyThread):
            self._thread = threading.current_thread()
        self._take_number(engine, process_set_id, titled)

    def _take_number(self, engine: Any, process_set_id: int, titled: _Titled) -> None:
        self._engine, self._process_set_id, self._error = weakref.ref(engine), process_set_id, None
        for other in titled.made_elsewhere(self._thread):
            self._error = other._error = MADE_IN_THREADS.format(
                function=self._function, title=self.title, first=other._thread.name, second=self._thread.name
            )
        self._number = titled.count
        titled.count += 1
        titled.alive.add(self)
