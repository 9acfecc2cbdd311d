"""Gradients that a lane reduces: in an order all ranks agreed on, with no negotiation, in the tensors that they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from time import perf_counter
from typing import Any

import torch

from hvdkit.arena import ARENA
from hvdkit.engine.steps.arrangement import UNSEEN
from hvdkit.engine.steps.offers import FILLED
from hvdkit.torch.gradients.half_summed import mark_half_summed
from hvdkit.torch.gradients.hooks import COMPUTED_AGAIN
from hvdkit.torch.gradients.layout import (
    ALONE,
    TOO_WIDE,
    Kinds,
    fits,
    gradient_dtype,
    has_storage_alone,
    layout_of,
    offer_from,
    overlapping,
    references,
    storage_of,
    tensor_on,
)
from hvdkit.torch.gradients.watch import Watched, changed_since, raise_if_changed, watch


class PlannedGradients:
    """The gradients of ``parameters`` and their slots in ``lane``, in the same order.

    When a step is over, the tensor that ``p.grad`` was when backward() ended holds the result. On the way a large one
    is reduced where it lies if nobody else has its storage; the others, the small ones, and what lies on another
    device, in another dtype or layout, are copied, and the results are written back into them. ``device``: that of the
    lane's memory.
    """

    def __init__(self, lane: Any, parameters: Sequence[torch.Tensor], kinds: Kinds, device: torch.device) -> None:
        self.lane = lane
        self.parameters = list(parameters)
        self.index = {id(parameter): i for i, parameter in enumerate(self.parameters)}
        self._sparse_dims = kinds.sparse_dims  # by id: gradients that optimizers must see as sparse tensors
        self._device = device
        # .to() may change a parameter
        self._like = [layout_of(parameter, kinds.dtypes[id(parameter)]) for parameter in self.parameters]
        self._small = {
            i: tensor_on(memory, like) for i, like in enumerate(self._like) if (memory := lane.small(i)) is not None
        }
        self._declared = [gradient_dtype(parameter) for parameter in self.parameters]
        # All at the end take less time than each at its own, when caches hold what the backward pass needs.
        self._hands_over_late = lane.takes_turns
        self._start_step()

    def _start_step(self) -> None:
        self._watched: dict[int, Watched] = {}
        self._waiting: dict[int, float] = {}  # complete, but not handed over before the step is completed; since when
        self._in_place: dict[int, int] = {}  # by address: the gradients that are reduced where they lie
        self._repeated: set[int | None] = set()  # addresses of storages that several parameters' gradients have
        self._copies: dict[int, torch.Tensor] = {}  # what is reduced in the place of a gradient
        self._left_out: set[int] = set()

    def _takes_part(self, i: int) -> bool:
        """Whether a gradient counts in this step: also that of a parameter that was frozen after it was complete."""
        return i not in self._left_out and (self.parameters[i].requires_grad or i in self._watched)

    def _taking_part(self, slots: Iterable[int]) -> list[int]:
        """Return the slots whose gradients count in this step; faster than ``_takes_part`` for each."""
        left_out, watched, parameters = self._left_out, self._watched, self.parameters
        return [i for i in slots if i not in left_out and (i in watched or parameters[i].requires_grad)]

    def leave_out(self, ids: Collection[int]) -> None:
        """Reduce zeros for parameters whose gradients have another dtype now: this step is the last one of this lane.

        On all ranks alike.
        """
        self._left_out = {index for key in ids if (index := self.index.get(key)) is not None}

    def hand_over(
        self, i: int, since: float | None = None, watched: Watched | None = None, may_grow: bool = False
    ) -> None:
        """A gradient is complete, ``since`` if not just now: let it be reduced, now or when the step is completed.

        ``watched``: as it was then. ``may_grow``: this backward pass may add to it once more and call this again.
        """
        gradient = self.parameters[i].grad
        if gradient is not None and gradient.dtype is not self._like[i].dtype and not self._fits_dtype(i, gradient):
            return
        if watched is not None:
            self._watched[i] = watched
            if watched.is_moved(gradient):
                return  # check_unchanged() will say so
        elif gradient is not None:
            self._watched[i] = watch(gradient)
        if may_grow and self.lane.is_ready(i):
            raise AssertionError(COMPUTED_AGAIN.format(name=self.lane.slots[i].name))
        if self._hands_over_late or may_grow:
            self.lane.begin()
            self._waiting[i] = perf_counter() if since is None else since
            return
        if gradient is None or i in self._small or self.lane.on_device:
            self._hand_over(i, since)
            return
        is_free = self._is_free(i, gradient)
        if is_free and not ARENA.contains(gradient.data_ptr()):
            # It would be reduced in memory that is not ours to keep: share_memory_() may free it.
            self._waiting[i] = perf_counter() if since is None else since
        else:
            self._hand_over(i, since, is_free)

    def _fits_dtype(self, i: int, gradient: torch.Tensor) -> bool:
        """True if the slot holds a gradient of this dtype; False if its parameter's dtype was changed on all ranks.

        Raises:
            ValueError: the dtype was left open, and this gradient would be rounded.
        """
        dtype, agreed = gradient.dtype, self._like[i].dtype
        if gradient_dtype(self.parameters[i]) is not self._declared[i]:
            return False
        if torch.promote_types(dtype, agreed) is not agreed:
            raise ValueError(TOO_WIDE.format(name=self.lane.slots[i].name, dtype=dtype, agreed=agreed))
        return True

    def _hand_over(self, i: int, since: float | None, is_free: bool | None = None) -> None:
        """``is_free``: what ``_is_free`` says of the gradient, where that was asked already."""
        parameter, small = self.parameters[i], self._small.get(i)
        gradient, started = parameter.grad, perf_counter()
        if not self._takes_part(i):
            self.lane.ready(i, None, since)
        elif small is not None:
            if gradient is None:
                small.zero_()
            else:
                small.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
            self.lane.records.copied([i], started)
            self.lane.ready(i, FILLED, since)
        elif gradient is not None and (self._is_free(i, gradient) if is_free is None else is_free):
            self._in_place[gradient.data_ptr()] = i
            self.lane.ready(i, offer_from(gradient, self.lane.on_device), since)
        else:
            copy = self._copies[i] = self._copied(i, gradient)
            self.lane.records.copied([i], started)
            self.lane.ready(i, offer_from(copy, self.lane.on_device), since)

    def _is_free(self, i: int, gradient: torch.Tensor) -> bool:
        """Whether a gradient can be reduced where it lies.

        The backward pass may go on to read a storage that others have too, and two gradients may have one storage.
        """
        return (
            gradient.device == self._device
            and fits(gradient, self._like[i])
            and has_storage_alone(gradient)
            and storage_of(gradient) not in self._repeated
            and self._in_place.get(gradient.data_ptr(), i) == i
        )

    def _copied(self, i: int, gradient: torch.Tensor | None) -> torch.Tensor:
        """A gradient's values, zeros if it is None, as the lane takes them."""
        like = self._like[i]
        with ARENA.serving():
            copy = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=self._device)
        return copy.zero_() if gradient is None else copy.copy_(gradient.to_dense() if gradient.is_sparse else gradient)

    def check_unchanged(self, name_of: Any) -> None:
        """Raise AssertionError if somebody changed or replaced a gradient while it was being reduced."""
        changed = changed_since(self._watched, {i: self.parameters[i].grad for i in self._watched})
        changed += self._aliases_of_what_is_in_flight()
        raise_if_changed([self.parameters[i] for i in changed], name_of)

    def _aliases_of_what_is_in_flight(self) -> list[int]:
        """Slots, not handed over yet, whose gradients share the storage of one that is being reduced where it lies."""
        unready = self.lane.unready_slots() if self._in_place else []
        if not unready:
            return []
        in_flight = {storage_of(self.parameters[i].grad) for i in self._in_place.values()}
        return [i for i in unready if storage_of(self.parameters[i].grad) in in_flight - {None}]

    def finish(self) -> None:
        """Wait until all are reduced. What was not handed over counts as it stands, as zeros if it is None."""
        self._hand_over_rest()
        self.lane.finish()
        self.give_back(range(len(self.parameters)))
        self._start_step()

    def begin_finish(self) -> None:
        """The same, but for the wait: ``lane.wait`` waits for some, ``give_back`` follows, and ``end``."""
        self._hand_over_rest()
        self.lane.begin_finish()

    def end(self) -> None:
        """The step is over."""
        self.lane.finish()
        self._start_step()

    def held(self, known: int = 0) -> set[int]:
        """The slots of gradients that somebody holds or has a view of, and may read or clear without our knowing.

        ``known``: how many hold each who do neither.
        """
        found = set()
        for i, parameter in enumerate(self.parameters):
            gradient = parameter.grad
            if gradient is None or gradient.layout is not torch.strided:
                continue
            is_in_place = self._in_place.get(gradient.data_ptr()) == i  # nobody else had its storage then, we have now
            is_known = references(gradient) == ALONE + (i in self._watched) + known
            if not is_known or not (is_in_place or has_storage_alone(gradient)):
                found.add(i)
        return found

    def can_be_collected_apart(self) -> bool:
        """Whether no two gradients may lie in the same memory: one's result may come before the other's is used."""
        gradients = [
            gradient
            for i in self._taking_part(range(len(self.parameters)))
            if (gradient := self.parameters[i].grad) is not None and gradient.layout is torch.strided
        ]
        return not overlapping(gradients, [True] * len(gradients))

    def _hand_over_rest(self) -> None:
        unready = self.lane.unready_slots()
        for i in unready:
            if i not in self._watched and i not in self._left_out and (gradient := self.parameters[i].grad) is not None:
                self._fits_dtype(i, gradient)
        # What is to be copied for one parameter must not be reduced where it lies for another.
        storages = Counter(storage_of(self.parameters[i].grad) for i in unready)
        self._repeated = {storage for storage, times in storages.items() if times > 1}
        filled = self._fill_small(unready)
        for i in unready:
            since = self._waiting.get(i, UNSEEN)
            if i in filled:
                self.lane.ready(i, FILLED, since)
            else:
                self._hand_over(i, since)

    def _fill_small(self, slots: Sequence[int]) -> set[int]:
        """Copy dense gradients of small slots, all of them in one go; returns of which slots."""
        started = perf_counter()
        gradients = {
            i: gradient
            for i in self._taking_part(slots)
            if i in self._small and (gradient := self.parameters[i].grad) is not None and not gradient.is_sparse
        }
        if gradients:
            torch._foreach_copy_([self._small[i] for i in gradients], list(gradients.values()))
        self.lane.records.copied(list(gradients), started)
        return set(gradients)

    def give_back(self, slots: Sequence[int]) -> None:
        """These gradients hold their results: those that were reduced elsewhere get them now."""
        gradients: list[torch.Tensor] = []  # dense ones, and what each is to be given, if it is not there
        results: list[torch.Tensor | None] = []
        owners: list[int] = []
        for i in self._taking_part(slots):
            parameter = self.parameters[i]
            gradient, result = parameter.grad, self._copies.get(i, self._small.get(i))
            sparse_dim = self._sparse_dims.get(id(parameter))
            if sparse_dim is None and gradient is not None and gradient.is_sparse:
                sparse_dim = gradient.sparse_dim()  # sparse for the first time, and only this rank knows it
            if sparse_dim is not None and result is not None:
                sparse = result.to_sparse(sparse_dim)
                # Without any row it is no gradient: SparseAdam would count a step for it.
                parameter.grad = sparse.to(parameter.device) if sparse._nnz() else None
            elif gradient is None or (result is not None and torch._debug_has_internal_overlap(gradient) == 1):
                self._replace(i, parameter, result)
            else:
                gradients.append(gradient)
                results.append(result)
                owners.append(i)
        apart = set(range(len(gradients))) - set(overlapping(gradients, [result is None for result in results]))
        into: list[torch.Tensor] = []
        out_of: list[torch.Tensor] = []
        for index, (i, gradient, result) in enumerate(zip(owners, gradients, results, strict=True)):
            if index not in apart:
                self._replace(i, self.parameters[i], result)
            elif result is None:
                # A graph that saved it must not take the result for it.
                torch.autograd.graph.increment_version(gradient)
            elif gradient.is_conj() or gradient.is_neg():
                gradient.copy_(result)  # which _foreach_copy_ cannot do
            else:
                into.append(gradient)
                out_of.append(result)
        if into:
            torch._foreach_copy_(into, out_of)

    def _replace(self, i: int, parameter: torch.Tensor, result: torch.Tensor | None) -> None:
        """A gradient of its own for a parameter that had none, or one that cannot hold the result."""
        if result is not None:
            own = result if i in self._copies else result.clone()
            parameter.grad = own.to(parameter.device)

    def abandon(self) -> None:
        """Forget what was handed over in this step."""
        self.lane.abandon()
        self.move_out()

    def move_out(self) -> bool:
        """Gradients that may be half summed are marked and, after a failure, out of reach of a late message.

        Returns whether there are any.
        """
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
