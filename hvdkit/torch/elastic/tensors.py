"""Tensors in a state that is sent or rescued: they travel as arrays, whose memory is not in the pickle."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def reduce_tensor(tensor: torch.Tensor) -> Any:
    """Return how a tensor is made of an array; of other layouts in memory, PyTorch's own way."""
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        return tensor.__reduce_ex__(5)  # type: ignore[no-untyped-call]
    values = tensor.detach().resolve_conj().resolve_neg().cpu()
    # In the order in which the elements lie in memory, such as channels last: fused optimizers compute by that.
    strides = values.stride()
    order = sorted(range(values.dim()), key=lambda dimension: -strides[dimension])
    values = values.permute(order).contiguous()
    data = values.reshape(-1).view(torch.uint8).numpy()
    return _tensor, (data, tensor.dtype, values.shape, order, tensor.device.type, type(tensor), tensor.requires_grad)


def _tensor(
    data: npt.NDArray[np.uint8],
    dtype: torch.dtype,
    shape: torch.Size,
    order: list[int],
    device: str,
    kind: type[torch.Tensor],
    requires_grad: bool,
) -> torch.Tensor:
    """Return the tensor of these bytes, whose dimensions lie in this ``order``, on a device of this process."""
    inverse = [order.index(dimension) for dimension in range(len(order))]
    values = torch.from_numpy(data).view(dtype).reshape(shape).permute(inverse).to(device)
    if kind is torch.nn.Parameter:
        return torch.nn.Parameter(values, requires_grad)
    return values.requires_grad_(requires_grad)
