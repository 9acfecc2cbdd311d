"""What Keras asks of PyTorch's adapter: above all the gradients of an optimizer's step."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from hvdkit.api import backends
from hvdkit.api.gradients.settings import GradientSettings, names_of
from hvdkit.engine.loop.driver import ROUND_SECONDS
from hvdkit.torch.for_keras_hooks import TrainStepHooks
from hvdkit.torch.gradients.settings import Settings
from hvdkit.torch.gradients.synchronizer import GradientSynchronizer, is_current
from hvdkit.torch.gradients.verification import OptimizerVerification
from hvdkit.torch.gradients.watch import ChangedInFlightError
from hvdkit.torch.optimizers.names import parameters_of
from hvdkit.torch.optimizers.overlap import Updates
from hvdkit.torch.parameters import broadcast_tensors

BROADCAST = "hvd.callbacks.BroadcastGlobalVariablesCallback(0) in fit(), or hvd.broadcast_variables() in a loop"
CHANGED = (
    "The gradients of {names} were changed after the backward pass of Keras's own train_step, which hands them over, "
    "and before they were applied.\n"
    "HINT: change gradients in a train_step of the model's own, or in the optimizer's apply()."
)
# Lists that hold each gradient while Keras's own train_step applies it: its own, and two on the way here.
KNOWN_HOLDERS = 3


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
        planned = self._routes.planned if self._routes is not None and is_current(self._engine) else None
        index = None if planned is None else planned.index.get(id(parameter))
        if planned is not None and index is not None:
            planned.hand_over(index)

    def begin(self, local: Collection[int]) -> None:
        """A backward pass begins, whose gradients come to ``synchronize()`` as they are."""
        routes = self._routes
        if routes is None or routes.planned is None or routes.is_outdated or any(key in local for key in routes.ids):
            return
        if not routes.planned.lane.on_device:  # where a collective that others have begun cannot be given up
            self.hooks.begin()

    @property
    def is_begun(self) -> bool:
        """Whether a gradient was complete in a step that is not over."""
        return self.in_flight or (self._routes is not None and self._routes.in_flight)

    def give_up(self) -> None:
        """Forget a step that an exception ended. Nothing is waited for; ranks that use the step get an error."""
        self._unraised = None
        routes, current = self._routes, is_current(self._engine)
        if routes is not None:
            # What runs must not be in the middle of a sum; in a forked child nothing does.
            with self._engine.driver.halted(ROUND_SECONDS if current else 0.0):
                if routes.give_up(current):
                    self._routes = None
        self._start_step()


class _ByParameter:
    """An update, as a torch.optim.Optimizer makes it for some of its parameters."""

    def __init__(self, update: backends.Update, parameters: Sequence[torch.Tensor], variables: Sequence[Any]) -> None:
        self._update = update
        # What a variable gives where it is used next may be a copy of another dtype.
        self._variables = {id(one): variable for one, variable in zip(parameters, variables, strict=True)}
        self.param_groups: list[dict[str, Any]] = [{"params": list(parameters)}]

    def plain_with(self, param_groups: list[dict[str, Any]]) -> _ByParameter:
        """The same for other parameters."""
        chosen = parameters_of(param_groups)
        return _ByParameter(self._update, chosen, [self._variables[id(parameter)] for parameter in chosen])

    def step(self) -> None:
        """Make the update, by the gradients that the parameters have."""
        with torch.no_grad():
            gradients = [parameter.grad for parameter in parameters_of(self.param_groups)]
            self._update(gradients, list(self._variables.values()))


class TorchGradients(backends.Gradients):
    """Reduces the gradients of the parameters under Keras's variables."""

    def __init__(self, settings: GradientSettings) -> None:
        self._settings = settings
        self._parameters = _Parameters()
        self._synchronizer: _Synchronizer | None = None
        self._updates: Updates | None = None  # of the last step, some of which may be left

    def begin_backward(self, local: Collection[Any]) -> None:
        """What this backward pass computes goes to ``reduce`` as it is: it may travel when it is complete."""
        self.complete()
        if self._synchronizer is not None:
            self._synchronizer.begin({id(one.value) for one in local})

    def end_backward(self) -> None:
        """What was handed over and never came to ``reduce``, because of an exception, is of no step."""
        if self._synchronizer is not None:
            self._synchronizer.hooks.cancel()
            is_left = self._updates is not None and not self._updates.is_over
            if self._synchronizer.is_begun and not is_left:
                self._synchronizer.give_up()

    def complete(self) -> None:
        """See Gradients."""
        if self._updates is not None:
            self._updates.complete_all()
            if self._updates.is_over:
                self._updates = None

    def reduce_later(self, gradients: Sequence[Any], variables: Sequence[Any], update: backends.Update) -> bool:
        """See Gradients."""
        synchronizer = self._synchronizer
        if synchronizer is None or not synchronizer.hooks.hands_over or any(one is None for one in gradients):
            return False
        parameters = [variable.value for variable in variables]
        if any(one.grad is not gradient for one, gradient in zip(parameters, gradients, strict=True)):
            return False
        if synchronizer.verification.wants(synchronizer.verification.step):
            return False
        synchronizer.hooks.end()
        self._parameters.param_groups[0]["params"] = parameters
        with self._giving_up(synchronizer):
            begun = synchronizer.begin_step(KNOWN_HOLDERS)
            if begun is None:
                return False
            self._updates = Updates(synchronizer, *begun, _ByParameter(update, parameters, variables))
            self._updates.begin()
        return True

    @contextmanager
    def _giving_up(self, synchronizer: _Synchronizer) -> Iterator[None]:
        """What fails here gives the step up."""
        try:
            yield
        except BaseException as error:
            synchronizer.give_up()
            if isinstance(error, ChangedInFlightError):
                raise AssertionError(CHANGED.format(names=error.names)) from None
            raise

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any], local: Collection[int]) -> list[Any]:
        """See Gradients."""
        settings = self._settings
        self.complete()
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
        ours = settings.as_kind(Settings, groups=groups, names=named, backward_passes_per_step=1)
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
