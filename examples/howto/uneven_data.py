"""Train ranks with different numbers of batches: a rank that runs out joins, and receives the last rank's model."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import hvdkit.torch as hvd

hvd.init()
torch.manual_seed(hvd.rank())  # different weights on each rank, until rank 0's are broadcast

pixels, digits = load_digits(return_X_y=True)
images, labels = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(digits)
# 15 batches, dealt in turn: of two ranks, rank 0 has 8 and rank 1 has 7.
batches = [(images[first : first + 128], labels[first : first + 128]) for first in range(0, 1797, 128)]
batches = batches[hvd.rank() :: hvd.size()]

model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)

for _ in range(5):
    total, seen = torch.zeros(()), 0
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        # A rank that has joined contributes zeros, and the average still divides by the number of all ranks.
        optimizer.step()
        total += loss.detach() * len(y)
        seen += len(y)
    last = hvd.join()  # waits until no rank has batches left; returns the rank that joined last
    # Ranks that joined early have missed the last steps, so all ranks take over the state of the last rank.
    hvd.broadcast_parameters(model.state_dict(), root_rank=last)
    hvd.broadcast_optimizer_state(optimizer, root_rank=last)

total, seen = hvd.allreduce(torch.tensor([total, seen]), op=hvd.Sum, name="loss").tolist()
steps = hvd.allgather_object(len(batches))
if hvd.rank() == 0:
    print(f"loss {total / seen:.6f} over {seen:.0f} images, steps {steps}, on {hvd.size()} rank(s)")
