"""Sums in memory that all ranks share: of gradients in hvdkit's arena, and the bound of one pass over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import hvdkit.torch as hvd
from hvdkit import kernels
from hvdkit.arena import ARENA
from hvdkit.engine.session import runtime
from hvdkit.engine.steps.offers import FILLED, offer_of
from hvdkit.engine.steps.plan import Slot
from hvdkit.kernels._native import Cells
from hvdkit.transports.node.transport import NodeTransport

LINE = 64
# Places of the node's memory that no lane or process set reaches in a benchmark.
FIRST_SEGMENT = 1 << 20


def open_fusion() -> tuple[int, int, Callable[[Any], Any], Callable[[], None]]:
    """Return the rank, the number of ranks, a function that sums in place, and the shutdown.

    The function sums a gradient in the arena that is as large as its argument. The first call of a size registers a
    plan and sums the argument; later calls sum the gradient as it is (zeros).
    """
    hvd.init()
    engine = runtime.engine()
    lanes: dict[int, tuple[Any, Any]] = {}
    reason = ARENA.serve_torch()
    assert not reason, reason

    def step(lane: Any, gradient: Any) -> None:
        lane.ready(0, FILLED if lane.small(0) is not None else offer_of(gradient))
        lane.finish()

    def call(x: Any) -> Any:
        if x.numel() in lanes:
            return step(*lanes[x.numel()])
        slot = Slot("tensor", (x.numel(),), np.dtype(np.float32))
        lane = engine.register_plan(f"size.{x.numel()}", [slot], op=hvd.Sum)
        gradient = lane.small(0)
        if gradient is None:
            ARENA.add_sizes([x.nbytes])
            with ARENA.serving():
                gradient = x.clone().numpy()
        else:  # the lane has a place for the gradient
            gradient[...] = x.numpy()
        lanes[x.numel()] = lane, gradient
        step(lane, gradient)
        result = gradient.copy()
        gradient[...] = 0
        return result

    return hvd.rank(), hvd.size(), call, hvd.shutdown


def open_one_pass() -> tuple[int, int, Callable[[Any], Any], Callable[[], None]]:
    """Return the same for a bare sum: all ranks meet, each sums its share of all buffers into all buffers, all meet."""
    hvd.init()
    transport = runtime.engine().transport
    assert isinstance(transport, NodeTransport), "the bound needs ranks that share memory"
    rank, ranks = hvd.rank(), hvd.size()
    cells = Cells(transport.memory.window(FIRST_SEGMENT, ranks * LINE), 0, ranks)
    met = 0
    shares: dict[int, list[Any]] = {}

    def meet() -> None:
        nonlocal met
        met += 1
        cells.set(rank, met)
        while any(cells.get(other) < met for other in range(ranks)):
            pass

    def call(x: Any) -> Any:
        count = x.numel()
        if count in shares:
            return one_pass(shares[count])
        window = transport.memory.window(FIRST_SEGMENT + 1 + len(shares), ranks * count * 4)
        window.populate(0, ranks * count * 4)
        buffers = np.frombuffer(window, dtype=np.float32).reshape(ranks, count)
        buffers[rank] = x.numpy()
        share = slice(rank * count // ranks, (rank + 1) * count // ranks)
        shares[count] = [buffer[share] for buffer in buffers]
        one_pass(shares[count])
        result = buffers[rank].copy()
        meet()
        buffers[rank] = 0
        return result

    def one_pass(mine: list[Any]) -> None:
        meet()
        kernels.reduce_into(mine, mine, hvd.Sum, 1.0)
        meet()

    return rank, ranks, call, hvd.shutdown
