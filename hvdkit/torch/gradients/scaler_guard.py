"""GradScaler.unscale_() changes gradients where nothing tells of it: their versions stay. So it is stopped before."""

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
    """From now on unscale_() raises AssertionError while gradients of a distributed optimizer are being reduced."""
    plain = torch.amp.GradScaler.unscale_

    @functools.wraps(plain)
    def unscale_(self: torch.amp.GradScaler, optimizer: Any) -> None:
        is_too_early = getattr(optimizer, "_reads_gradients_too_early", None)
        if self.is_enabled() and is_too_early is not None and is_too_early():
            raise AssertionError(UNSCALED_IN_FLIGHT)
        plain(self, optimizer)

    torch.amp.GradScaler.unscale_ = unscale_  # type: ignore[method-assign]
