"""Every operation against what each rank can compute for itself: types, dimensions, groups, order, places in memory."""

from __future__ import annotations

import gc
import itertools
import json
import os
import tempfile
import time
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from tests.on_ranks import on_ranks
from tests.ranks import Skip, place_on_node
from tests.told import told
from tests.torch.data import INTEGERS, MOVABLE, REDUCIBLE, SHAPES, all_values, equal, mean, reductions, total, values

pytestmark = [
    on_ranks(1, 2, 3, 4, every_size=True),
    on_ranks((3, "torch"), name="two nodes", per_node=2),
    on_ranks((4, "mpi"), name="two nodes", thorough=True, per_node=2),
    on_ranks((3, "mpi"), name="no memory", HVDKIT_NODE_MEMORY="0"),
    on_ranks((3, "torch"), name="device", runner="tests.transports.pretend_device"),
]


def test_operations_leave_no_cycles(hvd):
    tensors = [torch.ones(4), torch.ones(3)]
    gc.collect()
    gc.disable()
    try:
        for _ in range(20):
            hvd.allreduce(tensors[0], name="cycles")
            hvd.grouped_allreduce(tensors, name="cycles.grouped")
            hvd.allgather(tensors[0], name="cycles.gathered")
            hvd.broadcast(tensors[0], 0, name="cycles.broadcast")
        found = gc.collect()
    finally:
        gc.enable()
    assert found < 20, "each would keep tensors until Python looks for cycles"


def test_allreduce_reduces_every_type_and_dimension_in_every_way(hvd):
    for dtype, shape in itertools.product(REDUCIBLE, SHAPES):
        inputs = all_values(hvd.size(), shape, dtype)
        for op, expected in reductions(hvd, inputs):
            assert equal(hvd.allreduce(inputs[hvd.rank()], op=op), expected), (op, dtype, shape)
        average = hvd.allreduce(inputs[hvd.rank()])
        assert average.dtype == dtype
        assert torch.allclose(average.double(), mean(inputs).double(), rtol=0 if dtype in INTEGERS else 1e-2)
        tensor = inputs[hvd.rank()].clone()
        assert hvd.allreduce_(tensor, op=hvd.Sum) is tensor
        assert equal(tensor, total(inputs)), (dtype, shape)


def test_allreduce_leaves_its_input_alone(hvd):
    tensor = values(hvd.rank(), (50,), torch.float32)
    before = tensor.clone()
    handle = hvd.allreduce_async(tensor, op=hvd.Sum)
    assert equal(tensor, before)
    tensor.fill_(-1.0)  # a copy was taken when the operation was started
    assert equal(hvd.synchronize(handle), total(all_values(hvd.size(), (50,), torch.float32)))
    assert bool((tensor == -1).all())


def test_several_large_tensors_at_once_whose_parts_travel_on_their_own(hvd):
    lengths = (3 << 20) + 7, 4 << 20, (2 << 20) - 1
    inputs = [all_values(hvd.size(), (length,), torch.float32) for length in lengths]
    first = hvd.allreduce_async(inputs[0][hvd.rank()], op=hvd.Sum, name="large.0")
    tensor = inputs[1][hvd.rank()].clone()
    second = hvd.allreduce_async_(tensor, op=hvd.Average, name="large.1")
    third = hvd.allreduce_async(inputs[2][hvd.rank()], op=hvd.Max, name="large.2")
    scaled = hvd.allreduce(inputs[0][hvd.rank()], op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.25)
    assert equal(hvd.synchronize(third), torch.stack(inputs[2]).amax(dim=0))
    assert hvd.synchronize(second) is tensor
    assert torch.allclose(tensor.double(), mean(inputs[1]).double(), rtol=1e-6)
    assert equal(hvd.synchronize(first), total(inputs[0]))
    assert equal(scaled, total(inputs[0]) / 2)


