"""Train a net pipeline-parallel: every rank has one layer, and micro-batches go from rank to rank.

    hvdkitrun -np 4 python examples/pytorch_pipeline.py
    hvdkitrun -np 4 python examples/pytorch_pipeline.py --bubble    # how long ranks wait for each other

The schedule is 1F1B: a rank that has started enough micro-batches alternates one forward and one backward pass
(Narayanan et al. 2019, PipeDream). Of p ranks with m micro-batches each rank is idle for (p-1)/(m+p-1) of the time,
since the last rank waits for the first micro-batch, and the first rank for its gradient. --bubble measures it with
layers that sleep. Needs: pip install '.[torch,examples]' in a checkout.
"""

from __future__ import annotations

import argparse
import copy
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Pipeline parallelism on handwritten digits", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=100, help="batches to train on")
    parser.add_argument("--batch-size", type=int, default=32, help="images per step")
    parser.add_argument("--micro-batches", type=int, default=8, help="parts of a batch; no fewer than ranks")
    parser.add_argument("--lr", type=float, default=0.2, help="learning rate")
    parser.add_argument("--bubble", action="store_true", help="measure how long ranks are idle, and do not train")
    parser.add_argument("--milliseconds", type=float, default=50, help="time of a pass, with --bubble")
    return parser.parse_args()


def load_batches(args: argparse.Namespace) -> list[tuple[Tensor, Tensor]]:
    """Return the same batches of images and labels on every rank."""
    pixels, labels = load_digits(return_X_y=True)
    images, targets = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels)
    chosen = torch.randint(len(targets), (args.steps, args.batch_size))
    return [(images[batch], targets[batch]) for batch in chosen]


def train(model: nn.Module, batches: list[tuple[Tensor, Tensor]], lr: float) -> Tensor:
    """Train in one process. Returns the loss of each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr)
    losses = []
    for images, labels in batches:
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def train_stage(layer: nn.Module, batches: list[tuple[Tensor, Tensor]], args: argparse.Namespace) -> Tensor:
    """Train this rank's layer. Returns the loss of each step on the last rank, zeros on the others."""
    rank, size = dist.get_rank(), dist.get_world_size()
    stage = PipelineStage(layer, rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, args.micro_batches, loss_fn=F.cross_entropy)
    optimizer = torch.optim.SGD(layer.parameters(), args.lr)
    losses = torch.zeros(len(batches))
    for step, (images, labels) in enumerate(batches):
        optimizer.zero_grad()
        parts: list[Tensor] = []  # the losses of the micro-batches
        inputs = [images] if rank == 0 else []  # the other ranks get theirs from the rank before
        schedule.step(*inputs, target=labels if rank == size - 1 else None, losses=parts)
        optimizer.step()
        if parts:
            losses[step] = torch.stack(parts).mean()
    return losses


class Sleep(torch.autograd.Function):
    """An operation that takes the same time forward and backward."""

    @staticmethod
    def forward(ctx, tensor: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None


class SleepingLayer(nn.Linear):
    """A layer whose passes take a time that is known."""

    def __init__(self, seconds: float) -> None:
        super().__init__(8, 8)
        self.seconds = seconds

    def forward(self, tensor: Tensor) -> Tensor:
        return Sleep.apply(super().forward(tensor), self.seconds)


def step_seconds(micro_batches: int, seconds: float, group: Any = None) -> float:
    """Return the time of a step in which each rank of ``group`` is a stage."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    stage = PipelineStage(SleepingLayer(seconds), rank, size, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, micro_batches, loss_fn=F.mse_loss)
    batch = torch.zeros(micro_batches, 8)
    for _ in range(2):  # in the first step ranks also tell each other shapes
        dist.barrier()
        started = time.perf_counter()
        schedule.step(*([batch] if rank == 0 else []), target=batch if rank == size - 1 else None)
        dist.barrier()
        took = time.perf_counter() - started
    return took


def idle_share(micro_batches: int, seconds: float) -> float:
    """Return the measured share of a step's time in which a rank does nothing for its own stage."""
    alone, _ = dist.new_subgroups(1)  # in which a step is one stage, without idle time
    work = step_seconds(micro_batches, seconds, alone)
    return 1 - work / step_seconds(micro_batches, seconds)


def main() -> None:
    args = parse_arguments()
    dist.init_process_group("hvdkit")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(0)  # the same on all ranks: weights and batches

    if args.bubble:
        for m in (4, 8, 16):
            share = idle_share(m, args.milliseconds / 1000)
            formula = (size - 1) / (m + size - 1)
            if rank == 0:
                print(f"{m} micro-batches: idle for {share:.1%} of a step, by the formula {formula:.1%}")
        dist.destroy_process_group()
        return

    widths = [64, *[128] * (size - 1), 10]
    layers = [nn.Sequential(nn.Linear(widths[k], widths[k + 1]), nn.ReLU()) for k in range(size - 1)]
    layers.append(nn.Sequential(nn.Linear(widths[-2], widths[-1])))
    batches = load_batches(args)
    alone = train(copy.deepcopy(nn.Sequential(*layers)), batches, args.lr)  # one process with all layers

    losses = train_stage(layers[rank], batches, args)
    dist.broadcast(losses, src=size - 1)

    if rank == 0:
        print(f"pipeline of {size} ranks: loss {losses[0]:.4f}, after {args.steps} steps {losses[-1]:.4f}")
        print(f"largest difference of losses: {(losses - alone).abs().max():.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
