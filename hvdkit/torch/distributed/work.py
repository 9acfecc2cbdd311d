"""The Work of torch.distributed for an operation of hvdkit."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hvdkit.engine.loop.completion import Completion
from hvdkit.torch.distributed import callbacks


class HvdkitWork(dist.Work):
    """An operation in flight, or done if ``operation`` is None; ``tensors`` have its result."""

    def __init__(self, operation: Completion | None, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._operation, self._tensors = operation, list(tensors)
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if self._operation is not None:
            self._operation.wait(timeout.total_seconds() or None)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._operation is None or self._operation.done()

    def is_success(self) -> bool:
        return self._operation is None or (self._operation.done() and self._operation.error is None)

    def exception(self) -> BaseException | None:
        return None if self._operation is None else self._operation.error

    def result(self) -> list[Tensor]:
        self.wait()
        return self._tensors

    def _source_rank(self) -> int:
        return getattr(self._operation, "source", -1)

    def get_future(self) -> Any:
        """Return a Future of the tensors. An operation's error is raised by it, in C++ too."""
        if self._future is None:
            done: torch.futures.Future[None] = torch.futures.Future()
            # DDP's C++ crashes on the error of Future.set_exception, and gets that which a callback raises.
            self._future = done.then(self._tensors_or_error)
            if self._operation is None:
                done.set_result(None)
            else:
                self._operation.call_when_done(lambda operation: callbacks.run(lambda: done.set_result(None)))
        return self._future

    def _tensors_or_error(self, done: torch.futures.Future[None]) -> list[Tensor]:
        if self._operation is not None and self._operation.error is not None:
            raise self._operation.error
        return self._tensors
