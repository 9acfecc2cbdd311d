"""Names and groups of gradients, on which ranks agree before they reduce gradients together."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

NO_GROUPS = (
    "groups should be a non-negative integer or a list of list of {kind}.\n"
    "{function}: groups: expected a number > 0 or a list of lists, got {got}"
)

Item = TypeVar("Item")


def check_groups(function: str, groups: Any, kind: str, is_member: Callable[[Any], bool]) -> int | list[Any] | None:
    """Return ``groups``, its members as lists. ``kind`` is the kind of their members, for messages.

    Raises ValueError unless it is None, a positive number, or a list of lists that share no member.
    """
    if groups is None:
        return None
    if isinstance(groups, int) and not isinstance(groups, bool) and groups > 0:
        return groups
    if not isinstance(groups, list):
        raise ValueError(NO_GROUPS.format(function=function, kind=kind, got=repr(groups)))
    formed: list[list[Any]] = []
    seen: set[int] = set()
    for index, group in enumerate(groups):
        if is_member(group) or not isinstance(group, Iterable):
            got = f"a {type(group).__name__}" if is_member(group) else repr(group)
            raise ValueError(NO_GROUPS.format(function=function, kind=kind, got=f"{got} at index {index}"))
        formed.append(list(group))
        for member in formed[-1]:
            if not is_member(member):
                raise ValueError(f"groups must consist of {kind}.\n{function}: got {member!r} in groups[{index}]")
            if id(member) in seen:
                raise ValueError(
                    f"A parameter can only appear once in groups.\n{function}: groups: got one of shape "
                    f"{tuple(member.shape)} again in groups[{index}]"
                )
            seen.add(id(member))
    return formed


def names_of_paths(paths: Sequence[str]) -> list[str]:
    """Return a unique name for each variable of a model: its layer's name, without Keras's number, and its own.

    The rest differs in a loaded model and after other models were made.
    """
    names: list[str] = []
    for index, path in enumerate(paths):
        *layer, own = path.split("/")[-2:]
        name = "/".join([*(re.sub(r"_\d+$", "", part) for part in layer), own])
        names.append(name if name not in names else f"{name} ({index})")
    return names


def plain_name(name: str) -> str:
    """Return a name of ``names_of_paths`` without its number: "dense/kernel" for "dense/kernel (2)"."""
    return re.sub(r" \(\d+\)$", "", name)


def split_list(items: Sequence[Item], parts: int) -> list[list[Item]]:
    """Split ``items`` into ``parts`` lists whose lengths differ by at most one, the longer ones first."""
    length, longer = divmod(len(items), parts)
    ends = [(part + 1) * length + min(part + 1, longer) for part in range(parts)]
    return [list(items[start:end]) for start, end in zip([0, *ends], ends, strict=False)]


def form_groups(parameters: Sequence[Any], groups: int | list[list[Any]] | None) -> list[list[Any]]:
    """Return the groups of parameters that are reduced together; groups of a single parameter are left out."""
    if isinstance(groups, int):
        formed = split_list(parameters, groups)
    else:
        present = {id(parameter) for parameter in parameters}
        formed = [[parameter for parameter in group if id(parameter) in present] for group in groups or ()]
    return [group for group in formed if len(group) > 1]


def local_variables(local_layers: Any) -> list[Any]:
    """Return the variables that layers train. Raises ValueError unless each is a layer, and built."""
    if local_layers is None:
        return []
    layers = local_layers if isinstance(local_layers, list | tuple | set) else [local_layers]
    variables: list[Any] = []
    for layer in layers:
        if not hasattr(layer, "trainable_weights"):
            raise ValueError(f"All local layers must be of tf.keras.layers.Layer type.\ngot {layer!r} in local_layers")
        if not getattr(layer, "built", True):
            raise ValueError(
                f"local_layers: layer '{layer.name}' has no variables yet\n"
                "HINT: build the model first: model.build(input_shape)."
            )
        variables += layer.trainable_weights
    return variables
