"""Every collective of torch.distributed does what its documentation says, and hvdkit runs all but a closed list."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hvdkit.engine.ordered.within_node import NodeRunner
from tests.on_ranks import on_ranks
from tests.ranks import Skip
from tests.told import told
from tests.torch.distributed import ranks

pytestmark = [
    on_ranks((2, "torch"), (3, "torch"), runner=ranks.RUNNER),
    on_ranks((1, "torch"), thorough=True, runner=ranks.RUNNER),
    on_ranks((3, "torch"), thorough=True, runner=ranks.RUNNER, name="apart", HVDKIT_NODE_MEMORY="0"),
    on_ranks((4, "torch"), per_node=2, runner=ranks.RUNNER, name="two nodes"),
    on_ranks((2, "torch"), thorough=True, runner=ranks.RUNNER, name="without arena", HVDKIT_ARENA="0"),
]

NODE_MEMORY = os.environ.get("HVDKIT_NODE_MEMORY") != "0"
SMALL, LARGE = 5, 300_001  # elements: published at a turn, and in chunks
DTYPES = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.int8, torch.int16, torch.int32,
    torch.int64,
)  # fmt: skip
SUM, AVG, PRODUCT, MIN, MAX = (getattr(dist.ReduceOp, name) for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX"))


def values(rank: int, elements: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return whole numbers, so that sums are exact."""
    return ((torch.arange(elements) * 7 + 3 * rank) % 11 + 1).to(dtype)


