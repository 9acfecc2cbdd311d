"""A job that trains a little: ``python -m tests.torch.train``."""

from __future__ import annotations

import hvdkit.torch as hvd
from tests.torch.optimizer_support import assert_identical, batch, distributed_sgd, make_net, train_step

STEPS = 20


def main() -> None:
    hvd.init()
    net = make_net(seed=hvd.rank())
    optimizer = distributed_sgd(hvd, net)
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    for step in range(STEPS):
        train_step(optimizer, net, batch(hvd.rank(), step), use_spare=True)
    assert_identical(hvd, net)
    hvd.shutdown()


if __name__ == "__main__":
    main()
