"""What Keras asks of PyTorch's adapter: above all the gradients of an optimizer's step."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from hvdkit.api import backends
from hvdkit.api.gradients.settings import GradientSettings, names_of
from hvdkit.engine.session import runtime
from hvdkit.torch.for_keras_hooks import TrainStepHooks
from hvdkit.torch.gradients.agreement import OptimizerSettings
from hvdkit.torch.gradients.synchronizer import GradientSynchronizer
from hvdkit.torch.gradients.verification import OptimizerVerification
from hvdkit.torch.gradients.watch import ChangedInFlightError
from hvdkit.torch.parameters import broadcast_tensors

BROADCAST = "hvd.callbacks.BroadcastGlobalVariablesCallback(0) in fit(), or hvd.broadcast_variables() in a loop"
CHANGED = (
    "The gradients of {names} were changed after the backward pass of Keras's own train_step, which hands them over, "
    "and before they were applied.\n"
    "HINT: change gradients in a train_step of the model's own, or in the optimizer's apply()."
)


class _Parameters:
    """What has parameters, as a torch.optim.Optimizer has them."""

    def __init__(self) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": []}]


class _Synchronizer(GradientSynchronizer):
    """Hands over early what Keras's own ``train_step`` computes for the lane; all else when it comes to ``reduce``.

    Keras lets a backward pass reach the parameters of other models, several of them before a step, and changes of
    gradients in between; and several optimizers may have the same parameters.
    """

    def _new_hooks(self) -> TrainStepHooks:
        return TrainStepHooks(self._hand_over_early, self.name_of)

    def _hand_over_early(self, parameter: torch.Tensor) -> None:
        # What goes by name has no way to be given up.
        planned = None if self._agreement is None else self._agreement.planned
        index = None if planned is None else planned.index.get(id(parameter))
        if planned is not None and index is not None:
            planned.hand_over(index)

    def begin(self, local: Collection[int]) -> None:
        """A backward pass begins, whose gradients come to ``synchronize()`` as they are."""
        self._settle()
        agreement = self._agreement
        if agreement is None or runtime.current() is not self._engine or agreement.is_outdated():
            return
        if agreement.planned is not None and not any(key in local for key in agreement.ids):
            self.hooks.begin()

    @property
    def is_begun(self) -> bool:
        """Whether a gradient was complete in a step that is not over."""
        planned = None if self._agreement is None else self._agreement.planned
        return self.in_flight or (planned is not None and planned.lane.in_flight and not planned.lane.is_abandoned)


class TorchGradients(backends.Gradients):
    """Reduces the gradients of the parameters under Keras's variables."""

    def __init__(self, settings: GradientSettings) -> None:
        self._settings = settings
        self._parameters = _Parameters()
        self._synchronizer: _Synchronizer | None = None

    def begin_backward(self, local: Collection[Any]) -> None:
        """What this backward pass computes goes to ``reduce`` as it is: it may travel when it is complete."""
        if self._synchronizer is not None:
            self._synchronizer.begin({id(one.value) for one in local})

    def end_backward(self) -> None:
        """What was handed over and never came to ``reduce``, because of an exception, is of no step."""
        if self._synchronizer is not None:
            self._synchronizer.hooks.cancel()
            if self._synchronizer.is_begun:
                self._synchronizer.abandon(waits=False)

    def complete(self) -> None:
        """See Gradients."""

    def reduce_later(self, gradients: Sequence[Any], variables: Sequence[Any], update: backends.Update) -> bool:
        """See Gradients."""
        return False

    @contextmanager
    def _giving_up(self, synchronizer: _Synchronizer) -> Iterator[None]:
        """What fails here gives the step up."""
        try:
            yield
        except BaseException as error:
            synchronizer.abandon(waits=False)
            if isinstance(error, ChangedInFlightError):
                raise AssertionError(CHANGED.format(names=error.names)) from None
            raise

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any], local: Collection[int]) -> list[Any]:
        """See Gradients."""
        settings = self._settings
        if self._synchronizer is not None:
            self._synchronizer.hooks.end()
        size = settings.process_set.size() if settings.process_set.included() else 1
        results = list(gradients)
        indices = []
        for index, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
            if gradient is None:
                continue
            if id(variable) not in local:
                indices.append(index)
            elif settings.scale_local_gradients:
                results[index] = gradient / size
            else:  # which may have been no local one in the step before, and be reduced once more
                results[index] = gradient.clone()
        if size == 1 or not indices:
            return results
        parameters = [variables[index].value for index in indices]
        for parameter, index in zip(parameters, indices, strict=True):
            if parameter.grad is not gradients[index]:  # the caller's own, which must stay as they are
                parameter.grad = gradients[index].clone()
        if self._synchronizer is None:
            self._synchronizer = self._made(variables)
        self._parameters.param_groups[0]["params"] = parameters
        # Between two steps nothing of ours runs, so what the last update left is looked at before this one.
        self._synchronizer.verification.updated(self._parameters.param_groups, self._synchronizer.name_of)
        with self._giving_up(self._synchronizer):
            self._synchronizer.synchronize()
        for parameter, index in zip(parameters, indices, strict=True):
            results[index] = parameter.grad
        return results

    def _made(self, variables: Sequence[Any]) -> _Synchronizer:
        settings, groups = self._settings, self._settings.groups
        if isinstance(groups, list):
            groups = [[variable.value for variable in group] for group in groups]
        names = names_of(variables, use_generic_names=False)
        named = list(zip(names, [variable.value for variable in variables], strict=True))
        # Who adds up several passes does so before.
        ours = settings.as_kind(OptimizerSettings, groups=groups, names=named, backward_passes_per_step=1)
        synchronizer = _Synchronizer(self._parameters, ours)  # type: ignore[arg-type]  # asked for its param_groups
        synchronizer.verification = OptimizerVerification(settings.process_set, BROADCAST)
        return synchronizer


@torch.no_grad()
def _broadcast_variables(variables: Sequence[Any], root_rank: int) -> None:
    # By place: of a model that one rank loaded the variables have other paths.
    named = [(f"variables[{index}]", variable.value.data) for index, variable in enumerate(variables)]
    broadcast_tensors(named, root_rank)


# Functions are taken as they are written, and run in the order in which they are written.
BACKEND = backends.Backend(
    torch.as_tensor, TorchGradients, _broadcast_variables, lambda function: function, lambda tensors: nullcontext()
)
