"""The arguments of a DistributedOptimizer, checked, in one object."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hvdkit.api import checks, gradient_settings
from hvdkit.api.gradient_settings import GradientSettings
from hvdkit.engine.process_sets import global_process_set
from hvdkit.kernels.reduce_op import ReduceOp

_FUNCTION = "DistributedOptimizer"


@dataclass(frozen=True)
class OptimizerSettings:
    """What a user asked of a DistributedOptimizer."""

    gradients: GradientSettings
    backward_passes_per_step: int
    average_aggregated_gradients: bool

    def __deepcopy__(self, memo: dict[int, Any]) -> OptimizerSettings:
        """The same: it does not change, and a process set must stay the one that it is."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """The process set of all ranks is every process's own; one of some ranks cannot be pickled."""
        if self.gradients.process_set is not global_process_set:
            raise TypeError(f"{_FUNCTION}: it can be pickled with the process set of all ranks only")
        values = {name: value for name, value in vars(self.gradients).items() if name != "process_set"}
        return _with_all_ranks, (values, self.backward_passes_per_step, self.average_aggregated_gradients)


def _with_all_ranks(values: dict[str, Any], passes: int, average: bool) -> OptimizerSettings:
    return OptimizerSettings(GradientSettings(**values), passes, average)


def check_settings(
    title: str,
    *,
    op: Any,
    backward_passes_per_step: Any,
    average_aggregated_gradients: bool,
    **options: Any,
) -> OptimizerSettings:
    """The settings; ``options`` are GradientSettings'. Raises TypeError or ValueError for what makes no sense."""
    reduce_op = checks.check_op(_FUNCTION, op)
    if reduce_op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise ValueError(
            f"op currently only supports Average and Sum\n{_FUNCTION}: got op=hvd.{reduce_op.name.capitalize()}"
        )
    return OptimizerSettings(
        gradient_settings.check_settings(_FUNCTION, op=reduce_op, title=title, **options),
        checks.check_passes(_FUNCTION, backward_passes_per_step),
        bool(average_aggregated_gradients),
    )
