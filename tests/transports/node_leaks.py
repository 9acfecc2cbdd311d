"""What a rank runs that comes and goes: rounds of init and shutdown, and what it holds before and after them."""

from __future__ import annotations

import collections
import gc
import json
import os
import re
import sys
import time
from typing import Any

import torch

import hvdkit.torch as hvd
from tests.transports.shared import mapped_memory_files, open_descriptors

WARM_UP = 5
SETTLE_SECONDS = 0.25  # a thread that was joined, or a socket that was closed, may still be on its way out


def held() -> dict[str, Any]:
    """What this process has, by kind: descriptors, threads, regions of the node's memory."""
    gc.collect()
    # Sockets and pipes have numbers, which change.
    kinds = collections.Counter(re.sub(r"\d+", "N", target) for target in open_descriptors().values())
    threads = len(os.listdir("/proc/self/task"))
    return {"descriptors": kinds, "threads": threads, "mapped": mapped_memory_files()}


def grown(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What there is more of. What was still on its way out before may be less after; a leak grows with each round."""
    descriptors = collections.Counter(after["descriptors"]) - collections.Counter(before["descriptors"])
    counts = {name: after[name] - before[name] for name in ("threads", "mapped") if after[name] > before[name]}
    return {**({"descriptors": dict(descriptors)} if descriptors else {}), **counts}


def init_and_shut_down(number: int) -> None:
    hvd.init()
    hvd.shutdown()


def use_and_shut_down(number: int) -> None:
    """Everything that takes memory of the node: messages, staged tensors, buckets."""
    hvd.init()
    total = hvd.allreduce(torch.full((30_000,), 1.0 + hvd.rank()), op=hvd.Sum, name=f"round{number}")
    assert total.unique().tolist() == [3.0]
    assert hvd.broadcast_object(number, root_rank=1) == number
    model = torch.nn.Linear(300, 10)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 300)).sum().backward()
        optimizer.step()
    hvd.shutdown()


def main(kind: str, rounds: int) -> None:
    one_round = {"empty": init_and_shut_down, "used": use_and_shut_down}[kind]
    for number in range(WARM_UP):
        one_round(number)
    hvd.init()
    inside = held()
    hvd.shutdown()
    time.sleep(SETTLE_SECONDS)
    before = held()
    for number in range(rounds):
        one_round(number)
    deadline = time.monotonic() + 20 * SETTLE_SECONDS
    while grown(before, held()) and time.monotonic() < deadline:
        time.sleep(0.01)
    print("HELD " + json.dumps({"inside": inside, "before": before, "after": held()}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
