"""A bucket of gradients that DistributedDataParallel hands to a hook, and the Future for which DDP waits."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.futures import Future

logger = logging.getLogger("hvdkit")


@dataclass(eq=False)
class HookBucket:
    """A bucket of DDP in one step. ``waits``: the buckets of slots to be averaged first, None before they are known."""

    flat: Tensor
    parameters: list[Tensor]
    future: Future[Tensor]
    waits: set[int] | None = None
    error: BaseException | None = None

    def result(self, done: Future[Tensor]) -> Tensor:
        """Return the average, as a callback of the Future, or raise the error that ended the step.

        DDP waits in C++, which gets an error that a callback raises, but not that of Future.set_exception.
        """
        if self.error is not None:
            raise self.error
        return done.value()

    def finish(self) -> None:
        """End the Future with the averages."""
        try:
            self.future.set_result(self.flat)
        except Exception as error:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """End the Future with an error."""
        self.error = error
        try:
            if not self.future.done():
                self.future.set_result(torch.empty(0))  # never used, and not on the device, which may have failed
        except Exception:  # the Futures of other buckets must end all the same
            logger.exception("ddp_hook: a bucket's Future could not be completed")

    def gradients(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each parameter with its gradient, flat."""
        begin = 0
        for parameter in self.parameters:
            end = begin + parameter.numel() * (2 if parameter.is_complex() else 1)  # DDP views complex as real pairs
            yield parameter, self.flat[begin:end]
            begin = end
        assert begin == self.flat.numel(), begin
