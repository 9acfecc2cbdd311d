"""What a timeline shows of a training step: who came last, what was waited for, and where the passes are."""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as modules
from torch.utils.checkpoint import checkpoint

from hvdkit.engine.session import runtime
from hvdkit.engine.telemetry.trace import Activity, Trace, late_waits, read_trace
from hvdkit.errors import HorovodInternalError
from tests.on_ranks import on_ranks
from tests.ranks import ROOT
from tests.torch.optimizer_support import batch, distributed_sgd, loss_of, make_net, train, train_step, wrapped_net
from tests.transports.shared import in_thread
from tests.waiting import until

pytestmark = [
    on_ranks(2, 3, HOROVOD_DYNAMIC_PROCESS_SETS="1"),
    on_ranks((3, "torch"), name="no memory", HVDKIT_NODE_MEMORY="0", HOROVOD_DYNAMIC_PROCESS_SETS="1"),
    on_ranks((3, "torch"), name="nodes", per_node=1, HOROVOD_DYNAMIC_PROCESS_SETS="1"),
]

LATE_SECONDS = 0.5
COMPUTATION = "training: forward and backward"
DOCUMENTED = set(re.findall(r"`([A-Z_]+(?: n)?|[A-Z_]+_n)`", Path(ROOT, "docs", "timeline.md").read_text()))
DOCUMENTED |= {f"NEGOTIATE_{name}" for name in DOCUMENTED}


def shown_in(path: Path) -> list[Activity]:
    trace = read_trace(path)
    assert trace.unfinished == []
    return sorted(trace.activities, key=lambda one: one.begin)


@contextmanager
def recorded(hvd: Any) -> Iterator[list[Activity]]:
    """Holds what rank 0's timeline shows of the block, once it is over; nothing on other ranks."""
    shown: list[Activity] = []
    path = Path(tempfile.gettempdir(), f"hvdkit-shown-{os.getpid()}.json")
    hvd.start_timeline(str(path))
    try:
        yield shown
    finally:
        hvd.stop_timeline()
        if path.exists():
            shown += shown_in(path)
            path.unlink()
            names = {re.sub(r"(?<=[_ ])\d+$", "n", one.name) for one in shown}
            assert names <= DOCUMENTED, f"docs/timeline.md does not know {names - DOCUMENTED}"


def late(hvd: Any, action: Callable[[], Any], directory: str, number: int) -> None:
    """Every rank acts; the last one only when all others wait for it, and some time more has passed."""
    flags = [Path(directory, f"waits-{number}-{rank}") for rank in range(hvd.size() - 1)]
    if hvd.rank() < len(flags):
        engine = runtime.engine()

        def tell() -> None:
            until(lambda: engine.operations or engine.submissions, 120)
            flags[hvd.rank()].touch()

        teller = in_thread(tell)
        action()
        teller.result()
    else:
        until(lambda: all(flag.exists() for flag in flags), 120)
        time.sleep(LATE_SECONDS)
        action()


def test_the_last_rank_is_named_where_gradients_are_reduced(hvd: Any) -> None:
    directory = hvd.broadcast_object(tempfile.mkdtemp() if hvd.rank() == 0 else None)
    net = make_net()
    optimizer, last = distributed_sgd(hvd, net), hvd.size() - 1
    train_step(optimizer, net, batch(hvd.rank()))
    with recorded(hvd) as shown:
        for number in range(2):
            optimizer.zero_grad()
            loss_of(net, batch(hvd.rank())).backward()
            late(hvd, optimizer.step, directory, number)
    if hvd.rank() != 0:
        assert shown == []
        return
    reductions = [one for one in shown if one.name == "ALLREDUCE"]
    waits = [one for one in shown if one.row == reductions[0].row and one.name == f"WAIT_FOR_RANK_{last}"]
    shares_memory = hvd.local_size() == hvd.size() and runtime.engine().settings.node_memory
    assert len(waits) == (2 if shares_memory else 0), shown
    for one in waits:
        assert one.args["last_rank"] == last, one
        assert one.args["ms_after_the_first"] >= one.args["ms_after_the_one_before"] >= 0.5e3 * LATE_SECONDS, one
        # Drawn before the reduction, not as a part of it.
        assert not any(one.begin < other.end and other.begin < one.end for other in reductions), shown
    waited = [one for one in shown if one.name == "WAIT_FOR_GRADIENTS"]
    assert [one.row for one in waited] == [COMPUTATION] * 2, shown  # of the training thread
    assert all(one.end - one.begin >= 0.5e3 * LATE_SECONDS for one in [*waits, *waited]), shown


