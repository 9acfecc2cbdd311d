"""Meshes of torch.distributed as process sets, and process sets as a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

from hvdkit.engine.session import runtime
from hvdkit.engine.session.process_sets import ProcessSet, add_process_set, global_process_set

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def process_sets_of(mesh: DeviceMesh) -> dict[str, ProcessSet]:
    """Make process sets of the ranks along each dimension of a mesh. Every rank calls this with the same mesh.

    ``DistributedOptimizer(..., process_set=sets["data"])`` averages gradients along dimension "data" alone. Sets that
    the job lacks are added, which needs ``hvd.init(process_sets="dynamic")``.

    Args:
        mesh: a mesh of all ranks of the job, whose dimensions have names.

    Returns:
        The process set that this rank is in, by the dimension's name. A set has its ranks in ascending order.

    Raises:
        ValueError: for another mesh, and where process sets are not dynamic.
        NotInitializedError: before init() or after shutdown().

    Examples:
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "tensor"))
        >>> sets = hvd.process_sets_of(mesh)
        >>> sets["data"].ranks, sets["tensor"].ranks  # on rank 1: ([0, 1], [1])
        ([0, 1], [0])
    """
    size, ranks = runtime.topology().size, sorted(mesh.mesh.flatten().tolist())
    if mesh.mesh_dim_names is None or ranks != list(range(size)):
        raise ValueError(
            f"process_sets_of: expected a mesh of {size} ranks with names, got ranks {ranks} and names "
            f"{mesh.mesh_dim_names}\nHINT: give the whole mesh, made with mesh_dim_names=(...)."
        )
    sets = {}
    for dimension, name in enumerate(mesh.mesh_dim_names):
        lines = mesh.mesh.movedim(dimension, -1).reshape(-1, mesh.mesh.shape[dimension])
        for line in lines.tolist():
            process_set = _process_set(line)
            if process_set.included():
                sets[name] = process_set
    return sets


def device_mesh(process_sets: Sequence[ProcessSet], names: tuple[str, str], device_type: str = "cpu") -> DeviceMesh:
    """Make the mesh that has a row for each process set. Every rank calls this with the same sets.

    Args:
        process_sets: sets of equal size, of which each rank of the job is in one.
        names: the names of the dimensions: along the sets, and within a set.
        device_type: the device of the mesh's tensors.

    Returns:
        The DeviceMesh, of two dimensions.

    Raises:
        ValueError: for other sets. torch.distributed must have been initialized with the job's ranks.

    Examples:
        >>> hvd.device_mesh([hvd.global_process_set], ("data", "tensor")).mesh
        tensor([[0, 1]], dtype=torch.int32)
    """
    from torch.distributed.device_mesh import DeviceMesh

    size, rows = runtime.topology().size, [process_set.ranks or [] for process_set in process_sets]
    if len({len(row) for row in rows}) != 1 or sorted(chain(*rows)) != list(range(size)):
        raise ValueError(
            f"device_mesh: expected sets of equal size that share the ranks 0 to {size - 1}, got {rows}\n"
            "HINT: give one set for each row, and put each rank into one set."
        )
    return DeviceMesh(device_type, rows, mesh_dim_names=names)


def _process_set(ranks: list[int]) -> ProcessSet:
    """Return the job's process set of these ranks, added if there is none."""
    for number, members in runtime.process_sets().items():
        if members == sorted(ranks):
            process_set = global_process_set if number == 0 else ProcessSet(ranks)
            process_set.process_set_id = number
            return process_set
    return add_process_set(ranks)
