"""Gradients that live in a lane's fusion buffers: reduced in an order all ranks agreed on, with no negotiation."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import ml_dtypes
import numpy as np
import torch

from hvdkit.engine.plan import Slot

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


def tensor_on(memory: Any, parameter: torch.Tensor) -> torch.Tensor:
    """A tensor with a parameter's shape and strides whose elements are ``memory``.

    ``memory``: a flat array of the parameter's dtype, or a flat tensor of a device.
    """
    if isinstance(memory, torch.Tensor):
        flat = memory
    elif parameter.dtype is torch.bfloat16:
        flat = torch.from_numpy(memory.view(np.int16)).view(torch.bfloat16)
    else:
        flat = torch.from_numpy(memory)
    fills_memory = parameter.is_contiguous() or memory_order(parameter) is not None
    view = flat.as_strided(parameter.shape, parameter.stride()) if fills_memory else flat.view(parameter.shape)
    # .data: torch must not take it for a view, which zero_grad(set_to_none=False) may refuse to detach in place.
    return view.data


def address(tensor: torch.Tensor) -> int:
    """Where a tensor's values are; 0 for a sparse one."""
    return 0 if tensor.is_sparse else tensor.data_ptr()


def lives_in(slot: torch.Tensor, gradient: torch.Tensor | None) -> bool:
    """Whether the gradient's values are the slot's memory, element for element."""
    return (
        gradient is not None
        and gradient.layout is slot.layout
        and gradient.data_ptr() == slot.data_ptr()
        and gradient.dtype is slot.dtype
        and gradient.device == slot.device
        and gradient.shape == slot.shape
        and gradient.stride() == slot.stride()
    )


class PlannedGradients:
    """The gradients of ``parameters`` and their slots in ``lane``, in the same order.

    ``p.grad`` lives in the slot where both are on one device: on the CPU, and on CUDA if the lane's buffers are there
    too. A gradient on another device than the slots, of another dtype, or a sparse one, is copied there and back.
    """

    def __init__(self, lane: Any, parameters: Sequence[torch.Tensor], sparse_dims: dict[int, int]) -> None:
        self.lane = lane
        self.parameters = list(parameters)
        self.index = {id(parameter): i for i, parameter in enumerate(self.parameters)}
        self._sparse_dims = sparse_dims  # by id: gradients that optimizers must see as sparse tensors
        self._in_flight: dict[int, tuple[torch.Tensor, int, int]] = {}
        self._fetch_slots()

    def _fetch_slots(self) -> None:
        self._generation = self.lane.generation
        self._slots = [tensor_on(self.lane.slot_array(i), parameter) for i, parameter in enumerate(self.parameters)]

    def _follow_lane(self) -> None:
        """Move to where the slots are now, if the lane has laid them out anew."""
        if self.lane.generation != self._generation:
            old = self._slots
            self._fetch_slots()
            # The old slots may be memory of other gradients now.
            for i, (parameter, before) in enumerate(zip(self.parameters, old, strict=True)):
                if lives_in(before, parameter.grad):
                    parameter.grad = self._alias(i)

    def _alias(self, i: int) -> torch.Tensor:
        """The slot as a tensor of its own: ``p.grad.data = other`` must not take the slot itself elsewhere."""
        return self._slots[i].data

    def _can_hold(self, i: int, parameter: torch.Tensor) -> bool:
        """Whether the parameter's gradient may live in its slot; .to() may have changed the parameter."""
        slot = self._slots[i]
        return parameter.device == slot.device and parameter.dtype == slot.dtype and parameter.shape == slot.shape

    def hand_over(self, i: int, since: float | None = None) -> None:
        """A gradient is complete, ``since`` if not just now: put it into its slot and let it be reduced."""
        self._follow_lane()
        parameter = self.parameters[i]
        started = perf_counter()
        self._fill(i, parameter)
        self.lane.copied(i, started)
        gradient = parameter.grad
        if gradient is not None:
            self._in_flight[i] = gradient, gradient._version, address(gradient)
        self.lane.ready(i, since)

    def _fill(self, i: int, parameter: torch.Tensor) -> None:
        gradient, slot = parameter.grad, self._slots[i]
        if gradient is None or not parameter.requires_grad:
            slot.zero_()
        elif gradient.is_sparse:
            slot.copy_(gradient.to_dense())
        elif not lives_in(slot, gradient):
            slot.copy_(gradient)
            if self._can_hold(i, parameter):
                parameter.grad = self._alias(i)

    def check_unchanged(self, name_of: Any) -> None:
        """Raise AssertionError if somebody changed or replaced a gradient while it was being reduced."""
        changed = [
            name_of(self.parameters[i])
            for i, (gradient, version, where) in self._in_flight.items()
            if self.parameters[i].grad is not gradient or (gradient._version, address(gradient)) != (version, where)
        ]
        if changed:
            raise AssertionError(CHANGED_IN_FLIGHT.format(names=", ".join(changed)))

    def finish(self) -> None:
        """Wait until all are reduced. What was not handed over counts as it stands, as zeros if it is None."""
        self._follow_lane()
        for i in self.lane.unready_slots():
            self._fill(i, self.parameters[i])
            self.lane.ready(i)
        self.lane.finish()
        self._end_step()
        for i, parameter in enumerate(self.parameters):
            if parameter.requires_grad:
                self._give_back(i, parameter)

    def _end_step(self) -> None:
        self._in_flight.clear()
        self._follow_lane()

    def _give_back(self, i: int, parameter: torch.Tensor) -> None:
        gradient, slot = parameter.grad, self._slots[i]
        if lives_in(slot, gradient):
            return
        sparse_dim = self._sparse_dims.get(id(parameter))
        if sparse_dim is None and gradient is not None and gradient.is_sparse:
            sparse_dim = gradient.sparse_dim()  # sparse for the first time, and only this rank knows it
        if sparse_dim is not None:
            parameter.grad = slot.to_sparse(sparse_dim).to(parameter.device)
        elif self._can_hold(i, parameter):
            parameter.grad = self._alias(i)
        elif gradient is None:
            parameter.grad = slot.to(parameter.device, parameter.dtype)
        else:
            gradient.copy_(slot)

    def move_in(self) -> None:
        """Between two steps: let gradients that are elsewhere live in the slots."""
        self._follow_lane()
        for i, parameter in enumerate(self.parameters):
            gradient = parameter.grad
            if gradient is not None and not gradient.is_sparse and self._can_hold(i, parameter):
                self._fill(i, parameter)

    def abandon(self) -> None:
        """Forget what was handed over in this step."""
        self.lane.abandon()
        self._end_step()
        if self.lane.error is not None:
            self.move_out()

    def move_out(self) -> None:
        """After a failure: give each gradient memory of its own, since a late message may still write into slots."""
        for slot, parameter in zip(self._slots, self.parameters, strict=True):
            if lives_in(slot, parameter.grad):
                parameter.grad = slot.clone()

    def close(self) -> None:
        """Give the lane back."""
        self.lane.close()
