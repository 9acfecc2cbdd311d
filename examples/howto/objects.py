"""Python objects between ranks: one settings object for all ranks, and a list with an object from each rank."""

import random

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import hvdkit.torch as hvd

hvd.init()
# Rank 0 alone decides on a random choice, the name of a run, a vocabulary or the result of a query. All ranks call
# broadcast_object(), which ignores the objects of the other ranks.
settings = None
if hvd.rank() == 0:
    draws = random.Random(7)
    settings = {"rate": draws.choice([0.1, 0.2, 0.5]), "width": draws.choice([16, 32, 64]), "run": "digits-1"}
settings = hvd.broadcast_object(settings, root_rank=0)

pixels, digits = load_digits(return_X_y=True)
mine = range(hvd.rank(), 1792, hvd.size())
images = torch.tensor(pixels[mine], dtype=torch.float32) / 16
labels = torch.tensor(digits[mine])

torch.manual_seed(hvd.rank())  # different weights on each rank, until rank 0's are broadcast
model = nn.Sequential(nn.Linear(64, settings["width"]), nn.ReLU(), nn.Linear(settings["width"], 10))
optimizer = torch.optim.SGD(model.parameters(), lr=settings["rate"])
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)

for _ in range(150):
    optimizer.zero_grad()
    F.cross_entropy(model(images), labels).backward()
    optimizer.step()

wrong = (model(images).argmax(dim=1) != labels).nonzero().flatten().tolist()
# The objects may differ in size and type. The list is in the order of ranks, and all ranks get it.
parts = hvd.allgather_object({"images": [mine[place] for place in wrong]})
wrong = sorted(image for part in parts for image in part["images"])
if hvd.rank() == 0:
    print(f"{settings['run']}: {len(wrong)} images wrong, the first are {wrong[:5]}, on {hvd.size()} rank(s)")
