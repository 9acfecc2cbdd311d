"""``DistributedOptimizer``: Horovod's way to make a script's optimizer train on all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, TypeVar

import torch

from hvdkit.api.checks import check_name
from hvdkit.api.gradients.settings import check_settings, warn_of_overlap_forward
from hvdkit.engine.session import runtime
from hvdkit.engine.session.process_sets import ProcessSet, global_process_set
from hvdkit.kernels.reduce_op import ReduceOp
from hvdkit.torch.compression import Compression
from hvdkit.torch.gradients.names import check_names
from hvdkit.torch.optimizers.distributed_class import wrap

Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)


def DistributedOptimizer(
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | list[list[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    overlap_forward: bool = False,
    name: str | None = None,
) -> Optimizer:
    """An optimizer that steps with gradients reduced over all ranks.

    The result is of the class of ``optimizer`` and shares its state, its hooks and its parameter groups. Gradients are
    reduced while ``loss.backward()`` still computes others; ``step()`` waits for all. Every rank calls ``step()`` (or
    ``synchronize()``) equally often; a rank or a parameter without a gradient contributes zeros. ``step(closure)``
    reduces the gradients, and the loss, after each call of the closure. Parameters may be frozen, unfrozen or added
    between steps, on all ranks alike.

    Beside the methods of its class the result has ``synchronize()``, which waits for all gradients, so that they can be
    changed before they are used; ``skip_synchronize()``, a context in which ``step()`` does not do so again;
    ``set_backward_passes_per_step(passes)``; and ``reset_compression()``, which forgets what codecs keep.

    Args:
        optimizer: computes the updates.
        named_parameters: pairs (name, parameter), usually ``model.named_parameters()``, for errors and the timeline.
        compression: one of hvd.Compression: ``none``, ``fp16`` or ``bf16`` (gradients travel in 16 bits and are summed
            in 32), or a codec such as ``int8`` or ``topk(0.01)``, which biases, the weights of norms and tensors of
            less than 1024 elements do without; or, for each parameter, a mapping ``{pattern of names: codec}`` or a
            function ``(name, parameter) -> codec``, where None is dense; or Horovod's way, a class with static
            ``compress(tensor)`` and ``decompress(tensor, ctx)``.
        backward_passes_per_step: how many backward passes add up before gradients are reduced.
        op: hvd.Average, Sum, Min, Max or Product of the gradients, or Adasum of the ranks' updates.
        gradient_predivide_factor: an average is divided by this before the sum, and by size / this after it.
        num_groups: deprecated, use ``groups``.
        groups: how many groups of parameters are reduced together, or the groups as lists of parameters.
        sparse_as_dense: reduce sparse gradients as dense ones. A gradient is known to be sparse from the first step
            in which some rank computes it, if that is the first step, or the first after parameters were changed.
        process_set: the ranks that take part; on other ranks the optimizer is an ordinary one.
        overlap_forward: has no effect any more.
        name: what this optimizer is called in errors and in the timeline, its class otherwise. Optimizers of the ranks
            belong together by name and order of creation, so those that several threads make need different names.

    Returns:
        The optimizer to use in the place of ``optimizer``. Gradients and parameters keep their shapes and dtypes.

    Raises:
        TypeError, ValueError: for arguments that make no sense.
        HorovodInternalError: by ``step`` and ``synchronize``, on every rank where the ranks' parameters differ, or if a
            rank is lost.

    Examples:
        >>> optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        >>> optimizer.zero_grad()
        >>> model(x).mean().backward()  # the gradient of each weight is 1 on rank 0, 2 on rank 1
        >>> optimizer.step()  # at a learning rate of 0.1
        >>> model.weight.data
        tensor([[0.8500, 0.8500]])

        To change gradients before they are used, wait for them first:

        >>> optimizer.zero_grad()
        >>> model(x).mean().backward()
        >>> optimizer.synchronize()
        >>> norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        >>> with optimizer.skip_synchronize():
        ...     optimizer.step()
    """
    function = "DistributedOptimizer"
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"{function}: optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if "_synchronizer" in vars(optimizer):
        raise ValueError(f"{function}: optimizer is a DistributedOptimizer already\nHINT: wrap it once.")
    check_name(function, name)
    settings = check_settings(
        function,
        op=op,
        compression=compression,
        gradient_predivide_factor=gradient_predivide_factor,
        num_groups=num_groups,
        groups=groups,
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
        backward_passes_per_step=backward_passes_per_step,
        title=name or type(optimizer).__name__,
        members="torch.Tensor",
        is_member=torch.is_tensor,
    )
    if overlap_forward:
        warn_of_overlap_forward()
    names = check_names(named_parameters, optimizer.param_groups)
    is_alone = settings.op is ReduceOp.ADASUM and process_set.size() == 1
    chosen = replace(settings, op=ReduceOp.AVERAGE if is_alone else settings.op, names=names)
    if (engine := runtime.current()) is not None:
        chosen.label(engine)  # now: the order of first steps may be another on each rank
    wrapped: Optimizer = wrap(optimizer, chosen)
    return wrapped