def test_the_last_rank_is_named_where_a_tensor_is_reduced(hvd: Any) -> None:
    directory = hvd.broadcast_object(tempfile.mkdtemp() if hvd.rank() == 0 else None)
    last = hvd.size() - 1
    with recorded(hvd) as shown:
        late(hvd, lambda: hvd.allreduce(torch.ones(3), name="late"), directory, 0)
    if hvd.rank() == 0:
        (wait,) = [one for one in shown if one.name.startswith("WAIT_FOR_RANK_")]
        (asked,) = [one for one in shown if one.name == "NEGOTIATE_ALLREDUCE"]
        (ran,) = [one for one in shown if one.name == "ALLREDUCE"]
        assert wait.name == f"WAIT_FOR_RANK_{last}", shown
        assert wait.args["ms_after_the_one_before"] >= 0.5e3 * LATE_SECONDS, wait
        assert wait.row == asked.row == ran.row == "allreduce 'late'", shown
        assert asked.begin <= wait.begin <= wait.end <= asked.end <= ran.begin, shown


def test_tensors_that_wait_for_a_rank_at_a_time_are_one_wait(hvd: Any) -> None:
    directory = hvd.broadcast_object(tempfile.mkdtemp() if hvd.rank() == 0 else None)
    tensors = [(f"tensor {number}", torch.ones(3)) for number in range(20)]
    with recorded(hvd) as shown:
        late(hvd, lambda: hvd.broadcast_parameters(tensors, root_rank=0), directory, 0)
    if hvd.rank() == 0:
        waits = [wait for wait in late_waits(Trace(shown, [])) if wait.rank == hvd.size() - 1]
        assert len(waits) == 1, waits
        assert 0.5e3 * LATE_SECONDS < waits[0].end - waits[0].begin < 20 * 0.5e3 * LATE_SECONDS


def test_rank_0_is_named_where_it_comes_last(hvd: Any) -> None:
    times = 20
    with recorded(hvd) as shown:
        hvd.barrier()  # nobody asks before rank 0 records
        for _ in range(times):
            if hvd.rank() == 0:
                time.sleep(0.02)  # long after the others, which do nothing meanwhile
            hvd.allreduce(torch.ones(3), name="again")
    if hvd.rank() == 0:
        waits = [one for one in shown if one.row == "allreduce 'again'" and one.name.startswith("WAIT_FOR_RANK_")]
        assert len(waits) == times, shown  # also where another rank asks again before this one has the result
        assert [one.name for one in waits].count("WAIT_FOR_RANK_0") > times / 2, waits


def test_what_is_in_a_reduction_begins_and_ends_in_it(hvd: Any) -> None:
    where = "everywhere" if hvd.local_size() == hvd.size() else "between_nodes"
    net = nn.Linear(128, 64)
    hvd.broadcast_parameters(net.state_dict(), 0)
    optimizer = distributed_sgd(hvd, net, compression=hvd.Compression.int8(compress=where))
    with recorded(hvd) as shown:
        for _ in range(3):
            optimizer.zero_grad()
            net(torch.ones(2, 128)).sum().backward()
            optimizer.step()
    if hvd.rank() == 0:
        reductions = [one for one in shown if one.name == "ALLREDUCE"]
        within = [one for one in shown if one.name == "COMPRESSION"]
        assert len(within) == 3, shown
        for one in within:
            around = [other for other in reductions if other.begin <= one.begin and one.end <= other.end]
            assert [other.row for other in around if other.row == one.row] == [one.row], (one, reductions)


