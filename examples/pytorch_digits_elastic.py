"""Train a small convolutional network on handwritten digits, while processes come and go.

    hvdkitrun -np 2 --min-np 1 --max-np 3 python examples/pytorch_digits_elastic.py

Kill one of its processes, or change the output of a script given by --host-discovery-script: the others go on. What
makes the script elastic is marked with "hvd:". Needs: pip install '.[examples]' in a checkout.
"""

from __future__ import annotations

import argparse
import os
import signal

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hvdkit.torch as hvd


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Handwritten digits, elastic", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=20, help="passes over the training images")
    parser.add_argument("--batch-size", type=int, default=32, help="images per process and step")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate of one process; scaled by their number")
    parser.add_argument("--kill-at-epoch", type=int, help="the last of the first ranks kills itself in this epoch")
    return parser.parse_args()


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """The same split into 1437 training and 360 test images for everyone, always."""
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    train, test = train_test_split(range(len(labels)), test_size=0.2, random_state=0, stratify=labels)
    targets = torch.tensor(labels)
    return TensorDataset(images[train], targets[train]), TensorDataset(images[test], targets[test])


@torch.no_grad()
def evaluate(model: nn.Module, test: TensorDataset) -> float:
    """Each rank looks at its share of the test images. Returns the accuracy over all of them."""
    model.eval()
    images, labels = (tensor[hvd.rank() :: hvd.size()] for tensor in test.tensors)
    correct = (model(images).argmax(dim=1) == labels).sum()
    right, seen = hvd.allreduce(torch.tensor([correct, len(labels)]), name="accuracy", op=hvd.Sum).tolist()
    return right / seen


def main() -> None:
    args = parse_arguments()
    hvd.init()  # hvd: in an elastic job this connects nothing yet
    first_size = hvd.size()
    torch.set_num_threads(1)
    torch.manual_seed(42)
    train, test = load_data()
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * 4 * 4, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.9, weight_decay=1e-4)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    # hvd: shares the rest of an epoch among the ranks that there are.
    sampler = hvd.elastic.ElasticSampler(train, seed=42)
    loader = DataLoader(train, batch_size=args.batch_size, sampler=sampler)

    @hvd.elastic.run  # hvd: connects the ranks, and calls the function again when some have come or gone
    def train_on(state: hvd.elastic.TorchState) -> None:
        while state.epoch < args.epochs:
            model.train()
            for batch, (images, labels) in enumerate(loader):
                if state.epoch == args.kill_at_epoch and hvd.rank() == first_size - 1 and not state.was_killed:
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.zero_grad()
                F.cross_entropy(model(images), labels).backward()
                optimizer.step()
                sampler.record_batch(batch, args.batch_size)
                state.commit()  # hvd: a failure takes nothing back that was committed
            accuracy = evaluate(model, test)
            state.epoch += 1
            sampler.set_epoch(state.epoch)
            state.commit()
            if hvd.rank() == 0:
                print(f"epoch {state.epoch}: accuracy {accuracy:.1%} on {hvd.size()} process(es)", flush=True)

    def adapt() -> None:
        """Scale the learning rate to the number of ranks."""
        state.was_killed = True
        for group in optimizer.param_groups:
            group["lr"] = args.lr * hvd.size()

    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, was_killed=False)
    state.register_reset_callbacks([adapt])
    train_on(state)
    accuracy = evaluate(model, test)
    if hvd.rank() == 0:
        print(f"test accuracy {accuracy:.1%}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
