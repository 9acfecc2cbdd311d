"""The tensors of calls: checks, copies of sources that overlap their targets, and copies of results to outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hvdkit.engine.ordered.calls import NO_ARRAY, Collective, CollectiveKind, Description
from hvdkit.torch.distributed.memory import bytes_of
from hvdkit.torch.distributed.reductions import name_of


def dense_output(output: Tensor) -> Tensor:
    """Return an output, or contiguous memory in its place."""
    return output if output.is_contiguous() else torch.empty_like(output, memory_format=torch.contiguous_format)


def _with_mode(copy: Callable[[], None]) -> Callable[[], None]:
    """Return ``copy`` for another thread: in the caller's inference mode, and without gradients."""
    mode = torch.is_inference_mode_enabled()

    def run() -> None:
        with torch.inference_mode(mode), torch.no_grad():
            copy()

    return run


def separate_source(source: Tensor, target: Tensor, own_part: int | None = None) -> Tensor:
    """Return the source, or a copy if it overlaps the target and is not the target's part number ``own_part``."""
    begin, nbytes = source.data_ptr(), source.numel() * source.element_size()
    other, length = target.data_ptr(), target.numel() * target.element_size()
    if begin >= other + length or other >= begin + nbytes:
        return source
    if own_part is not None:
        part = min(nbytes, length)
        outer, inner = min(begin, other), max(begin, other)
        if inner == outer + own_part * part:
            return source
    return source.clone()


def with_result_in(call: Collective, output: Tensor, dense: Tensor) -> Collective:
    """Return the call, which copies its result from ``dense`` to the output if these are different tensors."""
    if dense is not output:
        call.finished = _with_mode(lambda: output.copy_(dense.view(output.shape)))  # type: ignore[arg-type]
    return call


def call_with_parts(
    kind: CollectiveKind, tensor: Tensor, outgoing: Sequence[Any], outputs: Sequence[Tensor]
) -> Collective:
    """Return a call whose parts have lengths of their own."""
    dense = [dense_output(output) for output in outputs]

    def copy() -> None:
        for output, memory in zip(outputs, dense, strict=True):
            if memory is not output:
                output.copy_(memory)

    incoming = [bytes_of(kind.name.lower(), memory) for memory in dense]
    description = Description(kind, name_of(tensor), -1)
    return Collective(description, NO_ARRAY, NO_ARRAY, outgoing=outgoing, incoming=incoming, finished=_with_mode(copy))


def copier_to(outputs: Sequence[Tensor], whole: Tensor) -> Callable[[], None]:
    """Return a function that copies equal parts of ``whole`` to the outputs."""

    def copy() -> None:
        for output, part in zip(outputs, whole.chunk(len(outputs)), strict=True):
            output.copy_(part.view(output.shape))

    return _with_mode(copy)


def check_count(function: str, tensors: Sequence[Tensor], count: int) -> None:
    """Raise ValueError unless there are ``count`` tensors."""
    if len(tensors) != count:
        raise ValueError(f"{function}: expected a list of {count} tensors, one for each rank, got {len(tensors)}")


def check_sizes(function: str, tensor: Tensor, count: int, expected: str) -> None:
    """Raise ValueError unless a tensor has ``count`` elements; ``expected`` says in words why so many."""
    if tensor.numel() != count:
        raise ValueError(f"{function}: expected a tensor of {count} elements, {expected}, got {tuple(tensor.shape)}")


def check_same_dtype(function: str, output: Tensor, tensor: Tensor) -> None:
    """Raise TypeError if an output has another dtype than the input."""
    if output.dtype != tensor.dtype:
        raise TypeError(f"{function}: expected an output of the input's dtype {tensor.dtype}, got {output.dtype}")
