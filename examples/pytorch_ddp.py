"""Train a net data-parallel with DistributedDataParallel: every rank has the net and a share of each batch.

    hvdkitrun -np 4 python examples/pytorch_ddp.py

The only line that names hvdkit is init_process_group("hvdkit"). Needs: pip install '.[torch,examples]' in a checkout.
"""

from __future__ import annotations

import argparse
import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Data parallelism on handwritten digits", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60, help="batches to train on")
    parser.add_argument("--batch-size", type=int, default=8, help="images per rank and step")
    parser.add_argument("--lr", type=float, default=0.5, help="learning rate")
    return parser.parse_args()


def load_batches(args: argparse.Namespace) -> list[tuple[Tensor, Tensor]]:
    """Return the same batches of images and labels on every rank."""
    pixels, labels = load_digits(return_X_y=True)
    images, targets = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels)
    chosen = torch.randint(len(targets), (args.steps, args.batch_size * dist.get_world_size()))
    return [(images[batch], targets[batch]) for batch in chosen]


def train(model: nn.Module, batches: list[tuple[Tensor, Tensor]], lr: float) -> Tensor:
    """Return the loss of each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr)
    losses = []
    for images, labels in batches:
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def main() -> None:
    args = parse_arguments()
    dist.init_process_group("hvdkit")  # was: "gloo"
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(0)  # the same on all ranks: weights and batches

    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    batches = load_batches(args)
    alone = train(copy.deepcopy(model), batches, args.lr)  # one process, on whole batches

    shares = [(images.chunk(size)[rank], labels.chunk(size)[rank]) for images, labels in batches]
    losses = train(DistributedDataParallel(model), shares, args.lr)  # averages gradients during backward()
    dist.all_reduce(losses)  # each rank saw its share: the loss of the batch is the mean over the ranks
    losses /= size

    if rank == 0:
        print(f"data parallel on {size} ranks: loss {losses[0]:.4f}, after {args.steps} steps {losses[-1]:.4f}")
        print(f"largest difference of losses: {(losses - alone).abs().max():.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
