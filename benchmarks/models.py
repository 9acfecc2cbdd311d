"""The models whose training steps are timed: a transformer and a convolutional network, about as large as each other.

Their gradients take 83 and 102 MB. What a step costs differs: the transformer's are matrix products with AdamW, the
network's are many small convolutions with SGD. The data are drawn at random; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jobs import ROOT
from torch import nn
from torch.nn import functional

sys.path.insert(0, str(ROOT / "examples"))

CLASSES = 1000


@dataclass(frozen=True)
class Workload:
    """A model, its optimizer, a source of batches, and the loss of a batch under the model or a wrapper of it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: Callable[[torch.Generator], tuple[torch.Tensor, ...]]
    loss: Callable[..., torch.Tensor]


def _transformer(args: argparse.Namespace) -> Workload:
    from pytorch_text import ByteTransformer, next_byte_loss

    model = ByteTransformer(args.context, args.layers, args.width)
    size = (args.batch_size, args.context + 1)
    return Workload(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-4),
        batch=lambda generator: (torch.randint(256, size, generator=generator),),
        loss=next_byte_loss,
    )


def _convolution(args: argparse.Namespace) -> Workload:
    model = residual_network()
    size = (args.images, 3, args.pixels, args.pixels)
    return Workload(
        model,
        torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        batch=lambda generator: (
            torch.randn(size, generator=generator),
            torch.randint(CLASSES, (args.images,), generator=generator),
        ),
        loss=lambda trained, images, labels: functional.cross_entropy(trained(images), labels),
    )


MODELS = {"transformer": _transformer, "convolution": _convolution}


class Bottleneck(nn.Module):
    """Convolutions of 1, 3 and 1 pixels around which the input is added (He et al. 2015)."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *_normalised(channels, width, 1),
            nn.ReLU(inplace=True),
            *_normalised(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *_normalised(width, 4 * width, 1),
        )
        same = stride == 1 and channels == 4 * width
        self.shortcut = nn.Identity() if same else nn.Sequential(*_normalised(channels, 4 * width, 1, stride))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.body(x) + self.shortcut(x))


def _normalised(channels: int, width: int, size: int, stride: int = 1) -> list[nn.Module]:
    convolution = nn.Conv2d(channels, width, size, stride, padding=size // 2, bias=False)
    return [convolution, nn.BatchNorm2d(width)]


def residual_network() -> nn.Module:
    """ResNet-50, 25.6 million parameters in 161 tensors."""
    layers = [*_normalised(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1)]
    channels = 64
    for width, blocks, first_stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for block in range(blocks):
            layers.append(Bottleneck(channels, width, 1 if block else first_stride))
            channels = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))
