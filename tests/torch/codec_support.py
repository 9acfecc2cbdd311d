"""Codecs and a model with known gradients, to look whether anything is lost on the way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from hvdkit.compression import CustomCodec

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class EverySecond(CustomCodec):
    """Half of the values, the rest next time: a codec as a user writes it."""

    name: ClassVar[str] = "every_second"
    largest_ratio: ClassVar[float] = 0.5

    first: int = 0

    def encode(self, values: np.ndarray) -> np.ndarray:
        return values[self.first :: 2]

    def decode(self, payload: np.ndarray, elements: int) -> np.ndarray:
        values = np.zeros(elements, dtype=np.float32)
        values[self.first :: 2] = payload.view(np.float32)
        return values


def keeping_codecs(compression: Any, **where: Any) -> dict[str, Any]:
    """Return codecs whose residual is all that they have not sent, by name."""
    return {
        "int8": compression.int8(**where),
        "int8 stochastic": compression.int8(stochastic=True, **where),
        "int4": compression.int4(**where),
        "onebit": compression.onebit(**where),
        "topk": compression.topk(0.05, **where),
        "randomk": compression.randomk(0.1, **where),
        "threshold": compression.threshold(2.0, **where),
        "custom": EverySecond(first=1, **where),
        "powersgd": compression.powersgd(2, **where),
    }


class Constant(nn.Module):
    """A model whose gradients do not depend on its weights, so that all steps' gradients are known."""

    def __init__(self, shapes: Shapes, seed: int = 0) -> None:
        super().__init__()
        self.shapes = shapes
        generator = torch.Generator().manual_seed(seed)
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))
            setattr(self, f"{name}_gradient", torch.randn(shape, generator=generator))

    def used(self) -> list[str]:
        """Return the parameters that the next step has gradients of."""
        return list(self.shapes)

    def forward(self) -> torch.Tensor:
        pairs = [(getattr(self, name), getattr(self, f"{name}_gradient")) for name in self.used()]
        return sum((parameter * gradient.to(parameter)).sum() for parameter, gradient in pairs)  # type: ignore[return-value]


def mean_gradients(shapes: Shapes, ranks: int) -> dict[str, torch.Tensor]:
    """Return the average of the gradients of models whose seeds are the ranks, by name."""
    nets = [Constant(shapes, rank) for rank in range(ranks)]
    return {name: sum(getattr(net, f"{name}_gradient") for net in nets) / ranks for name in shapes}
