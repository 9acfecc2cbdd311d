"""What an average is, to the last bit, and whether all ranks have the same bits where one flushes subnormal numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.on_ranks import on_ranks
from tests.ranks import Skip
from tests.scale_factors import BOTH, PRODUCTS
from tests.torch.optimizer_support import distributed_sgd, gradients, update

pytestmark = [
    on_ranks(2, 3),
    on_ranks((3, "torch"), name="no memory", HVDKIT_NODE_MEMORY="0"),
    on_ranks((3, "torch"), name="two nodes", per_node=2),
]

ELEMENTS = (5, 4097, 300_001)  # reduced whole by every rank of a node, by shares, and in several chunks
TINY = 1e-40  # below the smallest normal float32


def normal(rank: int, elements: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(rank), dtype=dtype)


def test_an_average_is_the_sum_divided(hvd: Any) -> None:
    for dtype in (torch.float32, torch.float64):
        for elements in ELEMENTS:
            mine = normal(hvd.rank(), elements, dtype)
            expected = hvd.allreduce(mine, op=hvd.Sum) / hvd.size()
            assert torch.equal(hvd.allreduce(mine), expected), (dtype, elements)
            assert torch.equal(hvd.allreduce_(mine.clone()), expected), (dtype, elements)
            for grouped in hvd.grouped_allreduce([mine, mine.clone()]):
                assert torch.equal(grouped, expected), (dtype, elements)
            own = hvd.reducescatter(mine, op=hvd.Sum) / hvd.size()
            assert torch.equal(hvd.reducescatter(mine), own), (dtype, elements)


def test_gradients_are_averaged_so_too(hvd: Any) -> None:
    for predivide in (1.0, 3.0):
        net = nn.ParameterList([torch.zeros(5000)])
        optimizer = distributed_sgd(hvd, net, gradient_predivide_factor=predivide)
        mine = normal(hvd.rank(), 5000)
        (net[0] * mine).sum().backward()
        optimizer.synchronize()
        if predivide == 1.0:
            expected = hvd.allreduce(mine, op=hvd.Sum) / hvd.size()
        else:
            expected = hvd.allreduce(mine * (1 / predivide), op=hvd.Sum) * (predivide / hvd.size())
        assert torch.equal(net[0].grad, expected), predivide
        update(optimizer)


def test_large_gradients_are_cut_alike_on_hosts_of_other_sizes(hvd: Any) -> None:
    shapes = [(600, 701), (7,), (512, 512), (3, 5), (700, 600)]  # some of more than a MiB
    for compression in (hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.topk(ratio=0.9)):
        net = nn.ParameterList([torch.zeros(shape) for shape in shapes])
        optimizer = distributed_sgd(hvd, net, compression=compression, op=hvd.Sum)
        for step in range(3):
            factors = [torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(step)) for shape in shapes]
            loss = sum((one * factor * (hvd.rank() + 1)).sum() for one, factor in zip(net, factors, strict=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.synchronize()
            times = hvd.size() * (hvd.size() + 1) // 2
            for one, factor in zip(net, factors, strict=True):
                assert torch.equal(one.grad, (factor * times).float())


def reductions(hvd: Any, tensor: torch.Tensor, **options: Any) -> dict[str, torch.Tensor]:
    """The reduction of a tensor by each operation that takes factors, all of its elements."""
    own = tensor.clone()
    results = {
        "allreduce": hvd.allreduce(tensor, **options),
        "allreduce_": hvd.allreduce_(tensor.clone(), **options),
        "allreduce_async": hvd.synchronize(hvd.allreduce_async(tensor, **options)),
        "allreduce_async_": hvd.synchronize(hvd.allreduce_async_(tensor.clone(), **options)),
        "grouped_allreduce": hvd.grouped_allreduce([tensor, tensor[:2]], **options)[0],
        "grouped_allreduce_": hvd.grouped_allreduce_([tensor.clone(), tensor[:2].clone()], **options)[0],
        "reducescatter": hvd.allgather(hvd.reducescatter(tensor, **options)),
        "grouped_reducescatter": hvd.allgather(hvd.grouped_reducescatter([tensor[:2], tensor], **options)[1]),
    }
    assert torch.equal(tensor, own)
    return results


def check_reductions(hvd: Any, mine: float, expected: float, dtype: torch.dtype, elements: int, **options: Any) -> None:
    for name, result in reductions(hvd, torch.full((elements,), mine, dtype=dtype), **options).items():
        wanted = torch.full((elements,), expected, dtype=dtype)
        assert torch.equal(result, wanted), (name, dtype, mine, options, result[0].item(), expected)


def test_a_factor_has_horovods_rounding(hvd: Any) -> None:
    size, is_first = hvd.size(), hvd.rank() == 0
    for name, rows in PRODUCTS.items():
        dtype = getattr(torch, name)
        for number, (element, factor, product) in enumerate(rows):
            elements = 300_001 if number == 0 and dtype.itemsize > 2 else 7
            # One rank has the element, so that the sum is the element whatever the number of ranks.
            for options in ({"prescale_factor": factor}, {"postscale_factor": factor}):
                check_reductions(hvd, element if is_first else 0, product, dtype, elements, op=hvd.Sum, **options)
            if dtype.is_floating_point and size & (size - 1) == 0:
                check_reductions(
                    hvd, element if is_first else 0, product / size, dtype, 7, op=hvd.Average, postscale_factor=factor
                )
            # All ranks have it. Horovod's own bound for floats on up to three ranks is none, too.
            if size <= 3 and abs(product * size) <= 100:
                check_reductions(hvd, element, product * size, dtype, 7, op=hvd.Sum, prescale_factor=factor)
                if size < 3 or not dtype.is_floating_point:
                    check_reductions(hvd, element, product, dtype, 7, op=hvd.Average, prescale_factor=factor)


def test_factors_before_and_after_are_rounded_one_after_the_other(hvd: Any) -> None:
    for name, (element, before, after, result) in BOTH.items():
        for elements in (7, 5000):
            mine = element if hvd.rank() == 0 else 0
            factors = {"prescale_factor": before, "postscale_factor": after}
            check_reductions(hvd, mine, result, getattr(torch, name), elements, op=hvd.Sum, **factors)


def test_averages_of_64_bits_are_exact(hvd: Any) -> None:
    each = 2**60 + 1  # no double
    assert hvd.allreduce(torch.tensor([each, -each])).tolist() == [each, -each]
    mixed = hvd.allreduce(torch.tensor([each if hvd.rank() == 0 else -1]))
    assert mixed.tolist() == [(each - (hvd.size() - 1)) // hvd.size()]


def test_a_sparse_average_is_the_sum_divided(hvd: Any) -> None:
    indices = torch.tensor([[0, 2, 3 + hvd.rank()]])
    for dtype in (torch.float32, torch.float64, torch.int64):
        mine = (normal(hvd.rank(), 3, torch.float64) * 10).to(dtype)
        sparse = torch.sparse_coo_tensor(indices, mine, (9,), check_invariants=True)
        total = hvd.sparse_allreduce_async(sparse, name="sum", op=hvd.Sum)().to_dense()
        average = hvd.sparse_allreduce_async(sparse, name="average", op=hvd.Average)().to_dense()
        rounding = None if dtype.is_floating_point else "trunc"
        assert torch.equal(average, torch.div(total, hvd.size(), rounding_mode=rounding)), dtype


def check_flushing(hvd: Any, what: Any, reduce: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    """Check that all ranks reduce to the same bits, not to zeros, where the last one flushes subnormal numbers."""
    last = hvd.rank() == hvd.size() - 1
    if last and not torch.set_flush_denormal(True):  # as a script asks PyTorch for
        raise Skip("this processor flushes no subnormal numbers")
    try:
        made = reduce(*arguments, **options)
    finally:
        torch.set_flush_denormal(False)  # comparing would take subnormal numbers for zero
    for result in made if isinstance(made, list) else [made]:
        # All ranks ask before one fails, so that no other waits for it.
        everyone = hvd.allgather_object(result.detach().contiguous().view(torch.uint8).numpy().tobytes())
        assert len(set(everyone)) == 1, what
        assert bool((result != 0).any()), what


def tiny(hvd: Any, elements: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (normal(hvd.rank(), elements).double() * TINY).to(dtype)


def test_all_ranks_have_the_same_bits_where_one_flushes_subnormal_numbers(hvd: Any) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for elements in ELEMENTS:
            mine = tiny(hvd, elements, dtype)
            for name, reduce in {
                "average": lambda x: hvd.allreduce(x),
                "sum": lambda x: hvd.allreduce(x, op=hvd.Sum),
                "scaled": lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=1.7, postscale_factor=0.7),
                "group": lambda x: hvd.grouped_allreduce([x, torch.ones(3)])[0],
            }.items():
                check_flushing(hvd, (name, dtype, elements), reduce, mine)


def test_so_it_is_with_adasum_and_with_sparse_averages(hvd: Any) -> None:
    if hvd.size() == 2:  # Adasum needs a power of two
        numbers = tiny(hvd, 4097)
        check_flushing(hvd, "adasum", hvd.allreduce, numbers, op=hvd.Adasum)
    sparse = torch.sparse_coo_tensor(torch.arange(50)[None], tiny(hvd, 50), (60,), check_invariants=True)

    def average() -> torch.Tensor:
        return hvd.sparse_allreduce_async(sparse, name="sparse", op=hvd.Average)().coalesce().values()

    check_flushing(hvd, "sparse", average)


def test_so_it_is_with_codecs(hvd: Any) -> None:
    where = {"compress": "everywhere"}
    # fp16 knows nothing so small; of int8 the steps are normal numbers, and a part of them is not.
    for codec, size in (
        (hvd.Compression.int8(**where), 1e4),
        (hvd.Compression.onebit(**where), 1.0),
        (hvd.Compression.topk(0.3, **where), 1.0),
        (hvd.Compression.topk(0.9, **where), 1.0),
        (hvd.Compression.randomk(0.5, **where), 1.0),
        (hvd.Compression.fp16, 1e35),
        (hvd.Compression.bf16, 1.0),
    ):
        mine = (tiny(hvd, 4096).double() * size).float()
        check_flushing(hvd, codec, hvd.allreduce, mine, compression=codec)


def test_so_it_is_with_products_of_low_rank(hvd: Any) -> None:
    net = nn.ParameterList([torch.zeros(64, 64), torch.zeros(64)])
    optimizer = distributed_sgd(hvd, net, compression=hvd.Compression.powersgd(2, compress="everywhere"))
    # Vectors of which some elements are as small, in a product that is not.
    of_weight = (normal(hvd.rank(), 4096).view(64, 64).double() * torch.logspace(-41, -8, 64)).float()
    of_bias = tiny(hvd, 64)

    def reduce() -> list[torch.Tensor]:
        optimizer.synchronize()
        return gradients(net)

    for _ in range(3):
        optimizer.zero_grad()
        ((net[0] * of_weight).sum() + (net[1] * of_bias).sum()).backward()
        check_flushing(hvd, "low rank", reduce)
        update(optimizer)
