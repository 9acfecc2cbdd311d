"""Gradients that a lane reduces: in an order all ranks agreed on, with no negotiation, in the tensors that they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import torch

from hvdkit.arena import ARENA
from hvdkit.engine.arrangement import UNSEEN
from hvdkit.engine.offers import FILLED, Offer
from hvdkit.engine.plan import Slot
from hvdkit.torch.arrays import as_array, as_tensor
from hvdkit.torch.half_summed import mark_half_summed

_NUMPY_DTYPES: dict[torch.dtype, np.dtype[Any]] = {
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
    torch.float16: np.dtype(np.float16),
    torch.bfloat16: np.dtype(ml_dtypes.bfloat16),
}

CHANGED_IN_FLIGHT = (
    "The gradients of {names} were changed after loss.backward() but before optimizer.step() or "
    "optimizer.synchronize(). This is prohibited as it can cause a race condition.\n"
    "HINT: call optimizer.synchronize() before gradients are clipped, unscaled or cleared, and then "
    "'with optimizer.skip_synchronize(): optimizer.step()'."
)


def can_be_planned(parameter: torch.Tensor) -> bool:
    """True for the gradients that fusion buffers hold: real floating point, dense."""
    return parameter.dtype in _NUMPY_DTYPES and parameter.layout is torch.strided


def memory_order(parameter: torch.Tensor) -> list[int] | None:
    """The axes from the slowest to the fastest where a parameter fills its memory in another order than its shape's.

    None for the usual order, and for a parameter whose elements do not fill one block of memory.
    """
    if parameter.is_contiguous():
        return None
    strides: tuple[int, ...] = parameter.stride()
    order = sorted(range(parameter.dim()), key=lambda axis: (strides[axis], parameter.shape[axis]), reverse=True)
    return order if parameter.permute(order).is_contiguous() else None


def slot_of(name: str, parameter: torch.Tensor, codec: int = 0) -> Slot:
    """A parameter's slot; ``codec`` is the number of its codec in the plan.

    Ranks whose memory orders differ (channels_last on some) differ in the slot's name.
    """
    shape = tuple(parameter.shape)
    order = memory_order(parameter)
    if order is not None:
        name, shape = f"{name} (axes in memory: {order})", tuple(parameter.shape[axis] for axis in order)
    return Slot(name, shape, _NUMPY_DTYPES[parameter.dtype], codec)


def tensor_on(memory: Any, like: torch.Tensor) -> torch.Tensor:
    """A tensor of the shape and strides of ``like`` whose elements are ``memory``, a flat array of its dtype."""
    return as_tensor(memory).as_strided(like.shape, like.stride())


class Watched(NamedTuple):
    """A gradient as it was when its backward pass had completed it."""

    gradient: torch.Tensor
    version: int
    address: int

    def is_moved(self, gradient: torch.Tensor | None) -> bool:
        """Whether the parameter's ``gradient`` is another tensor now, or lies elsewhere."""
        return gradient is not self.gradient or _address(gradient) != self.address


def watch(gradient: torch.Tensor) -> Watched:
    """Remember a gradient as it is."""
    return Watched(gradient, gradient._version, _address(gradient))


def changed_since(watched: Mapping[int, Watched], gradients: Mapping[int, torch.Tensor | None]) -> list[int]:
    """The keys of gradients that somebody has changed or replaced since, as far as PyTorch tells: ``.data`` does not.

    Views of one buffer count their versions together: what a backward pass added to another one is no change.
    """
    moved = {key: one.is_moved(gradients[key]) for key, one in watched.items()}
    changed = [key for key, one in watched.items() if moved[key] or one.gradient._version != one.version]
    if not changed:
        return []
    versions: dict[int, set[int]] = {}
    for one in watched.values():
        versions.setdefault(_storage_of(one.gradient) or id(one.gradient), set()).add(one.version)

    def is_anothers(one: torch.Tensor) -> bool:
        return one._version in versions[_storage_of(one) or id(one)]

    return [key for key in changed if moved[key] or not is_anothers(watched[key].gradient)]


def fits(gradient: torch.Tensor, like: torch.Tensor) -> bool:
    """Whether a gradient's elements are one block of memory in the order of its slot, which is that of ``like``."""
    return (
        gradient.layout is torch.strided
        and gradient.dtype is like.dtype
        and gradient.shape == like.shape
        and (gradient.stride() == like.stride() or (gradient.is_contiguous() and like.is_contiguous()))
        and not gradient.is_neg()
    )


