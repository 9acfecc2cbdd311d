"""Adasum of the ranks' updates, on a number of ranks that is a power of two."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.on_ranks import on_ranks
from tests.torch.optimizer_support import (
    assert_close,
    assert_identical,
    batch,
    expect,
    loss_of,
    make_net,
    train_step,
)
from tests.torch.test_optimizer import distributed_sgd

pytestmark = on_ranks(2, 4)


def adasum(vectors: list[np.ndarray]) -> np.ndarray:
    """Adasum of 2^n vectors by its definition, neighbours first."""
    while len(vectors) > 1:
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [(1 - a @ b / (2 * (a @ a) or 1.0)) * a + (1 - a @ b / (2 * (b @ b) or 1.0)) * b for a, b in pairs]
    return vectors[0]


def test_adasum_combines_the_updates(hvd: Any) -> None:
    net = make_net()
    optimizer = distributed_sgd(hvd, net, op=hvd.Adasum)
    replicas = [make_net() for _ in range(hvd.size())]
    plain = [torch.optim.SGD(replica.parameters(), lr=0.05, momentum=0.9) for replica in replicas]
    for step in range(3):
        train_step(optimizer, net, batch(hvd.rank(), step))
        starts = [parameter.detach().clone() for parameter in replicas[0].parameters()]
        for rank, replica in enumerate(replicas):
            train_step(plain[rank], replica, batch(rank, step))
        for index, start in enumerate(starts):
            members = [list(replica.parameters())[index] for replica in replicas]
            deltas = [(member.detach() - start).flatten().double().numpy() for member in members]
            with torch.no_grad():
                for member in members:
                    member.copy_(start + torch.from_numpy(adasum(deltas)).float().view_as(start))
            assert_close(list(net.parameters())[index].detach(), members[0].detach(), 1e-5)
    assert_identical(hvd, net)
    with expect(AssertionError, "Skipping synchronization is not supported when using Adasum", "HINT"):
        optimizer.skip_synchronize().__enter__()


def test_adasum_counts_passes(hvd: Any) -> None:
    net = make_net()
    optimizer = distributed_sgd(hvd, net, op=hvd.Adasum, backward_passes_per_step=2)
    for _ in range(2):
        loss_of(net, batch(hvd.rank())).backward()
        loss_of(net, batch(hvd.rank())).backward()
        with expect(AssertionError, "backward_passes_per_step"):
            loss_of(net, batch(hvd.rank())).backward()
        with expect(AssertionError, "optimizer.zero_grad()"):
            optimizer.zero_grad()
        optimizer.synchronize()
        optimizer.step()
        optimizer.zero_grad()
    assert_identical(hvd, net)
