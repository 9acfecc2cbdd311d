"""Train a small convolutional network on handwritten digits, on as many processes as you like.

    python examples/pytorch_digits.py                      # alone
    hvdkitrun -np 2 python examples/pytorch_digits.py      # on two processes
    hvdkitrun -np 2 python examples/pytorch_digits.py --resume --epochs 30    # go on from the checkpoint

The 1797 images of 8 x 8 pixels come with scikit-learn, so nothing is downloaded. What makes the script distributed is
marked with "hvd:". Needs: pip install '.[examples]' in a checkout.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from tqdm import tqdm

import hvdkit.torch as hvd


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Handwritten digits on several processes", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=20, help="passes over the training images")
    parser.add_argument("--batch-size", type=int, default=32, help="images per process and step")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate of one process; scaled by their number")
    parser.add_argument("--warmup-epochs", type=float, default=3, help="epochs until the rate is at its full size")
    parser.add_argument("--seed", type=int, default=42, help="seed of the weights and of the order of the images")
    parser.add_argument("--threads", type=int, default=1, help="compute threads per process")
    parser.add_argument("--checkpoint-dir", type=Path, default=Path("checkpoints"), help="where the checkpoint is kept")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint instead of starting afresh")
    return parser.parse_args()


class DigitsNet(nn.Sequential):
    """8 x 8 grey images to ten classes: two convolutions and two dense layers, 151 thousand parameters."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(0.25),
            nn.Flatten(),
            nn.Linear(64 * 4 * 4, 128),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(128, 10),
        )


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """The same split into 1437 training and 360 test images for everyone, always."""
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    train, test = train_test_split(range(len(labels)), test_size=0.2, random_state=0, stratify=labels)
    targets = torch.tensor(labels)
    return TensorDataset(images[train], targets[train]), TensorDataset(images[test], targets[test])


def learning_rate(epoch: float, args: argparse.Namespace) -> float:
    """From the rate of one process up to ``hvd.size()`` times that (Goyal et al. 2017), then a cosine down to zero."""
    if epoch < args.warmup_epochs:
        return args.lr * (1 + (hvd.size() - 1) * epoch / args.warmup_epochs)
    progress = (epoch - args.warmup_epochs) / max(args.epochs - args.warmup_epochs, 1e-9)
    return args.lr * hvd.size() * (1 + math.cos(math.pi * progress)) / 2


def train_epoch(
    epoch: int, model: nn.Module, optimizer: Optimizer, loader: DataLoader, args: argparse.Namespace, bar: tqdm
) -> float:
    """One pass over this rank's share of the images. Returns the loss averaged over all ranks."""
    model.train()
    loader.sampler.set_epoch(epoch)  # another order in each epoch, the same one on all ranks
    total = torch.zeros(())
    for batch, (images, labels) in enumerate(loader):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(epoch + batch / len(loader), args)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        total += loss.detach()
        bar.update()
    # hvd: every rank saw other images; this is the mean over all of them.
    return hvd.allreduce(total / len(loader), name="train_loss").item()


@torch.no_grad()
def evaluate(model: nn.Module, test: TensorDataset) -> tuple[float, int]:
    """Each rank looks at its share of the test images. Returns the accuracy over all of them, and how many they are."""
    model.eval()
    images, labels = (tensor[hvd.rank() :: hvd.size()] for tensor in test.tensors)
    correct = (model(images).argmax(dim=1) == labels).sum()
    # hvd: sum both counts, since shares differ by one image where the ranks do not divide them.
    right, seen = hvd.allreduce(torch.tensor([correct, len(labels)]), name="accuracy", op=hvd.Sum).tolist()
    return right / seen, seen


def save_checkpoint(path: Path, epochs_done: int, model: nn.Module, optimizer: Optimizer) -> None:
    """Write to the side and rename, so that whoever reads sees the old checkpoint or the new one, never half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".tmp")
    torch.save({"epochs": epochs_done, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, beside)
    os.replace(beside, path)


def main() -> None:
    args = parse_arguments()
    hvd.init()  # hvd: find the other ranks
    first = hvd.rank() == 0
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed + hvd.rank())  # other dropout masks on each rank; the weights are broadcast below

    train, test = load_data()
    # hvd: every rank gets its own share of the images, shuffled with a seed that all of them share.
    sampler = DistributedSampler(train, num_replicas=hvd.size(), rank=hvd.rank(), seed=args.seed)
    loader = DataLoader(train, batch_size=args.batch_size, sampler=sampler)

    model = DigitsNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True, weight_decay=1e-4)
    # hvd: average the gradients of all ranks before each step.
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    path = args.checkpoint_dir / "digits.pt"
    epochs_done = 0
    if args.resume and first and path.exists():
        checkpoint = torch.load(path, weights_only=True)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        epochs_done = checkpoint["epochs"]
    # hvd: everyone starts where rank 0 starts: after its checkpoint, or from its random weights.
    epochs_done = hvd.broadcast_object(epochs_done, root_rank=0)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    if first and args.resume:
        print(f"resumed from {path} after epoch {epochs_done}" if epochs_done else f"no checkpoint at {path} to resume")
        if epochs_done >= args.epochs:
            print(f"nothing left to train: {epochs_done} epochs are done and --epochs is {args.epochs}")

    started = time.perf_counter()
    # hvd: one progress bar, one checkpoint and one report: rank 0's.
    steps = {"initial": epochs_done * len(loader), "total": max(epochs_done, args.epochs) * len(loader)}
    with tqdm(**steps, desc="training", unit="step", disable=not first) as bar:
        for epoch in range(epochs_done, args.epochs):
            loss = train_epoch(epoch, model, optimizer, loader, args, bar)
            accuracy, _ = evaluate(model, test)
            bar.set_postfix(epoch=f"{epoch + 1}/{args.epochs}", loss=f"{loss:.4f}", accuracy=f"{accuracy:.1%}")
            if first:
                save_checkpoint(path, epoch + 1, model, optimizer)

    accuracy, images = evaluate(model, test)
    if first:
        seconds = time.perf_counter() - started
        print(f"test accuracy {accuracy:.1%} ({images} images, {hvd.size()} process(es), {seconds:.1f} s)")
    hvd.shutdown()


if __name__ == "__main__":
    main()
