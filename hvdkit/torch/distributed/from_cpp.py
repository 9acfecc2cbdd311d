"""Calls of torch's C++ that do not reach a process group in Python by themselves, and code that is not to be traced."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_kept: list[Any] = []  # the library of overrides lives as long as the process


def torch_version() -> tuple[int, ...]:
    """Return PyTorch's version, as (2, 13)."""
    return tuple(int(part) for part in torch.__version__.split(".")[:2])


def reach_python(group_class: Any) -> None:
    """Have ``_allgather_base_`` reach groups of ``group_class`` in PyTorch before 2.14. Only the first call acts.

    Of PyTorch's own C++ only ``_c10d_functional.all_gather_into_tensor_out`` calls a method of a group that a subclass
    in Python cannot override.
    """
    if _kept or torch_version() >= (2, 14):
        return

    def gather(output: Tensor, tensor: Tensor, group: Any, async_op: bool = True, timeout: int = -1) -> Any:
        process_group: Any = dist.ProcessGroup.unbox(group)
        if isinstance(process_group, group_class):
            work = process_group.all_gather_single(output, tensor)
            output._hvdkit_work = work  # type: ignore[attr-defined]  # C++ keeps its own part of a Work alone
        else:
            work = process_group._get_backend(output.device)._allgather_base(output, tensor)
        return output, work.boxed()

    library: Any = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # which says that it overrides
        library.impl("_allgather_base_", gather, "CPU", allow_override=True)
    _kept.append(library)


def leave_untraced(*classes: type) -> None:
    """Keep torch.compile from tracing methods of these classes, which C++ calls inside of a compiled frame."""
    frames: Any = torch._C._dynamo.eval_frame
    skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    for cls in classes:
        for function in vars(cls).values():
            if hasattr(function, "__code__"):
                frames.set_code_exec_strategy(function.__code__, skip)
