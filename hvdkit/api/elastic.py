"""Horovod's elastic API: a training function that goes on while ranks come and go, and the state that it keeps."""

from __future__ import annotations

import copy
import functools
import logging
import queue
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from hvdkit.api.objects import broadcast_object
from hvdkit.engine.ops.requests import Call, ReduceRequest
from hvdkit.engine.session import generations, runtime
from hvdkit.environments import elastic
from hvdkit.environments.ticket import Ticket
from hvdkit.errors import (
    HorovodInternalError,
    HostsUpdatedInterrupt,
    MismatchError,
    PeerFailedError,
    PeerLostError,
)
from hvdkit.kernels.reduce_op import ReduceOp

logger = logging.getLogger("hvdkit")

_INTERRUPT, _VERSIONS = "hvdkit.elastic.interrupt", "hvdkit.elastic.versions"
Result = TypeVar("Result")


class State(ABC):
    """The state of a training that all ranks hold, and that new ranks receive.

    Subclasses define ``save``, ``restore`` and ``sync``, and ``reset`` where the number of ranks matters to them.
    """

    def __init__(self) -> None:
        self._host_messages: queue.Queue[Any] = queue.Queue()
        self._last_updated_timestamp = 0
        self._reset_callbacks: list[Callable[[], object]] = []
        # The version of what was saved last: commits of the job, on whatever ranks, and later saves at an interrupt.
        self._commits = self._interrupts = 0

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], object]]) -> None:
        """Add functions to call after ranks have come or gone, before the state is synchronised.

        They adapt what depends on the number of ranks or on this rank's place, such as a learning rate, on all ranks
        alike: the state is not sent to ranks that have it. A new rank calls them if its place is another than the one
        that it was offered.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Adapt to a new set of ranks. ``run`` calls it."""
        self._host_messages = queue.Queue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: Any, update_res: Any) -> None:
        """Have the next check raise HostsUpdatedInterrupt, on all ranks. ``update_res`` is not used."""
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Save the state, to which a failure goes back, and check for updates.

        All ranks call it after the same step. Raises HostsUpdatedInterrupt on all ranks if some are to come or go.
        """
        self.save()
        self._commits, self._interrupts = self._commits + 1, 0
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise HostsUpdatedInterrupt on all ranks, at the same call, if some are to come or go.

        All ranks call it after the same step. It costs a small allreduce in an elastic job of several ranks.
        """
        launcher = elastic.launcher()
        is_wanted = launcher is not None and launcher.is_interrupted()
        while not self._host_messages.empty():
            self._last_updated_timestamp, _ = self._host_messages.get()
            is_wanted = True
        if launcher is not None and runtime.topology().size > 1:
            is_wanted = _any_rank(is_wanted)
        if is_wanted:
            raise HostsUpdatedInterrupt

    @abstractmethod
    def save(self) -> None:
        """Copy the state, in memory."""

    @abstractmethod
    def restore(self) -> None:
        """Go back to the copy that was saved last."""

    @abstractmethod
    def sync(self) -> None:
        """Replace the state on all ranks by that of rank 0, and save it. Collective."""

    def reset(self) -> None:
        """Adapt to a new number of ranks; by default nothing is to do."""


