"""Gradients that a lane reduces: in an order that all ranks agreed on, in their own tensors where that is possible."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import torch

from hvdkit.arena import ARENA
from hvdkit.engine.steps.offers import FILLED, Offer
from hvdkit.engine.steps.plan import UNSEEN
from hvdkit.torch.gradients.hooks import COMPUTED_AGAIN
from hvdkit.torch.gradients.layout import (
    TOO_WIDE,
    Kinds,
    can_be_reduced_in_place,
    flat_array,
    flat_view,
    form_of,
    gradient_dtype,
    layout_of,
    overlapping,
    storage_of,
)
from hvdkit.torch.gradients.watch import Watched, changed_since, is_moved, mark_half_summed, raise_if_changed, watch
from hvdkit.torch.ops.framework import as_tensor


class PlannedGradients:
    """The gradients of ``parameters`` and their slots in ``lane``, in the same order.

    After a step, the tensor that ``p.grad`` was at the end of backward() holds the result. A large gradient is reduced
    where it lies if no other tensor has its storage. Small gradients, and gradients on another device or of another
    dtype or layout than their slot's, are copied, and the results are written back. The lane's memory is on ``device``.
    """

    def __init__(self, lane: Any, parameters: Sequence[torch.Tensor], kinds: Kinds, device: torch.device) -> None:
        self.lane = lane
        self.parameters = list(parameters)
        self.index = {id(parameter): i for i, parameter in enumerate(self.parameters)}
        self._sparse_dims = kinds.sparse_dims  # by id: gradients that optimizers must see as sparse tensors
        self._device = device
        # .to() may change a parameter
        self._like = [layout_of(parameter, kinds.dtypes[id(parameter)]) for parameter in self.parameters]
        self._forms = [form_of(like, device) for like in self._like]
        self._flatten = flat_view if lane.on_device else flat_array
        self._small = {
            i: as_tensor(memory).view(like.dtype).as_strided(like.shape, like.stride())
            for i, like in enumerate(self._like)
            if (memory := lane.small(i)) is not None
        }
        self._declared = [gradient_dtype(parameter) for parameter in self.parameters]
        # Handing all over after backward() takes less time: during it, caches hold the data of the backward pass.
        self._hands_over_late = lane.takes_turns
        self._watched: dict[int, Watched] = {}
        self._waiting: dict[int, float] = {}  # by slot handed over at the end of the step: when it was complete
        self._in_place: dict[int, int] = {}  # by address: the slots that are reduced where they lie
        self._repeated: set[int] = set()  # ids of gradients that several parameters have
        self._copies: dict[int, torch.Tensor] = {}  # reduced in the place of a gradient
        self._left_out: set[int] = set()  # slots whose gradients count as zeros, and stay as they are

    def _start_step(self) -> None:
        self._watched, self._waiting, self._in_place, self._copies = {}, {}, {}, {}
        self._repeated, self._left_out = set(), set()

    def hand_over(
        self, i: int, since: float | None = None, watched: Watched | None = None, may_grow: bool = False
    ) -> None:
        """Let the complete gradient of slot ``i`` be reduced, now or when the step is completed.

        ``since``: when it was complete (perf_counter), if not just now; ``watched``: the gradient at that time.
        ``may_grow``: this backward pass may add to it once more and call this again.
        """
        gradient = self.parameters[i].grad
        if gradient is not None and gradient.dtype is not self._like[i].dtype and not self._fits_dtype(i, gradient):
            return
        if watched is not None:
            self._watched[i] = watched
            if is_moved(watched, gradient):
                return  # finish() raises
        elif gradient is not None:
            self._watched[i] = watch(gradient)
        if may_grow and i in self.lane.step.ready:
            raise AssertionError(COMPUTED_AGAIN.format(name=self.lane.slots[i].name))
        if (
            self._hands_over_late
            or may_grow
            # Now it would be reduced in memory that share_memory_() may free.
            or (
                gradient is not None
                and i not in self._small
                and not self.lane.on_device
                and not ARENA.contains(gradient.data_ptr())
                and can_be_reduced_in_place(gradient, self._forms[i])
            )
        ):
            self.lane.step.begun = True
            self._waiting[i] = perf_counter() if since is None else since
        else:
            self.lane.ready_all((i,), self._offers((i,), (gradient,)), (since,))

    def _fits_dtype(self, i: int, gradient: torch.Tensor) -> bool:
        """True if the slot holds this dtype, False if the parameter was cast; else raise, as it would be rounded."""
        dtype, agreed = gradient.dtype, self._like[i].dtype
        if gradient_dtype(self.parameters[i]) is not self._declared[i]:
            return False
        if torch.promote_types(dtype, agreed) is not agreed:
            raise ValueError(TOO_WIDE.format(name=self.lane.slots[i].name, dtype=dtype, agreed=agreed))
        return True

    def _offers(
        self, slots: Sequence[int], gradients: Sequence[torch.Tensor | None], filled: Collection[int] = ()
    ) -> list[Offer | None]:
        """Return this rank's contribution to each slot: the gradient itself or a copy; None for zeros."""
        small, forms, in_place, repeated = self._small, self._forms, self._in_place, self._repeated
        offers: list[Offer | None] = []
        for i, gradient in zip(slots, gradients, strict=True):
            if i in filled:
                offer: Offer | None = FILLED
            elif i in self._left_out:
                offer = None
            elif (
                gradient is not None
                and i not in small
                and can_be_reduced_in_place(gradient, forms[i])
                and id(gradient) not in repeated
                and in_place.setdefault(gradient.data_ptr(), i) == i
            ):
                # .data: set_() may make the tensor itself another size while it is in flight.
                offer = Offer(gradient.data_ptr(), partial(self._flatten, gradient.data))
            else:
                offer = self._copy(i, gradient)
            offers.append(offer)
        return offers

    def _copy(self, i: int, gradient: torch.Tensor | None) -> Offer:
        """Copy a gradient, zeros if it is None, in the layout of its slot."""
        started = perf_counter()
        offer = FILLED
        copy = self._small.get(i)
        if copy is None:
            like = self._like[i]
            with ARENA.serving():
                copy = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=self._device)
            self._copies[i] = copy
            offer = Offer(copy.data_ptr(), partial(self._flatten, copy.data))
        if gradient is None:
            copy.zero_()
        else:
            copy.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
        self.lane.records.copied([i], started)
        return offer

    def finish(self, name_of: Any, left_out: Collection[int] = ()) -> None:
        """Wait until all gradients are reduced. A gradient that was not handed over counts as it is, None as zeros.

        The gradients of the parameters ``left_out``, given by id, count as zeros too. Raises AssertionError if a
        gradient was changed or replaced while it was being reduced.
        """
        self._left_out = {index for key, index in self.index.items() if key in left_out} if left_out else set()
        parameters, unready = self.parameters, self.lane.unready_slots()
        changed = changed_since(self._watched, parameters)
        if self._in_place:  # no gradient that is not handed over yet may share the storage of one that is being reduced
            in_flight = {storage_of(parameters[i].grad) for i in self._in_place.values()} - {None}
            changed += [i for i in unready if storage_of(parameters[i].grad) in in_flight]
        if changed:
            raise_if_changed([parameters[i] for i in changed], name_of)
        gradients = [parameters[i].grad for i in unready]
        for i, gradient in zip(unready, gradients, strict=True):
            if i not in self._watched and not parameters[i].requires_grad:
                self._left_out.add(i)  # frozen before backward()
            elif i not in self._watched and i not in self._left_out and gradient is not None:
                self._fits_dtype(i, gradient)
        ids = list(map(id, gradients))
        if len(set(ids)) < len(ids):  # a gradient that is copied for one parameter must not be reduced for another
            self._repeated = {key for key, count in Counter(ids).items() if count > 1}
        filled = self._fill_small(unready, gradients) if self._small else set()
        since = [self._waiting.get(i, UNSEEN) for i in unready]
        self.lane.ready_all(unready, self._offers(unready, gradients, filled), since)
        self.lane.finish()
        self._give_back()
        self._start_step()

    def _fill_small(self, slots: Sequence[int], gradients: Sequence[torch.Tensor | None]) -> set[int]:
        """Copy the dense gradients of small slots together. Return the slots that were filled."""
        started = perf_counter()
        dense = {
            i: gradient
            for i, gradient in zip(slots, gradients, strict=True)
            if i in self._small and gradient is not None and not gradient.is_sparse and i not in self._left_out
        }
        if dense:
            torch._foreach_copy_([self._small[i] for i in dense], list(dense.values()))
        self.lane.records.copied(list(dense), started)
        return set(dense)

    def _give_back(self) -> None:
        """Write the results that lie elsewhere into the parameters' gradients."""
        copies, small = self._copies, self._small
        into: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by slot: a dense gradient and its result
        for i, parameter in enumerate(self.parameters):
            if i in self._left_out:
                continue
            gradient, result = parameter.grad, copies.get(i, small.get(i))
            if result is None:
                if gradient is not None:  # a graph that saved the gradient must not take the result for it
                    torch.autograd.graph.increment_version(gradient)
                continue
            sparse_dim = self._sparse_dims.get(id(parameter))
            if sparse_dim is None and gradient is not None and gradient.is_sparse:
                sparse_dim = gradient.sparse_dim()  # sparse for the first time, and only this rank knows it
            if sparse_dim is not None:
                sparse = result.to_sparse(sparse_dim)
                # SparseAdam would count a step for a gradient without rows.
                parameter.grad = sparse.to(parameter.device) if sparse._nnz() else None
            elif gradient is None:
                self._replace(i, parameter, result)
            else:
                into[i] = gradient, result
        if into:
            self._write(into)

    def _write(self, into: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Write results into dense gradients; replace gradients that share memory with another gradient."""
        slots = list(into)
        shared = {slots[index] for index in overlapping([gradient for gradient, _ in into.values()])}
        gradients, results = [], []
        for i, (gradient, result) in into.items():
            # A gradient that is reduced in place has its storage alone, and begins there.
            if i in shared or (gradient.numel() and gradient.untyped_storage().data_ptr() in self._in_place):
                self._replace(i, self.parameters[i], result)
            elif gradient.is_conj() or gradient.is_neg():
                gradient.copy_(result)  # _foreach_copy_ cannot do this
            else:
                gradients.append(gradient)
                results.append(result)
        if gradients:
            torch._foreach_copy_(gradients, results)

    def _replace(self, i: int, parameter: torch.Tensor, result: torch.Tensor) -> None:
        """Give a parameter a new gradient, because it had none or its own cannot hold the result."""
        own = result if i in self._copies else result.clone()
        parameter.grad = own.to(parameter.device)

    def move_out(self) -> bool:
        """Mark gradients that may be half summed, out of reach of late messages. Return True if there are any."""
        is_marked = False
        for address, i in self._in_place.items():
            gradient = self.parameters[i].grad
            if gradient is not None and gradient.data_ptr() == address:
                if self.lane.error is not None and self.lane.reducer.is_written_late:
                    self.parameters[i].grad = gradient = gradient.clone()
                mark_half_summed(self.parameters[i], gradient)
                is_marked = True
        self._start_step()
        return is_marked

    def close(self) -> None:
        """Give the lane back."""
        self.lane.close()
        self._small = {}
