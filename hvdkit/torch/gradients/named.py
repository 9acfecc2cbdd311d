"""Gradients reduced by named operations: sparse ones, and those that a compression class of the user's transforms."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any

import torch

from hvdkit.api.gradients.settings import GradientSettings
from hvdkit.engine.ops.hints import SPARSE
from hvdkit.errors import HorovodInternalError
from hvdkit.torch.gradients.hooks import COMPUTED_AGAIN
from hvdkit.torch.gradients.layout import TOO_WIDE, Kinds, gradient_dtype, overlapping, storage_of
from hvdkit.torch.ops.allreduce import grouped_allreduce_async_
from hvdkit.torch.ops.sparse import sparse_allreduce_async
from hvdkit.torch.ops.sync import synchronize

# Parameters, and their gradients as all ranks have them.
Results = list[tuple[torch.Tensor, torch.Tensor | None]]
# An operation in flight: a wait for its result, and a function that makes gradients of that.
Pending = tuple[Callable[[], Any], Callable[[Any], Results]]


class NamedGradients:
    """The operations by name for each parameter or group, submitted as soon as the gradients are complete.

    ``names`` are the operations' names by the parameters' ids. ``kinds``: dtypes, and which gradients are sparse on
    some rank. ``groups`` holds dense parameters that one operation reduces.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        names: dict[int, str],
        settings: GradientSettings,
        kinds: Kinds,
        groups: Sequence[Sequence[torch.Tensor]] = (),
    ) -> None:
        self.parameters = list(parameters)
        self._names = names
        self._settings = settings
        self._dtypes, self._sparse_dims = kinds
        self._group_of = {id(member): group for group in groups for member in group}
        self._ready: set[int] = set()
        self._submitted: set[int] = set()
        self._pending: list[Pending] = []

    def hand_over(self, parameter: torch.Tensor, may_grow: bool = False) -> None:
        """Submit a complete gradient, or its group with the last of it; a gradient that ``may_grow`` waits.

        A parameter that is not here, since it is new, is left for the next agreement.
        """
        key = id(parameter)
        if may_grow and key in self._submitted:
            raise AssertionError(COMPUTED_AGAIN.format(name=self._names[key]))
        if may_grow or key not in self._names:
            return
        gradient, dtype = parameter.grad, self._dtypes[key]
        if gradient is not None and gradient.dtype is not dtype and gradient_dtype(parameter) is not dtype:
            return  # finish() knows more
        self._ready.add(key)
        group = self._group_of.get(key, (parameter,))
        if all(id(member) in self._ready for member in group):
            self._submit(group)

    def finish(self, left_out: Collection[int] = ()) -> None:
        """Wait until all gradients are reduced. A gradient that was not handed over counts as it is, None as zeros.

        The parameters ``left_out``, given by id, the same on all ranks, are not reduced.
        """
        for parameter in self.parameters:
            if id(parameter) not in self._submitted and id(parameter) not in left_out:
                group = self._group_of.get(id(parameter), (parameter,))
                self._submit([member for member in group if id(member) not in left_out])
        dense: list[Any] = [each for each in self.parameters if storage_of(each.grad) is not None]
        shared = overlapping([member.grad for member in dense])
        able = {id(member) for index, member in enumerate(dense) if index not in shared}
        for wait, adopt in self._take_pending():
            for parameter, result in adopt(wait()):
                if not parameter.requires_grad:
                    continue
                if id(parameter) not in able or result is None or result.layout is not torch.strided:
                    parameter.grad = result
                else:
                    assert parameter.grad is not None
                    parameter.grad.copy_(result)

    def abandon(self, waits: bool) -> None:
        """Forget the operations submitted in this step, after a wait for them if it ``waits``."""
        for wait, _ in self._take_pending():
            with suppress(HorovodInternalError):
                if waits:
                    wait()

    def _take_pending(self) -> list[Pending]:
        pending, self._pending = self._pending, []
        self._ready.clear()
        self._submitted.clear()
        return pending

    def _submit(self, group: Sequence[torch.Tensor]) -> None:
        self._submitted.update(id(member) for member in group)
        is_sparse = id(group[0]) in self._sparse_dims and not self._settings.sparse_as_dense
        self._pending.append(self._submit_sparse(group[0]) if is_sparse else self._submit_dense(group))

    def _compressed(self, parameter: torch.Tensor) -> tuple[torch.Tensor, Any]:
        gradient = parameter.grad
        if gradient is None or not parameter.requires_grad:
            gradient = torch.zeros_like(parameter, requires_grad=False, memory_format=torch.contiguous_format)
        elif gradient.is_sparse:
            gradient = gradient.to_dense()
        dtype = self._dtypes[id(parameter)]
        if gradient.dtype is not dtype and torch.promote_types(gradient.dtype, dtype) is not dtype:
            raise ValueError(TOO_WIDE.format(name=self._names[id(parameter)], dtype=gradient.dtype, agreed=dtype))
        gradient = gradient.to(dtype)
        compressed, context = self._settings.compressor.compress(gradient)
        compressed = compressed.detach().contiguous()
        # What is summed in place must be nobody else's, and the gradient may be.
        is_view = storage_of(compressed) == storage_of(gradient)
        return compressed.clone() if is_view else compressed, context

    def _decompressed(self, parameter: torch.Tensor, reduced: torch.Tensor, context: Any) -> torch.Tensor:
        gradient: torch.Tensor = self._settings.compressor.decompress(reduced, context)
        gradient = gradient.to(dtype=self._dtypes[id(parameter)], device=parameter.device).view(parameter.shape)
        sparse_dim = self._sparse_dims.get(id(parameter))
        return gradient if sparse_dim is None else gradient.to_sparse(sparse_dim)

    def _submit_dense(self, group: Sequence[torch.Tensor]) -> Pending:
        compressed, contexts = zip(*map(self._compressed, group), strict=True)
        settings = self._settings
        prescale, postscale = settings.scales
        handle = grouped_allreduce_async_(
            compressed,
            name=self._names[id(group[0])],
            op=settings.op,
            prescale_factor=prescale,
            postscale_factor=postscale,
            process_set=settings.process_set,
        )

        def adopt(reduced: Sequence[torch.Tensor]) -> Results:
            return [
                (member, self._decompressed(member, gradient, context))
                for member, gradient, context in zip(group, reduced, contexts, strict=True)
            ]

        return lambda: synchronize(handle), adopt

    def _submit_sparse(self, parameter: torch.Tensor) -> Pending:
        gradient, sparse_dim = parameter.grad, self._sparse_dims[id(parameter)]
        if gradient is None or not parameter.requires_grad:
            indices = torch.empty((sparse_dim, 0), dtype=torch.int64, device=parameter.device)
            shape, dtype = (0, *parameter.shape[sparse_dim:]), self._dtypes[id(parameter)]
            values = torch.empty(shape, dtype=dtype, device=parameter.device)
            gradient = torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)
        elif not gradient.is_sparse:
            gradient = gradient.to_sparse(sparse_dim)
        name = f"{self._names[id(parameter)]}{SPARSE}"
        wait = sparse_allreduce_async(gradient, name, self._settings.op, self._settings.process_set)

        def adopt(reduced: torch.Tensor) -> Results:
            # A row that no rank computed is no gradient: SparseAdam would count a step for it.
            return [(parameter, reduced.to(parameter.device) if reduced._nnz() else None)]

        return wait, adopt
