"""The state of a training with PyTorch, copied into memory that is used again."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import torch

from hvdkit.api.elastic import ObjectState
from hvdkit.api.objects import broadcast_object
from hvdkit.engine.session import runtime
from hvdkit.torch.elastic.sampler import ElasticSampler
from hvdkit.torch.functions import broadcast_optimizer_state, broadcast_parameters


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


class StateHandler:
    """The part of a state that one object has.

    ``value``: an object with ``state_dict`` and ``load_state_dict``.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        self._snapshot = Snapshot()
        self.save()

    def save(self) -> None:
        """Copy the object's state."""
        self._snapshot.take(self.value.state_dict())

    def restore(self) -> None:
        """Load the copy that was saved last."""
        self.value.load_state_dict(self._snapshot.give())

    def sync(self) -> None:
        """Replace the object's state on all ranks by that of rank 0."""
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))

    def reset(self) -> None:
        """Adapt to a new number of ranks."""

    def set_value(self, value: Any) -> None:
        """Take another object in place of the present one."""
        self.value = value
        self.save()


class ModelStateHandler(StateHandler):
    """The state of a model: its parameters and buffers."""

    def restore(self) -> None:
        self.value.load_state_dict(self._snapshot.kept)  # which the model copies

    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=0)


class OptimizerStateHandler(StateHandler):
    """The state of an optimizer."""

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)


class SamplerStateHandler(StateHandler):
    """The place of an ElasticSampler in its data."""

    def reset(self) -> None:
        self.value.reset()


class LRSchedulerStateHandler(StateHandler):
    """The state of a learning-rate scheduler or a GradScaler."""


_handler_registry: list[tuple[Any, Any]] = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (torch.optim.lr_scheduler.LRScheduler, LRSchedulerStateHandler),
    (torch.amp.GradScaler, LRSchedulerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> list[tuple[Any, Any]]:
    """Return the pairs of a class and the StateHandler of its objects; the first that fits is taken."""
    return _handler_registry


def set_handler_registry(registry: list[tuple[Any, Any]]) -> None:
    """Replace the registry."""
    global _handler_registry
    _handler_registry = registry


def _handler(value: Any) -> Any:
    return next((handler(value) for kind, handler in _handler_registry if isinstance(value, kind)), None)


class TorchState(ObjectState):
    """The state of a training with PyTorch.

    Every argument is an attribute. Models, optimizers, learning-rate schedulers, GradScalers and ElasticSamplers are
    saved by their ``state_dict``, other objects by a copy. ``commit()`` copies into memory that is used again.

    Args:
        model: a torch.nn.Module, or None.
        optimizer: a torch.optim.Optimizer, wrapped by ``DistributedOptimizer`` or not, or None.
        kwargs: more models, optimizers and so on, and any objects that can be copied and pickled.
    """

    _handlers: dict[str, Any]

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        values = {**kwargs, "model": model, "optimizer": optimizer}
        handlers = {name: _handler(value) for name, value in values.items()}
        object.__setattr__(self, "_handlers", {name: each for name, each in handlers.items() if each is not None})
        for name, each in self._handlers.items():
            object.__setattr__(self, name, each.value)
        rest = {name: value for name, value in values.items() if name not in self._handlers}
        super().__init__(broadcast_object, lambda: runtime.topology().rank, **rest)

    def save(self) -> None:
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        for handler in self._handlers.values():
            handler.sync()
        super().sync()
        for handler in self._handlers.values():
            handler.save()

    def reset(self) -> None:
        for handler in self._handlers.values():
            getattr(handler, "reset", lambda: None)()  # handlers of users may lack it, as Horovod's do

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._handlers:
            self._handlers[name].set_value(value)
        super().__setattr__(name, value)
