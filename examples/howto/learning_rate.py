"""A learning rate that grows with the number of ranks, after a warm-up."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import hvdkit.torch as hvd

BATCH, RATE, EPOCHS, WARMUP_EPOCHS = 64, 0.05, 6, 2  # for one process

hvd.init()
torch.manual_seed(hvd.rank())  # different weights on each rank, until rank 0's are broadcast

pixels, digits = load_digits(return_X_y=True)
mine = slice(hvd.rank(), 1792, hvd.size())
images = torch.tensor(pixels[mine], dtype=torch.float32) / 16
labels = torch.tensor(digits[mine])
steps = len(labels) // BATCH  # per epoch: each rank keeps the batch size, so more ranks take fewer steps

model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
# A step uses size() times as many images, so the rate is that of one process times size().
optimizer = torch.optim.SGD(model.parameters(), lr=RATE * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)


def factor(step: int) -> float:
    """Return the factor of the full rate: from 1 / size(), the rate of one process, up to 1 (Goyal et al., 2017)."""
    progress = min(1.0, step / (WARMUP_EPOCHS * steps))
    return (1 + (hvd.size() - 1) * progress) / hvd.size()


# Made with the distributed optimizer. It counts the same steps on all ranks, so it needs no communication.
schedule = LambdaLR(optimizer, factor)
rates = []
for _ in range(EPOCHS):
    rates.append(optimizer.param_groups[0]["lr"])
    for first in range(0, steps * BATCH, BATCH):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images[first : first + BATCH]), labels[first : first + BATCH])
        loss.backward()
        optimizer.step()
        schedule.step()

with torch.no_grad():
    loss = hvd.allreduce(F.cross_entropy(model(images), labels), name="loss")
if hvd.rank() == 0:
    print(f"rates {', '.join(f'{rate:.3f}' for rate in rates)}; loss {loss:.4f}, on {hvd.size()} rank(s)")
