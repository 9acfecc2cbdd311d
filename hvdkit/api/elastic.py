"""Horovod's ``elastic.run``: a training function that goes on while ranks come and go."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import numpy as np

from hvdkit.api.interrupts import InterruptAgreement, LeaveJob
from hvdkit.api.rescue import Rescue, from_settings
from hvdkit.api.states import ObjectState, State, Version
from hvdkit.api.transfer import send_state
from hvdkit.engine.ops.requests import Call
from hvdkit.engine.session import generations, runtime
from hvdkit.environments import elastic
from hvdkit.environments.ticket import Ticket
from hvdkit.errors import (
    HorovodInternalError,
    HostsUpdatedInterrupt,
    MismatchError,
    PeerFailedError,
    PeerLostError,
    TransportUnavailableError,
)

__all__ = ["ObjectState", "State", "run", "run_fn"]
logger = logging.getLogger("hvdkit")

_VERSIONS = "hvdkit.elastic.versions"
Result = TypeVar("Result")
_runs = 0  # the calls of functions that ``run`` has decorated


def run(func: Callable[..., Result]) -> Callable[..., Result]:
    """Decorate a training function, whose first argument is a State, so that it goes on while ranks come and go.

    In an elastic job (``hvdkitrun --min-np``), the call connects this process to the others. After a failure of a rank
    the state goes back to the last commit; it is sent to ranks that lack it, and the function is called again. Where
    ranks come or go without a failure, it is called again at the point of the commit. A process that the job does not
    need any more ends with exit status 0. In other jobs the state is synchronised, and the function called once.
    With HVDKIT_RESCUE the state outlives the end of any job, see docs/elastic.md.

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
        global _runs
        call, launcher = functools.partial(func, state, *args, **kwargs), elastic.launcher()
        rescue, _runs = from_settings(_runs), _runs + 1
        if rescue is not None:
            return _run_with_rescue(rescue, launcher, call, state)
        if launcher is not None:
            return _run(launcher, call, state)
        state.sync()
        return call()

    return wrapper


def run_fn(func: Callable[..., Result], reset: Callable[[], object]) -> Callable[..., Result]:
    """Return ``run(func)``. ``reset`` is not called: hvdkit connects the ranks itself."""
    return run(func)


def _run_with_rescue(
    rescue: Rescue, launcher: elastic.ElasticLauncher | None, call: Callable[[], Result], state: State
) -> Result:
    """Begin with a rescued state, and rescue the state if the job ends before the function returns."""
    has_state = rescue.read(state)
    state._must_leave = lambda: rescue.is_due
    with rescue:
        try:
            if launcher is None:
                state.save()
                _synchronise(state, has_state)
                result = call()
            else:
                result = _run(launcher, call, state, has_state, rescue.waiting)
        except (LeaveJob, HorovodInternalError, TransportUnavailableError) as end:
            if isinstance(end, HorovodInternalError):
                state._go_back()
            else:
                state._interrupt()
            rescue.write(state)
            raise
    rescue.clear()
    return result


def _run(
    launcher: elastic.ElasticLauncher,
    call: Callable[[], Result],
    state: State,
    has_state: bool = False,
    waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Result:
    """Call the function in one generation after the other, until it returns.

    ``has_state``: the state is that of the job. ``waiting`` makes a context in which this process waits for others.
    """
    place = _place() if runtime.is_initialized() else None
    # An earlier call has connected this process, with another function or state.
    is_member = stays = runtime.current() is not None
    failed, is_new = False, True
    state.save()  # to which a rank returns that has received a part of another rank's state
    while True:
        steps = state._version.commits if has_state or is_member else None
        with waiting():
            ticket = None if stays else _enter_next(launcher, failed, steps)
        if is_new and ticket is not None and ticket.generation > 1:
            has_state = False  # a rescued state is older than that of a job that has begun
        is_new, needs_sync = False, ticket is None or ticket.needs_sync
        try:
            if place != _place():
                state.on_reset()
            if needs_sync:
                _synchronise(state, has_state)
            has_state, state._agreement = True, InterruptAgreement()
            try:
                result = call()
                state._agreement.finish()
                return result
            except HostsUpdatedInterrupt:
                failed = False
                state._interrupt()
                state._share()
        except HorovodInternalError as error:
            # hvdkitrun tells of lost ranks; a mistake of the program would come again.
            level = logging.INFO if isinstance(error, PeerLostError) else logging.WARNING
            logger.log(level, "The state returns to its last commit: %s", error)
            failed = True
            state._go_back()
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
    """Give ranks that lack it the newest state of any rank. Collective."""
    own = np.array([state._version if has_state else (-1, 0)])
    (gathered,) = runtime.engine().named.allgather([own], Call(_VERSIONS, wake=False)).wait()
    versions = [Version(*map(int, row)) for row in gathered]
    newest = max(versions)
    lacking = [rank for rank, version in enumerate(versions) if version != newest or newest.commits < 0]
    if not lacking:
        return
    if state._can_send():
        root = versions.index(newest)
        content = (state._content(), state._single_steps) if root == runtime.topology().rank else None
        received = send_state(content, root, [rank for rank in lacking if rank != root])
        if received is not None:
            content, state._single_steps = received
            state._take(content)
    else:
        state.sync()
        newest = versions[0]
    state._version = max(newest, Version())


def _place() -> tuple[int, int, int, int]:
    topology = runtime.topology()
    return topology.rank, topology.size, topology.local_rank, topology.local_size
