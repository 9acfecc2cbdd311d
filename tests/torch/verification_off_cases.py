"""HVDKIT_VERIFY=0: ranks train what they have."""

from __future__ import annotations

from typing import Any

from tests.torch.optimizer_cases import distributed_sgd
from tests.torch.optimizer_support import batch, make_net, train_step


def case_nothing_is_compared(hvd: Any) -> None:
    for options in ({}, {"op": hvd.Adasum}):
        net = make_net(seed=hvd.rank())
        optimizer = distributed_sgd(hvd, net, **options)
        for step in range(11):
            train_step(optimizer, net, batch(hvd.rank(), step))
