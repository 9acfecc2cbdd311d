"""The names of an optimizer's parameters, as the user gave them, checked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

ParamGroups = list[dict[str, Any]]

NO_PAIRS = (
    "named_parameters should be a sequence of tuples (name, parameter), usually produced by model.named_parameters().\n"
    "DistributedOptimizer: named_parameters: got {got}\n"
    "HINT: pass named_parameters=model.named_parameters()."
)


def parameters_of(param_groups: Iterable[dict[str, Any]]) -> list[torch.Tensor]:
    """Return all of an optimizer's parameters, in order."""
    return [parameter for group in param_groups for parameter in group["params"]]


def default_names(param_groups: ParamGroups) -> list[tuple[str, torch.Tensor]]:
    """Return Horovod's names for parameters without a name: their place in the optimizer."""
    return [
        (f"allreduce.noname.{i}.{j}", parameter)
        for i, group in enumerate(param_groups)
        for j, parameter in enumerate(group["params"])
    ]


def check_names(
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None, param_groups: ParamGroups
) -> list[tuple[str, torch.Tensor]]:
    """Return the pairs (name, parameter) to use.

    Raises ValueError for an element that is no pair, a name given twice, a parameter without a name; TypeError for an
    argument that cannot be iterated over.
    """
    if named_parameters is None:
        return default_names(param_groups)
    if not isinstance(named_parameters, Iterable):
        raise TypeError(NO_PAIRS.format(got=f"{named_parameters!r}"))
    pairs = list(named_parameters)
    for index, pair in enumerate(pairs):
        is_pair = isinstance(pair, tuple) and len(pair) == 2
        if not (is_pair and isinstance(pair[0], str) and isinstance(pair[1], torch.Tensor)):
            raise ValueError(NO_PAIRS.format(got=f"{_brief(pair)} at index {index}"))
    counts = Counter(name for name, _ in pairs)
    if duplicates := sorted(name for name, count in counts.items() if count > 1):
        raise ValueError(
            "Parameter names in named_parameters must be unique. Found duplicates: "
            f"{', '.join(duplicates)}\nHINT: several models in one optimizer need a prefix for each."
        )
    named = {id(parameter) for _, parameter in pairs}
    if unnamed := [parameter for parameter in parameters_of(param_groups) if id(parameter) not in named]:
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named. Python object ids: "
            f"{', '.join(str(id(parameter)) for parameter in unnamed)} (shapes: "
            f"{', '.join(str(tuple(parameter.shape)) for parameter in unnamed)})\n"
            "HINT: name every parameter of the optimizer, or pass named_parameters=None."
        )
    return pairs


def _brief(value: Any) -> str:
    """Describe an argument in few words, without a tensor's values."""
    if isinstance(value, tuple):
        return f"({', '.join(_brief(member) for member in value)})"
    return f"a {type(value).__name__}" if isinstance(value, torch.Tensor) else repr(value)
