"""A job that trains a little and prints the hash of its parameters: ``python -m tests.torch.train``."""

from __future__ import annotations

import torch

import hvdkit.torch as hvd
from tests.torch.optimizer_support import assert_identical, batch, digest, make_net, train_step

STEPS = 20


def main() -> None:
    hvd.init()
    net = make_net(seed=hvd.rank())
    sgd = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(sgd, net.named_parameters())
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    for step in range(STEPS):
        train_step(optimizer, net, batch(hvd.rank(), step), use_spare=True)
    assert_identical(hvd, net)
    if hvd.rank() == 0:
        print(f"digest {digest(net)}", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
