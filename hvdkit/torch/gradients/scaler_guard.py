"""GradScaler reads and changes gradients itself: its step() waits for them first, its unscale_() must come after that.

``unscale_`` leaves the gradients' version counters as they are, so a later look could not find the change.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

UNSCALED_IN_FLIGHT = (
    "GradScaler.unscale_() was called after loss.backward() but before optimizer.synchronize(). This is prohibited as "
    "it can cause a race condition.\n"
    "HINT: call optimizer.synchronize() before scaler.unscale_(optimizer), and then "
    "'with optimizer.skip_synchronize(): scaler.step(optimizer)'."
)


@functools.cache
def guard_scalers() -> None:
    """Wrap GradScaler's ``step`` and ``unscale_`` for distributed optimizers, once a process.

    ``step`` synchronises the gradients, unless the user has done so. ``unscale_`` raises AssertionError while they are
    being reduced.
    """
    scaler: Any = torch.amp.GradScaler
    plain_step, plain_unscale = scaler.step, scaler.unscale_

    @functools.wraps(plain_step)
    def step(self: torch.amp.GradScaler, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        synchronizer = getattr(optimizer, "_synchronizer", None)
        if synchronizer is not None and self.is_enabled() and "closure" not in kwargs:
            synchronizer.synchronize_for_scaler()
        return plain_step(self, optimizer, *args, **kwargs)

    @functools.wraps(plain_unscale)
    def unscale_(self: torch.amp.GradScaler, optimizer: Any) -> None:
        is_too_early = getattr(optimizer, "_reads_gradients_too_early", None)
        if self.is_enabled() and is_too_early is not None and is_too_early():
            raise AssertionError(UNSCALED_IN_FLIGHT)
        plain_unscale(self, optimizer)

    scaler.step, scaler.unscale_ = step, unscale_
