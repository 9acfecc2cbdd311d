"""A DataLoader with two workers on each rank: shares by DistributedSampler, and a seed of its own for each worker."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import hvdkit.torch as hvd

WORKERS = 2


class Digits(Dataset):
    """Images with their labels, and the seed of the worker that loads them. Workers call nothing of hvdkit."""

    def __init__(self) -> None:
        pixels, digits = load_digits(return_X_y=True)
        self.images, self.labels = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(digits)

    def __len__(self) -> int:
        return 1792

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return self.images[index], self.labels[index], torch.initial_seed()


def train() -> None:
    hvd.init()
    torch.manual_seed(hvd.rank())  # different weights on each rank, until rank 0's are broadcast
    data = Digits()
    sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(
        data,
        batch_size=128 // hvd.size(),
        sampler=sampler,
        num_workers=WORKERS,
        persistent_workers=True,  # start them once, not in each epoch
        generator=torch.Generator().manual_seed(hvd.rank()),  # so that workers of different ranks draw different noise
    )
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    seeds = set()
    for epoch in range(5):
        sampler.set_epoch(epoch)  # a new order in each epoch, the same on all ranks; each rank takes its share of it
        total = torch.zeros(())
        for images, labels, loaded_by in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            total += loss.detach()
            seeds.update(loaded_by.tolist())
    loss = hvd.allreduce(total / len(loader), name="loss")  # the mean over all ranks, of the last epoch
    seeds = set().union(*hvd.allgather_object(seeds))
    if hvd.rank() == 0:
        assert len(seeds) == WORKERS * hvd.size(), seeds
        print(f"loss {loss:.6f}, a seed for each worker, on {hvd.size()} rank(s)")


if __name__ == "__main__":  # a spawned worker imports this file, and must not train
    train()
