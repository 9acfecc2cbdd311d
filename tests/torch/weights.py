"""Trains a small model for a few steps on fixed data and prints a digest of each rank's weights."""

from __future__ import annotations

import hashlib

import torch

import hvdkit.torch as hvd


def main() -> None:
    torch.manual_seed(3)
    torch.set_num_threads(1)
    hvd.init()
    model = torch.nn.Sequential(torch.nn.Linear(30, 701), torch.nn.Tanh(), torch.nn.Linear(701, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    inputs = torch.randn(64, 30)[hvd.rank() :: hvd.size()]
    scale = torch.ones(1000) / 3
    for _ in range(4):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        scale = hvd.allreduce(scale * (hvd.rank() + 1), name="scale")
    weights = torch.cat([*(parameter.detach().flatten() for parameter in model.parameters()), scale])
    print("DIGEST", hashlib.sha256(weights.numpy().tobytes()).hexdigest())
    hvd.shutdown()


if __name__ == "__main__":
    main()
