"""A gradient as its backward pass left it, to see if the user has changed it since."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from hvdkit.torch.gradients.layout import storage_of

CHANGED_IN_FLIGHT = (
    "The gradients of {names} were changed after loss.backward() but before optimizer.step() or "
    "optimizer.synchronize(). This is prohibited as it can cause a race condition.\n"
    "HINT: call optimizer.synchronize() before gradients are clipped, unscaled or cleared, and then "
    "'with optimizer.skip_synchronize(): optimizer.step()'."
)


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


def changed_of(pairs: Sequence[tuple[torch.Tensor, Watched | None]]) -> list[torch.Tensor]:
    """Return the parameters whose dense gradients were changed since they were watched."""
    watched = {
        id(parameter): before for parameter, before in pairs if before is not None and before[0].layout is torch.strided
    }
    parameters = {id(parameter): parameter for parameter, _ in pairs}
    return [parameters[key] for key in changed_since(watched, parameters)]


def raise_if_changed(parameters: Sequence[torch.Tensor], name_of: Callable[[torch.Tensor], str]) -> None:
    """Raise ChangedInFlightError, an AssertionError, for the parameters whose gradients were changed, if any."""
    if parameters:
        names = ", ".join(map(name_of, parameters))
        error = ChangedInFlightError(CHANGED_IN_FLIGHT.format(names=names))
        error.names = names
        raise error
