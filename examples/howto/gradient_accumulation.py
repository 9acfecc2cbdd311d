"""Several backward passes for each step: gradients add up on each rank, and travel once."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import hvdkit.torch as hvd

PASSES = 4

hvd.init()
torch.manual_seed(hvd.rank())  # different weights on each rank, until rank 0's are broadcast

pixels, digits = load_digits(return_X_y=True)
mine = slice(hvd.rank(), 1792, hvd.size())
images = torch.tensor(pixels[mine], dtype=torch.float32) / 16
labels = torch.tensor(digits[mine])

model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), backward_passes_per_step=PASSES
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)

for _ in range(40):
    optimizer.zero_grad()  # once per step: between passes it raises an error, since it would discard their sum
    total = torch.zeros(())
    for part in range(PASSES):
        # Passes are added up, not averaged; the division makes them the mean over the whole batch.
        loss = F.cross_entropy(model(images[part::PASSES]), labels[part::PASSES]) / PASSES
        loss.backward()  # only the last of the passes starts to send
        total += loss.detach()
    optimizer.step()

loss = hvd.allreduce(total, name="loss")
if hvd.rank() == 0:
    print(f"loss {loss:.6f}, on {hvd.size()} rank(s)")
