"""Horovod's data loaders: a base class, and a mixin that reads batches ahead in a thread. They know no framework."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from time import monotonic
from typing import Any

__all__ = ["AsyncDataLoaderMixin", "BaseDataLoader"]


class BaseDataLoader:
    """The base of a loader of batches: a subclass defines ``__len__`` and ``_iterate``, which yields them.

    Examples:
        >>> from hvdkit.data import BaseDataLoader
        >>> class Squares(BaseDataLoader):
        ...     def __len__(self):
        ...         return 3
        ...     def _iterate(self):
        ...         yield from (number**2 for number in range(3))
        >>> list(Squares())
        [0, 1, 4]
    """

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        raise NotImplementedError(f"{type(self).__name__} does not define __len__")

    def _iterate(self) -> Iterable[Any]:
        """Return the batches of an epoch, as they are read."""
        raise NotImplementedError(f"{type(self).__name__} does not define _iterate")

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of an epoch, each as ``_process_batch`` returns it."""
        for batch in self._iterate():
            yield self._process_batch(batch)

    def _process_batch(self, batch: Any) -> Any:
        """Return what the training loop gets for a batch. A trainer may replace it."""
        return batch


class AsyncDataLoaderMixin:
    """A mixin before a ``BaseDataLoader`` in the list of bases; a thread of its own reads the batches of each epoch.

    An exception of ``_iterate`` is raised where the batches are used, after those that were read before it. The thread
    ends with the epoch, and when the loop over it is left early: the batch that is being read then is waited for.
    ``_process_batch`` runs in the thread that uses the batches.

    Args:
        async_loader_queue_size: the most batches that are read ahead; 0: batches are read when they are used.
        debug_data_loader: print after each epoch how long the loop waited for batches.
        args: for the next class, as ``kwargs``.

    Examples:
        >>> from hvdkit.data import AsyncDataLoaderMixin, BaseDataLoader
        >>> class Squares(BaseDataLoader):
        ...     def __len__(self):
        ...         return 3
        ...     def _iterate(self):
        ...         yield from (number**2 for number in range(3))
        >>> class AsyncSquares(AsyncDataLoaderMixin, Squares):
        ...     pass
        >>> list(AsyncSquares(async_loader_queue_size=2))
        [0, 1, 4]
    """

    _iterate: Callable[[], Iterable[Any]]
    _process_batch: Callable[[Any], Any]

    def __init__(
        self, async_loader_queue_size: int = 64, debug_data_loader: bool = False, *args: Any, **kwargs: Any
    ) -> None:
        self.async_loader_queue_size = async_loader_queue_size
        self.debug_data_loader = debug_data_loader
        self._epochs: set[_Epoch] = set()  # that are being read
        super().__init__(*args, **kwargs)

    def close_async_loader(self) -> None:
        """End the epochs under way, and their threads. Loops over them end; the next loop starts a new epoch."""
        for epoch in list(self._epochs):
            epoch.close()

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of an epoch, each as ``_process_batch`` returns it."""
        if self.async_loader_queue_size <= 0:
            for batch in self._iterate():
                yield self._process_batch(batch)
            return
        epoch = _Epoch(self._iterate, self.async_loader_queue_size)
        self._epochs.add(epoch)
        try:
            for batch in epoch:
                yield self._process_batch(batch)
        finally:
            self._epochs.discard(epoch)
            epoch.close()
            if self.debug_data_loader:
                words = (
                    f"{type(self).__name__}: used {epoch.used} batches, waited {epoch.waited_seconds:.3f} s for them"
                )
                print(words, flush=True)


class _Epoch:
    """The batches of one epoch between the thread that reads them and the thread that uses them."""

    def __init__(self, iterate: Callable[[], Iterable[Any]], most: int) -> None:
        self._iterate, self._most = iterate, most
        self._read: deque[Any] = deque()
        self._error: BaseException | None = None
        self._has_ended = self._is_closed = False
        self._changed = threading.Condition()
        self.used, self.waited_seconds = 0, 0.0
        self._thread = threading.Thread(target=self._run, name="hvdkit-data-loader", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            for batch in self._iterate():
                with self._changed:
                    self._changed.wait_for(lambda: len(self._read) < self._most or self._is_closed)
                    if self._is_closed:
                        return
                    self._read.append(batch)
                    self._changed.notify_all()
        except BaseException as raised:  # for the other thread to raise, also if it ends a process
            error = raised
        finally:
            with self._changed:
                self._error, self._has_ended = error, True
                self._changed.notify_all()

    def __iter__(self) -> Iterator[Any]:
        while True:
            began = monotonic()
            with self._changed:
                self._changed.wait_for(lambda: self._read or self._has_ended or self._is_closed)
                self.waited_seconds += monotonic() - began
                if self._is_closed or not self._read:
                    break
                batch = self._read.popleft()
                self._changed.notify_all()
            self.used += 1
            yield batch
            del batch
        if self._error is not None and not self._is_closed:
            raise self._error

    def close(self) -> None:
        """Drop what was read, and wait until the thread has ended."""
        if sys.is_finalizing():  # no other thread runs any more, and so none ends
            return
        with self._changed:
            self._is_closed = True
            self._read.clear()
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:  # in which a forgotten loop may be freed
            self._thread.join()
