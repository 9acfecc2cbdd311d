"""What a user asked of a DistributedOptimizer, in one object that can be pickled and copied with the model."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hvdkit.api.compression import NoneCompressor
from hvdkit.api.compression_policy import Policy
from hvdkit.kernels.reduce_op import ReduceOp

# The place of an object that every process has of its own: written to a pickle instead of the object.
_GLOBAL_PROCESS_SET = "global"


@dataclass
class Settings:
    """The arguments of ``DistributedOptimizer`` after they were checked."""

    names: list[tuple[str, torch.Tensor]]
    compression: Any
    backward_passes_per_step: int
    op: ReduceOp
    gradient_predivide_factor: float
    groups: int | list[list[torch.Tensor]] | None
    sparse_as_dense: bool
    process_set: Any
    policy: Policy = field(default_factory=Policy)  # which codec encodes which gradient

    @property
    def compressor(self) -> Any:
        """What compresses tensor by tensor, for gradients that are not in a plan."""
        return self.compression if self.policy.by_tensor else NoneCompressor

    @property
    def scales(self) -> tuple[float, float]:
        """What a gradient is multiplied with before and after the sum; the division of an average is not in it."""
        if self.op is ReduceOp.AVERAGE:
            return 1.0 / self.gradient_predivide_factor, self.gradient_predivide_factor
        return 1.0, 1.0

    def __deepcopy__(self, memo: dict[int, Any]) -> Settings:
        """Parameters are copied (to the model's copies, if it is copied along); the rest is shared."""
        return replace(self, names=copy.deepcopy(self.names, memo), groups=copy.deepcopy(self.groups, memo))

    def __getstate__(self) -> dict[str, Any]:
        from hvdkit.engine.process_sets import global_process_set

        state = dict(self.__dict__)
        if state["process_set"] is global_process_set:
            state["process_set"] = _GLOBAL_PROCESS_SET
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        from hvdkit.engine.process_sets import global_process_set

        self.__dict__.update(state)
        if self.process_set == _GLOBAL_PROCESS_SET:
            self.process_set = global_process_set
