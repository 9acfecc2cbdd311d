"""The state of a training with PyTorch, of which as much is copied as its optimizers do not keep themselves."""

from __future__ import annotations

import logging
import weakref
from typing import Any

import torch

from hvdkit.api.objects import broadcast_object
from hvdkit.api.states import ObjectState
from hvdkit.api.transfer import StatePickler
from hvdkit.engine.session import runtime
from hvdkit.torch.elastic.handlers import (
    OWN_HANDLERS,
    LRSchedulerStateHandler,
    ModelStateHandler,
    OptimizerStateHandler,
    SamplerStateHandler,
    StateHandler,
    get_handler_registry,
    handler_of,
    set_handler_registry,
    weakly,
)
from hvdkit.torch.elastic.residuals import codecs_of, share_residuals
from hvdkit.torch.elastic.tensors import reduce_tensor
from hvdkit.torch.gradients.compression_state import OptimizerCodecs

__all__ = [
    "LRSchedulerStateHandler",
    "ModelStateHandler",
    "OptimizerStateHandler",
    "SamplerStateHandler",
    "StateHandler",
    "TorchState",
    "get_handler_registry",
    "set_handler_registry",
]
logger = logging.getLogger("hvdkit")
StatePickler.dispatch_table[torch.Tensor] = StatePickler.dispatch_table[torch.nn.Parameter] = reduce_tensor

NO_STEPS_FOR_SAMPLER = (
    "TorchState: an ElasticSampler with exact=True goes on with the steps of the state's optimizer, but the state has "
    "no optimizer whose steps can be counted.\n"
    "HINT: pass an optimizer, other than LBFGS and without op=hvd.Adasum; or pass exact=False."
)

SCALER_SKIPS = (
    "TorchState: a GradScaler skips steps, and an ElasticSampler with exact=True would not count their batches.\n"
    "HINT: pass exact=False, or train in bfloat16, which needs no GradScaler."
)


class TorchState(ObjectState):
    """The state of a training with PyTorch.

    Every argument is an attribute. Models, optimizers, learning-rate schedulers, GradScalers and ElasticSamplers are
    saved by their ``state_dict``, other objects by a copy. A script that commits directly after each step of its
    optimizers has no copies of their parameters: a failed step changes none, so that there is nothing to go back to.
    Otherwise ``commit()`` copies all, into memory that is used again. PyTorch's random generators are restored too.

    Args:
        model: a torch.nn.Module, or None.
        optimizer: a torch.optim.Optimizer, wrapped by ``DistributedOptimizer`` or not, or None.
        kwargs: more models, optimizers and so on, and any objects that can be copied and pickled.
    """

    _handlers: dict[str, Any] = {}  # noqa: RUF012 (of a state that is not complete)

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        values = {**kwargs, "model": model, "optimizer": optimizer}
        handlers = {name: handler_of(value) for name, value in values.items()}
        object.__setattr__(self, "_handlers", {name: each for name, each in handlers.items() if each is not None})
        for name, each in self._handlers.items():
            object.__setattr__(self, name, each.value)
            each.save()
        self._join_samplers()
        rest = {name: value for name, value in values.items() if name not in self._handlers}
        super().__init__(broadcast_object, lambda: runtime.topology().rank, **rest)
        self._generators = _generators()

    def _join_samplers(self) -> None:
        """Have exact samplers go on with each step of the optimizer."""
        optimizer: Any = self._handlers.get("optimizer")
        if not self._exact_samplers():
            return
        if not getattr(optimizer, "is_watched", False):
            raise ValueError(NO_STEPS_FOR_SAMPLER)
        if any(
            isinstance(each.value, torch.amp.GradScaler) and each.value.is_enabled() for each in self._handlers.values()
        ):
            raise ValueError(SCALER_SKIPS)
        for sampler in self._exact_samplers():
            sampler.state = weakref.ref(self)  # an earlier state of the same sampler counts no more
        optimizer.on_step = weakly(self._advance)

    def _exact_samplers(self) -> list[Any]:
        samplers = [each.value for each in self._handlers.values() if isinstance(each, SamplerStateHandler)]
        return [sampler for sampler in samplers if sampler.exact]

    def _advance(self, optimizer: Any) -> None:
        for sampler in self._exact_samplers():
            if sampler.state is not None and sampler.state() is self:
                sampler.advance(getattr(optimizer, "backward_passes_per_step", 1))

    def _optimizers(self) -> list[OptimizerStateHandler]:
        handlers = self._handlers.values()
        return [each for each in handlers if isinstance(each, OptimizerStateHandler) and each.is_watched]

    def save(self) -> None:
        watched = self._optimizers()
        uncopied: set[int] = set()
        if not self._needs_copy() and self._can_send():
            uncopied = set().union(*(each.parameters() for each in watched))
        self._is_copied = not uncopied
        for handler in self._handlers.values():
            handler.uncopied = uncopied if isinstance(handler, ModelStateHandler) or handler in watched else ()
            handler.save()
        super().save()
        self._generators = _generators()

    def _check_passes(self) -> None:
        for handler in self._handlers.values():
            if isinstance(handler, OptimizerStateHandler):
                handler.check_passes()

    def restore(self) -> None:
        self._tell_of_kept_steps()
        optimizer: Any = self._handlers.get("optimizer")
        kept = 0 if self._is_copied or optimizer is None else optimizer.steps
        if self._codecs():
            logger.warning("If a rank was lost, its residuals, which compression has not sent yet, are lost too.")
        for handler in self._handlers.values():
            handler.restore()
        for _ in range(kept):
            self._advance(optimizer.value)
        torch.set_rng_state(self._generators[0])
        if self._generators[1] is not None:
            torch.cuda.set_rng_state_all(self._generators[1])
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

    def _steps(self) -> list[int]:
        return [each.steps for each in self._optimizers()]

    def _codecs(self) -> list[OptimizerCodecs]:
        handlers = [each for each in self._handlers.values() if isinstance(each, OptimizerStateHandler)]
        return [codecs for each in handlers if (codecs := codecs_of(each.value)) is not None]

    def _share(self) -> None:
        if codecs := self._codecs():
            share_residuals(codecs)

    def _can_send(self) -> bool:
        return type(self).sync is TorchState.sync and all(
            type(each) in OWN_HANDLERS for each in self._handlers.values()
        )

    def _content(self) -> Any:
        return self._attributes(), {name: handler.content() for name, handler in self._handlers.items()}

    def _take(self, content: Any) -> None:
        attributes, parts = content
        for name, handler in self._handlers.items():
            handler.take(parts[name])
            handler.save()
        self._set(attributes)

    def _set(self, values: dict[str, Any]) -> None:
        super()._set(values)
        self._generators = _generators()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._handlers:
            self._handlers[name].set_value(value)
            self._join_samplers()
        super().__setattr__(name, value)


def _generators() -> tuple[torch.Tensor, list[torch.Tensor] | None]:
    """Return the states of PyTorch's random generators, of GPUs if this process uses any."""
    uses_gpus = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.get_rng_state(), torch.cuda.get_rng_state_all() if uses_gpus else None
