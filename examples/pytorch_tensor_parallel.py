"""Train a net tensor-parallel with DTensor: every rank has a slice of each layer, and sees the whole batch.

    hvdkitrun -np 4 python examples/pytorch_tensor_parallel.py      # or 2, 8, ...: ranks that divide the width 256

A layer split by columns computes a part of its outputs on each rank. The layer split by rows that follows takes these
as its inputs, and its outputs are summed over the ranks (Shoeybi et al. 2019, Megatron-LM): two layers need one
allreduce forward and one backward. Needs: pip install '.[torch,examples]' in a checkout.
"""

from __future__ import annotations

import argparse
import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Tensor parallelism on handwritten digits", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60, help="batches to train on")
    parser.add_argument("--batch-size", type=int, default=32, help="images per step")
    parser.add_argument("--lr", type=float, default=0.5, help="learning rate")
    return parser.parse_args()


def load_batches(args: argparse.Namespace) -> list[tuple[Tensor, Tensor]]:
    """Return the same batches of images and labels on every rank."""
    pixels, labels = load_digits(return_X_y=True)
    images, targets = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels)
    chosen = torch.randint(len(targets), (args.steps, args.batch_size))
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
    dist.init_process_group("hvdkit")
    size = dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(0)  # the same on all ranks: weights and batches

    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    batches = load_batches(args)
    alone = train(copy.deepcopy(model), batches, args.lr)  # one process with whole layers

    mesh = init_device_mesh("cpu", (size,))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})  # the last layer stays whole
    first = model[0].weight
    losses = train(model, batches, args.lr)  # the same on all ranks

    if dist.get_rank() == 0:
        print(f"tensor parallel on {size} ranks: loss {losses[0]:.4f}, after {args.steps} steps {losses[-1]:.4f}")
        print(f"rank 0 has {tuple(first.to_local().shape)} of the first layer's weights {tuple(first.shape)}")
        print(f"largest difference of losses: {(losses - alone).abs().max():.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
