"""Meshes of torch.distributed as process sets of the job."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

from tests.on_ranks import on_ranks
from tests.ranks import free_port
from tests.told import told

pytestmark = on_ranks((4, "torch"), HOROVOD_DYNAMIC_PROCESS_SETS="1")

STEPS = 5


def _mesh(hvd, shape=(2, 2), names=("data", "tensor")):
    if not dist.is_initialized():
        address = hvd.broadcast_object(f"tcp://127.0.0.1:{free_port()}", name="address")
        dist.init_process_group("hvdkit", init_method=address, rank=hvd.rank(), world_size=hvd.size())
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def test_each_dimension_has_the_process_set_of_the_ranks_along_it(hvd):
    mesh = _mesh(hvd)
    sets = hvd.process_sets_of(mesh)
    row, column = divmod(hvd.rank(), 2)
    assert sets["data"].ranks == [column, column + 2]
    assert sets["tensor"].ranks == [2 * row, 2 * row + 1]
    assert all(sets[name].rank() == mesh.get_local_rank(name) for name in sets)
    assert hvd.allreduce(torch.tensor([hvd.rank()]), op=hvd.Sum, process_set=sets["data"]).item() == 2 * column + 2


def test_the_same_ranks_are_always_the_same_process_set(hvd):
    sets = hvd.process_sets_of(_mesh(hvd))
    again = hvd.process_sets_of(_mesh(hvd, names=("rows", "columns")))
    assert [again[name].process_set_id for name in again] == [sets[name].process_set_id for name in sets]
    flat = hvd.process_sets_of(_mesh(hvd, (4, 1, 1), ("data", "tensor", "pipeline")))
    assert flat["data"] is hvd.global_process_set
    assert flat["tensor"].ranks == [hvd.rank()]
    assert flat["tensor"].process_set_id == flat["pipeline"].process_set_id


def test_a_part_of_a_mesh_and_one_without_names_are_errors(hvd):
    mesh = _mesh(hvd)
    with told(ValueError, "expected a mesh of 4 ranks", "HINT: give the whole mesh"):
        hvd.process_sets_of(mesh["data"])
    with told(ValueError, "mesh_dim_names"):
        hvd.process_sets_of(init_device_mesh("cpu", (2, 2)))


def test_a_mesh_has_a_row_for_each_process_set(hvd):
    mesh = _mesh(hvd)
    made = hvd.device_mesh([hvd.ProcessSet(ranks) for ranks in ([0, 1], [2, 3])], ("data", "tensor"))
    assert made.mesh.tolist() == mesh.mesh.tolist()
    assert made.mesh_dim_names == ("data", "tensor")
    fact = "device_mesh: expected sets of equal size that share the ranks 0 to 3, got [[0, 1], [0, 1]]"
    with told(ValueError, fact, "HINT: give one set for each row, and put each rank into one set."):
        hvd.device_mesh([hvd.ProcessSet([0, 1]), hvd.ProcessSet([0, 1])], ("data", "tensor"))


class SlicedLayers(nn.Module):
    """Two layers of which this rank has half the hidden units."""

    def __init__(self, hvd, layers, process_set):
        super().__init__()
        self._sum = lambda part: hvd.allreduce(part, op=hvd.Sum, name="outputs", process_set=process_set)
        count, place = process_set.size(), process_set.rank()
        self.columns = nn.Parameter(layers[0].weight.detach().chunk(count, 0)[place].clone())
        self.rows = nn.Parameter(layers[2].weight.detach().chunk(count, 1)[place].clone())

    def forward(self, images):
        return self._sum(functional.linear(functional.linear(images, self.columns).relu(), self.rows))


def _layers_and_batches():
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 8, bias=False), nn.ReLU(), nn.Linear(8, 3, bias=False))
    return layers, [(torch.randn(8, 6), torch.randn(8, 3)) for _ in range(STEPS)]


def _losses_of_one_process(hvd, layers, batches):
    losses = []
    optimizer = hvd.unsynchronized(torch.optim.SGD(layers.parameters(), lr=0.3))
    for inputs, targets in batches:
        loss = functional.mse_loss(layers(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses)


def _own_share(mesh, batches):
    place = mesh.get_local_rank("data")
    return [(inputs.chunk(2)[place], targets.chunk(2)[place]) for inputs, targets in batches]


def test_an_optimizer_of_the_data_dimension_trains_slices_as_one_process_trains_layers(hvd):
    mesh = _mesh(hvd)
    sets = hvd.process_sets_of(mesh)
    layers, batches = _layers_and_batches()
    slices = SlicedLayers(hvd, layers, sets["tensor"])
    expected = _losses_of_one_process(hvd, layers, batches)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(slices.parameters(), lr=0.3), slices.named_parameters(), process_set=sets["data"]
    )
    losses = []
    for inputs, targets in _own_share(mesh, batches):
        loss = functional.mse_loss(slices(inputs), targets)
        optimizer.zero_grad()
        (loss / sets["tensor"].size()).backward()  # the gradient of a sum is the sum of all ranks' gradients
        optimizer.step()
        losses.append(hvd.allreduce(loss.detach(), name="loss").item())
    assert torch.allclose(torch.tensor(losses), expected, rtol=0, atol=1e-5), (losses, expected)
    assert torch.allclose(slices.columns, layers[0].weight.chunk(2)[sets["tensor"].rank()], atol=1e-5)


def test_gradients_of_dtensors_are_averaged_along_the_data_dimension(hvd):
    mesh = _mesh(hvd)
    sets = hvd.process_sets_of(mesh)
    layers, batches = _layers_and_batches()
    expected = _losses_of_one_process(hvd, copy.deepcopy(layers), batches)
    parallelize_module(layers, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = hvd.unsynchronized(torch.optim.SGD(layers.parameters(), lr=0.3))
    with told(ValueError, "DTensor", "average the local parts"):
        hvd.DistributedOptimizer(optimizer, layers.named_parameters(), process_set=sets["data"])
    losses = []
    for inputs, targets in _own_share(mesh, batches):
        loss = functional.mse_loss(layers(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        gradients = [parameter.grad.to_local() for parameter in layers.parameters()]
        hvd.grouped_allreduce_(gradients, name="gradients", process_set=sets["data"])
        optimizer.step()
        losses.append(hvd.allreduce(loss.detach(), name="loss").item())
    assert torch.allclose(torch.tensor(losses), expected, rtol=0, atol=1e-5), (losses, expected)
