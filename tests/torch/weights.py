"""Trains small models for a few steps on fixed data and prints digests of what each rank holds at the end.

DIGEST is of all that does not depend on whether ranks share memory, COMPRESSED of what the fp16 codec rounds only where
it travels between ranks that do not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

import hvdkit.torch as hvd

STEPS = 4


def digest(tensors: Sequence[torch.Tensor]) -> str:
    assert all(bool(tensor.isfinite().all()) for tensor in tensors)
    everything = b"".join(tensor.detach().view(torch.uint8).numpy().tobytes() for tensor in tensors)
    return hashlib.sha256(everything).hexdigest()


def trained(model: torch.nn.Module, inputs: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    """The weights of a model whose parts may be of different types, after all ranks have trained them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), **options)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for _ in range(STEPS):
        optimizer.zero_grad()
        values = inputs
        for part in model:
            values = part(values.to(next(part.parameters()).dtype)).tanh()
        values.float().square().mean().backward()
        optimizer.step()
    return list(model.parameters())


def reduced() -> list[torch.Tensor]:
    """What named operations make: each rank of a node reduces a share above 32 KB, nodes send pieces above 8 MiB."""
    generator = torch.Generator().manual_seed(hvd.rank())
    scale = torch.ones(1000) / 3
    large = torch.randn(9001, generator=generator)
    kinds = [large, large.half(), torch.cat([large, large]).bfloat16()]
    for step in range(STEPS):
        scale = hvd.allreduce(scale * (hvd.rank() + 1), name="scale")
        kinds = [
            hvd.allreduce(tensor * (hvd.rank() + step), name=f"large.{number}") for number, tensor in enumerate(kinds)
        ]
    huge = [torch.randn((9 << 20) // 4 + 3, generator=generator), torch.randn(5 << 20, generator=generator).half()]
    kinds += [hvd.allreduce(tensor, name=f"huge.{number}") for number, tensor in enumerate(huge)]
    least = hvd.allreduce(large, name="least", op=hvd.Min)
    half = hvd.allreduce(large, name="half", compression=hvd.Compression.fp16)
    return [scale, *kinds, least, half]


def main() -> None:
    torch.manual_seed(3)
    torch.set_num_threads(1)
    hvd.init()
    inputs = torch.randn(64, 30)[hvd.rank() :: hvd.size()]
    linear, sequential = torch.nn.Linear, torch.nn.Sequential
    mixed = sequential(linear(30, 701), linear(701, 40).half(), linear(40, 40).bfloat16(), linear(40, 5))
    least, compressed = sequential(linear(30, 40)), sequential(linear(30, 701), linear(701, 5))
    tensors = [*trained(mixed, inputs), *trained(least, inputs, op=hvd.Min), *reduced()]
    print("DIGEST", digest(tensors))
    print("COMPRESSED", digest(trained(compressed, inputs, compression=hvd.Compression.fp16)))
    hvd.shutdown()


if __name__ == "__main__":
    main()
