"""The class of a distributed optimizer: the user's class, with gradients synchronised before its ``step``."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hvdkit.api.checks import check_passes
from hvdkit.api.gradients.settings import GradientSettings
from hvdkit.kernels.reduce_op import ReduceOp
from hvdkit.torch.gradients.compression_state import KEY, check
from hvdkit.torch.gradients.layout import encodable_shapes
from hvdkit.torch.gradients.names import parameters_of
from hvdkit.torch.gradients.synchronizer import GradientSynchronizer
from hvdkit.torch.optimizers.step import AdasumSynchronizer, guard_clipping, guard_scalers, reduce_and_step

_SETTINGS = "_distributed_settings"  # a key of a pickled optimizer

CLEARED_IN_FLIGHT = (
    "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or optimizer.synchronize(). "
    "This is prohibited as it can cause a race condition.\n"
    "HINT: clear gradients after step(); where another model's loss also reaches these parameters, as in a GAN, turn "
    "their requires_grad off for that pass or call optimizer.synchronize() after it."
)
NO_SKIP_WITH_ADASUM = (
    "Skipping synchronization is not supported when using Adasum optimizer.\n"
    "HINT: call optimizer.step() outside of optimizer.skip_synchronize(); with Adasum, gradients stay on their rank."
)


def _only_makes_state(optimizer: Any) -> bool:
    """True if step(closure=None) is how torch.distributed.checkpoint.state_dict has an optimizer make its state.

    It does so where there is no state, with gradients of zeros that no backward pass computed and learning rates of 0.
    This moves no parameter, so it is made without the other ranks: one rank may save alone.
    """
    if optimizer._synchronizer.hooks.touched or optimizer.state:
        return False
    if any(group.get("lr", 0.0) != 0 for group in optimizer.param_groups):
        return False
    gradients = [member.grad for member in parameters_of(optimizer.param_groups) if member.requires_grad]
    return all(gradient is not None and not gradient.any() for gradient in gradients)


def _synchronizer_for(optimizer: torch.optim.Optimizer, settings: GradientSettings) -> GradientSynchronizer:
    kind = AdasumSynchronizer if settings.op is ReduceOp.ADASUM else GradientSynchronizer
    return kind(optimizer, settings)


def wrap(optimizer: torch.optim.Optimizer, settings: GradientSettings) -> Any:
    """Return a distributed optimizer that shares state, defaults, groups and hooks with ``optimizer``."""
    wrapped = _new(type(optimizer))
    # A learning rate scheduler made earlier has put its own step on the object; it must not bypass ours.
    wrapped.__dict__.update({key: value for key, value in optimizer.__dict__.items() if key != "step"})
    wrapped._wrapped_optimizer = optimizer
    wrapped._synchronizer = _synchronizer_for(wrapped, settings)
    return wrapped


def _new(base: Any) -> Any:
    cls = distributed_class(base)
    return cls.__new__(cls)


@functools.cache
def distributed_class(base: Any) -> Any:
    """Return a subclass of ``base`` with its name and no other parent: ``super(cls, it)`` is the plain optimizer."""
    guard_scalers()
    guard_clipping()
    if not getattr(base.step, "hooked", False):  # what the constructor does; an unpickled object never ran one
        base.step = torch.optim.Optimizer.profile_hook_step(base.step)
        base.step.hooked = True

    class Distributed(base):  # type: ignore[misc]  # the base is known at run time only
        _synchronizer: GradientSynchronizer
        _wrapped_optimizer: Any = None

        @property
        def backward_passes_per_step(self) -> int:
            """The number of backward passes that a step expects."""
            return self._synchronizer.settings.backward_passes_per_step

        @property
        def op(self) -> ReduceOp:
            """The operation that reduces gradients."""
            return self._synchronizer.settings.op

        @property
        def process_set(self) -> Any:
            """The ranks among which gradients are reduced."""
            return self._synchronizer.settings.process_set

        @property
        def _parameter_names(self) -> dict[torch.Tensor, str]:
            """The names of parameters, given or by place: scripts made for Horovod read them."""
            return {parameter: name for name, parameter in self._synchronizer.settings.names}

        def set_backward_passes_per_step(self, passes: int) -> None:
            """Expect another number of backward passes before each step.

            Args:
                passes: the number of passes, at least 1.

            Raises:
                TypeError: unless it is an integer.
                ValueError: unless it is above 0.

            Examples:
                >>> optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
                >>> optimizer.set_backward_passes_per_step(2)
                >>> for _ in range(2):
                ...     (model(x).mean() / 2).backward()
                >>> optimizer.step()
            """
            self._synchronizer.set_passes(check_passes("set_backward_passes_per_step", passes))

        def synchronize(self) -> None:
            """Wait until all gradients are reduced; then they can be clipped before step(). Collective.

            Raises:
                HorovodInternalError: on every rank where the ranks' parameters differ, or if a rank is lost.

            Examples:
                >>> optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
                >>> model(x).mean().backward()
                >>> optimizer.synchronize()
                >>> model.weight.grad
                tensor([[1.5000, 1.5000]])
            """
            self._synchronizer.synchronize()

        def reset_compression(self) -> None:
            """Forget what codecs keep from step to step, as residuals; call it on all ranks.

            Examples:
                >>> optimizer = hvd.DistributedOptimizer(
                ...     optimizer, model.named_parameters(), compression=hvd.Compression.topk(0.01)
                ... )
                >>> optimizer.reset_compression()
            """
            self._synchronizer.codecs.reset()

        @contextmanager
        def skip_synchronize(self) -> Iterator[None]:
            """Let step() take the gradients as they are in this context, because synchronize() was called.

            Returns:
                A context manager.

            Raises:
                AssertionError: with ``op=hvd.Adasum``.

            Examples:
                >>> optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
                >>> model(x).mean().backward()
                >>> optimizer.synchronize()
                >>> torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
                >>> with optimizer.skip_synchronize():
                ...     optimizer.step()
                >>> model.weight.data
                tensor([[0.9000, 0.9000]])
            """
            if self.op is ReduceOp.ADASUM:
                raise AssertionError(NO_SKIP_WITH_ADASUM)
            self._synchronizer.should_synchronize = False
            try:
                yield
            finally:
                self._synchronizer.should_synchronize = True

        @functools.wraps(base.step)
        def step(self, *args: Any, **kwargs: Any) -> Any:
            if kwargs == {"closure": None} and not args and _only_makes_state(self):
                return super().step(**kwargs)
            if isinstance(self._synchronizer, AdasumSynchronizer):
                result = self._synchronizer.step(super().step, args, kwargs)
            else:
                result = reduce_and_step(self._synchronizer, super().step, args, kwargs)
            if self._wrapped_optimizer is not None:
                self._wrapped_optimizer._opt_called = True  # for a scheduler that was made with the wrapped one
            return result

        def zero_grad(self, *args: Any, **kwargs: Any) -> None:
            """Clear the gradients; the arguments are PyTorch's.

            Raises:
                AssertionError: between backward() and step() or synchronize().
            """
            if self._synchronizer.hooks.touched:
                raise AssertionError(CLEARED_IN_FLIGHT)
            self._synchronizer.forget_synchronized()
            super().zero_grad(*args, **kwargs)

        def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            """Return the wrapped optimizer's state, and the codecs' state of this rank, if any, as "compression"."""
            state: dict[str, Any] = super().state_dict(*args, **kwargs)
            codecs = self._synchronizer.codecs.state()
            return state if codecs is None else {**state, KEY: codecs}

        def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
            """Set the state back, and the codecs' state on this rank; forget a step that was begun.

            Raises ValueError or TypeError, and changes nothing, if codecs cannot go on from their state.
            """
            state = args[0] if args else kwargs["state_dict"]
            if state.get(KEY) is not None:
                check(state[KEY], encodable_shapes(self._synchronizer.groups(), self._synchronizer.name_of))
            self._synchronizer.abandon()
            super().load_state_dict(*args, **kwargs)
            self._synchronizer.codecs.load(state.get(KEY))
            if self._wrapped_optimizer is not None:
                self._wrapped_optimizer.state = self.state
                self._wrapped_optimizer.param_groups = self.param_groups

        def __getstate__(self) -> dict[str, Any]:
            codecs = self._synchronizer.codecs.state()
            return {**super().__getstate__(), _SETTINGS: self._synchronizer.settings, KEY: codecs}

        def __setstate__(self, state: dict[str, Any]) -> None:
            super().__setstate__({key: value for key, value in state.items() if key not in (_SETTINGS, KEY)})
            if _SETTINGS in state:
                self._synchronizer = _synchronizer_for(self, state[_SETTINGS])
                self._synchronizer.codecs.load(state[KEY])

        def __copy__(self) -> Any:
            """Return an optimizer with the same parameters, groups and state, as in PyTorch: either may step.

            Both reduce gradients by the same synchronizer, since a parameter can have one only.
            """
            copied = _new(base)
            copied.__setstate__(super().__getstate__())
            copied._synchronizer = self._synchronizer
            copied._wrapped_optimizer = self  # the synchronizer takes the groups from it
            return copied

        def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
            return _new, (base,), self.__getstate__()

    Distributed.step.hooked = True  # type: ignore[attr-defined]  # base.step runs the hooks, on reduced gradients
    Distributed.__name__, Distributed.__qualname__, Distributed.__doc__ = base.__name__, base.__qualname__, base.__doc__
    # As in Horovod, optimizer.__module__ == DistributedOptimizer.__module__ tells such an optimizer from a plain one.
    Distributed.__module__ = "hvdkit.torch.optimizer"
    return Distributed
