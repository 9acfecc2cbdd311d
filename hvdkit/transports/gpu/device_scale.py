"""Scaling tensors of a device, with the bits of the host's kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hvdkit import kernels
from hvdkit.kernels import BFLOAT16, ONE, Scale

# Elements that are converted to a wider type at a time, to limit memory.
_CHUNK = 1 << 22


def rescale_(flat: Tensor, scale: Scale) -> Tensor:
    """Multiply a flat contiguous tensor of a floating type by ``scale`` in place, and return it.

    ``Scale`` describes the rounding. On the CPU hvdkit's kernels compute, since PyTorch's threads may flush subnormals.
    """
    if scale == ONE:
        return flat
    if flat.device.type == "cpu":
        array = _array(flat)
        kernels.scale_into(array, array, scale)
    elif flat.dtype not in (torch.float32, torch.float64):
        for part in torch.split(flat, _CHUNK):
            part.copy_(rescale_(part.to(torch.float32), scale))
    elif scale.factor == 1.0:
        # By a tensor of the device: PyTorch divides by a number of the host by multiplying with a rounded reciprocal.
        flat.div_(torch.full((), scale.divisor, dtype=flat.dtype, device=flat.device))
    else:
        flat.mul_(scale.number)  # which PyTorch rounds to the type of the tensor
    return flat


def _array(flat: Tensor) -> Any:
    """Return an array that shares the memory of a CPU tensor."""
    if flat.dtype == torch.bfloat16:
        return flat.detach().view(torch.int16).numpy().view(BFLOAT16)
    return flat.detach().numpy()
