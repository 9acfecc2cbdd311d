"""Stop when the loss over all ranks' validation images stops falling: all ranks in the same epoch."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import hvdkit.torch as hvd

PATIENCE = 3

hvd.init()
torch.manual_seed(hvd.rank())  # different weights on each rank, until rank 0's are broadcast

pixels, digits = load_digits(return_X_y=True)
images, labels = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(digits)
train_images, train_labels = images[:256][hvd.rank() :: hvd.size()], labels[:256][hvd.rank() :: hvd.size()]
test_images, test_labels = images[256:][hvd.rank() :: hvd.size()], labels[256:][hvd.rank() :: hvd.size()]

model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)

best, best_epoch = float("inf"), 0
for epoch in range(1, 201):
    optimizer.zero_grad()
    F.cross_entropy(model(train_images), train_labels).backward()
    optimizer.step()
    with torch.no_grad():
        own = F.cross_entropy(model(test_images), test_labels, reduction="sum").double()
    sums = torch.stack([own, torch.tensor(len(test_labels)).double()])
    total, seen = hvd.allreduce(sums, op=hvd.Sum, name="validation").tolist()
    # All ranks have the same bits, so all decide alike. If each rank used its own loss, one would stop while the
    # others wait for its gradients.
    if total / seen < best:
        best, best_epoch = total / seen, epoch
    elif epoch - best_epoch >= PATIENCE:
        break

stopped = hvd.allgather_object(epoch)
if hvd.rank() == 0:
    assert len(set(stopped)) == 1, stopped
    print(f"stopped after epoch {epoch}, best loss {best:.6f} in epoch {best_epoch}, on {hvd.size()} rank(s)")