def holders(tensor: torch.Tensor) -> int:
    """How many tensors, and others, hold a tensor's storage, as far as a constant."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


# What ``holders`` says of a storage that one tensor has.
_ALONE = holders(torch.empty(1))


def flat_view(tensor: torch.Tensor) -> torch.Tensor:
    """The one block of memory that a tensor's elements fill."""
    # .data: what the engine writes there must not count as a change of the tensor.
    return tensor.data.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def offer_from(tensor: torch.Tensor, as_tensor: bool) -> Offer:
    """A tensor that fills one block of memory, for the engine, which takes it ``as_tensor`` or as an array."""
    own = tensor.data  # now: set_() may make the tensor itself another size while it is in flight
    if as_tensor:
        return Offer(0, lambda: flat_view(own))
    return Offer(tensor.data_ptr(), lambda: as_array(flat_view(own)))


def extent(tensor: torch.Tensor) -> int:
    """Bytes from a strided tensor's first element to the end of its last one, with what lies between them."""
    if tensor.numel() == 0:
        return 0
    steps = ((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (sum(steps) + 1) * tensor.element_size()


def overlapping(tensors: Sequence[torch.Tensor], keep: Sequence[bool]) -> list[int]:
    """Which of these dense tensors may have memory in common with one before them; those to ``keep`` come first."""
    begins = [tensor.data_ptr() for tensor in tensors]
    found, reached = [], 0
    for one in sorted(range(len(tensors)), key=lambda one: (begins[one], not keep[one])):
        if begins[one] < reached:
            found.append(one)
        reached = max(reached, begins[one] + extent(tensors[one]))
    return found


class ChangedInFlightError(AssertionError):
    """Gradients were changed while they were being reduced; ``names`` are those of their parameters."""

    names = ""


class PlannedGradients:
    """The gradients of ``parameters`` and their slots in ``lane``, in the same order.

    When a step is over, the tensor that ``p.grad`` was when backward() ended holds the result. On the way a large one
    is reduced where it lies if nobody else has its storage; the others, the small ones, and what lies on another
    device, in another dtype or layout, are copied, and the results are written back into them. ``device``: that of the
    lane's memory.
    """

    def __init__(
        self, lane: Any, parameters: Sequence[torch.Tensor], sparse_dims: dict[int, int], device: torch.device
    ) -> None:
        self.lane = lane
        self.parameters = list(parameters)
        self.index = {id(parameter): i for i, parameter in enumerate(self.parameters)}
        self._sparse_dims = sparse_dims  # by id: gradients that optimizers must see as sparse tensors
        self._device = device
        self._like = [_layout_of(parameter) for parameter in self.parameters]  # .to() may change a parameter
        self._small = {
            i: tensor_on(memory, like) for i, like in enumerate(self._like) if (memory := lane.small(i)) is not None
        }
        self._start_step()

    def _start_step(self) -> None:
        self._watched: dict[int, Watched] = {}
        self._waiting: dict[int, float] = {}  # complete, but not handed over before the step is completed; since when
        self._in_place: dict[int, int] = {}  # by address: the gradients that are reduced where they lie
        self._repeated: set[int | None] = set()  # addresses of storages that several parameters' gradients have
        self._copies: dict[int, torch.Tensor] = {}  # what is reduced in the place of a gradient

    def hand_over(self, i: int, since: float | None = None, watched: Watched | None = None) -> None:
        """A gradient is complete, ``since`` if not just now: let it be reduced. ``watched``: as it was then."""
        gradient = self.parameters[i].grad
        if watched is not None:
            self._watched[i] = watched
            if watched.is_moved(gradient):
                return  # check_unchanged() will say so
        elif gradient is not None:
            self._watched[i] = watch(gradient)
        if gradient is None or i in self._small or self.lane.on_device:
            self._hand_over(i, since)
            return
        is_free = self._is_free(i, gradient)
        if is_free and not ARENA.contains(gradient.data_ptr()):
            # It would be reduced in memory that is not ours to keep: share_memory_() may free it.
            self._waiting[i] = perf_counter() if since is None else since
        else:
            self._hand_over(i, since, is_free)

    def _hand_over(self, i: int, since: float | None, is_free: bool | None = None) -> None:
        """``is_free``: what ``_is_free`` says of the gradient, where that was asked already."""
        parameter, small = self.parameters[i], self._small.get(i)
        gradient, started = parameter.grad, perf_counter()
        if not parameter.requires_grad:
            self.lane.ready(i, None, since)
        elif small is not None:
            if gradient is None:
                small.zero_()
            else:
                small.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
            self.lane.copied(i, started)
            self.lane.ready(i, FILLED, since)
        elif gradient is not None and (self._is_free(i, gradient) if is_free is None else is_free):
            self._in_place[gradient.data_ptr()] = i
            self.lane.ready(i, offer_from(gradient, self.lane.on_device), since)
        else:
            copy = self._copies[i] = self._copied(i, gradient)
            self.lane.copied(i, started)
            self.lane.ready(i, offer_from(copy, self.lane.on_device), since)

    def _is_free(self, i: int, gradient: torch.Tensor) -> bool:
        """Whether a gradient can be reduced where it lies.

        The backward pass may go on to read a storage that others have too, and two gradients may have one storage.
        """
        return (
            gradient.device == self._device
            and fits(gradient, self._like[i])
            and holders(gradient) == _ALONE
            and _storage_of(gradient) not in self._repeated
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
        if changed:
            names = ", ".join(name_of(self.parameters[i]) for i in changed)
            error = ChangedInFlightError(CHANGED_IN_FLIGHT.format(names=names))
            error.names = names
            raise error

    def _aliases_of_what_is_in_flight(self) -> list[int]:
        """Slots, not handed over yet, whose gradients share the storage of one that is being reduced where it lies."""
        unready = self.lane.unready_slots() if self._in_place else []
        if not unready:
            return []
        in_flight = {_storage_of(self.parameters[i].grad) for i in self._in_place.values()}
        return [i for i in unready if _storage_of(self.parameters[i].grad) in in_flight - {None}]

    def finish(self) -> None:
        """Wait until all are reduced. What was not handed over counts as it stands, as zeros if it is None."""
        unready = self.lane.unready_slots()
        # What is to be copied for one parameter must not be reduced where it lies for another.
        storages = Counter(_storage_of(self.parameters[i].grad) for i in unready)
        self._repeated = {storage for storage, times in storages.items() if times > 1}
        for i in unready:
            self._hand_over(i, self._waiting.get(i, UNSEEN))
        self.lane.finish()
        self._give_back()
        self._start_step()

    def _give_back(self) -> None:
        """Every gradient holds its result: those that were reduced elsewhere get it now."""
        gradients: list[torch.Tensor] = []  # dense ones, and what each is to be given, if it is not there
        results: list[torch.Tensor | None] = []
        owners: list[int] = []
        for i, parameter in enumerate(self.parameters):
            if not parameter.requires_grad:
                continue
            gradient, result = parameter.grad, self._copies.get(i, self._small.get(i))
            sparse_dim = self._sparse_dims.get(id(parameter))
            if sparse_dim is None and gradient is not None and gradient.is_sparse:
                sparse_dim = gradient.sparse_dim()  # sparse for the first time, and only this rank knows it
            if sparse_dim is not None and result is not None:
                parameter.grad = result.to_sparse(sparse_dim).to(parameter.device)
            elif gradient is None or (result is not None and torch._debug_has_internal_overlap(gradient) == 1):
                self._replace(i, parameter, result)
            else:
                gradients.append(gradient)
                results.append(result)
                owners.append(i)
        apart = set(range(len(gradients))) - set(overlapping(gradients, [result is None for result in results]))
        into: list[torch.Tensor] = []
        out_of: list[torch.Tensor] = []
        for place, (i, gradient, result) in enumerate(zip(owners, gradients, results, strict=True)):
            if place not in apart:
                self._replace(i, self.parameters[i], result)
            elif result is None:
                # A graph that saved it must not take the result for it.
                torch.autograd.graph.increment_version(gradient)
            else:
                into.append(gradient)
                out_of.append(result)
        if into:
            torch._foreach_copy_(into, out_of)

    def _replace(self, i: int, parameter: torch.Tensor, result: torch.Tensor | None) -> None:
        """A gradient of its own for a parameter that had none, or one that cannot hold the result."""
        if result is not None:
            own = result if i in self._copies else result.clone()
            parameter.grad = own.to(parameter.device, parameter.dtype)

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
                if self.lane.error is not None and self.lane.home.is_written_late:
                    self.parameters[i].grad = gradient = gradient.clone()
                mark_half_summed(self.parameters[i], gradient)
                is_marked = True
        self._start_step()
        return is_marked

    def close(self) -> None:
        """Give the lane back."""
        self.lane.close()
        self._small = {}


def _storage_of(gradient: torch.Tensor | None) -> int | None:
    """The address of a dense gradient's storage."""
    if gradient is None or gradient.layout is not torch.strided:
        return None
    return gradient.untyped_storage().data_ptr()


def _address(gradient: torch.Tensor | None) -> int:
    """Where a dense gradient begins; 0 for others."""
    return 0 if gradient is None or gradient.layout is not torch.strided else gradient.data_ptr()


def _layout_of(parameter: torch.Tensor) -> torch.Tensor:
    """A tensor without memory, of a parameter's shape and dtype, whose strides are those of its slot."""
    fills_memory = parameter.is_contiguous() or memory_order(parameter) is not None
    meta = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    return meta.as_strided(parameter.shape, parameter.stride()) if fills_memory else meta
