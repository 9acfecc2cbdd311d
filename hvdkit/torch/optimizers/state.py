"""Broadcast of an optimizer's state: first what it looks like on the root, then its tensors, then all ranks take it.

No rank steps its optimizer to have state to write into, so ranks may begin with any state or none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hvdkit.api.checks import check_root
from hvdkit.api.objects import allgather_object, broadcast_object
from hvdkit.engine.session import runtime
from hvdkit.engine.session.process_sets import global_process_set
from hvdkit.torch.gradients.names import parameters_of
from hvdkit.torch.parameters import broadcast_tensors

# Tensors up to this size travel inside the structure: a message of their own would cost more.
_SMALL = 64
# Keys of a parameter group that describe the model, not the optimizer.
_NOT_OPTIONS = frozenset({"params", "param_names"})


@dataclass(frozen=True)
class _Slot:
    """The place of a tensor in the root's state. ``value`` is the tensor itself unless it is broadcast on its own."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    with_parameter: bool  # on the device of its parameter, else on the CPU
    value: Tensor | None


@dataclass(frozen=True)
class _Structure:
    """The root's optimizer with slots for tensors."""

    optimizer: str
    options: list[dict[str, Any]]  # for each parameter group
    shapes: list[list[tuple[int, ...]]]  # of the parameters of each group
    states: list[Any]  # for each parameter in order, None where it has no state
    others: dict[Any, Any]  # state under keys that are no parameters


