"""A notebook as a script: try the training on one rank in this process, then run it on two ranks from a cell."""

# %%
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import hvdkit
import hvdkit.torch as hvd


# %% The whole job is one function: its arguments come from the notebook, and its result goes back there.
def train(rate: float) -> str:
    """Train on the digits, on as many ranks as there are, and return the loss over all of them."""
    hvd.init()  # a second call, as when a cell runs twice, does nothing
    torch.manual_seed(hvd.rank())  # different weights on each rank, until rank 0's are broadcast
    pixels, digits = load_digits(return_X_y=True)
    share = slice(hvd.rank(), 1792, hvd.size())
    images, labels = torch.tensor(pixels[share], dtype=torch.float32) / 16, torch.tensor(digits[share])
    model = nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)  # a new one in each call: it can be wrapped only once
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for _ in range(40):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
    loss = hvd.allreduce(loss.detach(), name="loss")
    return f"loss {loss:.6f}, on {hvd.size()} rank(s)"


# %% This process is a job of one rank: use it to debug, to try a small model and to inspect tensors.
print(train(rate=0.5))
print(train(rate=0.5))

# %% Two new processes call the function, and their results come back in the order of ranks.
results = hvdkit.run(train, args=(0.5,), np=2)
assert results[0] == results[1], results
print(results[0])
