"""The arguments of a DistributedOptimizer, checked, in one object."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

from hvdkit.api import checks
from hvdkit.api.gradients.settings import GradientSettings
from hvdkit.engine.session.process_sets import global_process_set
from hvdkit.kernels.reduce_op import ReduceOp

FUNCTION = "DistributedOptimizer"


@dataclass(frozen=True)
class OptimizerSettings(GradientSettings):
    """What a user asked of a DistributedOptimizer."""

    average_aggregated_gradients: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> OptimizerSettings:
        """The same with a pairing of its own; a process set must stay the one that it is."""
        return replace(self, pairing=copy.copy(self.pairing))

    def __getstate__(self) -> dict[str, Any]:
        """The process set of all ranks is every process's own; one of some ranks cannot be pickled."""
        if self.process_set is not global_process_set:
            raise TypeError(f"{FUNCTION}: it can be pickled with the process set of all ranks only")
        return vars(self)


def check_sums(op: Any) -> None:
    """Raises ValueError for an operation that an optimizer of Keras does not know."""
    reduce_op = checks.check_op(FUNCTION, op)
    if reduce_op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise ValueError(
            f"op currently only supports Average and Sum\n{FUNCTION}: got op=hvd.{reduce_op.name.capitalize()}"
        )
