"""Operations on tensors of a GPU: each dtype and operator, in place and not, async, grouped, in a stream of the user's.

Values are whole numbers that every dtype holds exactly, so that results are compared bit by bit.
"""

from __future__ import annotations

from functools import reduce

import torch

from hvdkit.engine.session import runtime
from tests.gpu import card

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
SHAPE = (7, 33)
pytestmark = [*card.on_card(2), *card.on_card(4, thorough=True)]


def own(rank: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """A rank's tensor, of whole numbers from 1 to 3: sums and products of four ranks fit all dtypes."""
    numbers = torch.randint(1, 4, SHAPE, generator=torch.Generator().manual_seed(seed * 100 + rank))
    return numbers.to(card.DEVICE, dtype)


def everyones(hvd, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    return [own(rank, dtype, seed) for rank in range(hvd.size())]


def check(result: torch.Tensor, expected: torch.Tensor, what: object) -> None:
    assert result.device.type == card.DEVICE.type, (what, result.device)
    assert result.dtype == expected.dtype, (what, result.dtype)
    assert torch.equal(result, expected), (what, result, expected)


def test_allreduce_of_each_dtype_with_each_operator(hvd):
    on_tensors = {hvd.Sum: torch.add, hvd.Min: torch.minimum, hvd.Max: torch.maximum, hvd.Product: torch.mul}
    for dtype in (*FLOATS, *INTEGERS):
        for op, function in on_tensors.items():
            tensors = everyones(hvd, dtype)
            own_tensor, expected = tensors[hvd.rank()], reduce(function, tensors)
            check(hvd.allreduce(own_tensor, op=op, name=f"new.{dtype}.{op}"), expected, (dtype, op))
            check(own_tensor, own(hvd.rank(), dtype), "what was given stays")
            assert hvd.allreduce_(own_tensor, op=op, name=f"place.{dtype}.{op}") is own_tensor
            check(own_tensor, expected, (dtype, op))


def test_operations_go_the_way_that_is_tried(hvd):
    hvd.allreduce(torch.ones(3, device=card.DEVICE))
    collectives = any(runtime.engine().groups._device_collectives.values())
    assert collectives == (card.WAY == "nccl")


def test_averages_of_each_dtype(hvd):
    for dtype in FLOATS:
        tensors = [tensor * hvd.size() for tensor in everyones(hvd, dtype)]
        expected = reduce(torch.add, tensors) / hvd.size()
        check(hvd.allreduce(tensors[hvd.rank()], name=f"average.{dtype}"), expected, dtype)
        factors = {"prescale_factor": 0.5, "postscale_factor": 4.0}
        scaled = hvd.allreduce(tensors[hvd.rank()], op=hvd.Sum, name=f"scaled.{dtype}", **factors)
        check(scaled, 2 * reduce(torch.add, tensors), dtype)


def test_adasum_of_equal_tensors_is_that_tensor(hvd):
    for dtype in FLOATS:
        own_tensor = own(0, dtype)
        check(hvd.allreduce(own_tensor, op=hvd.Adasum, name=f"adasum.{dtype}"), own_tensor, dtype)


def test_broadcast_allgather_alltoall_and_reducescatter_of_each_dtype(hvd):
    size, rank = hvd.size(), hvd.rank()
    for dtype in (*FLOATS, *INTEGERS, torch.bool):
        tensors = everyones(hvd, dtype)
        check(hvd.broadcast(tensors[rank], size - 1, name=f"b.{dtype}"), tensors[size - 1], dtype)
        rows = [tensor[: 1 + number] for number, tensor in enumerate(tensors)]
        check(hvd.allgather(rows[rank], name=f"g.{dtype}"), torch.cat(rows), dtype)
        parts = [torch.full((size,), number, device=card.DEVICE).to(dtype) for number in range(size)]
        received = hvd.alltoall(parts[rank], name=f"a.{dtype}")
        check(received, torch.arange(size, device=card.DEVICE).to(dtype), dtype)
        if dtype is not torch.bool:
            total = reduce(torch.add, tensors)
            own_tensor = torch.tensor_split(total, size)[rank]
            check(hvd.reducescatter(tensors[rank], op=hvd.Sum, name=f"r.{dtype}"), own_tensor, dtype)


def test_grouped_operations(hvd):
    several = [everyones(hvd, dtype, seed) for seed, dtype in enumerate((*FLOATS, torch.int64, torch.float32))]
    own_tensors = [tensors[hvd.rank()] for tensors in several]
    sums = [reduce(torch.add, tensors) for tensors in several]
    for name, results, expected in (
        ("grouped", hvd.grouped_allreduce(own_tensors, op=hvd.Sum, name="grouped"), sums),
        ("gathered", hvd.grouped_allgather(own_tensors, name="gathered"), [torch.cat(tensors) for tensors in several]),
        ("in place", hvd.grouped_allreduce_(own_tensors, op=hvd.Sum, name="in place"), sums),
        ("in place", own_tensors, sums),
    ):
        for result, wanted in zip(results, expected, strict=True):
            check(result, wanted, name)


def test_many_at_once_in_an_order_of_each_ranks_own(hvd):
    order = list(range(40)) if hvd.rank() % 2 else list(reversed(range(40)))
    handles = {}
    for number in order:
        tensor = torch.full((100 + number,), float(number + hvd.rank()), device=card.DEVICE)
        handles[number] = hvd.allreduce_async_(tensor, op=hvd.Sum, name=f"many.{number}")
    for number in reversed(order):
        total = hvd.size() * number + sum(range(hvd.size()))
        check(hvd.synchronize(handles[number]), torch.full((100 + number,), float(total), device=card.DEVICE), number)


def test_work_before_and_after_in_a_stream_of_the_users_own(hvd):
    total = float(sum(range(1, hvd.size() + 1)))
    for turn in range(5):
        with card.own_stream():
            tensor = torch.zeros(100_000, device=card.DEVICE)
            card.keep_busy()
            tensor.fill_(hvd.rank() + 1.0)  # behind the work above
            handle = hvd.allreduce_async_(tensor, op=hvd.Sum, name=f"stream.{turn}")
            hvd.synchronize(handle)
            tensor.mul_(2)
            gathered = hvd.allgather(tensor[:1] + turn, name=f"gathered.{turn}")
            result = tensor.clone()
        assert result.eq(2 * total).all()
        assert gathered.tolist() == [2 * total + turn] * hvd.size()


def test_tensors_that_are_no_block_of_memory(hvd):
    tensors = everyones(hvd, torch.float32)
    total = reduce(torch.add, tensors)
    own_tensor = tensors[hvd.rank()]
    check(hvd.allreduce(own_tensor.t(), op=hvd.Sum, name="transposed"), total.t(), "transposed")
    check(hvd.allreduce(own_tensor[:, ::2], op=hvd.Sum, name="every second"), total[:, ::2], "every second")
    hvd.allreduce_(own_tensor.t(), op=hvd.Sum, name="transposed in place")
    check(own_tensor, total, "transposed in place")


def test_gradients_of_operations(hvd):
    own_tensor = own(hvd.rank(), torch.float32).requires_grad_()
    hvd.allreduce(own_tensor, op=hvd.Sum, name="with a gradient").mul(hvd.rank() + 1.0).sum().backward()
    check(own_tensor.grad, torch.full(SHAPE, float(sum(range(1, hvd.size() + 1))), device=card.DEVICE), "gradient")


def test_a_rank_that_joined_gives_zeros(hvd):
    if hvd.rank() == 0:
        alone = torch.ones(1000, device=card.DEVICE)
        check(hvd.allreduce(alone, op=hvd.Sum, name="alone"), torch.ones(1000, device=card.DEVICE), "alone")
    hvd.join()


def test_init_again(hvd):
    for _ in range(2):
        hvd.shutdown()
        hvd.init()
        result = hvd.allreduce(torch.ones(1000, device=card.DEVICE), op=hvd.Sum)
        check(result, torch.full((1000,), float(hvd.size()), device=card.DEVICE), "after init again")
