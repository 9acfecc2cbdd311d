"""The time of a step with each codec: slow_network.sh starts this on two hosts with a slow wire between them."""

import time

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import hvdkit.torch as hvd

CODECS = {"none": hvd.Compression.none, "fp16": hvd.Compression.fp16, "int8": hvd.Compression.int8}

hvd.init()
pixels, digits = load_digits(return_X_y=True)
mine = slice(hvd.rank(), 128, hvd.size())
images, labels = torch.tensor(pixels[mine], dtype=torch.float32) / 16, torch.tensor(digits[mine])

for name, codec in CODECS.items():
    torch.manual_seed(0)  # the same weights on all ranks, and for each codec
    model = nn.Sequential(nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 1024), nn.ReLU(), nn.Linear(1024, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=codec)
    times = []
    for _ in range(20):
        began = time.perf_counter()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        times.append(time.perf_counter() - began)
    loss = hvd.allreduce(loss.detach(), name="loss")  # the mean over all ranks
    if hvd.rank() == 0:  # the fastest step: other programs on this machine make some steps slower, and none faster
        print(f"{name}: {1e3 * min(times):.0f} ms a step, loss {loss:.2f}, on {hvd.size()} rank(s)", flush=True)

if hvd.rank() == 0:
    print(f"{hvd.compression_stats()}, on {hvd.size()} rank(s)")
