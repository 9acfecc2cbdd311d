"""The order in which rank 0 saw its gradients, adopted by all ranks; from then on nothing is said about gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from hvdkit.engine.ops.batch import Submission
from hvdkit.engine.session import runtime
from tests.on_ranks import on_ranks
from tests.torch.optimizer_support import assert_close, distributed_sgd

pytestmark = on_ranks(2, 3, HOROVOD_FUSION_THRESHOLD="0")

SEEN = ["c", "a", "e", "b", "d"]  # by rank 0 in the first step; the others see the reverse


def five(hvd: Any) -> tuple[nn.ParameterDict, Any]:
    """Five parameters and their optimizer."""
    net = nn.ParameterDict({name: torch.ones(8) for name in sorted(SEEN)})
    return net, distributed_sgd(hvd, net, lr=0.0)


def backward(hvd: Any, net: nn.ParameterDict, order: list[str]) -> None:
    """One parameter after the other gets its gradient."""
    for name in order:
        (net[name] * (hvd.rank() + 1.0)).sum().backward()


def bucket_order(optimizer: Any) -> list[str]:
    lane = optimizer._synchronizer._agreement.planned.lane
    return [lane.slots[slot].name for bucket in lane.arrangement.buckets for slot in bucket.slots]


def travel_order(optimizer: Any) -> list[str]:
    lane = optimizer._synchronizer._agreement.planned.lane
    return [name for index in range(len(lane.arrangement.pieces)) for name in lane.records.names_in(index)]


@contextmanager
def announcements() -> Iterator[list[Any]]:
    """Collect what this rank tells the coordinator in the block: messages, and operations that it announces."""
    collected: list[Any] = []
    negotiation = runtime.engine().negotiation
    with pytest.MonkeyPatch.context() as patch:
        for name in ("announce", "send_to_coordinator"):
            plain = getattr(negotiation, name)
            patch.setattr(negotiation, name, lambda what, plain=plain: (collected.append(what), plain(what)))
        yield collected


def test_every_rank_adopts_the_order_that_rank_0_observed(hvd: Any) -> None:
    net, optimizer = five(hvd)
    for step in range(3):
        optimizer.zero_grad()
        backward(hvd, net, SEEN if hvd.rank() == 0 else SEEN[::-1])
        optimizer.step()
        assert hvd.allgather_object(bucket_order(optimizer)) == [SEEN] * hvd.size(), step
        orders = hvd.allgather_object(travel_order(optimizer))
        assert orders == [orders[0]] * hvd.size(), step
        assert sorted(orders[0]) == sorted(SEEN), step
        for parameter in net.parameters():
            assert_close(parameter.grad, torch.full((8,), (hvd.size() + 1) / 2))


def test_planned_gradients_are_not_negotiated(hvd: Any) -> None:
    net, optimizer = five(hvd)
    with announcements() as messages:
        backward(hvd, net, SEEN)
        optimizer.step()
        # The plan itself is negotiated, so the count counts.
        kinds = [submission.signature["kind"] for submission in messages if isinstance(submission, Submission)]
        assert kinds.count("plan") == 1, messages
    optimizer.zero_grad()
    hvd.barrier()
    with announcements() as messages:
        for _ in range(4):
            backward(hvd, net, SEEN if hvd.rank() else SEEN[::-1])
            optimizer.step()
            optimizer.zero_grad()
        assert messages == []
        hvd.allgather(torch.ones(1), name="negotiated")
        assert messages != []
