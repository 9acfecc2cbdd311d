"""The state of a training with PyTorch, of which as much is copied as its optimizers do not keep themselves."""

from __future__ import annotations

import logging
from typing import Any

from hvdkit.api.objects import broadcast_object
from hvdkit.api.states import ObjectState
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
)
from hvdkit.torch.elastic.residuals import codecs_of, share_residuals

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
from hvdkit.torch.gradients.compression_state import OptimizerCodecs

logger = logging.getLogger("hvdkit")

NO_STEPS_FOR_SAMPLER = (
    "TorchState: an ElasticSampler with exact=True goes on with the steps of the state's optimizer, and there is none "
    "whose steps can be counted.\nHINT: pass the optimizer, other than LBFGS and without op=hvd.Adasum, or exact=False."
)


class TorchState(ObjectState):
    """The state of a training with PyTorch.

    Every argument is an attribute. Models, optimizers, learning-rate schedulers, GradScalers and ElasticSamplers are
    saved by their ``state_dict``, other objects by a copy. A script that commits directly after each step of its
    optimizers has no copies of their parameters: a failed step changes none, so that there is nothing to go back to.
    Otherwise ``commit()`` copies all, into memory that is used again.

    Args:
        model: a torch.nn.Module, or None.
        optimizer: a torch.optim.Optimizer, wrapped by ``DistributedOptimizer`` or not, or None.
        kwargs: more models, optimizers and so on, and any objects that can be copied and pickled.
    """

    _handlers: dict[str, Any]

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        values = {**kwargs, "model": model, "optimizer": optimizer}
        handlers = {name: handler_of(value) for name, value in values.items()}
        object.__setattr__(self, "_handlers", {name: each for name, each in handlers.items() if each is not None})
        for name, each in self._handlers.items():
            object.__setattr__(self, name, each.value)
        self._join_samplers()
        rest = {name: value for name, value in values.items() if name not in self._handlers}
        super().__init__(broadcast_object, lambda: runtime.topology().rank, **rest)

    def _join_samplers(self) -> None:
        """Have exact samplers go on with each step of the optimizer."""
        handlers = self._handlers.values()
        exact = [each.value for each in handlers if isinstance(each, SamplerStateHandler) and each.value.exact]
        optimizer: Any = self._handlers.get("optimizer")
        if exact and not getattr(optimizer, "is_watched", False):
            raise ValueError(NO_STEPS_FOR_SAMPLER)
        for sampler in exact:
            optimizer.value.register_step_post_hook(
                lambda value, *_, to=sampler: to.advance(getattr(value, "backward_passes_per_step", 1))
            )

    def _optimizers(self) -> list[OptimizerStateHandler]:
        handlers = self._handlers.values()
        return [each for each in handlers if isinstance(each, OptimizerStateHandler) and each.is_watched]

    def save(self) -> None:
        watched = self._optimizers()
        uncopied = (
            set[int]()
            if self._needs_copy() or not self._can_send()
            else set().union(*(each.parameters() for each in watched))
        )
        self._is_copied = not uncopied
        for handler in self._handlers.values():
            handler.uncopied = uncopied if isinstance(handler, ModelStateHandler) or handler in watched else ()
            handler.save()
        super().save()

    def restore(self) -> None:
        has_kept = self._kept_steps() > 0
        if self._codecs():
            logger.warning("What a lost rank has compressed and not sent (its residuals) is lost with it.")
        for handler in self._handlers.values():
            if not (has_kept and isinstance(handler, SamplerStateHandler) and handler.value.exact):
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

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._handlers:
            self._handlers[name].set_value(value)
        super().__setattr__(name, value)
