"""The arguments of a DistributedOptimizer, checked, in one object."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hvdkit.api import checks, planning
from hvdkit.api.compression_policy import Policy, check_policy
from hvdkit.engine.process_sets import ProcessSet, global_process_set
from hvdkit.kernels.reduce_op import ReduceOp

_FUNCTION = "DistributedOptimizer"


@dataclass(frozen=True)
class OptimizerSettings:
    """What a user asked of a DistributedOptimizer."""

    title: str
    op: ReduceOp
    compression: Any
    policy: Policy
    predivide: float
    groups: int | list[list[Any]] | None
    sparse_as_dense: bool
    process_set: ProcessSet
    scale_local_gradients: bool
    device_dense: str
    device_sparse: str
    backward_passes_per_step: int
    average_aggregated_gradients: bool

    def __deepcopy__(self, memo: dict[int, Any]) -> OptimizerSettings:
        """The same: it does not change, and a process set must stay the one that it is."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """The process set of all ranks is every process's own; one of some ranks cannot be pickled."""
        if self.process_set is not global_process_set:
            raise TypeError(f"{_FUNCTION}: it can be pickled with the process set of all ranks only")
        return _with_all_ranks, ({name: value for name, value in vars(self).items() if name != "process_set"},)


def _with_all_ranks(values: dict[str, Any]) -> OptimizerSettings:
    return OptimizerSettings(process_set=global_process_set, **values)


def check_settings(
    title: str,
    *,
    op: Any,
    compression: Any,
    gradient_predivide_factor: Any,
    num_groups: int,
    groups: Any,
    sparse_as_dense: bool,
    process_set: Any,
    scale_local_gradients: bool,
    device_dense: str,
    device_sparse: str,
    backward_passes_per_step: Any,
    average_aggregated_gradients: bool,
) -> OptimizerSettings:
    """The settings. Raises TypeError or ValueError for what makes no sense."""
    reduce_op = checks.check_op(_FUNCTION, op)
    if reduce_op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise ValueError(
            f"op currently only supports Average and Sum\n{_FUNCTION}: got op=hvd.{reduce_op.name.capitalize()}"
        )
    checks.check_registered(_FUNCTION, process_set)
    return OptimizerSettings(
        title=title,
        op=reduce_op,
        compression=compression,
        policy=check_policy(_FUNCTION, compression, reduce_op),
        predivide=planning.check_predivide(_FUNCTION, gradient_predivide_factor, reduce_op),
        groups=planning.check_groups(
            _FUNCTION,
            planning.groups_or_number(groups, num_groups),
            "variables",
            lambda member: hasattr(member, "assign"),
        ),
        sparse_as_dense=bool(sparse_as_dense),
        process_set=process_set,
        scale_local_gradients=bool(scale_local_gradients),
        device_dense=device_dense,
        device_sparse=device_sparse,
        backward_passes_per_step=checks.check_passes(_FUNCTION, backward_passes_per_step),
        average_aggregated_gradients=bool(average_aggregated_gradients),
    )
