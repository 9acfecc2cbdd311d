"""Operations among some of the ranks."""

from __future__ import annotations

import os

import torch

from hvdkit.engine.session import runtime
from tests.on_ranks import on_ranks
from tests.ranks import Skip
from tests.told import told
from tests.torch.data import equal, total, values

pytestmark = [
    on_ranks(2, 3, 4, every_size=True, HOROVOD_DYNAMIC_PROCESS_SETS="1"),
    on_ranks((4, "mpi"), name="two nodes", per_node=2, HOROVOD_DYNAMIC_PROCESS_SETS="1"),
]


def _sets(hvd):
    """Even ranks, odd ranks (where there are any), and the last rank alone where that is another set."""
    size = hvd.size()
    members = [list(range(0, size, 2)), list(range(1, size, 2)), [size - 1]]
    distinct = {tuple(ranks): ranks for ranks in members if ranks and len(ranks) < size}
    assert distinct, "one rank has no other sets"
    return [hvd.add_process_set(ranks) for ranks in distinct.values()]


def _remove(hvd, sets):
    for process_set in sets:
        assert hvd.remove_process_set(process_set)


def _own_sets(hvd):
    """Make the sets, give those that this rank is in, and remove all."""
    sets = _sets(hvd)
    yield from (process_set for process_set in sets if process_set.included())
    _remove(hvd, sets)


def test_all_operations_stay_inside_the_set(hvd):
    for process_set in _own_sets(hvd):
        members = process_set.ranks
        inputs = [values(rank, (4, 3), torch.float32) for rank in members]
        mine, index, count = inputs[process_set.rank()], process_set.rank(), len(members)
        assert process_set.size() == count
        assert members[index] == hvd.rank()
        assert equal(hvd.allreduce(mine, op=hvd.Sum, process_set=process_set), total(inputs))
        assert torch.allclose(hvd.allreduce(mine, process_set=process_set), total(inputs) / count)
        assert equal(hvd.allreduce_(mine.clone(), op=hvd.Sum, process_set=process_set), total(inputs))
        outputs = hvd.grouped_allreduce([mine, mine], op=hvd.Sum, process_set=process_set)
        assert all(equal(output, total(inputs)) for output in outputs)
        assert equal(hvd.allgather(mine, process_set=process_set), torch.cat(inputs))
        assert equal(hvd.broadcast(mine, members[-1], process_set=process_set), inputs[-1])
        rows = torch.arange(count) + 10 * index
        assert equal(hvd.alltoall(rows, process_set=process_set), torch.arange(count) * 10 + index)
        share = hvd.reducescatter(mine, op=hvd.Sum, process_set=process_set)
        assert equal(share, total(inputs).tensor_split(count)[index])
        hvd.barrier(process_set=process_set)


def test_sets_that_come_and_go_leave_no_memory_behind(hvd):
    memory = getattr(runtime.engine().transport, "memory", None)
    if memory is None or hvd.size() < 3 or len(runtime.engine().transport.members) < hvd.size():
        raise Skip("needs memory that three ranks of a node share")
    numbers = torch.ones(1 << 20)

    def held() -> int:
        return int(hvd.broadcast(torch.tensor([os.fstat(memory._descriptor).st_blocks]), 0)) * 512

    before = held()
    for _ in range(8):
        pair = hvd.add_process_set([0, 1])
        if pair.included():
            assert equal(hvd.allreduce(numbers, op=hvd.Sum, process_set=pair), 2 * numbers)
        assert hvd.remove_process_set(pair)
    assert held() - before < numbers.nbytes, (before, held())  # two ranks stage 1 MiB each in each set


def test_objects_and_sparse_tensors_in_a_set(hvd):
    for process_set in _own_sets(hvd):
        members = process_set.ranks
        assert hvd.broadcast_object(hvd.rank(), members[-1], process_set=process_set) == members[-1]
        assert hvd.allgather_object({"rank": hvd.rank()}, process_set=process_set) == [{"rank": r} for r in members]
        sparse = torch.ones(3).to_sparse()
        summed = hvd.sparse_allreduce_async(sparse, name="sparse", op=hvd.Sum, process_set=process_set)()
        assert torch.equal(summed.to_dense(), torch.full((3,), float(len(members))))