@torch.no_grad()
def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int, model: Any = None) -> None:
    """Give all ranks the root's optimizer state and options such as the learning rate.

    State that the root does not have is lost. Parameters, gradients and the parameter group objects (which learning
    rate schedulers hold) stay; tensors take the device of their parameter.

    Args:
        optimizer: any optimizer but LBFGS, or a DistributedOptimizer, with parameter groups of equal shapes on all
            ranks.
        root_rank: whose state all get.
        model: accepted for Horovod's sake and not needed.

    Raises:
        ValueError: for LBFGS and, on every rank, where optimizers differ.
        TypeError: for what is no optimizer.

    Examples:
        >>> if hvd.rank() == 0:  # which has loaded a checkpoint
        ...     optimizer.param_groups[0]["lr"] = 0.01
        >>> hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        >>> optimizer.param_groups[0]["lr"]
        0.01
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("broadcast_optimizer_state: cannot broadcast torch.optim.LBFGS state")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"broadcast_optimizer_state: optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}"
        )
    topology = runtime.engine().topology
    root = check_root("broadcast_optimizer_state", root_rank, global_process_set, topology.size)
    if topology.size == 1:
        return
    name, is_root = "broadcast_optimizer_state", topology.rank == root
    sent: list[Tensor] = []  # tensors that are broadcast on their own, in the same order on all ranks
    own = _describe(optimizer, sent) if is_root else None
    structure: _Structure = broadcast_object(own, root, f"{name}.structure")
    problems = allgather_object(_difference(structure, optimizer), f"{name}.check")
    if any(problems):
        fact = f"{name}: optimizers must be alike on all ranks, but these differ from that of rank {root}:"
        lines = [f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem]
        raise ValueError("\n".join([fact, *lines]))
    states = []
    if not is_root:
        for state, parameter in zip(structure.states, parameters_of(optimizer.param_groups), strict=True):
            states.append(None if state is None else _allocate(state, parameter, optimizer.state.get(parameter), sent))
    broadcast_tensors([(f"{name}.{index}", tensor) for index, tensor in enumerate(sent)], root)
    if not is_root:
        _install(optimizer, structure, states)


def _shapes(optimizer: torch.optim.Optimizer) -> list[list[tuple[int, ...]]]:
    return [[tuple(parameter.shape) for parameter in group["params"]] for group in optimizer.param_groups]


def _describe(optimizer: torch.optim.Optimizer, sent: list[Tensor]) -> _Structure:
    groups, state = optimizer.param_groups, optimizer.state
    return _Structure(
        optimizer=type(optimizer).__name__,
        options=[
            {key: _describe_value(value, None, sent) for key, value in group.items() if key not in _NOT_OPTIONS}
            for group in groups
        ],
        shapes=_shapes(optimizer),
        states=[_describe_value(state[each], each, sent) if each in state else None for each in parameters_of(groups)],
        others={key: _describe_value(value, None, sent) for key, value in state.items() if not isinstance(key, Tensor)},
    )


def _describe_value(value: Any, parameter: Tensor | None, sent: list[Tensor]) -> Any:
    """Return ``value`` with slots for its tensors. Large tensors of a parameter are put into ``sent``."""
    if isinstance(value, dict):
        return {key: _describe_value(entry, parameter, sent) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_describe_value(entry, parameter, sent) for entry in value)
    if not isinstance(value, Tensor):
        return value
    with_parameter = parameter is not None and value.device == parameter.device
    dense = type(value) in (Tensor, torch.nn.Parameter) and value.layout == torch.strided and not value.is_quantized
    if parameter is not None and dense and value.numel() > _SMALL:
        sent.append(value)
        return _Slot(tuple(value.shape), value.dtype, with_parameter, None)
    return _Slot(tuple(value.shape), value.dtype, with_parameter, value.detach().to("cpu", copy=True))


def _difference(structure: _Structure, optimizer: torch.optim.Optimizer) -> str | None:
    """Return why this rank's optimizer cannot take the root's state, or None."""
    if structure.optimizer != type(optimizer).__name__:
        return f"optimizer is {type(optimizer).__name__}, not {structure.optimizer}"
    shapes = _shapes(optimizer)
    if len(shapes) != len(structure.shapes):
        return f"{len(shapes)} parameter groups, not {len(structure.shapes)}"
    for index, (group, root_group) in enumerate(zip(shapes, structure.shapes, strict=True)):
        if len(group) != len(root_group):
            return f"{len(group)} parameters in group {index}, not {len(root_group)}"
        for position, (shape, root_shape) in enumerate(zip(group, root_group, strict=True)):
            if shape != root_shape:
                return f"parameter {position} of group {index} has shape {shape}, not {root_shape}"
    return None


def _allocate(described: Any, parameter: Tensor | None, existing: Any, sent: list[Tensor]) -> Any:
    """Return the described value with tensors in its slots: this rank's own where they fit, else new tensors.

    Tensors whose values are still to come are put into ``sent``.
    """
    if isinstance(described, dict):
        own = existing if isinstance(existing, dict) else {}
        return {key: _allocate(entry, parameter, own.get(key), sent) for key, entry in described.items()}
    if type(described) in (list, tuple):
        return type(described)(_allocate(entry, parameter, None, sent) for entry in described)
    if not isinstance(described, _Slot):
        return described
    device = parameter.device if parameter is not None and described.with_parameter else torch.device("cpu")
    if isinstance(existing, Tensor) and parameter is None:
        device = existing.device
    fits = (
        type(existing) is Tensor
        and existing.layout == torch.strided
        and (tuple(existing.shape), existing.dtype, existing.device) == (described.shape, described.dtype, device)
    )
    if described.value is not None:
        return existing.copy_(described.value) if fits else described.value.to(device)
    if fits:
        tensor = existing
    elif parameter is not None and described.shape == tuple(parameter.shape):
        tensor = torch.empty_like(parameter, dtype=described.dtype, device=device, requires_grad=False)
    else:
        tensor = torch.empty(described.shape, dtype=described.dtype, device=device)
    sent.append(tensor)
    return tensor


def _install(optimizer: torch.optim.Optimizer, structure: _Structure, states: list[Any]) -> None:
    """Put the received state in place of this rank's own."""
    optimizer.state.clear()
    for parameter, state in zip(parameters_of(optimizer.param_groups), states, strict=True):
        if state is not None:
            optimizer.state[parameter] = state
    for key, value in structure.others.items():
        optimizer.state[key] = _allocate(value, None, None, [])
    for group, options in zip(optimizer.param_groups, structure.options, strict=True):
        for key, option in options.items():
            group[key] = _allocate(option, None, group.get(key), [])
