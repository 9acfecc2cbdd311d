"""Metrics of all ranks in the log of one rank, and one progress bar."""

import logging
import sys

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from tqdm import trange

import hvdkit.torch as hvd

EVERY = 10  # steps between two lines of the log

hvd.init()
# All ranks call log.info(), and rank 0 alone prints it; every rank prints its warnings.
level = logging.INFO if hvd.rank() == 0 else logging.WARNING
logging.basicConfig(level=level, format="%(message)s", stream=sys.stdout)
log = logging.getLogger("train")
torch.manual_seed(hvd.rank())  # different weights on each rank, until rank 0's are broadcast

pixels, digits = load_digits(return_X_y=True)
share = slice(hvd.rank(), 1792, hvd.size())  # equal shares: the mean of the ranks' means is that of all images
images, labels = torch.tensor(pixels[share], dtype=torch.float32) / 16, torch.tensor(digits[share])

model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)

sums = torch.zeros(2)  # of this rank, since the last line of the log; no .item() in between
for step in trange(1, 41, desc="steps", disable=hvd.rank() != 0):
    optimizer.zero_grad()
    scores = model(images)
    loss = F.cross_entropy(scores, labels)
    loss.backward()
    optimizer.step()
    sums += torch.stack([loss.detach(), (scores.argmax(dim=1) == labels).float().mean()])
    if step % EVERY == 0:
        # One allreduce for all metrics, and on all ranks: under "if hvd.rank() == 0" it would wait for the others.
        loss, accuracy = hvd.allreduce(sums / EVERY, name="metrics").tolist()
        log.info("step %d: loss %.6f, accuracy %.4f", step, loss, accuracy)
        # With TensorBoard, only rank 0 has a writer: if writer is not None: writer.add_scalar("loss", loss, step)
        sums.zero_()
log.info("%d steps, on %d rank(s)", step, hvd.size())
