"""Two teams of ranks train a model each, with different learning rates, and then all ranks compare them."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import hvdkit.torch as hvd

hvd.init(process_sets="dynamic")  # allows adding sets after init(), when hvd.size() is known
# Every rank adds every set, in the same order, including the set that it is not in.
teams = [hvd.add_process_set(list(range(first, hvd.size(), 2))) for first in range(2)]
team = teams[hvd.rank() % 2]
rate = [0.5, 0.05][hvd.rank() % 2]

pixels, digits = load_digits(return_X_y=True)
mine = slice(team.rank(), 1792, team.size())  # each team trains on all images: rank and size within the team
images = torch.tensor(pixels[mine], dtype=torch.float32) / 16
labels = torch.tensor(digits[mine])

torch.manual_seed(hvd.rank())
model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=rate)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), process_set=team)
# broadcast_parameters() takes no process set, and gives both teams the weights of rank 0 to start from.
hvd.broadcast_parameters(model.state_dict(), root_rank=0)

for _ in range(40):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()

loss = hvd.allreduce(loss.detach(), name="loss", process_set=team)  # the mean over the team
results = hvd.allgather_object((rate, loss.item()))  # without a set: over all ranks
if hvd.rank() == 0:
    for rate, loss in sorted(set(results)):
        print(f"learning rate {rate}: loss {loss:.6f}, on {results.count((rate, loss))} of {hvd.size()} ranks")
