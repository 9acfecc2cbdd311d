"""Broadcast of parameters and buffers: tensors of any type and layout in memory, in place, all in flight at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from hvdkit.errors import HorovodInternalError
from hvdkit.torch.ops.broadcast import broadcast_async_
from hvdkit.torch.ops.framework import MOVABLE_DTYPES, resolved
from hvdkit.torch.ops.sync import synchronize


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Give all ranks the root's values of ``params``, in place.

    Args:
        params: a dict of tensors such as ``model.state_dict()``, or an iterable of tensors or of (name, tensor), of
            equal names, shapes and dtypes on all ranks. Tensors may be frozen, not contiguous, expanded, and of any
            dense dtype. A module's ``_extra_state`` that is no tensor, and None, are left out.
        root_rank: the rank whose values all ranks get.

    Raises:
        TypeError, ValueError: for anything else.
        HorovodInternalError: on every rank if ranks disagree.

    Examples:
        >>> _ = torch.nn.init.constant_(model.weight, hvd.rank())
        >>> hvd.broadcast_parameters(model.state_dict(), root_rank=1)
        >>> model.weight.data
        tensor([[1., 1.]])
    """
    if isinstance(params, Mapping):
        entries: list[Any] = sorted(params.items(), key=lambda item: str(item[0]))
    elif isinstance(params, Iterable) and not isinstance(params, (Tensor, str)):
        entries = [entry if isinstance(entry, tuple) else (None, entry) for entry in params]
    else:
        raise ValueError(
            "broadcast_parameters: params must be a dict or an iterable of tensors or of (name, tensor), "
            f"got invalid params of type: {type(params).__name__}"
        )
    named: list[tuple[str | None, Tensor]] = []
    for name, value in entries:
        if isinstance(value, Tensor):
            named.append((None if name is None else str(name), value))
        elif value is not None and not str(name).endswith("_extra_state"):
            raise TypeError(
                f"broadcast_parameters: params[{name!r}] must be a torch.Tensor, got {type(value).__name__}\n"
                "HINT: broadcast_optimizer_state() takes optimizers, broadcast_object() any other object."
            )
    broadcast_tensors(named, root_rank)


def broadcast_tensors(named: Iterable[tuple[str | None, Tensor]], root_rank: int) -> None:
    """Broadcast (name, tensor) pairs in place; an error is raised after all have ended."""
    started = []
    for name, tensor in named:
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
            raise ValueError(
                f"broadcast_parameters: params[{name!r}] must be a dense tensor with data, got {tensor.layout}, "
                f"{tensor.dtype} on {tensor.device}\nHINT: use broadcast_object()."
            )
        elements = tensor.detach()
        for dimension, (length, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            if stride == 0 and length > 1:  # ``expand`` repeated elements, each of which is sent once
                elements = elements.narrow(dimension, 0, 1)
        # A dtype that the engine does not know (float8, ...) travels as a flat copy of its bytes.
        is_known = elements.dtype in MOVABLE_DTYPES
        sent = elements if is_known else resolved(elements).reshape(-1).clone().view(torch.uint8)
        started.append((broadcast_async_(sent, root_rank, name), elements, sent))
    failure: HorovodInternalError | None = None
    for handle, elements, sent in started:
        try:
            synchronize(handle)
        except HorovodInternalError as error:
            failure = failure or error
            continue
        if sent is not elements:
            elements.copy_(sent.view(elements.dtype).reshape(elements.shape))
    if failure is not None:
        raise failure
