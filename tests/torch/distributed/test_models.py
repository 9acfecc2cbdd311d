"""Models that torch.distributed trains over hvdkit give what one process gives on the joined batch."""

from __future__ import annotations

import copy
import shutil
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hvdkit.arena import ARENA
from tests.on_ranks import on_ranks
from tests.ranks import Skip
from tests.torch.distributed import ranks

pytestmark = [
    on_ranks((2, "torch"), runner=ranks.RUNNER),
    on_ranks((3, "torch"), thorough=True, runner=ranks.RUNNER),
    on_ranks((2, "torch"), thorough=True, runner=ranks.RUNNER, name="apart", HVDKIT_NODE_MEMORY="0"),
]

STEPS, BATCH, WIDTH = 6, 4, 600


def net() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(16, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))


def data(step: int) -> tuple[Tensor, Tensor]:
    """Return the joined batch of a step."""
    generator = torch.Generator().manual_seed(step)
    rows = BATCH * dist.get_world_size()
    return torch.randn(rows, 16, generator=generator), torch.randn(rows, 3, generator=generator)


def train(model: nn.Module, parameters: Any, joined: bool) -> list[float]:
    """Return the losses of some steps, over the joined batch or this rank's part of it."""
    optimizer, losses = torch.optim.AdamW(parameters, lr=0.01), []
    for step in range(STEPS):
        inputs, targets = data(step)
        if not joined:
            part = slice(dist.get_rank() * BATCH, (dist.get_rank() + 1) * BATCH)
            inputs, targets = inputs[part], targets[part]
        loss = ((model(inputs) - targets) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        if not joined:
            dist.all_reduce(total, op=dist.ReduceOp.AVG)
        losses.append(total.item())
    return losses


def alone() -> list[float]:
    model = net()
    return train(model, model.parameters(), True)


def check(losses: list[float]) -> None:
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(alone()), rtol=0, atol=1e-5)


def test_ddp(hvd: Any) -> None:
    for options in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}, {"bucket_cap_mb": 0.2}):
        model = DistributedDataParallel(net(), **options)
        check(train(model, model.parameters(), False))


def test_the_buckets_of_ddp_move_into_the_arena(hvd: Any) -> None:
    if ARENA.serve_torch():
        raise Skip(f"there is no arena: {ARENA.reason}")
    model = DistributedDataParallel(net(), gradient_as_bucket_view=True)
    check(train(model, model.parameters(), False))
    weight = model.module[2].weight
    assert weight.grad is not None
    assert ARENA.contains(weight.grad.data_ptr())


def test_accumulation_unused_parameters_and_uneven_data(hvd: Any) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(net())
    inputs, _ = data(0)
    with model.no_sync():
        model(inputs[:2] * (rank + 1)).sum().backward()
    model(inputs[2:4] * (rank + 1)).sum().backward()
    expected = net()
    for other in range(size):
        (expected(inputs[:4] * (other + 1)).sum() / size).backward()
    for parameter, reference in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, reference.grad, rtol=1e-4, atol=1e-4)

    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.used(inputs)

    partly = DistributedDataParallel(Partly(), find_unused_parameters=True)
    for _ in range(3):
        partly(torch.ones(2, 4)).sum().backward()
    with partly.join():  # some ranks have more batches
        for _ in range(rank + 1):
            partly(torch.ones(2, 4)).sum().backward()


def test_fsdp(hvd: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    for allocates in (False, True):
        model = net()
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
        sharded = fully_shard(model)
        if allocates:
            sharded.set_allocate_memory_from_process_group_for_comm(True)
        check(train(sharded, sharded.parameters(), False))


def test_compiled_ddp(hvd: Any) -> None:
    model = DistributedDataParallel(net())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(train(torch.compile(model, backend="aot_eager"), model.parameters(), False))


def test_models_that_inductor_compiles(hvd: Any) -> None:
    """With collectives inside of the compiled function, too."""
    import torch.distributed._functional_collectives as functional
    from torch.distributed.fsdp import fully_shard

    if shutil.which("g++") is None:
        raise Skip("needs a compiler")
    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD

    def reduced(values: Tensor) -> Tensor:
        gathered = functional.all_gather_tensor(values, 0, group)
        scattered = functional.reduce_scatter_tensor(gathered, "sum", 0, group)
        return functional.all_reduce(values * 2, "sum", group) + scattered + gathered.sum()

    total = size * (size + 1) / 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        values = torch.compile(reduced)(torch.full((8,), rank + 1.0))
        assert torch.equal(values, torch.full((8,), 2 * total + size * (rank + 1) + 8 * total))
        model = DistributedDataParallel(net())
        check(train(torch.compile(model), model.parameters(), False))
        sharded = fully_shard(net())
        check(train(torch.compile(sharded), sharded.parameters(), False))


def test_checkpoints_of_sharded_models(hvd: Any) -> None:
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(net())
    before = copy.deepcopy({name: tensor.full_tensor() for name, tensor in model.state_dict().items()})
    folder: list[Any] = [None]
    with TemporaryDirectory() as own:
        folder[0] = own
        dist.broadcast_object_list(folder)
        state = get_model_state_dict(model)
        checkpoint.save(state, checkpoint_id=Path(folder[0]))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        state = get_model_state_dict(model)
        checkpoint.load(state, checkpoint_id=Path(folder[0]))
        set_model_state_dict(model, state)
        dist.barrier()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.full_tensor(), before[name]), name
