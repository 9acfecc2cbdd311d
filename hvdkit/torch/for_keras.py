"""The functions of PyTorch's adapter that Keras uses, and the gradients of a Keras optimizer's step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from hvdkit.api import backends
from hvdkit.api.gradients.settings import GradientSettings, names_of
from hvdkit.engine.session import runtime
from hvdkit.torch.gradients.hooks import ParameterHooks, is_of
from hvdkit.torch.gradients.synchronizer import GradientSynchronizer
from hvdkit.torch.gradients.verification import OptimizerVerification
from hvdkit.torch.gradients.watch import ChangedInFlightError
from hvdkit.torch.parameters import broadcast_tensors

BROADCAST = "hvd.callbacks.BroadcastGlobalVariablesCallback(0) in fit(), or hvd.broadcast_variables() in a loop"
CHANGED = (
    "Gradients were changed after the backward pass of Keras's own train_step, which hands them over, and before they "
    "were applied.\n"
    "HINT: change gradients in a train_step of the model's own, or in the optimizer's apply().\n"
    "Changed: {names}"
)
COMPUTED_TWICE = (
    "The gradient of '{name}' was changed again in a backward pass that had already completed it.\n"
    "HINT: a backward pass inside of the backward pass does that: pass use_reentrant=False to torch.utils.checkpoint, "
    "or give the model its own train_step, whose gradients are reduced when they are applied."
)


class TrainStepHooks(ParameterHooks):
    """Hooks that hand gradients over during the backward pass of Keras's own ``train_step``: from begin() to end().

    A pass hands over only if the pass before completed each gradient once; nested passes complete gradients twice.
    Other optimizers may have hooks on the same parameters.
    """

    def __init__(self, complete: Callable[[torch.Tensor], None]) -> None:
        super().__init__(complete)
        self._is_open = self._hands_over = False  # True between begin() and end()
        self._completes_once = False  # the last watched pass completed each gradient once
        self._was_wrong = False  # a pass that handed over completed a gradient twice
        self.touched = False  # a gradient was handed over since reset()

    def attach(self, parameter: torch.Tensor) -> bool:
        """Hook a parameter. After a new hook the next backward pass is only watched."""
        is_new = super().attach(parameter)
        self._completes_once = self._completes_once and not is_new
        return is_new

    def reset(self) -> None:
        """Begin a new step."""
        self.touched = False

    def begin(self) -> None:
        """Begin a backward pass, which alone runs until ``end()``."""
        self._passes.clear()
        self._is_open = True
        may_hand_over = self._completes_once and not self._was_wrong
        self._hands_over = may_hand_over and all(_is_last(handle) for handle, _ in self._handles.values())

    def end(self) -> None:
        """End a backward pass, and remember whether it completed each gradient once."""
        if self._is_open and self._passes:
            self._completes_once = all(times == 1 for times in self._passes.values())
        self.cancel()

    def cancel(self) -> None:
        """End a backward pass that may have failed."""
        self._is_open = self._hands_over = False

    def _computed(self, parameter: torch.Tensor) -> None:
        if not self._is_open or runtime.is_forked():
            return
        times = self._passes[id(parameter)] = self._passes.get(id(parameter), 0) + 1
        if not self._hands_over:
            return
        if times > 1:
            self._was_wrong = True
            raise AssertionError(COMPUTED_TWICE.format(name=self._name(parameter)))
        owner = self._owner()
        if owner is not None and parameter.grad is not None and not parameter.grad.requires_grad:
            self.touched = True  # before: Ctrl-C may come in between
            self._complete(owner, parameter)


def _is_last(handle: RemovableHandle) -> bool:
    """True if no hook of the user's runs after hvdkit's on a parameter, and so sees or changes what it handed over."""
    hooks: Any = handle.hooks_dict_ref() or {}  # by ids, which ascend
    return all(is_of(hook, TrainStepHooks) for key, hook in hooks.items() if handle.id in hooks and key > handle.id)


class _KerasSynchronizer(GradientSynchronizer):
    """The synchronizer of a Keras optimizer, whose gradients are complete only when ``apply`` has them.

    Only the lane takes gradients before ``apply``, since an operation by name cannot be abandoned, and only from
    Keras's own ``train_step``: other passes may reach parameters of other models, and gradients may change afterwards.
    """

    def _new_hooks(self) -> TrainStepHooks:
        return TrainStepHooks(self._hand_over)

    def _hand_over(self, parameter: torch.Tensor) -> None:
        planned = self._planned
        if planned is not None and (index := planned.index.get(id(parameter))) is not None:
            planned.hand_over(index)

    def begin_backward(self, local: Collection[int]) -> None:
        """Begin a backward pass whose gradients all reach ``synchronize()`` unchanged."""
        agreement = self._agreement
        if agreement is None or runtime.current() is not self._engine or agreement.is_outdated():
            return
        planned = agreement.planned  # a device's collective that other ranks have begun cannot be abandoned
        if planned is not None and not planned.lane.on_device and not any(key in local for key in agreement.ids):
            self.hooks.begin()

    def end_backward(self) -> None:
        """End the step. Gradients that were handed over and not reduced, because of an exception, are abandoned."""
        self.hooks.cancel()
        if self.hooks.touched or (self._planned is not None and self._planned.lane.in_flight):
            self.abandon(has_raised=True)


class TorchGradients(backends.OptimizerGradients):
    """The gradients of the parameters under Keras's variables, in ``param_groups`` as in a torch.optim.Optimizer."""

    def __init__(self, settings: GradientSettings) -> None:
        self._settings = settings
        self.param_groups: list[dict[str, Any]] = [{"params": []}]
        self._synchronizer: _KerasSynchronizer | None = None

    def begin_backward(self, local: Collection[Any]) -> None:
        if self._synchronizer is not None:
            self._synchronizer.begin_backward({id(variable.value) for variable in local})

    def end_backward(self) -> None:
        if self._synchronizer is not None:
            self._synchronizer.end_backward()

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any], local: Collection[int]) -> list[Any]:
        settings = self._settings
        if self._synchronizer is not None:
            self._synchronizer.hooks.end()
        size = settings.process_set.size() if settings.process_set.included() else 1
        results = list(gradients)
        indices = [index for index, gradient in enumerate(gradients) if gradient is not None]
        for index in [index for index in indices if id(variables[index]) in local]:
            indices.remove(index)
            # A copy: if the variable became local after the last step, the plan may reduce the gradient again.
            results[index] = results[index] / size if settings.scale_local_gradients else results[index].clone()
        if size == 1 or not indices:
            return results
        parameters = [variables[index].value for index in indices]
        for parameter, index in zip(parameters, indices, strict=True):
            if parameter.grad is not gradients[index]:  # the caller's own tensor, which must stay as it is
                parameter.grad = gradients[index].clone()
        synchronizer = self._synchronizer = self._synchronizer or self._new_synchronizer(variables)
        self.param_groups[0]["params"] = parameters
        # hvdkit does not run between two steps, so the last update's result is verified before this one.
        synchronizer.verification.updated(self.param_groups, synchronizer.name_of)
        try:
            synchronizer.synchronize()
        except BaseException as error:
            synchronizer.abandon(has_raised=True)
            if isinstance(error, ChangedInFlightError):
                raise AssertionError(CHANGED.format(names=error.names)) from None
            raise
        for parameter, index in zip(parameters, indices, strict=True):
            results[index] = parameter.grad
        return results

    def _new_synchronizer(self, variables: Sequence[Any]) -> _KerasSynchronizer:
        groups = self._settings.groups
        if isinstance(groups, list):
            groups = [[variable.value for variable in group] for group in groups]
        names = names_of(variables, use_generic_names=False)
        named = [(name, variable.value) for name, variable in zip(names, variables, strict=True)]
        # DistributedStep adds up several passes before.
        own = replace(self._settings, groups=groups, names=named, backward_passes_per_step=1)
        synchronizer = _KerasSynchronizer(self, own)  # type: ignore[arg-type]  # uses its param_groups only
        synchronizer.verification = OptimizerVerification(BROADCAST)
        return synchronizer


@torch.no_grad()
def _broadcast_variables(variables: Sequence[Any], root_rank: int) -> None:
    # Named by position: if one rank loaded the model, the paths of its variables differ.
    broadcast_tensors([(f"variables[{index}]", each.value.data) for index, each in enumerate(variables)], root_rank)


# PyTorch does not translate functions, and runs operations in the order in which they are written.
BACKEND = backends.Backend(
    tensor=torch.as_tensor,
    gradients=TorchGradients,
    broadcast_variables=_broadcast_variables,
    as_written=lambda function: function,
    after=lambda tensors: nullcontext(),
)
