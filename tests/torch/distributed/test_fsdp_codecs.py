"""Gradients of FSDP2 that travel encoded."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from hvdkit.errors import MismatchError
from hvdkit.torch.fsdp import ReduceScatter
from tests.on_ranks import on_ranks
from tests.told import told
from tests.torch.distributed import ranks
from tests.torch.distributed.test_models import alone, check, net, train

pytestmark = [
    on_ranks((2, "torch"), runner=ranks.RUNNER),
    on_ranks((3, "torch"), runner=ranks.RUNNER, name="apart", HVDKIT_NODE_MEMORY="0"),
]

ELEMENTS = 6000


def sharded(codec: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    model = net()
    for layer in model:
        if next(layer.parameters(), None) is not None:
            fully_shard(layer).set_custom_reduce_scatter(ReduceScatter(codec))
    return fully_shard(model)


def test_a_model_trains_with_encoded_gradients(hvd: Any) -> None:
    model = sharded(hvd.Compression.int8(compress="everywhere"))
    losses = torch.tensor(train(model, model.parameters(), False))
    expected = torch.tensor(alone())
    assert not torch.equal(losses, expected)
    torch.testing.assert_close(losses, expected, rtol=0.05, atol=0)


def test_a_codec_leaves_gradients_within_a_node_as_they_are(hvd: Any) -> None:
    if dist.get_world_size() == 2:  # on one node
        model = sharded(hvd.Compression.int8)
        check(train(model, model.parameters(), False))


def test_all_that_a_codec_keeps_back_comes_in_later_steps(hvd: Any) -> None:
    rank, size, steps = dist.get_rank(), dist.get_world_size(), 60
    generator = torch.Generator().manual_seed(3)
    gradients = torch.randn(size, size * ELEMENTS, generator=generator)
    reduce, total = ReduceScatter(hvd.Compression.topk(0.1, compress="everywhere")), torch.zeros(ELEMENTS)
    for _ in range(steps):
        output = torch.empty(ELEMENTS)
        work = reduce(output, gradients[rank].clone(), dist.group.WORLD, dist.ReduceOp.AVG, async_op=True)
        work.wait()
        total += output
    mean = gradients.mean(0).view(size, ELEMENTS)[rank]
    assert (total / steps - mean).abs().max() < 0.5 * mean.abs().max()
    kept = reduce._state.residual
    assert kept is not None
    residuals = [torch.empty(size * ELEMENTS) for _ in range(size)]
    dist.all_gather(residuals, torch.from_numpy(kept.copy()))
    owed = torch.stack(residuals).mean(0).view(size, ELEMENTS)[rank]
    torch.testing.assert_close(total + owed, steps * mean, rtol=1e-4, atol=1e-3)


def test_wrong_uses_are_errors_that_say_what_to_do(hvd: Any) -> None:
    with told(TypeError, "MixedPrecisionPolicy"):
        ReduceScatter(hvd.Compression.fp16)
    reduce, size = ReduceScatter(hvd.Compression.int8), dist.get_world_size()
    reduce(torch.empty(4), torch.ones(4 * size), dist.group.WORLD, dist.ReduceOp.SUM)
    fact = f"fsdp.ReduceScatter: got a gradient of {5 * size} elements, after one of {4 * size}"
    with told(ValueError, fact, "HINT: make one ReduceScatter for each module that fully_shard has wrapped."):
        reduce(torch.empty(5), torch.ones(5 * size), dist.group.WORLD, dist.ReduceOp.SUM)
    with told(ValueError, "a sum or an average"):
        reduce(torch.empty(4), torch.ones(4 * size), dist.group.WORLD, dist.ReduceOp.MAX)
    with told(TypeError, "init_process_group"):
        reduce(torch.empty(4), torch.ones(4 * size), None, dist.ReduceOp.SUM)


def test_ranks_with_other_codecs_are_told(hvd: Any) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for elements in (4, ELEMENTS):
        on = dist.new_group(list(range(size)))
        codec = hvd.Compression.int8(compress="everywhere") if rank == 0 else hvd.Compression.int8
        with told(MismatchError, "codec", "[0]"):
            ReduceScatter(codec)(torch.empty(elements), torch.ones(size * elements), on, dist.ReduceOp.SUM)
        dist.destroy_process_group(on)