def test_gradients_stay_inside_the_set(hvd):
    for process_set in _own_sets(hvd):
        count, index, members = process_set.size(), process_set.rank(), process_set.ranks
        leaf = torch.ones(2, requires_grad=True)
        hvd.allreduce(leaf, op=hvd.Sum, process_set=process_set).sum().backward()
        assert torch.equal(leaf.grad, torch.full((2,), float(count)))
        leaf = torch.ones(2, requires_grad=True)
        gathered = hvd.allgather(leaf, process_set=process_set)
        gathered.backward(torch.arange(2.0 * count))
        assert torch.equal(leaf.grad, torch.arange(2.0 * count).split(2)[index])
        leaf = torch.ones(2, requires_grad=True)
        hvd.broadcast(leaf, members[0], process_set=process_set).sum().backward()
        assert torch.equal(leaf.grad, torch.full((2,), 1.0 if index == 0 else 0.0))
        leaf = torch.ones(2 * count, requires_grad=True)
        hvd.reducescatter(leaf, op=hvd.Sum, process_set=process_set).sum().backward()
        assert torch.equal(leaf.grad, torch.full((2 * count,), float(count)))


def test_sets_work_at_the_same_time_under_the_same_name(hvd):
    sets = _sets(hvd)
    handles = [
        (process_set, hvd.allreduce_async(torch.ones(3), op=hvd.Sum, name="shared", process_set=process_set))
        for process_set in [hvd.global_process_set, *sets]
        if process_set is hvd.global_process_set or process_set.included()
    ]
    for process_set, handle in reversed(handles):
        assert equal(hvd.synchronize(handle), torch.full((3,), float(process_set.size())))
    _remove(hvd, sets)


def test_wrong_uses_of_sets_are_told(hvd):
    sets = _sets(hvd)
    for process_set in sets:
        if process_set.included():
            outsider = next(rank for rank in range(hvd.size()) if rank not in process_set.ranks)
            with told(
                ValueError,
                f"broadcast: root_rank must be one of the process set's ranks {process_set.ranks}, "
                f"got invalid root rank {outsider}\n"
                "HINT: ranks count from 0; in a process set, root_rank is the rank in the whole job.",
            ):
                hvd.broadcast(torch.ones(1), outsider, process_set=process_set)
            with told(NotImplementedError, "Adasum does not support non-global process sets"):
                hvd.allreduce(torch.ones(1), op=hvd.Adasum, process_set=process_set)
        else:
            with told(ValueError, "HINT"):
                hvd.allreduce(torch.ones(1), process_set=process_set)
            with told(ValueError) as caught:
                process_set.rank()
            number, ranks = process_set.process_set_id, process_set.ranks
            assert f"rank {hvd.rank()} is not in process set {number}, which has the ranks {ranks}" in str(caught.value)
            with told(ValueError, "not a member"):
                hvd.barrier(process_set=process_set)
    _remove(hvd, sets)
    for process_set in sets:
        with told(ValueError, "must be registered"):
            hvd.allreduce(torch.ones(1), process_set=process_set)


def test_ranks_that_name_different_sets_are_told(hvd):
    if hvd.size() < 3:
        raise Skip("needs three ranks")
    sets = [hvd.add_process_set([0, 1]), hvd.add_process_set([0, 1, 2])] if hvd.size() > 3 else []
    if sets and hvd.rank() < 2:
        with told(hvd.HorovodInternalError, "clash", f"process set {sets[0].process_set_id}", "rank 0", "rank 1"):
            hvd.allreduce(torch.ones(2), name="clash", process_set=sets[0] if hvd.rank() else hvd.global_process_set)
    hvd.barrier()
    _remove(hvd, sets)
