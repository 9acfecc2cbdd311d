"""Copies of state_dicts, in memory that is used again."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import torch

_NEVER_CHANGED = {int, float, bool, str, type(None)}


class Snapshot:
    """A copy of a state_dict. Taking another copy of the same shapes uses the same memory."""

    def __init__(self) -> None:
        self.kept: Any = None

    def take(self, tree: Any) -> None:
        """Copy a tree of dicts, lists, tensors and other objects."""
        self.kept = _copied(tree, self.kept)

    def give(self) -> Any:
        """Return a copy of the copy, for an owner that may change it."""
        return _copied(self.kept, None)


def _copied(value: Any, kept: Any) -> Any:
    """Return a copy of a tree, in the memory of an earlier copy where that fits."""
    if isinstance(value, torch.Tensor):
        value = value.detach()
        fits = isinstance(kept, torch.Tensor) and (kept.shape, kept.dtype) == (value.shape, value.dtype)
        if fits and kept.device == value.device and kept.layout == value.layout == torch.strided:
            return kept.copy_(value)
        return value.clone()
    if type(value) in _NEVER_CHANGED:
        return value
    if isinstance(value, dict):
        kept = kept if isinstance(kept, dict) else {}
        copied = {key: _copied(each, kept.get(key)) for key, each in value.items()}
        if hasattr(value, "_metadata"):  # the versions of a model's modules, which load_state_dict reads
            copied = OrderedDict(copied)
            copied._metadata = value._metadata  # type: ignore[attr-defined]
        return copied
    if type(value) in (list, tuple):
        kept = kept if type(kept) is type(value) and len(kept) == len(value) else [None] * len(value)
        return type(value)(_copied(each, other) for each, other in zip(value, kept, strict=True))
    return copy.deepcopy(value)
