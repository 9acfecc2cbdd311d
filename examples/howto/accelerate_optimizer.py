"""Train with Accelerate and a DistributedOptimizer: the model stays outside of a DistributedDataParallel."""

import os

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hvdkit.torch as hvd

if "RANK" in os.environ:
    torch.distributed.init_process_group("hvdkit")  # for the loader and accelerator.reduce()
hvd.init()
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
size = accelerator.num_processes

torch.manual_seed(accelerator.process_index)  # different weights on each rank, until rank 0's are broadcast
pixels, digits = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(pixels[:1792], dtype=torch.float32) / 16, torch.tensor(digits[:1792]))
model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), backward_passes_per_step=2)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
loader = DataLoader(data, batch_size=128 // size)
# Not the model: Accelerate would put it into a DistributedDataParallel, which reduces gradients, too.
optimizer, loader = accelerator.prepare(optimizer, loader)

for _ in range(5):
    for images, labels in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
            optimizer.zero_grad()

loss = accelerator.reduce(loss.detach(), "mean")
if accelerator.is_main_process:
    print(f"loss {loss:.6f}, norm before clipping {norm:.6f}, on {size} rank(s)")
