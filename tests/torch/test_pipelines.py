"""Every schedule of torch.distributed.pipelining on hvdkit, and FSDP over a mesh, train as one process does."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import mse_loss

from tests.on_ranks import on_ranks
from tests.ranks import free_port

pytestmark = on_ranks((4, "torch"), thorough=True)

SIZE, WIDTH, STEPS, MICRO_BATCHES = 4, 16, 4, 8
TOLERANCE = 1e-5


def _join(hvd):
    if not dist.is_initialized():
        address = hvd.broadcast_object(f"tcp://127.0.0.1:{free_port()}", name="address")
        dist.init_process_group("hvdkit", init_method=address, rank=hvd.rank(), world_size=hvd.size())


def _batches():
    return [(torch.randn(16, WIDTH), torch.randn(16, WIDTH)) for _ in range(STEPS)]


def _train(hvd, model, batches, largest_norm=None):
    losses = []
    optimizer = hvd.unsynchronized(torch.optim.SGD(model.parameters(), lr=0.5))
    for inputs, targets in batches:
        loss = mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        if largest_norm:
            nn.utils.clip_grad_norm_(model.parameters(), largest_norm)
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def _train_stages(hvd, schedule_class, layers, indices, batches):
    """Train this rank's layers. Returns the losses, on all ranks."""
    stages = [PipelineStage(layers[index], index, len(layers), torch.device("cpu")) for index in indices]
    schedule = schedule_class(stages[0] if len(stages) == 1 else stages, MICRO_BATCHES, loss_fn=mse_loss)
    parameters = [parameter for index in indices for parameter in layers[index].parameters()]
    optimizer = hvd.unsynchronized(torch.optim.SGD(parameters, lr=0.5))
    has_last, losses = len(layers) - 1 in indices, torch.zeros(len(batches))
    for step, (inputs, targets) in enumerate(batches):
        optimizer.zero_grad()
        parts: list[torch.Tensor] = []
        schedule.step(*([inputs] if 0 in indices else []), target=targets if has_last else None, losses=parts)
        optimizer.step()
        if has_last:
            losses[step] = torch.stack(parts).mean()
    dist.all_reduce(losses)
    return losses


def _check_schedule(hvd, name, indices):
    _join(hvd)
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(SIZE * len(indices))]
    batches = _batches()
    expected = _train(hvd, nn.Sequential(*copy.deepcopy(layers)), batches)
    losses = _train_stages(hvd, getattr(pipelining, name), layers, indices, batches)
    assert torch.allclose(losses, expected, rtol=0, atol=TOLERANCE), (name, losses, expected)


def test_schedules_of_one_stage_a_rank_train_as_one_process(hvd):
    for name in ("ScheduleGPipe", "Schedule1F1B"):
        _check_schedule(hvd, name, [hvd.rank()])


def test_schedules_that_go_round_the_ranks_twice_train_as_one_process(hvd):
    for name in ("ScheduleInterleaved1F1B", "ScheduleLoopedBFS", "ScheduleInterleavedZeroBubble"):
        _check_schedule(hvd, name, [hvd.rank(), hvd.rank() + SIZE])


def test_schedules_that_go_forth_and_back_train_as_one_process(hvd):
    for name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV"):
        _check_schedule(hvd, name, [hvd.rank(), 2 * SIZE - 1 - hvd.rank()])


def _net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 256), nn.ReLU(), nn.Linear(256, WIDTH))


def _shard(model, mesh):
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def test_shards_that_are_copied_along_a_second_dimension_train_as_one_process(hvd):
    _join(hvd)
    model, batches = _net(), _batches()
    expected = _train(hvd, copy.deepcopy(model), batches)
    _shard(model, init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards")))
    rank = hvd.rank()
    losses = _train(hvd, model, [(inputs.chunk(4)[rank], targets.chunk(4)[rank]) for inputs, targets in batches])
    dist.all_reduce(losses)
    assert torch.allclose(losses / 4, expected, rtol=0, atol=TOLERANCE), (losses, expected)


def test_shards_of_slices_with_clipped_gradients_train_as_one_process(hvd):
    _join(hvd)
    model, batches = _net(), _batches()
    expected = _train(hvd, copy.deepcopy(model), batches, largest_norm=0.1)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    _shard(model, mesh["data"])
    place = mesh.get_local_rank("data")
    shares = [(inputs.chunk(2)[place], targets.chunk(2)[place]) for inputs, targets in batches]
    losses = _train(hvd, model, shares, largest_norm=0.1)
    dist.all_reduce(losses)
    assert torch.allclose(losses / 4, expected, rtol=0, atol=TOLERANCE), (losses, expected)
