"""The arguments of tapes and optimizers about the reduction of gradients, checked, in one object."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from hvdkit.api import checks
from hvdkit.api.gradients import planning
from hvdkit.api.gradients.compression import NoneCompressor, Policy, check_policy, codec_of
from hvdkit.api.gradients.pairing import Pairing
from hvdkit.compression import CASTS
from hvdkit.engine.session.process_sets import ProcessSet, global_process_set
from hvdkit.kernels.reduce_op import ReduceOp


@dataclass(frozen=True)
class GradientSettings:
    """The arguments of a DistributedGradientTape or a DistributedOptimizer; ``title`` is its name in messages."""

    title: str
    # Pairs the optimizers of all ranks. None for a tape, which is made for each step.
    pairing: Pairing | None = field(default=None, compare=False)
    op: ReduceOp = ReduceOp.AVERAGE
    predivide: float = 1.0
    groups: int | list[list[Any]] | None = None
    sparse_as_dense: bool = False
    process_set: ProcessSet = global_process_set
    policy: Policy = field(default_factory=Policy)  # gives the codec of each gradient
    backward_passes_per_step: int = 1
    names: Sequence[tuple[str, Any]] = ()  # of PyTorch's parameters
    scale_local_gradients: bool = True
    device_dense: str = ""
    device_sparse: str = ""

    @property
    def scales(self) -> tuple[float, float]:
        """Return the factors of a gradient before and after the sum, without the division of an average."""
        return (1.0 / self.predivide, self.predivide) if self.op is ReduceOp.AVERAGE else (1.0, 1.0)

    @property
    def encodes(self) -> bool:
        """True if some gradients may be encoded."""
        return bool(self.policy.by_pattern or (codec_of(self.policy.compression) or CASTS["none"]).encodes)

    @property
    def compressor(self) -> Any:
        """Return the class that compresses tensor by tensor, for gradients that are not in a plan."""
        return NoneCompressor if self.encodes else self.policy.compression

    def label(self, engine: Any) -> str:
        """Return the optimizer's name, which is the same on all ranks; see Pairing."""
        if self.pairing is None:
            return self.title
        return self.pairing.label(engine, checks.check_registered(self.title, self.process_set))

    def __deepcopy__(self, memo: dict[int, Any]) -> GradientSettings:
        """Copy parameters (to the model's copies, if it is copied along) and the pairing; the rest is shared."""
        names, groups = copy.deepcopy((self.names, self.groups), memo)
        return replace(self, names=names, groups=groups, pairing=copy.copy(self.pairing))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Raise ValueError for a pickle of another hvdkit, which would train by defaults, not the user's arguments."""
        if missing := [setting.name for setting in fields(self) if setting.name not in state]:
            raise ValueError(
                f"this optimizer was pickled by another version of hvdkit, without {', '.join(missing)}.\n"
                "HINT: make a new DistributedOptimizer, and load the state_dict() of the old one."
            )
        vars(self).update(state)


def is_variable(source: Any) -> bool:
    """True for a tf.Variable, or a variable of Keras."""
    return hasattr(source, "assign") and hasattr(source, "shape")


def check_settings(
    function: str,
    *,
    op: Any,
    compression: Any,
    gradient_predivide_factor: Any,
    num_groups: int,
    groups: Any,
    process_set: Any,
    backward_passes_per_step: Any = 1,
    title: str | None = None,
    is_kept: bool = True,
    members: str = "variables",
    is_member: Callable[[Any], bool] = is_variable,
    **others: Any,
) -> GradientSettings:
    """Return the settings for a user's arguments of ``function``; ``others`` need no check.

    ``title``: another name for messages; ``is_kept``: False if their owner makes only one step; ``members``,
    ``is_member``: the kind of the members of groups. Raises TypeError or ValueError for wrong arguments.
    """
    passes = checks.check_passes(function, backward_passes_per_step)
    reduce_op = checks.check_op(function, op)
    policy = check_policy(function, compression, reduce_op)
    predivide = checks.check_factor(function, "gradient_predivide_factor", gradient_predivide_factor)
    if predivide != 1.0 and reduce_op is not ReduceOp.AVERAGE:
        raise ValueError(
            "gradient_predivide_factor not supported with op != Average\n"
            f"{function}: got gradient_predivide_factor={predivide} and op=hvd.{reduce_op.name.capitalize()}"
        )
    if not predivide > 0.0:
        raise ValueError(f"{function}: gradient_predivide_factor must be > 0, got {predivide}")
    checks.check_registered(function, process_set)
    if num_groups != 0:
        text = "Parameter `num_groups` has been replaced by `groups` and will be removed."
        warnings.warn(text, DeprecationWarning, stacklevel=3)  # the caller of the function that has this argument
        groups = num_groups if groups is None else groups
    if reduce_op is ReduceOp.ADASUM and process_set is not global_process_set:
        raise NotImplementedError("Adasum does not support non-global process sets yet.")
    return GradientSettings(
        title=title or function,
        pairing=Pairing(function, title or function) if is_kept else None,
        op=reduce_op,
        predivide=predivide,
        groups=planning.check_groups(function, groups, members, is_member),
        process_set=process_set,
        policy=policy,
        backward_passes_per_step=passes,
        **others,
    )


def names_of(sources: Sequence[Any], use_generic_names: bool) -> list[str]:
    """Return a unique name for each source, the same on all ranks: the variable's name, or its place."""
    if use_generic_names:
        return [f"grad_{index}" for index in range(len(sources))]
    own = [getattr(each, "path", None) or (is_variable(each) and each.name.removesuffix(":0")) for each in sources]
    return planning.names_of_paths([str(path or f"grad_{index}") for index, path in enumerate(own)])


@functools.cache
def warn_of_overlap_forward() -> None:
    """Warn once a process that the argument overlap_forward has no effect any more."""
    text = "overlap_forward is removed: step() ends when the update is made; remove the argument"
    warnings.warn(text, DeprecationWarning, stacklevel=3)
