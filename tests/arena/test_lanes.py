"""Blocks that several ranks sum: they stay until all are through, whatever becomes of optimizers and tensors."""

from __future__ import annotations

import gc
import os
import tempfile
import threading
import weakref
from pathlib import Path
from typing import Any

import torch

from hvdkit.arena import ARENA
from hvdkit.engine.steps.node_pass import NodePass
from tests.arena.blocks import MIB, born, lies_in_arena, served, used
from tests.forking import in_child
from tests.on_ranks import on_ranks
from tests.transports.shared import needs_memory_files, needs_native

pytestmark = [
    needs_native,
    needs_memory_files,
    # Reduced beside the backward pass, and not after it, also where the ranks' threads have every core.
    on_ranks((2, "torch"), HVDKIT_FUSION_THRESHOLD="1048576"),
]

OTHER_RANK_SECONDS = 60


def test_an_optimizer_that_goes_in_the_middle_of_a_step_leaves_no_memory_that_others_still_write(hvd):
    with tempfile.TemporaryDirectory() as folder, served(MIB):
        pipe = Path(hvd.broadcast_object(str(Path(folder) / "pipe"), root_rank=0))
        if hvd.rank() == 0:
            os.mkfifo(pipe)
        weight = torch.nn.Parameter(torch.ones(MIB // 4))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=hvd.Sum)
        for _ in range(2):  # from the second step on gradients travel during backward()
            weight.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        hvd.barrier()
        has_begun, has_run, run = threading.Event(), threading.Event(), NodePass.run

        def run_when_told(*arguments: Any) -> None:
            has_begun.set()
            if hvd.rank() == 1:
                assert pipe.read_text() == "go on"
            run(*arguments)
            has_run.set()

        NodePass.run = run_when_told  # type: ignore[method-assign]
        try:
            weight.sum().backward()
            assert (has_begun if hvd.rank() == 1 else has_run).wait(OTHER_RANK_SECONDS)
            before = used()
            gone = weakref.ref(optimizer._synchronizer)
            weight.grad.share_memory_()  # moves it; what is summed still lies where it was
            weight.grad = None
            del optimizer
            gc.collect()
            assert gone() is None
            mine = [born(MIB).fill_(7) for _ in range(8)]
            assert all(map(lies_in_arena, mine))
            if hvd.rank() == 0:
                pipe.write_text("go on")
            hvd.barrier()
            assert has_run.is_set()
        finally:
            NodePass.run = run  # type: ignore[method-assign]
        hvd.barrier()
        assert all(bool((one == 7).all()) for one in mine)
        del mine
        assert used() == before - MIB  # what was pinned has come back


def test_an_optimizer_has_its_gradients_in_the_arena_and_only_while_it_lives(hvd):
    weight = torch.nn.Parameter(torch.ones(MIB // 4))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    weight.sum().backward()
    assert ARENA.contains(weight.grad.data_ptr())
    optimizer.step()
    del optimizer
    gc.collect()
    weight.grad = None
    weight.sum().backward()
    assert not ARENA.contains(weight.grad.data_ptr())


def test_a_fork_that_lets_go_of_its_optimizer_leaves_its_parents_small_gradients(hvd):
    first, second = (torch.nn.Parameter(torch.ones(3000)) for _ in range(2))
    optimizers = [hvd.DistributedOptimizer(torch.optim.SGD([first, second], lr=1.0), op=hvd.Sum)]
    (first.sum() + second.sum()).backward()
    optimizers[0].step()
    optimizers[0].zero_grad()
    first.sum().backward()  # waits in the lane for what the second one has

    def let_go() -> None:
        gone = weakref.ref(optimizers[0]._synchronizer)
        optimizers.clear()
        gc.collect()
        assert gone() is None

    in_child(let_go)
    optimizers[0].step()
    assert bool((first.grad == hvd.size()).all())