def test_the_timeline_tells_of_pieces_where_a_tensor_goes_between_nodes(hvd):
    if hvd.size() == 1:
        raise Skip("nothing is sent")
    path = f"{tempfile.gettempdir()}/hvdkit-pieces-{os.getpid()}.json"
    hvd.start_timeline(path)
    hvd.allreduce(torch.ones(6 << 20, dtype=torch.int16), op=hvd.Sum, name="large")  # no device sums int16 itself
    hvd.stop_timeline()
    if hvd.rank() == 0:
        with open(path) as file:
            reasons = [event["args"]["reason"] for event in json.load(file) if event.get("name") == "ALLREDUCE"]
        os.unlink(path)
        one_memory = hvd.local_size() == hvd.size() and os.environ.get("HVDKIT_NODE_MEMORY") != "0"
        (reason,) = reasons
        assert ("in 3 pieces" in reason) != one_memory, reason
        assert ("each rank of the node reduces its share" in reason) == one_memory, reason


def test_allreduce_in_place_takes_tensors_that_are_not_contiguous(hvd):
    for dtype in REDUCIBLE:
        base = torch.zeros(6, 10, dtype=dtype)
        view = base.t()[1:9:2]
        inputs = all_values(hvd.size(), tuple(view.shape), dtype)
        view.copy_(inputs[hvd.rank()])
        handle = hvd.allreduce_async_(view, op=hvd.Sum)
        assert hvd.synchronize(handle) is view
        assert equal(view, total(inputs))
        assert not base[:, 0].any()


