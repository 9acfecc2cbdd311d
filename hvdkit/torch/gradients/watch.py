"""Gradients that no optimizer may step on: changed while they were being reduced, or half summed by a step that failed.

In a step that failed or was abandoned some elements of a gradient may be sums already, while others are not.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch.utils.hooks import RemovableHandle

from hvdkit.errors import abridged
from hvdkit.torch.gradients.layout import can_be_planned, storage_of

CHANGED_IN_FLIGHT = (
    "Gradients were changed after loss.backward() but before optimizer.step() or optimizer.synchronize(). This is "
    "prohibited as it can cause a race condition: they may still be in the middle of a sum over ranks.\n"
    "HINT: call optimizer.synchronize() before gradients are clipped, unscaled or cleared, and then "
    "'with optimizer.skip_synchronize(): optimizer.step()'.\n"
    "Changed: {names}"
)
HALF_SUMMED = (
    "The gradient of '{name}' was left by a step that failed or was given up: some of its elements may be summed over "
    "ranks already, others are not.\n"
    "HINT: call optimizer.zero_grad() and run the forward and backward pass again."
)
MOST_NAMES = 8  # parameters that a message lists
# At the end of the error that a step fails with.
STEP_FAILED = "The gradients of this step may be half summed: call optimizer.zero_grad() before you go on."


class ChangedInFlightError(AssertionError):
    """Gradients were changed while they were being reduced; ``names`` are those of their parameters."""

    names = ""


# A gradient as its backward pass left it: the tensor, its version and its address. Made for each gradient of a step.
Watched = tuple[torch.Tensor, int, int]


def watch(gradient: torch.Tensor) -> Watched:
    """Remember a gradient as it is."""
    return gradient, gradient._version, gradient.data_ptr() if gradient.layout is torch.strided else 0


def is_moved(watched: Watched, gradient: torch.Tensor | None) -> bool:
    """True if the parameter's ``gradient`` is another tensor than the watched one, or lies elsewhere now."""
    address = 0 if gradient is None or gradient.layout is not torch.strided else gradient.data_ptr()
    return gradient is not watched[0] or address != watched[2]


def changed_since(
    watched: Mapping[int, Watched], parameters: Mapping[int, torch.Tensor] | Sequence[torch.Tensor]
) -> list[int]:
    """Return the keys of parameters whose gradients were changed or replaced since, as far as PyTorch shows it.

    Changes by ``.data`` are not seen. Views of one buffer count their versions together: a sum that a backward pass
    added to another view is no change.
    """
    changed = []
    for key, (gradient, version, address) in watched.items():
        if (
            parameters[key].grad is not gradient
            or gradient._version != version
            or (gradient.data_ptr() if gradient.layout is torch.strided else 0) != address
        ):
            changed.append(key)
    if not changed:
        return []
    versions: dict[int, set[int]] = {}
    for gradient, version, _ in watched.values():
        versions.setdefault(storage_of(gradient) or id(gradient), set()).add(version)

    def is_of_another_view(gradient: torch.Tensor) -> bool:
        return gradient._version in versions[storage_of(gradient) or id(gradient)]

    return [
        key
        for key in changed
        if is_moved(watched[key], parameters[key].grad) or not is_of_another_view(watched[key][0])
    ]


def raise_if_changed(parameters: Sequence[torch.Tensor], name_of: Callable[[torch.Tensor], str]) -> None:
    """Raise ChangedInFlightError, an AssertionError, for the parameters whose gradients were changed, if any."""
    if parameters:
        names = abridged([name_of(parameter) for parameter in parameters], MOST_NAMES)
        error = ChangedInFlightError(CHANGED_IN_FLIGHT.format(names=names))
        error.names = names
        raise error


# The attribute of a gradient that may be half summed, until it is replaced, or all zeros when it is looked at. No table
# of weak references to gradients, since torch.utils.swap_tensors refuses a tensor that has such.
_ATTRIBUTE = "_hvdkit_half_summed"


class _Mark:
    """The mark that a gradient holds under ``_ATTRIBUTE``."""


# Empty if no gradient has to be looked at.
HALF_SUMMED_MARKS: weakref.WeakSet[_Mark] = weakref.WeakSet()


def mark_half_summed(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """Let no optimizer step on this gradient of a parameter until it is cleared, whatever is done to it or added."""

    def look(_: torch.Tensor) -> None:  # before a backward pass adds to what may have been cleared
        if not is_half_summed(parameter.grad):
            handle.remove()

    if not hasattr(gradient, _ATTRIBUTE):
        mark = _Mark()
        setattr(gradient, _ATTRIBUTE, mark)
        HALF_SUMMED_MARKS.add(mark)
        # With a hook of its own: a job of one rank that goes on has no others.
        handle: RemovableHandle = parameter.register_hook(look)  # type: ignore[no-untyped-call]


def is_half_summed(gradient: torch.Tensor | None) -> bool:
    """True if a failed step left this gradient, or it was made of such a gradient, by clipping for example."""
    if gradient is None or not hasattr(gradient, _ATTRIBUTE):
        return False
    if bool(gradient.any()):
        return True
    delattr(gradient, _ATTRIBUTE)
    return False


def check_unchanged(
    gradients: Iterable[tuple[torch.Tensor, float, Watched | None]], name_of: Callable[[torch.Tensor], str]
) -> None:
    """Raise ValueError for parameters whose dense gradients were changed since they were watched."""
    parameters, watched = {}, {}
    for parameter, _, gradient in gradients:
        parameters[id(parameter)] = parameter
        if gradient and gradient[0].layout is torch.strided and can_be_planned(parameter, gradient[0].dtype):
            watched[id(parameter)] = gradient
    raise_if_changed([parameters[key] for key in changed_since(watched, parameters)], name_of)
