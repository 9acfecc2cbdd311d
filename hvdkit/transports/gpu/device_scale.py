"""Scales on tensors of a device, with the bits of the host's kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hvdkit import kernels
from hvdkit.kernels import BFLOAT16, ONE, Scale

# Elements that are worked on in a wider type at a time, so that little memory is needed.
_CHUNK = 1 << 22


def rescale_(flat: Tensor, scale: Scale) -> Tensor:
    """Replace a flat contiguous tensor of a floating type by ``scale`` times it; returns it.

    See ``Scale`` for how it is rounded. On the CPU the kernels do it, whatever PyTorch's threads were set to.
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
        # By a tensor of the device: by a number of the host PyTorch multiplies with its rounded reciprocal.
        flat.div_(torch.full((), scale.divisor, dtype=flat.dtype, device=flat.device))
    else:
        flat.mul_(scale.number)  # which PyTorch rounds to the type of the tensor
    return flat


def _array(flat: Tensor) -> Any:
    """A tensor of the CPU as an array of the same memory."""
    if flat.dtype == torch.bfloat16:
        return flat.detach().view(torch.int16).numpy().view(BFLOAT16)
    return flat.detach().numpy()
