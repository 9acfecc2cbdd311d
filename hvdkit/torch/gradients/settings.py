"""What a user asked of a DistributedOptimizer, in one object that can be pickled and copied with the model."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hvdkit.api.gradients.settings import GradientSettings
from hvdkit.engine.session.process_sets import global_process_set


@dataclass(frozen=True)
class Settings(GradientSettings):
    """The arguments of ``DistributedOptimizer`` after they were checked; ``title`` is the optimizer's class."""

    process_set: Any = global_process_set
    names: Sequence[tuple[str, torch.Tensor]] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Settings:
        """Copy parameters (to the model's copies, if it is copied along) and the pairing; the rest is shared."""
        return replace(
            self,
            names=copy.deepcopy(self.names, memo),
            groups=copy.deepcopy(self.groups, memo),
            pairing=copy.copy(self.pairing),
        )
