"""The gradients of an optimizer's step on the PyTorch backend."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from hvdkit.api.gradient_settings import GradientSettings, names_of
from hvdkit.torch.gradient_settings import Settings
from hvdkit.torch.gradient_sync import GradientSynchronizer
from hvdkit.torch.verification import OptimizerVerification

BROADCAST = "hvd.callbacks.BroadcastGlobalVariablesCallback(0) in fit(), or hvd.broadcast_variables() in a loop"


class _Parameters:
    """What has parameters, as a torch.optim.Optimizer has them."""

    def __init__(self) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": []}]


class _NoHooks:
    """Gradients are handed over in the step, not by backward().

    Keras lets a backward pass reach the parameters of other models, several of them before a step, and changes of
    gradients in between; hooks would have to forbid all three.
    """

    touched = False
    superseded = False

    def attach(self, parameter: torch.Tensor) -> None:
        """Nothing."""

    def detach(self) -> None:
        """Nothing."""

    def reset(self) -> None:
        """Nothing."""


class TorchGradients:
    """Reduces the gradients of the parameters under Keras's variables."""

    def __init__(self, settings: GradientSettings) -> None:
        self._settings = settings
        self._parameters = _Parameters()
        self._synchronizer: GradientSynchronizer | None = None

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any], local: Collection[int]) -> list[Any]:
        """The gradients as all ranks of the process set have them; None stays None.

        ``local`` are ids of variables whose gradients stay this rank's. Collective: every rank has gradients for the
        same variables. Raises HorovodInternalError on every rank where ranks disagree.
        """
        settings = self._settings
        size = settings.process_set.size() if settings.process_set.included() else 1
        results = list(gradients)
        places = []
        for place, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
            if gradient is None:
                continue
            if id(variable) not in local:
                places.append(place)
            elif settings.scale_local_gradients:
                results[place] = gradient / size
        if size == 1 or not places:
            return results
        parameters = [variables[place].value for place in places]
        for parameter, place in zip(parameters, places, strict=True):
            if parameter.grad is not gradients[place]:  # the caller's own, which must stay as they are
                parameter.grad = gradients[place].clone()
        self._parameters.param_groups[0]["params"] = parameters
        if self._synchronizer is None:
            self._synchronizer = self._made(variables)
        # Between two steps nothing of ours runs, so what the last update left is looked at before this one.
        self._synchronizer.verification.updated(self._parameters.param_groups, self._synchronizer.name_of)
        self._synchronizer.synchronize()
        for parameter, place in zip(parameters, places, strict=True):
            results[place] = parameter.grad
        return results

    def _made(self, variables: Sequence[Any]) -> GradientSynchronizer:
        settings, groups = self._settings, self._settings.groups
        if isinstance(groups, list):
            groups = [[variable.value for variable in group] for group in groups]
        names = names_of(variables, use_generic_names=False)
        synchronizer = GradientSynchronizer(
            self._parameters,  # type: ignore[arg-type]  # only asked for its param_groups
            Settings(
                names=list(zip(names, [variable.value for variable in variables], strict=True)),
                compression=settings.compression,
                backward_passes_per_step=1,
                op=settings.op,
                gradient_predivide_factor=settings.predivide,
                groups=groups,
                sparse_as_dense=settings.sparse_as_dense,
                process_set=settings.process_set,
                policy=settings.policy,
            ),
            settings.title,
        )
        synchronizer.verification = OptimizerVerification(settings.process_set, BROADCAST)
        synchronizer._hooks = _NoHooks()  # type: ignore[assignment]
        return synchronizer
