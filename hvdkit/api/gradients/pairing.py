"""Names by which the optimizers of all ranks pair up: the title, and the order in which each rank made them."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from collections import Counter, defaultdict
from typing import Any

MADE_IN_THREADS = (
    "{function}: '{title}' was made in the threads '{first}' and '{second}' of this process. Threads may make "
    "optimizers in another order on each rank, and gradients of different models would then be reduced together.\n"
    "HINT: give each one a name of its own, the same on all ranks: {function}(..., name='critic')."
)

_ORDER = itertools.count()
_LOCK = threading.RLock()  # a thread may take it again, because collecting garbage runs finalizers


class _Job:
    """The pairings of one engine, their numbers by process set and title, and of agreements by label and epoch."""

    def __init__(self) -> None:
        self.alive: defaultdict[tuple[int, str], weakref.WeakSet[Pairing]] = defaultdict(weakref.WeakSet)
        self.counts: Counter[tuple[int, str]] = Counter()
        self.agreements: Counter[tuple[str, int]] = Counter()


_MADE: dict[str, weakref.WeakSet[Pairing]] = {}  # of this process, by title
_JOBS: weakref.WeakKeyDictionary[Any, _Job] = weakref.WeakKeyDictionary()


class Pairing:
    """The identity of an optimizer in a job: its title and its number among the optimizers of that title.

    A copy or an unpickled optimizer is an optimizer of its own, which gets its number at its first use.
    """

    def __init__(self, function: str, title: str, is_copy: bool = False) -> None:
        self._function, self.title = function, title
        self._engine: weakref.ref[Any] | None = None
        self._process_set_id: int | None = None  # None before the first use
        self._number = 0
        self._thread = threading.current_thread()
        self.error: str | None = None  # another optimizer of this title was made in another thread
        self._is_copy = is_copy
        with _LOCK:
            self._order = next(_ORDER)
            _MADE.setdefault(title, weakref.WeakSet()).add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return Pairing, (self._function, self.title, True)

    def label(self, engine: Any, process_set_id: int) -> str:
        """Return the optimizer's name, the same on all ranks of its process set, which call it in the same order.

        Raises:
            ValueError: optimizers of this title were made in several threads.
        """
        with _LOCK:
            if self._engine is None or self._engine() is not engine:
                self._join(engine, process_set_id)
            if self.error is not None:
                raise ValueError(self.error)
        return f"{self.title}.{self._number}" + (f".process_set{process_set_id}" if process_set_id else "")

    def next_title(self, engine: Any, process_set_id: int) -> str:
        """Return a name for this optimizer's next agreement, the same on all ranks of the process set.

        A rank that has joined misses agreements, so all ranks count anew after a join with agreements.
        """
        label, epoch = self.label(engine, process_set_id), engine.groups.plan_epoch
        with _LOCK:
            agreements = _JOBS[engine].agreements
            number = agreements[label, epoch]
            agreements[label, epoch] += 1
        return label + (f"#join{epoch}" if epoch else "") + (f"#{number}" if number else "")

    def _join(self, engine: Any, process_set_id: int) -> None:
        job, key = _JOBS.setdefault(engine, _Job()), (process_set_id, self.title)
        in_threads = any(pairing._thread is not self._thread for pairing in job.alive[key])
        if len(_MADE[self.title]) > 1 and (in_threads or not job.counts[key]):
            gc.collect()  # unused optimizers must not count, and not on some ranks only; it takes 0.1 to 0.4 s
        if not job.counts[key]:  # number those of an earlier job, or made before hvd.init(), in their order
            for pairing in sorted(_MADE[self.title], key=lambda pairing: pairing._order):
                is_earlier = not pairing._is_copy and pairing._order < self._order
                if is_earlier and pairing._process_set_id in (None, process_set_id):
                    pairing._take_number(engine, process_set_id, job)
        if self._is_copy and not isinstance(threading.current_thread(), threading._DummyThread):
            self._thread = threading.current_thread()
        self._take_number(engine, process_set_id, job)

    def _take_number(self, engine: Any, process_set_id: int, job: _Job) -> None:
        self._engine = weakref.ref(engine)
        self._process_set_id = process_set_id
        self.error = None
        alive = job.alive[process_set_id, self.title]
        for other in alive:
            if other._thread is not self._thread:
                self.error = other.error = MADE_IN_THREADS.format(
                    function=self._function, title=self.title, first=other._thread.name, second=self._thread.name
                )
        self._number = job.counts[process_set_id, self.title]
        job.counts[process_set_id, self.title] += 1
        alive.add(self)