def test_a_step_that_fails_leaves_nothing_open(hvd: Any) -> None:
    net, optimizer = wrapped_net(hvd)
    train_step(optimizer, net, batch(hvd.rank()))
    with recorded(hvd):  # which looks whether each that began has ended
        loss_of(net, batch(hvd.rank())).backward()
        waits = optimizer.step if hvd.rank() == 0 else lambda: hvd.allgather(torch.ones(1), name="meanwhile")
        with pytest.raises(HorovodInternalError):  # each waits for the other
            waits()


def test_steps_and_passes_are_marked(hvd: Any) -> None:
    net, optimizer = wrapped_net(hvd)
    with recorded(hvd) as shown:
        train(hvd, optimizer, net)
        with torch.no_grad():
            net(batch(hvd.rank())[0])
    if hvd.rank() != 0:
        return
    assert all(one.begin >= 0 for one in shown), "times begin with the recording"
    passes = [one for one in shown if one.row == COMPUTATION and one.name != "WAIT_FOR_GRADIENTS"]
    # What recorded() began after the optimizer was made is followed from the first step's end on.
    names = [one.name for one in passes]
    assert names == ["FORWARD", "BACKWARD"] * 2 + ["FORWARD_WITHOUT_GRADIENTS"], names
    assert all(one.args["module"] == "Net" for one in passes if one.name != "BACKWARD"), passes
    assert all(one.end <= other.begin for one, other in pairwise(passes)), passes
    steps = [one for one in shown if one.name.startswith("STEP ")]
    assert [one.name for one in steps] == ["STEP 1", "STEP 2", "STEP 3"], steps
    assert all(abs(one.end - other.begin) < 1e-3 for one, other in pairwise(steps)), steps
    assert steps[0].row.startswith("training: steps of SGD"), steps


def test_no_hook_stays_when_the_recording_is_over(hvd: Any) -> None:
    def hooks() -> int:
        return len(modules._global_forward_pre_hooks) + len(modules._global_forward_hooks)

    net = make_net()
    distributed_sgd(hvd, make_net())  # those of an earlier recording go when it is noticed that it is over
    before = hooks()
    with recorded(hvd):
        optimizer = distributed_sgd(hvd, net)
        assert hooks() == before + (2 if hvd.rank() == 0 else 0)
        train_step(optimizer, net, batch(hvd.rank()))
    train_step(optimizer, net, batch(hvd.rank()))
    assert hooks() == before


class Unusual(nn.Module):
    """Its passes lie within each other: the forward pass is computed once more in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.last = nn.Linear(4, 1)

    def forward(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.last(checkpoint(self.inner, rows, use_reentrant=True)).mean()}


def test_passes_are_marked_whatever_a_model_does(hvd: Any) -> None:
    torch.manual_seed(0)
    net = Unusual()
    rows = torch.ones(2, 4, requires_grad=True)
    same = nn.Identity()

    def fails(_: torch.Tensor) -> None:
        raise ArithmeticError

    with recorded(hvd) as shown:
        optimizer = distributed_sgd(hvd, net)
        for step in range(2):
            optimizer.zero_grad()
            loss = net(rows)["loss"]
            if step == 0:  # a backward pass that an exception ends before it has computed a gradient
                loss.register_hook(fails)
                with pytest.raises(ArithmeticError):
                    loss.backward()
                loss = net(rows)["loss"]
            for _ in range(5):
                loss = same(loss)
            assert len(loss._backward_hooks or ()) <= 1, "a module that gives back what it was given"
            loss.backward()
            optimizer.step()
    if hvd.rank() == 0:
        shown[:] = [one for one in shown if one.args.get("module") != "Identity"]
        passes = [one for one in shown if one.name in ("FORWARD", "BACKWARD")]
        within = [one for one in passes if any(other.begin < one.begin and one.end < other.end for other in passes)]
        assert [one.name for one in passes if one not in within] == ["FORWARD"] + ["FORWARD", "BACKWARD"] * 2, shown
        assert [one.name for one in within] == ["FORWARD", "BACKWARD"] * 2, shown
        assert {one.args["module"] for one in within if one.name == "FORWARD"} == {"Sequential"}, shown