def test_average_of_integers_is_cut_off(hvd):
    size = hvd.size()
    numbers = torch.tensor([-5, -1, 0, 1, 5]) * (hvd.rank() + 1)
    summed = torch.tensor([-5, -1, 0, 1, 5]) * (size * (size + 1) // 2)
    assert equal(hvd.allreduce(numbers), torch.trunc(summed.double() / size).long())


def test_half_types_are_summed_in_single_precision(hvd):
    for dtype in (torch.float16, torch.bfloat16):
        tensor = torch.tensor([1.0 if hvd.rank() == 0 else 2.0**-10], dtype=dtype)
        expected = torch.tensor([1.0 + (hvd.size() - 1) * 2.0**-10]).to(dtype)
        assert equal(hvd.allreduce(tensor, op=hvd.Sum), expected)


def test_average_parameter_still_works_and_warns(hvd):
    inputs = all_values(hvd.size(), (4,), torch.float64)
    for average, expected in ((True, mean(inputs)), (False, total(inputs))):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            got = hvd.allreduce(inputs[hvd.rank()], average=average)
        assert torch.allclose(got, expected)
        assert [warning.category for warning in caught] == [DeprecationWarning]
        assert caught[0].filename == __file__


def test_handles_can_be_synchronized_in_any_order(hvd):
    tensors = [all_values(hvd.size(), (n + 1,), torch.float32, seed=n) for n in range(30)]
    start = range(30) if hvd.rank() % 2 == 0 else reversed(range(30))
    handles = {n: hvd.allreduce_async(tensors[n][hvd.rank()], op=hvd.Sum, name=f"any_order.{n}") for n in start}
    for n in sorted(handles, key=lambda n: (n * 7 + hvd.rank() * 11) % 30):
        assert equal(hvd.synchronize(handles[n]), total(tensors[n]))


def test_poll_becomes_true_and_synchronize_answers_once(hvd):
    if hvd.rank() == 0:  # holds its part back until all others have polled
        hvd.barrier()
    handle = hvd.allreduce_async(torch.ones(3), op=hvd.Sum, name="polled")
    assert isinstance(handle, int)
    if hvd.rank() > 0:
        assert hvd.poll(handle) is False
        hvd.barrier()
    deadline = time.monotonic() + 30
    while hvd.poll(handle) is not True:
        assert time.monotonic() < deadline
    assert equal(hvd.synchronize(handle), torch.full((3,), float(hvd.size())))
    assert hvd.synchronize(handle) is None
    assert hvd.synchronize(10**9) is None


def check_group(hvd, operation, inputs, expected, **options):
    """Check an operation on this rank's tensors of many types and shapes, of which ``inputs`` has all ranks'."""
    own = [tensors[hvd.rank()] for tensors in inputs]
    outputs = getattr(hvd, f"grouped_{operation}")(own, **options)
    later = hvd.synchronize(getattr(hvd, f"grouped_{operation}_async")(own, **options))
    assert isinstance(outputs, list)
    assert isinstance(later, tuple)
    for results in (outputs, later):
        assert len(results) == len(expected)
        assert all(map(equal, results, expected))


def test_groups_mix_types_and_shapes(hvd):
    kinds = list(itertools.product(REDUCIBLE, SHAPES))
    inputs = [all_values(hvd.size(), shape, dtype, seed=n) for n, (dtype, shape) in enumerate(kinds)]
    check_group(hvd, "allreduce", inputs, [*map(total, inputs)], op=hvd.Sum, name="group")
    kinds = list(itertools.product(MOVABLE, SHAPES[1:]))
    inputs = [
        [values(rank, (rank + n % 3, *shape[1:]), dtype, seed=n) for rank in range(hvd.size())]
        for n, (dtype, shape) in enumerate(kinds)
    ]
    check_group(hvd, "allgather", inputs, [*map(torch.cat, inputs)])
    kinds = [(dtype, (rows, 3)) for dtype, rows in itertools.product(REDUCIBLE, (1, 4, 6))]
    inputs = [all_values(hvd.size(), shape, dtype, seed=n) for n, (dtype, shape) in enumerate(kinds)]
    shares = [torch.tensor_split(total(tensors), hvd.size())[hvd.rank()] for tensors in inputs]
    check_group(hvd, "reducescatter", inputs, shares, op=hvd.Sum)


def test_grouped_allreduce_in_place(hvd):
    inputs = [all_values(hvd.size(), (n, 3), torch.float32, seed=n) for n in range(5)]
    own = [tensors[hvd.rank()].clone() for tensors in inputs]
    own[2] = own[2].t().contiguous().t()
    outputs = hvd.grouped_allreduce_(own, op=hvd.Sum)
    for output, tensor, tensors in zip(outputs, own, inputs, strict=True):
        assert output is tensor
        assert equal(tensor, total(tensors))


def test_allgather_joins_rows_of_every_type_and_dimension(hvd):
    for dtype, shape in itertools.product(MOVABLE, SHAPES[1:]):
        inputs = [values(rank, (rank + 1, *shape[1:]), dtype) for rank in range(hvd.size())]
        tensor = inputs[hvd.rank()].clone()
        assert equal(hvd.allgather(tensor), torch.cat(inputs)), (dtype, shape)
        assert equal(tensor, inputs[hvd.rank()])


def test_allgather_of_ranks_without_rows(hvd):
    for with_rows in (0, hvd.size() - 1):
        rows = 3 if hvd.rank() == with_rows else 0
        got = hvd.allgather(torch.full((rows, 2), 7.0))
        assert equal(got, torch.full((3, 2), 7.0))
    assert hvd.allgather(torch.empty(0, 4)).shape == (0, 4)


def test_a_tensor_that_is_twice_in_a_group_is_scaled_once(hvd):
    tensor = torch.full((5,), float(hvd.rank() + 1))
    hvd.grouped_allreduce_([tensor, tensor], op=hvd.Sum, prescale_factor=2.0)
    assert tensor.tolist() == [2.0 * sum(range(1, hvd.size() + 1))] * 5


def test_broadcast_gives_every_type_and_dimension_from_every_root(hvd):
    for dtype, shape in itertools.product(MOVABLE, SHAPES):
        inputs = all_values(hvd.size(), shape, dtype)
        for root in range(hvd.size()):
            tensor = inputs[hvd.rank()].clone()
            assert equal(hvd.broadcast(tensor, root), inputs[root]), (dtype, shape, root)
            assert equal(tensor, inputs[hvd.rank()])
            assert hvd.broadcast_(tensor, root_rank=root) is tensor
            assert equal(tensor, inputs[root]), (dtype, shape)


def test_broadcast_in_place_of_a_view(hvd):
    base = torch.full((4, 6), float(hvd.rank()))
    view = base.t()[::2]
    assert hvd.synchronize(hvd.broadcast_async_(view, 0)) is view
    assert equal(view, torch.zeros(3, 4))
    assert equal(base.t()[1::2], torch.full((3, 4), float(hvd.rank())))


def _row(sender: int, receiver: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return values(17 * sender + receiver, shape, dtype)


def test_inputs_that_nobody_holds_are_gone_while_results_wait(hvd):
    rows = torch.ones(hvd.size(), 3)
    for start in (
        hvd.allreduce_async,
        lambda tensor: hvd.grouped_allreduce_async([tensor, rows]),
        lambda tensor: hvd.broadcast_async(tensor, 0),
        hvd.allgather_async,
        hvd.reducescatter_async,
        hvd.alltoall_async,
    ):
        tensor = rows.clone()
        gone, handle = weakref.ref(tensor), start(tensor)
        del tensor
        assert gone() is None
        assert hvd.synchronize(handle) is not None


def test_alltoall_with_splits_of_every_type_and_dimension(hvd):
    size, rank = hvd.size(), hvd.rank()
    for dtype, shape in itertools.product(MOVABLE, SHAPES[1:]):
        # rank r sends r + q + 1 rows to rank q
        tensor = torch.cat([_row(rank, other, dtype, (rank + other + 1, *shape[1:])) for other in range(size)])
        splits = [rank + other + 1 for other in range(size)]
        before = tensor.clone()
        output, received = hvd.alltoall(tensor, splits=splits)
        expected = torch.cat([_row(other, rank, dtype, (rank + other + 1, *shape[1:])) for other in range(size)])
        assert equal(output, expected), (dtype, shape)
        assert equal(received, torch.tensor(splits, dtype=torch.int32))
        assert equal(tensor, before)


def test_alltoall_without_splits_gives_equal_shares(hvd):
    size, rank = hvd.size(), hvd.rank()
    tensor = torch.cat([_row(rank, other, torch.float32, (2, 3)) for other in range(size)])
    expected = torch.cat([_row(other, rank, torch.float32, (2, 3)) for other in range(size)])
    assert equal(hvd.alltoall(tensor), expected)
    for dtype in (torch.int32, torch.int64):  # received splits are like those given
        output, received = hvd.alltoall(tensor, splits=torch.full((size,), 2, dtype=dtype))
        assert equal(output, expected)
        assert equal(received, torch.full((size,), 2, dtype=dtype))


def test_alltoall_keeps_rows_that_no_split_covers(hvd):
    tensor = torch.arange(hvd.size() + 3).float()
    output, _ = hvd.alltoall(tensor, splits=[1] * hvd.size())
    assert equal(output, torch.full((hvd.size(),), float(hvd.rank())))


def test_reducescatter_gives_each_rank_its_rows(hvd):
    size, rank = hvd.size(), hvd.rank()
    for dtype, rows in itertools.product(REDUCIBLE, (size, 2 * size, 7, 1)):
        for shape in ((rows,), (rows, 3), (rows, 2, 2)):
            inputs = all_values(size, shape, dtype)
            tensor = inputs[rank].clone()
            expected = torch.tensor_split(total(inputs), size)[rank]
            assert equal(hvd.reducescatter(tensor, op=hvd.Sum), expected), (dtype, shape)
            assert equal(tensor, inputs[rank])
            average = hvd.reducescatter(tensor)
            expected = torch.tensor_split(mean(inputs), size)[rank]
            assert average.dtype == dtype
            assert torch.allclose(average.double(), expected.double(), rtol=1e-2), (dtype, shape)


def test_no_element_and_one_element_of_every_type(hvd):
    size, rank = hvd.size(), hvd.rank()
    for dtype, elements in itertools.product(MOVABLE, (0, 1)):
        inputs = all_values(size, (elements,), dtype)
        mine, expected = inputs[rank], []  # what was started, and what it must give

        def start(handle, result, expected=expected):
            expected.append((handle, result))

        if dtype in REDUCIBLE:
            for op, result in reductions(hvd, inputs):
                start(hvd.allreduce_async(mine, op=op), result)
                start(hvd.allreduce_async_(mine.clone(), op=op), result)
            start(hvd.grouped_allreduce_async([mine, mine.clone()], op=hvd.Sum), (total(inputs),) * 2)
            own = total(inputs)[:elements] if rank == 0 else mine[:0]
            start(hvd.reducescatter_async(mine, op=hvd.Sum), own)
            start(hvd.grouped_reducescatter_async([mine, mine], op=hvd.Sum), (own, own))
        start(hvd.allgather_async(mine), torch.cat(inputs))
        start(hvd.grouped_allgather_async([mine, mine]), (torch.cat(inputs),) * 2)
        for root in range(size):
            start(hvd.broadcast_async(mine, root), inputs[root])
            start(hvd.broadcast_async_(mine.clone(), root), inputs[root])
        splits = [elements if other == size - 1 else 0 for other in range(size)]
        received = torch.tensor([elements if rank == size - 1 else 0] * size, dtype=torch.int32)
        there = torch.cat(inputs) if rank == size - 1 else mine[:0]
        start(hvd.alltoall_async(mine, splits=splits), (there, received))
        for handle, result in reversed(expected):
            got = hvd.synchronize(handle)
            results, outputs = (result, got) if isinstance(result, tuple) else ((result,), (got,))
            assert len(outputs) == len(results)
            assert all(map(equal, outputs, results)), (dtype, elements, outputs, results)


def _overlapping(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Views of a flat tensor that share elements with each other, the last one even each element with itself."""
    square = tensor.view(-1, 4)
    return [tensor, tensor[:-5], tensor[5:], tensor, square, square.t(), tensor[::2], tensor[3:4].expand(9)]


def test_views_that_overlap_are_operations_of_their_own(hvd):
    size, rank = hvd.size(), hvd.rank()
    for elements, dtype in itertools.product((24, 20_000), (torch.float32, torch.bfloat16, torch.int64)):
        inputs = all_values(size, (elements,), dtype)
        tensor = inputs[rank].clone()
        views, of_ranks = _overlapping(tensor), list(zip(*map(_overlapping, inputs), strict=True))
        sums = [total(list(one)) for one in of_ranks]
        gathered = [torch.cat(one) for one in of_ranks]
        shares = [torch.tensor_split(one, size)[rank] for one in sums]
        reductions = [hvd.allreduce_async(view, op=hvd.Sum, prescale_factor=2.0) for view in views]
        gathers = [hvd.allgather_async(view) for view in views]
        scatters = [hvd.reducescatter_async(view, op=hvd.Sum) for view in views]
        grouped = hvd.grouped_allreduce_async(views, op=hvd.Sum)
        assert all(map(equal, hvd.synchronize(grouped), sums))
        assert all(map(equal, map(hvd.synchronize, scatters), shares))
        assert all(map(equal, map(hvd.synchronize, gathers), gathered))
        assert all(map(equal, map(hvd.synchronize, reductions), [2 * one for one in sums]))
        assert all(map(equal, hvd.grouped_allreduce(views, op=hvd.Sum, postscale_factor=2.0), [2 * s for s in sums]))
        assert all(map(equal, hvd.grouped_allgather(views), gathered))
        assert all(map(equal, hvd.grouped_reducescatter(views, op=hvd.Sum), shares))
        assert equal(tensor, inputs[rank])


@contextmanager
def _read_only(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The same in a file that is mapped for reading: whoever writes there is killed by a signal."""
    with tempfile.NamedTemporaryFile() as file, warnings.catch_warnings():
        file.write(tensor.flatten().view(torch.uint8).numpy().tobytes())
        file.flush()
        warnings.simplefilter("ignore", UserWarning)  # torch has no tensors that know that they are read-only
        memory = torch.from_numpy(np.memmap(file.name, dtype=np.uint8, mode="r"))
        yield memory.view(tensor.dtype).view(tensor.shape)


def _in_every_form(hvd, name: str, tensor: torch.Tensor, **options) -> list[torch.Tensor]:
    """What the forms of an operation give that leave their inputs alone."""
    group = [tensor, tensor[:0], tensor]
    return [
        getattr(hvd, name)(tensor, **options),
        hvd.synchronize(getattr(hvd, f"{name}_async")(tensor, **options)),
        *getattr(hvd, f"grouped_{name}")(group, **options)[::2],
        *hvd.synchronize(getattr(hvd, f"grouped_{name}_async")(group, **options))[::2],
    ]


def test_inputs_may_be_read_only(hvd):
    size, rank = hvd.size(), hvd.rank()
    for rows, dtype in itertools.product((12, 6_000), (torch.float32, torch.bfloat16, torch.int64)):
        inputs = all_values(size, (rows, 3), dtype)
        summed, gathered = total(inputs), torch.cat(inputs)
        share = torch.tensor_split(summed, size)[rank]
        rows_for_me = torch.cat([torch.tensor_split(one, size)[rank] for one in inputs])
        with _read_only(inputs[rank]) as tensor:
            for factor, factors in ((1, {}), (2, {"prescale_factor": 2.0}), (2, {"postscale_factor": 2.0})):
                for name, expected in (("allreduce", summed * factor), ("reducescatter", share * factor)):
                    results = _in_every_form(hvd, name, tensor, op=hvd.Sum, **factors)
                    assert all(equal(result, expected) for result in results), (name, factors)
            assert equal(hvd.allreduce(tensor, op=hvd.Sum, compression=hvd.Compression.fp16), summed)
            assert all(equal(result, gathered) for result in _in_every_form(hvd, "allgather", tensor))
            for root in range(size):
                assert equal(hvd.broadcast(tensor, root), inputs[root])
            assert equal(hvd.alltoall(tensor), rows_for_me)
            assert equal(hvd.alltoall(tensor, splits=[rows // size] * size)[0], rows_for_me)
            if dtype.is_floating_point and size & (size - 1) == 0:
                hvd.allreduce(tensor, op=hvd.Adasum)
            sparse = hvd.sparse_allreduce_async(_sparse(tensor), name="sparse.read_only", op=hvd.Sum)()
            assert equal(sparse.to_dense(), summed)
            assert equal(tensor, inputs[rank])


def _sparse(tensor: torch.Tensor) -> torch.Tensor:
    """All rows of a tensor, whose memory holds the values."""
    indices = torch.arange(tensor.shape[0]).unsqueeze(0)
    return torch.sparse_coo_tensor(indices, tensor, tensor.shape, is_coalesced=True)


def test_sparse_allreduce_adds_up_the_elements_of_all_ranks(hvd):
    for dtype in (torch.float32, torch.float64):
        dense = []
        for rank in range(hvd.size()):
            tensor = torch.zeros(10, 4, dtype=dtype)
            tensor[rank : rank + 3] = rank + 1
            dense.append(tensor)
        for op, expected in ((hvd.Sum, total(dense)), (hvd.Average, mean(dense))):
            for sparse_dimensions in (1, 2):
                sparse = dense[hvd.rank()].to_sparse(sparse_dimensions)
                result = hvd.sparse_allreduce_async(sparse, name=f"sparse.{sparse_dimensions}", op=op)()
                assert result.is_sparse
                assert torch.allclose(result.to_dense(), expected)
    dense = torch.zeros(6)
    nothing = hvd.sparse_allreduce_async(dense.to_sparse(), name="sparse.nothing", op=hvd.Average)()
    assert torch.equal(nothing.to_dense(), dense)
    dense[2] = 3.0 if hvd.rank() == 0 else 0.0
    result = hvd.sparse_allreduce_async(dense.to_sparse(), name="sparse.empty", op=hvd.Sum)()
    assert torch.equal(result.to_dense(), torch.tensor([0, 0, 3.0, 0, 0, 0]))


def test_fp16_compression_travels_in_half_and_comes_back_in_the_own_type(hvd):
    inputs = all_values(hvd.size(), (9, 2), torch.float64)
    tensor = inputs[hvd.rank()]
    assert equal(hvd.allreduce(tensor, op=hvd.Sum, compression=hvd.Compression.fp16), total(inputs))
    (got,) = hvd.grouped_allreduce([tensor], op=hvd.Sum, compression=hvd.Compression.fp16)
    assert equal(got, total(inputs))
    expected = torch.tensor_split(total(inputs), hvd.size())[hvd.rank()]
    assert equal(hvd.reducescatter(tensor, op=hvd.Sum, compression=hvd.Compression.fp16), expected)
    whole = torch.full((3,), 100_000)
    assert equal(hvd.allreduce(whole, op=hvd.Max, compression=hvd.Compression.fp16), whole)


def test_async_and_in_place_forms_take_tensors_that_require_grad(hvd):
    size = hvd.size()
    leaf = torch.ones(3, requires_grad=True)
    assert equal(hvd.synchronize(hvd.allreduce_async(leaf, op=hvd.Sum)), torch.full((3,), float(size)))
    hvd.allreduce_(leaf, op=hvd.Sum)
    assert equal(leaf.detach(), torch.full((3,), float(size)))
    assert leaf.requires_grad
    hvd.broadcast_(leaf, 0)
    assert hvd.synchronize(hvd.allgather_async(leaf)).shape == (3 * size,)


def test_join_lets_ranks_run_out_of_batches_at_different_times(hvd):
    size, rank = hvd.size(), hvd.rank()
    for step in range(rank + 1):
        contributors = size - step  # ranks 0 .. step - 1 have joined
        got = hvd.allreduce(torch.ones(4), op=hvd.Sum, name=f"uneven.{step}")
        assert equal(got, torch.full((4,), float(contributors))), step
    last = hvd.join()
    assert last == hvd.allreduce(torch.tensor(last), op=hvd.Max)
    assert 0 <= last < size
    if size > 1:
        assert last == size - 1


def test_average_counts_joined_ranks_with_zeros(hvd):
    if hvd.rank() != 0:
        got = hvd.allreduce(torch.full((2,), 6.0), name="average.while.one.joined")
        assert torch.allclose(got, torch.full((2,), 6.0 * (hvd.size() - 1) / hvd.size()))
    hvd.join()


def test_who_am_i(hvd):
    assert 0 <= hvd.rank() < hvd.size()
    assert hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))
    per_node = int(os.environ["RANKS_PER_NODE"])
    place = place_on_node(hvd.rank(), hvd.size(), per_node)
    assert (hvd.local_rank(), hvd.local_size()) == (place["LOCAL_RANK"], place["LOCAL_WORLD_SIZE"])
    if per_node == hvd.size():
        assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)
    assert hvd.is_initialized()
    assert hvd.is_homogeneous() is (hvd.size() % per_node == 0)
    # Horovod's engine goes with what connects the ranks.
    by_mpi = os.environ["HVDKIT_TRANSPORT"] != "torch" and "OMPI_COMM_WORLD_RANK" in os.environ
    assert (hvd.mpi_enabled(), hvd.gloo_enabled()) == (by_mpi, not by_mpi)
    assert hvd.mpi_built() or not hvd.mpi_enabled()
    if hvd.mpi_enabled():
        assert hvd.mpi_threads_supported() is True  # mpi4py asks for it, and Open MPI and MPICH have it
    else:
        with told(ValueError, "MPI is not enabled"):
            hvd.mpi_threads_supported()


def test_inference_mode(hvd):
    with torch.inference_mode():
        tensor = torch.ones(3)
        assert equal(hvd.allreduce(tensor, op=hvd.Sum), torch.full((3,), float(hvd.size())))
        assert equal(hvd.allreduce_(tensor, op=hvd.Max), torch.ones(3))
        assert equal(hvd.broadcast_(tensor.t(), 0), torch.ones(3))
    assert sorted(hvd.allgather(torch.tensor([hvd.rank()])).tolist()) == list(range(hvd.size()))


def test_operations_without_a_name_match_again_after_an_uneven_join(hvd):
    for _ in range(hvd.rank() + 1):
        hvd.allreduce(torch.ones(2))
    hvd.join()
    assert equal(hvd.allreduce(torch.ones(2), op=hvd.Sum), torch.full((2,), float(hvd.size())))
    assert equal(hvd.allgather(torch.ones(1)), torch.ones(hvd.size()))