class ObjectState(State):
    """The state of Python objects, which are attributes.

    Args:
        bcast_object: a function that gives all ranks the object of rank 0.
        get_rank: a function that returns this rank. Not used; Horovod's scripts may pass it.
        kwargs: the attributes with their first values, which can be copied and pickled.
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        super().__init__()
        self._bcast_object, self._names, self._saved = bcast_object, list(kwargs), dict[str, Any]()
        for name, value in kwargs.items():
            setattr(self, name, value)
        ObjectState.save(self)

    def save(self) -> None:
        self._saved = {name: copy.deepcopy(getattr(self, name)) for name in self._names}

    def restore(self) -> None:
        for name, value in self._saved.items():
            setattr(self, name, copy.deepcopy(value))

    def sync(self) -> None:
        values = self._bcast_object({name: getattr(self, name) for name in self._names})
        for name, value in values.items():
            setattr(self, name, value)
        ObjectState.save(self)


class VariablesState(ObjectState):
    """The state of variables of TensorFlow or Keras, copied into memory that is used again, and of Python objects."""

    def __init__(self, **kwargs: Any) -> None:
        self._arrays: list[npt.NDArray[Any]] = []
        super().__init__(broadcast_object, lambda: runtime.topology().rank, **kwargs)
        self._save_variables()

    @abstractmethod
    def _variables(self) -> list[Any]:
        """Return the variables, in the same order on all ranks."""

    @abstractmethod
    def _array(self, variable: Any) -> npt.NDArray[Any]:
        """Return the value of a variable."""

    @abstractmethod
    def _broadcast(self, variables: list[Any]) -> None:
        """Give all ranks the values of rank 0."""

    def _save_variables(self) -> None:
        arrays = [self._array(variable) for variable in self._variables()]
        if [each.shape for each in arrays] != [each.shape for each in self._arrays]:
            self._arrays = [array.copy() for array in arrays]
        for kept, array in zip(self._arrays, arrays, strict=True):
            np.copyto(kept, array)

    def save(self) -> None:
        self._save_variables()
        super().save()

    def restore(self) -> None:
        for variable, array in zip(self._variables(), self._arrays, strict=True):
            variable.assign(array)
        super().restore()

    def sync(self) -> None:
        self._broadcast(self._variables())
        super().sync()
        self._save_variables()


def run(func: Callable[..., Result]) -> Callable[..., Result]:
    """Decorate a training function, whose first argument is a State, so that it goes on while ranks come and go.

    In an elastic job (``hvdkitrun --min-np``), the call connects this process to the others. After a failure of a rank
    the state goes back to the last commit; it is sent to ranks that lack it, and the function is called again. Where
    ranks come or go without a failure, it is called again at the point of the commit. A process that the job does not
    need any more ends with exit status 0. In other jobs the state is synchronised, and the function called once.

    Returns a function with the arguments of ``func`` and its result.

    Examples:
        >>> @hvd.elastic.run
        ... def train(state):
        ...     for state.epoch in range(state.epoch, epochs):
        ...         train_epoch(state)
        ...         state.commit()
        >>> train(hvd.elastic.TorchState(model, optimizer, epoch=0))
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Result:
        launcher = elastic.launcher()
        if launcher is not None:
            return _run(launcher, func, state, args, kwargs)
        state.sync()
        return func(state, *args, **kwargs)

    return wrapper


def run_fn(func: Callable[..., Result], reset: Callable[[], object]) -> Callable[..., Result]:
    """Return ``run(func)``. ``reset`` is not called: hvdkit connects the ranks itself."""
    return run(func)


def _run(
    launcher: elastic.ElasticLauncher, func: Callable[..., Result], state: State, args: Any, kwargs: dict[str, Any]
) -> Result:
    """Call the function in one generation after the other, until it returns."""
    place = _place() if runtime.is_initialized() else None
    # An earlier call has connected this process, with another function or state.
    is_member = stays = runtime.current() is not None
    has_state = failed = False
    state.save()  # to which a rank returns that has received a part of another rank's state
    while True:
        steps = state._commits if has_state or is_member else None
        needs_sync = stays or _enter_next(launcher, failed, steps).needs_sync
        try:
            if place != _place():
                state.on_reset()
            if needs_sync:
                _synchronise(state, has_state)
            has_state = True
            return func(state, *args, **kwargs)
        except HorovodInternalError as error:
            # hvdkitrun tells of lost ranks; a mistake of the program would come again.
            level = logging.INFO if isinstance(error, PeerLostError) else logging.WARNING
            logger.log(level, "The state returns to its last commit: %s", error)
            failed = True
            state.restore()
        except HostsUpdatedInterrupt:
            failed = False
            state.save()  # a failure before the state is synchronised loses no step
            state._interrupts += 1
        place, stays = None, False  # in all later generations the callbacks are called


def _enter_next(launcher: elastic.ElasticLauncher, failed: bool, steps: int | None) -> Ticket:
    """Enter the next generation in which all members meet: where some die meanwhile, there is another."""
    while True:
        try:
            return generations.enter_next(launcher, failed, steps)
        except (PeerLostError, PeerFailedError, MismatchError) as error:
            failed = True
            logger.info("Not all ranks have met: %s", error)


def _synchronise(state: State, has_state: bool) -> None:
    """Give all ranks the state of rank 0, which has the newest, if any rank has another. Collective."""
    own = np.array([[state._commits, state._interrupts]] if has_state else [[-1, 0]])
    (versions,) = runtime.engine().named.allgather([own], Call(_VERSIONS, wake=False)).wait()
    if versions.min() < 0 or (versions != versions[0]).any():
        state.sync()
        state._commits, state._interrupts = max(0, int(versions[0, 0])), int(versions[0, 1])


def _place() -> tuple[int, int, int, int]:
    topology = runtime.topology()
    return topology.rank, topology.size, topology.local_rank, topology.local_size


def _any_rank(flag: bool) -> bool:
    """Return True on all ranks if it is True on any. Collective."""
    numbers = np.array([float(flag)])
    request = ReduceRequest(ReduceOp.MAX)
    runtime.engine().named.allreduce([numbers], request, Call(_INTERRUPT, wake=False)).wait()
    return bool(numbers[0])
