"""Handlers: the part of a TorchState that a model, an optimizer or another object has, copied into kept memory."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection
from typing import Any

import torch

from hvdkit.api.objects import broadcast_object
from hvdkit.api.states import BETWEEN_PASSES
from hvdkit.kernels.reduce_op import ReduceOp
from hvdkit.torch.elastic.sampler import ElasticSampler
from hvdkit.torch.elastic.snapshot import Snapshot
from hvdkit.torch.functions import broadcast_optimizer_state, broadcast_parameters
from hvdkit.torch.gradients.compression_state import KEY

COMMIT_LATER = "the optimizer expects {passes} passes before each step; call commit() after step()."

CHANGED_OUTSIDE = (
    "Parameters were changed since the last commit, but not by a step of their optimizer; they stay as they are: the "
    "script commits each step, so there is no copy to restore.\n"
    "HINT: change parameters between step() and commit(), or undo a swap of averaged parameters in a finally block."
)
# Options of parameter groups that a learning-rate scheduler changes.
SCHEDULED = {"lr", "initial_lr", "momentum", "betas"}
logger = logging.getLogger("hvdkit")


class StateHandler:
    """The part of a state that one object has.

    ``value``: an object with ``state_dict`` and ``load_state_dict``. ``uncopied``: the ids of parameters that only
    optimizers of this state change, so that a save does not copy them, and a restore leaves them as they are.
    """

    uncopied: Collection[int] = ()

    def __init__(self, value: Any) -> None:
        self.value = value  # which TorchState saves, once a subclass is complete
        self._snapshot = Snapshot()

    def save(self) -> None:
        """Copy the object's state."""
        self._snapshot.take(self.value.state_dict())

    def restore(self) -> None:
        """Load the copy that was saved last."""
        self.value.load_state_dict(self._snapshot.give())

    def sync(self) -> None:
        """Replace the object's state on all ranks by that of rank 0."""
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))

    def content(self) -> Any:
        """Return the object's state for ranks that lack it."""
        return self.value.state_dict()

    def take(self, content: Any) -> None:
        """Load the content of another rank."""
        self.value.load_state_dict(content)

    def reset(self) -> None:
        """Adapt to a new number of ranks."""

    def set_value(self, value: Any) -> None:
        """Take another object in place of the present one."""
        self.value, self.uncopied = value, ()
        self.save()


