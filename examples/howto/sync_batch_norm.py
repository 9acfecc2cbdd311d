"""Batch normalisation over the batch of all ranks, as one process would have it."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import hvdkit.torch as hvd

hvd.init()
torch.manual_seed(hvd.rank())  # different weights on each rank, until rank 0's are broadcast

pixels, digits = load_digits(return_X_y=True)
# In the order of their digits, so that the ranks' images differ much: of two ranks, rank 0 has no digit above 4.
mine = digits[:1792].argsort(kind="stable").reshape(hvd.size(), -1)[hvd.rank()]
images = torch.tensor(pixels[mine]).reshape(-1, 1, 8, 8) / 16  # in float64, so that results do not depend on rounding
labels = torch.tensor(digits[mine])

model = nn.Sequential(
    nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 32), nn.BatchNorm1d(32), nn.ReLU()
)
model.append(nn.Linear(32, 10)).double()
# Before the optimizer is made. Parameters and running averages stay the same tensors, so checkpoints fit.
model = hvd.SyncBatchNorm.convert_sync_batchnorm(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # state_dict(): the running averages, too

for _ in range(20):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(images), labels)  # every rank calls the model equally often while it trains
    loss.backward()
    optimizer.step()

model.eval()  # from here on by the running averages, without communication
with torch.no_grad():
    loss = hvd.allreduce(F.cross_entropy(model(images), labels), name="loss")
if hvd.rank() == 0:
    print(f"loss {loss:.6f}, running variance {model[1].running_var.mean():.7f}, on {hvd.size()} rank(s)")