def of_all(elements: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [values(rank, elements, dtype) for rank in range(dist.get_world_size())]


def reduced(tensors: list[Tensor], op: Any) -> Tensor:
    stacked = torch.stack(tensors)
    if op == AVG:
        return stacked.sum(0) / len(tensors)
    return {SUM: stacked.sum, PRODUCT: stacked.prod, MIN: stacked.amin, MAX: stacked.amax}[op](0).to(stacked.dtype)


def check(result: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(result, expected, rtol=0, atol=0)


def asynchronous(call: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    """Call with ``async_op``, and wait."""
    work = call(*arguments, async_op=True, **options)
    work.wait()
    assert work.is_completed()
    assert work.exception() is None


def small_and_large(test: Callable[[Any, int], None]) -> Callable[[Any], None]:
    """Return a test that checks both sizes of tensors."""

    def run(hvd: Any) -> None:
        for elements in (SMALL, LARGE):
            test(hvd, elements)

    return run


def both(call: Callable[..., Any]) -> list[Callable[..., Any]]:
    return [call, lambda *arguments, **options: asynchronous(call, *arguments, **options)]


@small_and_large
def test_all_reduce(hvd: Any, elements: int) -> None:
    for call in both(dist.all_reduce):
        for dtype in DTYPES:
            for op in (SUM, MIN, MAX):
                tensor = values(dist.get_rank(), elements, dtype)
                call(tensor, op=op)
                check(tensor, reduced(of_all(elements, dtype), op))
        for op in (AVG, PRODUCT):
            tensor = values(dist.get_rank(), elements, torch.float64)
            call(tensor, op=op)
            check(tensor, reduced(of_all(elements, torch.float64), op))


def test_all_reduce_of_complex_and_boolean_and_multiplied_numbers(hvd: Any) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = torch.complex(values(rank, 9), -values(rank, 9))
    dist.all_reduce(tensor)
    total = reduced(of_all(9), SUM)
    check(tensor, torch.complex(total, -total))
    flags = torch.tensor([True, rank == 0, False])
    dist.all_reduce(flags, op=MAX)
    assert flags.tolist() == [True, True, False]
    tensor = values(rank, 9)
    dist.all_reduce(tensor, op=dist._make_nccl_premul_sum(0.5))
    check(tensor, 0.5 * total)
    output = torch.empty(3)
    dist.reduce_scatter_tensor(output, torch.ones(3 * size), op=dist._make_nccl_premul_sum(2.0))
    check(output, torch.full((3,), 2.0 * size))


def test_a_product_minimum_or_maximum_of_complex_numbers_is_refused(hvd: Any) -> None:
    size, numbers = dist.get_world_size(), torch.ones(2 * dist.get_world_size(), dtype=torch.complex64)
    for op in (PRODUCT, MIN, MAX):
        with told(ValueError, "reduce: expected a sum or an average of complex tensors"):
            dist.reduce(numbers, 0, op=op)
        with told(ValueError, "reduce_scatter_tensor: expected a sum or an average of complex tensors"):
            dist.reduce_scatter_tensor(torch.empty(2, dtype=torch.complex64), numbers, op=op)
    dist.reduce_scatter_tensor(output := torch.empty(2, dtype=torch.complex64), numbers * 1j)
    check(output, torch.full((2,), size * 1j))


def test_a_closed_list_goes_to_gloo_and_all_else_to_hvdkit(hvd: Any) -> None:
    from hvdkit.torch.distributed.inner import COUNTS

    rank, size = dist.get_rank(), dist.get_world_size()
    before = COUNTS.copy()
    for op, expected in (("BAND", 0), ("BOR", 2**size - 1), ("BXOR", 2**size - 1)):
        tensor = torch.tensor([1 << rank] if size > 1 else [0 if op == "BAND" else 1])
        dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op))
        assert tensor.item() == expected
    sparse = torch.sparse_coo_tensor([[rank]], [1.0], (size,))
    dist.all_reduce(sparse)
    check(sparse.to_dense(), torch.ones(size))
    assert COUNTS - before == {("allreduce", "gloo"): 4}
    dist.all_reduce(torch.ones(3))
    assert COUNTS - before == {("allreduce", "gloo"): 4, ("allreduce", "hvdkit"): 1}


@small_and_large
def test_reduce_broadcast_gather_and_scatter(hvd: Any, elements: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for root in range(size):
        for call in both(dist.reduce):
            tensor = values(rank, elements)
            call(tensor, root)
            check(tensor, reduced(of_all(elements), SUM) if rank == root else values(rank, elements))
        for call in both(dist.broadcast):
            tensor = values(rank, elements, torch.int16)
            call(tensor, root)
            check(tensor, values(root, elements, torch.int16))
        for call in both(dist.gather):
            outputs = [torch.empty(elements) for _ in range(size)] if rank == root else None
            call(values(rank, elements), outputs, dst=root)
            for output, expected in zip(outputs or [], of_all(elements), strict=False):
                check(output, expected)
        for call in both(dist.scatter):
            output = torch.empty(elements)
            call(output, of_all(elements) if rank == root else None, src=root)
            check(output, values(rank, elements))


def test_a_broadcast_of_many_megabytes_goes_by_way_of_the_nodes(hvd: Any) -> None:
    for root in range(dist.get_world_size()):
        tensor = values(dist.get_rank(), 1_500_001)
        dist.broadcast(tensor, root)
        check(tensor, values(root, 1_500_001))


@small_and_large
def test_all_gather_and_reduce_scatter_in_both_generations_of_names(hvd: Any, elements: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for call in both(dist.all_gather):
        outputs = [torch.empty(elements) for _ in range(size)]
        call(outputs, values(rank, elements))
        for output, expected in zip(outputs, of_all(elements), strict=True):
            check(output, expected)
    for name in ("all_gather_into_tensor", "all_gather_single"):
        for call in both(getattr(dist, name)):
            output = torch.empty(size, elements, dtype=torch.float64)
            call(output, values(rank, elements, torch.float64))
            check(output, torch.stack(of_all(elements, torch.float64)))
    whole = [torch.cat([values(rank + other, elements) for rank in range(size)]) for other in range(size)]
    for name in ("reduce_scatter_tensor", "reduce_scatter_single"):
        for call in both(getattr(dist, name)):
            for op in (SUM, MAX):
                output = torch.empty(elements)
                call(output, whole[rank].clone(), op=op)
                check(output, reduced(whole, op).view(size, elements)[rank])
    for call in both(dist.reduce_scatter):
        output = torch.empty(elements)
        call(output, list(whole[rank].clone().chunk(size)))
        check(output, reduced(whole, SUM).view(size, elements)[rank])


def test_ranks_may_have_parts_of_other_sizes(hvd: Any) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    outputs = [torch.empty(2 * other + 1) for other in range(size)]
    dist.all_gather(outputs, values(rank, 2 * rank + 1))
    for other, output in enumerate(outputs):
        check(output, values(other, 2 * other + 1))
    output = torch.empty(rank + 1)
    dist.reduce_scatter(output, [values(rank, other + 1) for other in range(size)])
    check(output, reduced([values(other, rank + 1) for other in range(size)], SUM))
    # Rank r sends r + p rows to rank p.
    rows = [torch.full((rank + other, 3), 10.0 * rank + other) for other in range(size)]
    output = torch.empty(sum(other + rank for other in range(size)), 3)
    dist.all_to_all_single(output, torch.cat(rows), [other + rank for other in range(size)], [len(row) for row in rows])
    check(output, torch.cat([torch.full((other + rank, 3), 10.0 * other + rank) for other in range(size)]))
    outputs = [torch.empty(other + rank, 3) for other in range(size)]
    dist.all_to_all(outputs, rows)
    for other, output in enumerate(outputs):
        check(output, torch.full((other + rank, 3), 10.0 * other + rank))


@small_and_large
def test_all_to_all_single(hvd: Any, elements: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for call in both(dist.all_to_all_single):
        output = torch.empty(size, elements, dtype=torch.int32)
        call(output, torch.stack([values(rank + 5 * other, elements, torch.int32) for other in range(size)]))
        check(output, torch.stack([values(other + 5 * rank, elements, torch.int32) for other in range(size)]))


def test_tensors_that_are_not_contiguous(hvd: Any) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = (torch.arange(6.0).view(2, 3) + rank).T
    dist.all_reduce(tensor)
    check(tensor, size * torch.arange(6.0).view(2, 3).T + sum(range(size)))
    column = torch.zeros(3, 2)
    column[:, 1] = rank
    dist.broadcast(column[:, 1], size - 1)
    check(column, torch.tensor([[0.0, size - 1]] * 3))
    outputs = [torch.empty(2, 3).T for _ in range(size)]
    dist.all_gather(outputs, (torch.arange(6.0).view(2, 3) + rank).T)
    for other, output in enumerate(outputs):
        check(output, (torch.arange(6.0).view(2, 3) + other).T)


def test_empty_tensors_and_scalars(hvd: Any) -> None:
    size = dist.get_world_size()
    empty, scalar = torch.empty(0), torch.tensor(1.0)
    dist.all_reduce(empty)
    dist.broadcast(empty, 0)
    dist.all_gather_into_tensor(torch.empty(0), empty)
    dist.all_reduce(scalar)
    assert scalar.item() == size


def test_operations_that_are_started_together_end_in_order(hvd: Any) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    tensors = [values(rank + number, LARGE if number % 3 == 0 else SMALL) for number in range(12)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    works[-1].wait()
    assert all(work.is_completed() for work in works)
    for number, tensor in enumerate(tensors):
        check(tensor, reduced([values(other + number, len(tensor)) for other in range(size)], SUM))


def test_a_future_completes_without_a_caller_that_waits(hvd: Any) -> None:
    size, tensor, seen = dist.get_world_size(), torch.ones(LARGE), []
    future = dist.all_reduce(tensor, async_op=True).get_future().then(lambda future: seen.append(future.value()[0]))
    future.wait()  # in C++, which drives nothing
    check(seen[0], torch.full((LARGE,), float(size)))


def test_a_callback_may_wait_for_another_operation(hvd: Any) -> None:
    """PowerSGD's hook does so."""
    size = dist.get_world_size()

    def reduce_again(future: Any) -> Tensor:
        (tensor,) = future.value()
        dist.all_reduce(tensor, async_op=True).get_future().wait()
        dist.all_reduce(tensor)
        return tensor

    for elements in (SMALL, LARGE):
        future = dist.all_reduce(torch.ones(elements), async_op=True).get_future()
        check(future.then(reduce_again).wait(), torch.full((elements,), float(size) ** 3))


@small_and_large
def test_inputs_that_overlap_outputs(hvd: Any, elements: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = torch.cat([values(rank + 5 * other, elements) for other in range(size)])
    dist.all_to_all_single(tensor, tensor)
    check(tensor, torch.cat([values(other + 5 * rank, elements) for other in range(size)]))
    whole = [torch.cat([values(rank + other, elements) for rank in range(size)]) for other in range(size)]
    tensor = whole[rank].clone()
    dist.reduce_scatter_tensor(tensor[:elements], tensor)
    check(tensor[:elements], reduced(whole, SUM).view(size, elements)[rank])
    output = torch.empty(size, elements)
    output[rank] = values(rank, elements)
    dist.all_gather_into_tensor(output, output[rank])
    check(output, torch.stack(of_all(elements)))


@small_and_large
def test_tensors_of_inference_mode(hvd: Any, elements: int) -> None:
    with torch.inference_mode():
        outputs = [torch.empty(elements) for _ in range(dist.get_world_size())]
        dist.all_gather(outputs, values(dist.get_rank(), elements), async_op=True).wait()
        for output, expected in zip(outputs, of_all(elements), strict=True):
            check(output, expected)


def test_coalesced_operations(hvd: Any) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    tensors = [values(rank, SMALL), values(rank, LARGE)]
    dist.all_reduce_coalesced(tensors)
    for tensor in tensors:
        check(tensor, reduced(of_all(len(tensor)), SUM))
    with dist._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor, op=MAX)
    for tensor in tensors:
        check(tensor, reduced(of_all(len(tensor)), SUM))
    outputs = [torch.empty(size * SMALL), torch.empty(size * LARGE)]
    with dist._coalescing_manager():
        for output, elements in zip(outputs, (SMALL, LARGE), strict=True):
            dist.all_gather_into_tensor(output, values(rank, elements))
    for output, elements in zip(outputs, (SMALL, LARGE), strict=True):
        check(output, torch.cat(of_all(elements)))


def test_functional_collectives(hvd: Any) -> None:
    import torch.distributed._functional_collectives as functional

    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    for elements in (SMALL, LARGE):
        check(functional.all_reduce(values(rank, elements), "sum", group), reduced(of_all(elements), SUM))
        check(functional.all_gather_tensor(values(rank, elements), 0, group), torch.cat(of_all(elements)))
        part = functional.reduce_scatter_tensor(torch.cat(of_all(elements)), "sum", 0, group)
        check(part, size * values(rank, elements))
        check(functional.broadcast(values(rank, elements), size - 1, group), values(size - 1, elements))
        exchanged = functional.all_to_all_single(torch.cat(of_all(elements)), None, None, group)
        check(exchanged, torch.cat([values(rank, elements)] * size))
        output = torch.empty(size * elements)
        output = torch.ops._c10d_functional.all_gather_into_tensor_out(
            values(rank, elements), size, group.group_name, out=output
        )
        check(torch.ops._c10d_functional.wait_tensor(output), torch.cat(of_all(elements)))
    several = functional.all_reduce_coalesced([values(rank, SMALL), values(rank, LARGE)], "avg", group)
    for tensor in several:
        check(tensor, reduced(of_all(len(tensor)), AVG))


def test_objects(hvd: Any) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, {"rank": rank, "text": "x" * rank})
    assert gathered == [{"rank": other, "text": "x" * other} for other in range(size)]
    objects = ["a", {"b": 2}] if rank == 0 else [None, None]
    dist.broadcast_object_list(objects)
    assert objects == ["a", {"b": 2}]
    output: list[Any] = [None]
    dist.scatter_object_list(output, [f"for {other}" for other in range(size)] if rank == 0 else None)
    assert output == [f"for {rank}"]
    collected: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object(rank, collected)
    assert collected == (list(range(size)) if rank == 0 else None)


def test_messages(hvd: Any) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1:
        raise Skip("needs two ranks")
    right, left = (rank + 1) % size, (rank - 1) % size
    for elements in (SMALL, LARGE):
        into = torch.empty(elements)
        works = [dist.isend(values(rank, elements), right, tag=3), dist.irecv(into, left, tag=3)]
        for work in works:
            work.wait()
        check(into, values(left, elements))
        # Tags tell messages apart, in whatever order they are received.
        sends = [dist.isend(values(10 * tag + rank, elements), right, tag=tag) for tag in (1, 2)]
        for tag in (2, 1):
            assert dist.recv(into, left, tag=tag) == left
            check(into, values(10 * tag + left, elements))
        for work in sends:
            work.wait()
        operations = [dist.P2POp(dist.isend, values(rank, elements), left), dist.P2POp(dist.irecv, into, right)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        check(into, values(right, elements))


def test_a_receive_from_any_rank_tells_its_source(hvd: Any) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1:
        raise Skip("needs two ranks")
    for elements in (SMALL, LARGE):
        if rank == 0:
            sources = set()
            for _ in range(size - 1):
                into = torch.empty(elements)
                source = dist.recv(into)
                check(into, values(source, elements))
                sources.add(source)
            assert sources == set(range(1, size))
        else:
            dist.send(values(rank, elements), 0)
        dist.barrier()
    objects: list[Any] = [None]
    if rank == 1:
        dist.send_object_list(["text", 1], 0)
    elif rank == 0:
        objects = [None, None]
        dist.recv_object_list(objects, 1)
        assert objects == ["text", 1]


def test_messages_and_collectives_do_not_wait_for_each_other(hvd: Any) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1:
        raise Skip("needs two ranks")
    tensor, message = torch.ones(LARGE), values(rank, 4 * LARGE)
    # Rank 0 sends before the collective, rank 1 receives after it; and the other way.
    if rank == 0:
        work = dist.isend(message, 1)
        dist.all_reduce(tensor)
        work.wait()
        dist.recv(message, 1)
    else:
        dist.all_reduce(tensor)
        if rank == 1:
            into = torch.empty_like(message)
            dist.recv(into, 0)
            check(into, values(0, 4 * LARGE))
            dist.send(values(1, 4 * LARGE), 0)
    check(tensor, torch.full((LARGE,), float(size)))
    if rank == 0:
        check(message, values(1, 4 * LARGE))


def test_groups_of_some_ranks(hvd: Any) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    pairs = [(first, second) for first in range(size) for second in range(first + 1, size)]
    groups = {pair: dist.new_group(list(pair)) for pair in pairs}
    for _ in range(3):
        works = []
        for pair, group in groups.items():
            if rank in pair:
                tensor = values(rank, LARGE)
                works.append((pair, tensor, dist.all_reduce(tensor, group=group, async_op=True)))
        for pair, tensor, work in reversed(works):
            work.wait()
            check(tensor, values(pair[0], LARGE) + values(pair[1], LARGE))
    for pair, group in groups.items():
        if rank in pair:
            tensor = values(rank, SMALL)
            dist.broadcast(tensor, pair[1], group=group)
            check(tensor, values(pair[1], SMALL))
            assert dist.get_world_size(group) == 2
            dist.destroy_process_group(group)
    tensor = torch.ones(SMALL)
    dist.all_reduce(tensor)
    check(tensor, torch.full((SMALL,), float(size)))


def test_an_operation_in_the_arena_is_over_when_all_ranks_are_through(hvd: Any) -> None:
    memory = dist.group.WORLD._get_backend(torch.device("cpu"))
    if not memory.supports_tensor_alloc(torch.device("cpu")):
        raise Skip("there is no arena")
    rank, size, run_in_place = dist.get_rank(), dist.get_world_size(), NodeRunner._run_in_place
    in_place = []

    def slowly(*arguments: Any) -> None:
        in_place.append(arguments)
        if rank == size - 1:
            time.sleep(0.5)
        run_in_place(*arguments)

    NodeRunner._run_in_place = slowly  # type: ignore[method-assign]
    try:
        tensor = memory.allocate_tensor(LARGE, dtype=torch.float32, device=torch.device("cpu"))
        tensor.copy_(values(rank, LARGE))
        dist.all_reduce(tensor)
        check(tensor, reduced(of_all(LARGE), SUM))
        # What this rank writes into its memory now must not reach the slow one.
        tensor.copy_(values(rank, LARGE))
        output = torch.empty(size * LARGE)
        dist.all_gather_into_tensor(output, tensor)
        tensor.zero_()
        check(output, torch.cat(of_all(LARGE)))
    finally:
        NodeRunner._run_in_place = run_in_place  # type: ignore[method-assign]
    one_node = os.environ.get("LOCAL_WORLD_SIZE") == str(size)
    assert len(in_place) == (2 if size > 1 and NODE_MEMORY and one_node else 0)


def test_barriers(hvd: Any) -> None:
    dist.barrier()
    dist.barrier(async_op=True).wait()
    dist.group.WORLD.barrier().wait()
    for _ in range(3):
        dist.group.WORLD.monitored_barrier()
        dist.group.WORLD.monitored_barrier(timedelta(seconds=30), wait_all_ranks=True)
    assert dist.get_backend() == "hvdkit"


def test_arguments_that_cannot_be_are_errors_of_this_rank_alone(hvd: Any) -> None:
    size = dist.get_world_size()
    with told(ValueError, "all_gather_into_tensor", f"{size} times"):
        dist.all_gather_into_tensor(torch.empty(size * 3 + 1), torch.ones(3))
    with told(ValueError, "reduce_scatter_tensor"):
        dist.reduce_scatter_tensor(torch.empty(2), torch.ones(2 * size + 1))
    with told(ValueError, "boolean"):
        dist.all_reduce(torch.ones(LARGE, dtype=torch.bool), op=AVG)
    with told(TypeError, "float64"):
        dist.all_gather_into_tensor(torch.empty(size * 3, dtype=torch.float64), torch.ones(3))
    if size > 1:
        with told(ValueError, "all_to_all_single", "no multiple"):
            dist.all_to_all_single(torch.empty(size + 1), torch.empty(size + 1))
        with told(ValueError, "input_split_sizes"):
            dist.all_to_all_single(torch.empty(size), torch.empty(size), [1] * size, [2] * size)
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    check(tensor, torch.full((2,), float(size)))


def test_calls_on_one_tensor_run_one_after_the_other(hvd: Any) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for elements in (1000, 300_000):
        tensor, others = torch.full((elements,), rank + 1.0), [torch.ones(elements) for _ in range(6)]
        works = []
        for other in others:
            works += [dist.all_reduce(tensor, async_op=True), dist.all_reduce(other, async_op=True)]
        works += [dist.broadcast(tensor, size - 1, async_op=True), dist.reduce(tensor, 0, async_op=True)]
        for work in works:
            work.wait()
        total = size * (size + 1) / 2 * size**5
        assert rank > 0 or torch.equal(tensor, torch.full((elements,), total * size))
        assert all(torch.equal(other, torch.full((elements,), float(size))) for other in others)


def test_a_large_tensor_travels_in_pieces(hvd: Any) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    values = (torch.arange(9_000_000) % 1000.0).view(3000, 3000)
    for tensor in (values + rank, (values + rank).t().contiguous().t()):
        dist.all_reduce(tensor)
        assert torch.equal(tensor, values * size + size * (size - 1) / 2)
