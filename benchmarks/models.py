"""The models whose training steps are timed: transformers, a convolutional network, and many small tensors.

Their gradients take 82 to 102 MB. Their steps differ: a transformer computes matrix products, the convolutional network
many small convolutions, and the 2000 small tensors cost next to nothing to compute. The data are drawn at random;
nothing is downloaded.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jobs import ROOT
from torch import nn
from torch.nn import functional

sys.path.insert(0, str(ROOT / "examples"))

CLASSES = 1000
WORDS, VOCABULARY = 64, 8192
SMALL_TENSORS, SMALLEST, LARGEST = 2000, 256, 25600  # of 1 to 100 KB


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


def _words(optimizer: Callable[..., torch.optim.Optimizer], args: argparse.Namespace) -> Workload:
    model = WordTransformer()
    size = (args.batch_size, WORDS)
    return Workload(
        model,
        optimizer(model.parameters(), lr=1e-4),
        batch=lambda generator: (torch.randint(VOCABULARY, size, generator=generator),),
        loss=lambda trained, words: functional.cross_entropy(trained(words).flatten(0, 1), words.flatten()),
    )


def _tensors(args: argparse.Namespace) -> Workload:
    sizes = torch.linspace(SMALLEST, LARGEST, SMALL_TENSORS).long().tolist()
    order = torch.randperm(SMALL_TENSORS, generator=torch.Generator().manual_seed(0)).tolist()
    model = Products([sizes[index] for index in order])
    return Workload(
        model,
        torch.optim.SGD(model.parameters(), lr=0.01),
        batch=lambda generator: (torch.randn(LARGEST, generator=generator),),
        loss=lambda trained, numbers: trained(numbers),
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


MODELS: dict[str, Callable[[argparse.Namespace], Workload]] = {
    "words": functools.partial(_words, torch.optim.SGD),
    "words-adamw": functools.partial(_words, torch.optim.AdamW),
    "transformer": _transformer,
    "convolution": _convolution,
    "tensors": _tensors,
}


class WordTransformer(nn.Module):
    """PyTorch's own layers between an embedding and a head: 20.5 million parameters in 99 tensors."""

    def __init__(self, layers: int = 8, width: int = 384, heads: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        layer = nn.TransformerEncoderLayer
        self.layers = nn.Sequential(
            *(layer(width, heads, 4 * width, dropout=0, batch_first=True) for _ in range(layers))
        )
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embedding(words)))


class Products(nn.Module):
    """The sum of the products of the same numbers with each of many tensors."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.factors = nn.ParameterList(torch.randn(size) for size in sizes)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return torch.stack([torch.mul(factor, numbers[: len(factor)]).sum() for factor in self.factors]).sum()


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
    """Return ResNet-50, with 25.6 million parameters in 161 tensors."""
    layers = [*_normalised(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1)]
    channels = 64
    for width, blocks, first_stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for block in range(blocks):
            layers.append(Bottleneck(channels, width, 1 if block else first_stride))
            channels = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))
