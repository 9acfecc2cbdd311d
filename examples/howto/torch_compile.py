"""torch.compile beside a DistributedOptimizer: calls go through the compiled model, names are the model's own."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import hvdkit.torch as hvd

hvd.init()
torch.manual_seed(hvd.rank())  # different weights on each rank, until rank 0's are broadcast

pixels, digits = load_digits(return_X_y=True)
share = slice(hvd.rank(), 1792, hvd.size())  # equal shares: the mean of their gradients is that of the batch
images, labels = torch.tensor(pixels[share], dtype=torch.float32) / 16, torch.tensor(digits[share])

model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
compiled = torch.compile(model)  # shares the model's parameters; may stand before or after the next two lines
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)

for _ in range(40):
    optimizer.zero_grad()
    loss = F.cross_entropy(compiled(images), labels)  # the first call compiles, on all ranks at once
    loss.backward()
    optimizer.step()

# A checkpoint of the model fits with and without torch.compile; the compiled model's keys have a prefix.
key, prefixed = next(iter(model.state_dict())), next(iter(compiled.state_dict()))
loss = hvd.allreduce(loss.detach(), name="loss")  # the mean over all ranks
if hvd.rank() == 0:
    print(f"loss {loss:.6f}; keys {key!r} and {prefixed!r}, on {hvd.size()} rank(s)")
