"""Children forked from ranks, as workers of a DataLoader are: they may ask who they are, and communicate nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from hvdkit.errors import ForkedChildError, NotInitializedError
from tests.forking import forked, in_child
from tests.on_ranks import on_ranks
from tests.ranks import TORCH, run_ranks
from tests.told import told
from tests.torch import forked_endings
from tests.torch.operations import still_works
from tests.torch.optimizer_support import distributed_sgd, update

pytestmark = on_ranks(2)


def answers(hvd: Any) -> list[Any]:
    questions = (
        hvd.rank, hvd.size, hvd.local_rank, hvd.local_size, hvd.cross_rank, hvd.cross_size, hvd.is_initialized,
        hvd.is_homogeneous, hvd.mpi_enabled, hvd.gloo_enabled,
        *(getattr(hvd.global_process_set, name) for name in ("rank", "size", "included")), hvd.ProcessSet([0]).included,
    )  # fmt: skip
    return [*(question() for question in questions), hvd.global_process_set.ranks]


def test_a_child_keeps_what_its_parent_had_when_it_was_forked(hvd: Any) -> None:
    """Gradients, and what a hook made of them: the parent drops them and goes on, as after a checkpoint's fork."""
    weights = torch.nn.ParameterList([torch.ones(elements) for elements in (1 << 16, 1 << 18, 100)])
    optimizer = distributed_sgd(hvd, weights, lr=0.0, op=hvd.Sum)
    statistics: list[torch.Tensor] = []
    weights[0].register_hook(lambda gradient: statistics.append(gradient * 6))

    def backward(factor: float) -> None:
        statistics.clear()
        torch.stack([(weight * factor).sum() for weight in weights]).sum().backward()

    for _ in range(2):  # in the second step gradients are reduced where they lie
        optimizer.zero_grad()
        backward(12)
        optimizer.step()
    kept = [*(weight.grad for weight in weights), *statistics]

    def check() -> None:
        assert [one.unique().tolist() for one in kept] == [[12 * hvd.size()]] * 3 + [[72]]

    children = [forked(check) for _ in range(2)]
    kept.clear()
    for step in range(3):
        optimizer.zero_grad(set_to_none=step != 1)
        backward(100 + step)
        children.append(forked_with([weight.grad for weight in weights]))  # in the middle of a step
        optimizer.step()
    for child in children:
        child()
    still_works(hvd)


def forked_with(gradients: list[Any]) -> Callable[[], None]:
    """What is being summed may be there in part, as in any fork; but it does not change."""
    earlier: list[torch.Tensor] = []

    def check() -> None:
        assert all(map(torch.equal, gradients, earlier))

    return forked(check, lambda: earlier.extend(gradient.clone() for gradient in gradients))


class Sharded(IterableDataset[int]):
    """Each rank, and each of its workers, has other numbers."""

    def __init__(self, hvd: Any) -> None:
        self.hvd = hvd

    def __iter__(self) -> Any:
        worker = torch.utils.data.get_worker_info()
        yield from range(self.hvd.rank() * worker.num_workers + worker.id, 12, self.hvd.size() * worker.num_workers)


def test_questions_about_ranks_are_answered_as_in_the_parent(hvd: Any) -> None:
    expected = answers(hvd)

    def check() -> None:
        assert answers(hvd) == expected

    def check_in_a_child_too() -> None:
        check()
        in_child(check)

    in_child(check_in_a_child_too)
    still_works(hvd)


