"""Train on a mesh of 2 x 2 ranks: data by tensor parallelism, then data by pipeline parallelism.

    hvdkitrun -np 4 python examples/pytorch_hybrid.py

Ranks 0 and 1 hold one copy of the net, ranks 2 and 3 the other. Within a copy each rank has slices of layers, or some
of the layers; between the copies gradients are averaged. Needs: pip install '.[torch,examples]' in a checkout.
"""

from __future__ import annotations

import argparse
import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Two kinds of parallelism at once", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60, help="batches to train on")
    parser.add_argument("--batch-size", type=int, default=32, help="images per step, all ranks together")
    parser.add_argument("--micro-batches", type=int, default=4, help="parts of a share that go through the pipeline")
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


def data_by_tensor(model: nn.Module, mesh: DeviceMesh, batches: list[tuple[Tensor, Tensor]], lr: float) -> Tensor:
    """Split layers over "model"; shard the slices, and average their gradients, over "data"."""
    parallelize_module(model, mesh["model"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    return train(model, batches, lr)


def data_by_pipeline(
    model: nn.Sequential, mesh: DeviceMesh, batches: list[tuple[Tensor, Tensor]], args: argparse.Namespace
) -> Tensor:
    """Give the first half of the layers to the first rank of "model"; average gradients over "data"."""
    place = mesh.get_local_rank("model")
    layers = DistributedDataParallel(model[:2] if place == 0 else model[2:], process_group=mesh.get_group("data"))
    stage = PipelineStage(layers, place, 2, torch.device("cpu"), group=mesh.get_group("model"))
    schedule = Schedule1F1B(stage, args.micro_batches, loss_fn=F.cross_entropy)
    optimizer = torch.optim.SGD(layers.parameters(), args.lr)
    losses = torch.zeros(len(batches))
    for step, (images, labels) in enumerate(batches):
        optimizer.zero_grad()
        if place == 0:
            schedule.step(images)
        else:
            parts: list[Tensor] = []  # the losses of the micro-batches
            schedule.step(target=labels, losses=parts)
            losses[step] = torch.stack(parts).mean()
        optimizer.step()
    dist.all_reduce(losses, group=mesh.get_group("model"))  # the first rank has zeros
    return losses


def main() -> None:
    args = parse_arguments()
    dist.init_process_group("hvdkit")
    torch.set_num_threads(1)
    torch.manual_seed(0)  # the same on all ranks: weights and batches

    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    batches = load_batches(args)
    alone = train(copy.deepcopy(model), batches, args.lr)  # one process, on whole batches

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    copy_number = mesh.get_local_rank("data")  # which copy of the net this rank is part of
    shares = [(images.chunk(2)[copy_number], labels.chunk(2)[copy_number]) for images, labels in batches]
    for name, losses in (
        ("data by tensor", data_by_tensor(copy.deepcopy(model), mesh, shares, args.lr)),
        ("data by pipeline", data_by_pipeline(copy.deepcopy(model), mesh, shares, args)),
    ):
        dist.all_reduce(losses, group=mesh.get_group("data"))  # the loss of the batch is the mean over the copies
        losses /= 2
        if dist.get_rank() == 0:
            print(f"{name} on 2 x 2 ranks: loss {losses[0]:.4f}, after {args.steps} steps {losses[-1]:.4f}")
            print(f"largest difference of losses: {(losses - alone).abs().max():.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
