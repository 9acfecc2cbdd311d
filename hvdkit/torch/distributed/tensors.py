"""Tensors of calls: checks, sources apart from their targets, and results that are brought to their places."""

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


def apart(source: Tensor, target: Tensor, own_part: int | None = None) -> Tensor:
    """Return the source, or a copy of it if the target overlaps it otherwise than as the part number ``own_part``."""
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


def giving_back(call: Collective, output: Tensor, dense: Tensor) -> Collective:
    """Have a call bring its result from ``dense`` to the output, if that is another tensor. Returns the call."""
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


def spreading(outputs: Sequence[Tensor], whole: Tensor) -> Callable[[], None]:
    def spread() -> None:
        for output, part in zip(outputs, whole.chunk(len(outputs)), strict=True):
            output.copy_(part.view(output.shape))

    return _with_mode(spread)


def check_count(function: str, tensors: Sequence[Tensor], count: int) -> None:
    if len(tensors) != count:
        raise ValueError(f"{function}: expected a list of {count} tensors, one for each rank, got {len(tensors)}")


def check_sizes(function: str, tensor: Tensor, count: int, what: str) -> None:
    if tensor.numel() != count:
        raise ValueError(f"{function}: expected a tensor of {count} elements, {what}, got {tuple(tensor.shape)}")


def check_same_dtype(function: str, output: Tensor, tensor: Tensor) -> None:
    if output.dtype != tensor.dtype:
        raise TypeError(f"{function}: expected an output of the input's dtype {tensor.dtype}, got {output.dtype}")
