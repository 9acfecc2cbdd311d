"""HVDKIT_VERIFY=0: ranks train what they have."""

from __future__ import annotations

from typing import Any

from tests.on_ranks import on_ranks
from tests.torch.optimizer_support import batch, make_net, train_step
from tests.torch.test_optimizer import distributed_sgd

pytestmark = on_ranks((2, "torch"), HVDKIT_VERIFY="0")


def test_nothing_is_compared(hvd: Any) -> None:
    for options in ({}, {"op": hvd.Adasum}):
        net = make_net(seed=hvd.rank())
        optimizer = distributed_sgd(hvd, net, **options)
        for step in range(11):
            train_step(optimizer, net, batch(hvd.rank(), step))
