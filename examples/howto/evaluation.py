"""Accuracy and loss over all test images; the ranks have shares of different sizes."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import hvdkit.torch as hvd

hvd.init()
torch.manual_seed(hvd.rank())  # different weights on each rank, until rank 0's are broadcast

pixels, digits = load_digits(return_X_y=True)
images, labels = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(digits)
train_images, train_labels = images[:1280][hvd.rank() :: hvd.size()], labels[:1280][hvd.rank() :: hvd.size()]
test_images, test_labels = images[1280:], labels[1280:]  # 517 of them

model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)

for _ in range(40):
    optimizer.zero_grad()
    F.cross_entropy(model(train_images), train_labels).backward()
    optimizer.step()


@torch.no_grad()
def evaluate() -> tuple[float, float, int]:
    """Return the loss and the accuracy over all test images, and the number of these images."""
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64)  # exact, however many images there are
    # Batches are dealt in turn, so no image counts twice. Of two ranks, rank 0 has 300 images and rank 1 has 217.
    batches = range(0, len(test_labels), 100)[hvd.rank() :: hvd.size()]
    for first in batches:
        x, y = test_images[first : first + 100], test_labels[first : first + 100]
        scores = model(x)
        sums[0] += F.cross_entropy(scores, y, reduction="sum")
        sums[1] += (scores.argmax(dim=1) == y).sum()
        sums[2] += len(y)
    # One call, after the loop: all ranks make it once. Sums, since the mean of the ranks' means would give an image
    # of a small share more weight.
    loss, right, seen = hvd.allreduce(sums, op=hvd.Sum, name="evaluation").tolist()
    return loss / seen, right / seen, int(seen)


loss, accuracy, seen = evaluate()
if hvd.rank() == 0:
    print(f"loss {loss:.6f}, accuracy {accuracy:.6f}, of {seen} images, on {hvd.size()} rank(s)")
