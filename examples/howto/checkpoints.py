"""Rank 0 writes a checkpoint and reads it again; all ranks continue from it."""

import os
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import hvdkit.torch as hvd

hvd.init()
pixels, digits = load_digits(return_X_y=True)
mine = slice(hvd.rank(), 1792, hvd.size())
images = torch.tensor(pixels[mine], dtype=torch.float32) / 16
labels = torch.tensor(digits[mine])


def train(path: Path, epochs: int) -> None:
    """Train until ``epochs`` epochs are done, from the checkpoint if there is one, and print the loss."""
    torch.manual_seed(hvd.rank())  # different weights on each rank, until rank 0's are broadcast
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    done = 0
    if hvd.rank() == 0 and path.exists():  # the other hosts may not see the file
        checkpoint = torch.load(path, weights_only=True)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        done = checkpoint["epochs"]
    # All ranks call these, with or without a checkpoint. The optimizer's state is its momentum and its learning rate.
    done = hvd.broadcast_object(done, root_rank=0)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    for epoch in range(done, epochs):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        if hvd.rank() == 0:
            state = {"epochs": epoch + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, path.with_suffix(".tmp"))
            os.replace(path.with_suffix(".tmp"), path)  # if killed here, the old or the new file remains
    loss = hvd.allreduce(loss.detach(), name="loss")
    if hvd.rank() == 0:
        print(f"epochs {done} to {epochs}: loss {loss:.6f}, on {hvd.size()} rank(s)")


with tempfile.TemporaryDirectory() as folder:
    train(Path(folder) / "at_once.pt", 20)
    train(Path(folder) / "in_two.pt", 10)
    train(Path(folder) / "in_two.pt", 20)  # as a restarted job does; the loss equals that of the first line
