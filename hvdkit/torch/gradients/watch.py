"""A gradient as its backward pass left it, and whether somebody has changed it since."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

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
    is_dense = gradient.layout is torch.strided
    return Watched(gradient, gradient._version, gradient.data_ptr() if is_dense else 0)


def changed_since(watched: Mapping[int, Watched], gradients: Mapping[int, torch.Tensor | None]) -> list[int]:
    """The keys of gradients that somebody has changed or replaced since, as far as PyTorch tells: ``.data`` does not.

    Views of one buffer count their versions together: what a backward pass added to another one is no change.
    """
    changed = [
        key
        for key, (gradient, version, address) in watched.items()
        if gradients[key] is not gradient
        or gradient._version != version
        or (gradient.data_ptr() if gradient.layout is torch.strided else 0) != address
    ]
    if not changed:
        return []
    versions: dict[int, set[int]] = {}
    for one in watched.values():
        versions.setdefault(storage_of(one.gradient) or id(one.gradient), set()).add(one.version)

    def is_anothers(one: torch.Tensor) -> bool:
        return one._version in versions[storage_of(one) or id(one)]

    return [key for key in changed if watched[key].is_moved(gradients[key]) or not is_anothers(watched[key].gradient)]


def changed_of(pairs: Sequence[tuple[torch.Tensor, Watched | None]]) -> list[torch.Tensor]:
    """Those of these parameters whose dense gradients were changed since they were as it says beside them."""
    watched = {id(one): seen for one, seen in pairs if seen is not None and seen.gradient.layout is torch.strided}
    parameters = {id(one): one for one, _ in pairs}
    return [parameters[key] for key in changed_since(watched, {key: parameters[key].grad for key in watched})]


def raise_if_changed(parameters: Sequence[torch.Tensor], name_of: Callable[[torch.Tensor], str]) -> None:
    """Raise ChangedInFlightError, an AssertionError, for the parameters whose gradients were changed, if any."""
    if parameters:
        names = ", ".join(map(name_of, parameters))
        error = ChangedInFlightError(CHANGED_IN_FLIGHT.format(names=names))
        error.names = names
        raise error


def _address(gradient: torch.Tensor | None) -> int:
    """Where a dense gradient begins; 0 for others."""
    return 0 if gradient is None or gradient.layout is not torch.strided else gradient.data_ptr()