def test_workers_of_a_data_loader_shard_by_rank(hvd: Any) -> None:
    for context in (None, "fork"):
        found = [int(one) for one in DataLoader(Sharded(hvd), num_workers=2, multiprocessing_context=context)]
        mine = [number for number in range(12) if number // 2 % hvd.size() == hvd.rank()]
        assert sorted(found) == mine
    still_works(hvd)


def test_collective_calls_raise_at_once(hvd: Any) -> None:
    tensor = torch.ones(2 * hvd.size())
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 2)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    pending = None if hvd.rank() == hvd.size() - 1 else hvd.allreduce_async(tensor, name="pending")
    calls = [
        lambda: hvd.allreduce(tensor),
        lambda: hvd.allreduce_async_(tensor, name="x"),
        lambda: hvd.grouped_allreduce([tensor]),
        lambda: hvd.sparse_allreduce_async(tensor.to_sparse(), "x", hvd.Sum),
        lambda: hvd.allgather(tensor),
        lambda: hvd.broadcast_(tensor, 0),
        lambda: hvd.alltoall(tensor),
        lambda: hvd.reducescatter(tensor),
        lambda: hvd.broadcast_object(1, 0),
        lambda: hvd.allgather_object(1),
        lambda: hvd.broadcast_parameters(model.state_dict(), 0),
        lambda: hvd.broadcast_optimizer_state(optimizer, 0),
        hvd.join,
        hvd.barrier,
        optimizer.step,
        optimizer.synchronize,
        lambda: update(optimizer),
        lambda: hvd.SyncBatchNorm(2).train()(torch.ones(4, 2)),
        *([lambda: hvd.synchronize(pending)] if pending is not None else []),
    ]

    rest = (
        ", whose connections and memory it must not use: hvd.rank(), hvd.size() and similar functions work here, but "
        "nothing is communicated.\n"
        "HINT: make collective calls and optimizer steps in the process that called hvd.init(); let workers of a "
        "DataLoader and other child processes return data to that process."
    )

    def check() -> None:
        for call in calls:
            with told(ForkedChildError, f"this process was forked from rank {hvd.rank()} (", rest):
                call()

    in_child(check)
    hvd.barrier()
    if pending is None:
        pending = hvd.allreduce_async(tensor, name="pending")
    assert hvd.synchronize(pending).tolist() == tensor.tolist()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    still_works(hvd)


def test_shutdown_and_init_in_a_child_are_its_own(hvd: Any) -> None:
    def check() -> None:
        expected = answers(hvd)
        hvd.init()  # as a second call
        assert answers(hvd) == expected
        hvd.shutdown()
        assert not hvd.is_initialized()
        for call in (hvd.rank, lambda: hvd.allreduce(torch.ones(1))):
            with told(NotInitializedError, "has not been initialized"):
                call()
        hvd.init()
        assert answers(hvd) == expected
        with told(ForkedChildError, "forked from rank"):
            hvd.barrier()

    in_child(check)
    still_works(hvd)


@pytest.mark.parametrize(
    ("transport", "arguments", "variables"),
    [
        ("mpi", [], {}),
        ("mpi", ["mpi4py first"], {}),
        ("torch", [], {}),
        pytest.param("torch", [], {"HVDKIT_NODE_MEMORY": "0"}, marks=pytest.mark.thorough),
    ],
)
def test_children_end_however_they_like(transport: str, arguments: list[str], variables: dict[str, str]) -> None:
    command = [sys.executable, "-m", forked_endings.__name__, *arguments]
    status, output = run_ranks(command, 2, transport, timeout=200, preload=TORCH, **variables)
    assert status == 0, output
    assert all(f"RANK {rank} THROUGH" in output for rank in range(2)), output
    for way in forked_endings.WAYS:
        assert output.count(f"CHILD {way} CLEANED UP") == 2, output


WITHOUT_GUARD = """
import sys
import torch
from torch.utils.data import DataLoader
import hvdkit.torch as hvd

hvd.init()
loader = DataLoader(torch.arange(6), num_workers=1, multiprocessing_context=sys.argv[1])
try:
    print(len(list(loader)), "LOADED", flush=True)
except (RuntimeError, OSError, EOFError) as error:  # a worker, or the forkserver, ended
    print(type(error).__name__, "INSTEAD", flush=True)
total = hvd.allreduce(torch.ones(3), op=hvd.Sum)
assert total.tolist() == [hvd.size()] * 3
print("RANK", hvd.rank(), "THROUGH", flush=True)
hvd.shutdown()
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_worker_that_imports_a_script_without_guard_does_not_join(tmp_path: Path, method: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(WITHOUT_GUARD)
    status, output = run_ranks([sys.executable, str(script), method], 2, "torch", timeout=200)
    assert status == 0, output
    assert "LOADED" not in output
    assert all(f"RANK {rank} THROUGH" in output for rank in range(2)), output
    assert (
        "ValueError: init: multiprocessing has started this process (spawn or forkserver), and it imports the script "
        "again.\n"
        'HINT: put hvd.init() and the training below `if __name__ == "__main__":`, which child processes skip.\n'
    ) in output
