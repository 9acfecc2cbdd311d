"""Ranks that share no memory, and post their transfers in different orders."""

from __future__ import annotations

import threading
from time import sleep

import torch

from tests.on_ranks import on_ranks
from tests.waiting import until

pytestmark = on_ranks((2, "mpi"), (2, "torch"), HVDKIT_NODE_MEMORY="0")

LAYERS, WIDTH = 12, 512  # each layer a transfer of 1 MiB


class Training:
    """Steps of a model whose gradients are those of its rank."""

    def __init__(self, hvd) -> None:
        self.layers = [torch.nn.Parameter(torch.zeros(WIDTH, WIDTH)) for _ in range(LAYERS)]
        names = [(f"layer{number}", layer) for number, layer in enumerate(self.layers)]
        self.optimizer = hvd.DistributedOptimizer(torch.optim.SGD(self.layers, lr=1.0), named_parameters=names)
        self.steps = 0
        self.rank, self.size = hvd.rank(), hvd.size()

    def backward(self) -> None:
        self.optimizer.zero_grad()
        sum(layer.sum() * self.rank for layer in self.layers).backward()

    def step(self) -> None:
        self.optimizer.step()
        self.steps += 1
        expected = -self.steps * (self.size - 1) / 2
        assert all(torch.equal(layer, torch.full_like(layer, expected)) for layer in self.layers)


def test_a_sum_ends_though_the_peer_posts_gradients_only_after_it(hvd):
    training = Training(hvd)
    for number in range(6):
        tensor = torch.full((WIDTH, WIDTH), float(hvd.rank() + number))
        if number < 2:  # all ranks agree on the order of gradients
            training.backward()
        elif hvd.rank() == 0:
            handle = hvd.allreduce_async_(tensor, op=hvd.Sum, name="sum")
            training.backward()
            hvd.synchronize(handle)
        else:
            sleep(0.1)  # the gradients of rank 0 are posted first
            hvd.synchronize(hvd.allreduce_async_(tensor, op=hvd.Sum, name="sum"))
            training.backward()
        if number >= 2:
            assert torch.equal(tensor, torch.full_like(tensor, float(sum(range(hvd.size())) + number * hvd.size())))
        training.step()


def test_few_threads_wait_for_transfers(hvd):
    training = Training(hvd)
    for _ in range(10):
        training.backward()
        training.step()
    until(lambda: len([one for one in threading.enumerate() if one.name.startswith("hvdkit-wait")]) <= 4, 10.0)
