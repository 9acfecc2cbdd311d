"""Autocast and a GradScaler, with gradients that are reduced, then unscaled, then clipped, then used."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import hvdkit.torch as hvd

hvd.init()
torch.manual_seed(hvd.rank())  # different weights on each rank, until rank 0's are broadcast

pixels, digits = load_digits(return_X_y=True)
mine = slice(hvd.rank(), 1792, hvd.size())
images = torch.tensor(pixels[mine], dtype=torch.float32) / 16
labels = torch.tensor(digits[mine])

model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)

# On a GPU: "cuda" here and below, and torch.float16. The scale doubles after ten steps without inf or nan.
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=10)

for step in range(40):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(images), labels)
    if step == 5 and hvd.rank() == 0:
        loss = loss * float("inf")  # as after an overflow on one rank: after the sum, all ranks skip this step
    scaler.scale(loss).backward()
    optimizer.synchronize()  # waits for the gradients of all ranks; from here on your own functions may change them
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.25)
    with optimizer.skip_synchronize():
        scaler.step(optimizer)
    scaler.update()

loss = hvd.allreduce(loss.detach().float(), name="loss")
scales = hvd.allgather_object(scaler.get_scale())
if hvd.rank() == 0:
    assert len(set(scales)) == 1, scales  # every rank skipped the same steps
    print(f"loss {loss:.4f}, scale 2**{torch.tensor(scales[0]).log2():.0f}, on {hvd.size()} rank(s)")