class ModelStateHandler(StateHandler):
    """The state of a model: its parameters and buffers."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self._places: dict[str, tuple[dict[str, Any], str]] | None = None  # of the entries that are copied
        self._places_for: Collection[int] = ()

    def save(self) -> None:
        if self._places is not None and self.uncopied and self.uncopied == self._places_for:
            self._snapshot.take({name: members[key] for name, (members, key) in self._places.items()})
            return
        entries, places = self.value.state_dict(), {}
        for prefix, module in self.value.named_modules(remove_duplicate=False) if self.uncopied else ():
            for members in (module._parameters, module._buffers):
                for key, value in members.items():
                    name = f"{prefix}.{key}" if prefix else key
                    if id(value) in self.uncopied:
                        entries.pop(name, None)
                    elif name in entries and entries[name].data_ptr() == value.data_ptr():
                        places[name] = members, key
        # Else the model has other state than its tensors, or another way to tell it.
        self._places = places if places.keys() == entries.keys() else None
        self._places_for = set(self.uncopied)
        self._snapshot.take(entries)

    def set_value(self, value: Any) -> None:
        self._places = None
        super().set_value(value)

    def restore(self) -> None:
        self.value.load_state_dict(self._snapshot.kept, strict=not self.uncopied)  # which the model copies

    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=0)


class OptimizerStateHandler(StateHandler):
    """The state of an optimizer.

    ``steps``: those that it has applied since the last save, if it ``is_watched``: only then nothing but its step
    changes its parameters, all or none. ``on_step`` is called after each step.
    """

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.on_step: Callable[[Any], object] = lambda optimizer: None
        self._hooks: list[Any] = []
        self._watch()

    def _watch(self) -> None:
        """Count the steps of the optimizer, and of a former one no more."""
        for hook in self._hooks:
            hook.remove()
        base: Any = type(self.value) if _synchronizer_of(self.value) is None else type(self.value).__mro__[1]
        changes_in_parts = issubclass(base, torch.optim.LBFGS) or getattr(self.value, "op", None) is ReduceOp.ADASUM
        has_own_state = base.state_dict is not torch.optim.Optimizer.state_dict
        has_hooks = hasattr(self.value, "_optimizer_step_post_hooks")
        self.is_watched = has_hooks and not (changes_in_parts or has_own_state)
        self.steps = self._depth = 0
        self._versions: dict[int, int] = {}
        # The optimizer, which may live longer, does not keep this handler.
        self._hooks = (
            [
                self.value.register_step_pre_hook(weakly(self._begin_step)),
                self.value.register_step_post_hook(weakly(self._end_step)),
            ]
            if has_hooks
            else []
        )

    def _begin_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._depth += 1  # a step may call that of its base class, which has the hooks called again
        has_closure = any(args[1:]) or kwargs.get("closure") is not None
        if has_closure:  # between two calls of it parameters may change
            self.is_watched = False

    def _end_step(self, optimizer: Any, *step: Any) -> None:
        self._depth -= 1
        if self._depth <= 0:
            self.steps += 1
            self._note_versions()
            self.on_step(optimizer)

    def parameters(self) -> dict[int, torch.Tensor]:
        """Return the parameters that steps change, by id."""
        members = [each for group in self.value.param_groups for each in group["params"]]
        return {id(each): each for each in members if each.requires_grad}

    def _note_versions(self) -> None:
        """Note how often each parameter was changed in its place, as far as PyTorch counts that."""
        self._versions = {key: each._version for key, each in self.parameters().items()} if self.uncopied else {}

    def check_passes(self) -> None:
        """Raise ValueError between the backward passes of one step."""
        gradients = _synchronizer_of(self.value)
        if gradients is not None and gradients.hooks.is_between_passes:
            hint = COMMIT_LATER.format(passes=self.value.backward_passes_per_step)
            raise ValueError(BETWEEN_PASSES.format(hint=hint))

    def save(self) -> None:
        self.check_passes()
        if self.uncopied:
            options = [{key: each[key] for key in each.keys() - {"params"}} for each in self.value.param_groups]
            gradients = _synchronizer_of(self.value)
            residuals = None if gradients is None else gradients.codecs.state()
            self._snapshot.take({"param_groups": options, **({} if residuals is None else {KEY: residuals})})
        else:
            self._snapshot.take(self.value.state_dict())
        self.steps = self._depth = 0
        self._note_versions()

    def restore(self) -> None:
        present = self.parameters()
        if any(key in present and present[key]._version != number for key, number in self._versions.items()):
            logger.warning(CHANGED_OUTSIDE)
        parts = self._snapshot.give()
        residuals = parts.pop(KEY, None)
        if self.uncopied:
            own = torch.optim.Optimizer.state_dict(self.value)
            for now, then in zip(own["param_groups"], parts["param_groups"], strict=True):
                # Other options, in which an optimizer counts, belong to a step that is kept.
                now |= {key: then[key] for key in (SCHEDULED & then.keys() if self.steps else then)}
            parts = own
        self.value.load_state_dict(parts)
        if (gradients := _synchronizer_of(self.value)) is not None:
            gradients.codecs.load(residuals, is_own=True)
        self.value.zero_grad()  # what the failed step has computed; the loop may clear gradients at its end alone
        self.steps = self._depth = 0

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)

    def content(self) -> Any:
        return {key: value for key, value in self.value.state_dict().items() if key != KEY}  # each rank has its own

    def take(self, content: Any) -> None:
        residuals = self.value.state_dict().get(KEY)
        self.value.load_state_dict(content)
        if residuals is not None:
            _synchronizer_of(self.value).codecs.load(residuals, is_own=True)

    def set_value(self, value: Any) -> None:
        super().set_value(value)
        self._watch()


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Return a function that calls a method as long as its object lives."""
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any) -> None:
        if (living := reference()) is not None:
            living(*arguments)

    return call


def _synchronizer_of(optimizer: Any) -> Any:
    """Return what reduces the gradients of a DistributedOptimizer; None of another."""
    return getattr(optimizer, "_synchronizer", None)


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
OWN_HANDLERS = {handler for _, handler in _handler_registry}


def get_handler_registry() -> list[tuple[Any, Any]]:
    """Return the pairs of a class and the StateHandler of its objects; the first that fits is taken."""
    return _handler_registry


def set_handler_registry(registry: list[tuple[Any, Any]]) -> None:
    """Replace the registry."""
    global _handler_registry
    _handler_registry = registry


def handler_of(value: Any) -> Any:
    """Return the handler of an object; None if it has none."""
    return next((handler(value) for kind, handler in _handler_registry if isinstance(value, kind)), None)
