"""Clip the norm of the gradient that all ranks step with, as one process would on the whole batch."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import hvdkit.torch as hvd

hvd.init()
torch.manual_seed(hvd.rank())  # different weights on each rank, until rank 0's are broadcast

pixels, digits = load_digits(return_X_y=True)
mine = slice(hvd.rank(), 1792, hvd.size())  # equal shares: the mean of their gradients is that of the batch
images = torch.tensor(pixels[mine], dtype=torch.float32) / 16
labels = torch.tensor(digits[mine])

model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)

for _ in range(40):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    # backward() has only begun to reduce gradients. From here on .grad is the average over all ranks.
    optimizer.synchronize()
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.25)
    # Outside of skip_synchronize(), step() would reduce the clipped gradients again: slower, and wrong with hvd.Sum.
    with optimizer.skip_synchronize():
        optimizer.step()

loss = hvd.allreduce(loss.detach(), name="loss")  # the mean over all ranks
if hvd.rank() == 0:
    print(f"loss {loss:.6f}, norm before clipping {norm:.6f}, on {hvd.size()} rank(s)")
