"""States of an elastic training: what ranks go back to after a failure, and what new ranks receive."""

from __future__ import annotations

import copy
import logging
import queue
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from hvdkit.api.interrupts import InterruptAgreement, leave_job
from hvdkit.engine.session import runtime
from hvdkit.environments import elastic
from hvdkit.errors import HostsUpdatedInterrupt

logger = logging.getLogger("hvdkit")

BETWEEN_PASSES = (
    "The state was saved between backward passes of a step: a failure would lose the step's gradients.\nHINT: {hint}"
)
# A rank that joins between two commits, or is interrupted there, sees a shorter interval than there is.
COMMITS_TO_LEARN = 2


class Version(NamedTuple):
    """The version of a state. Of two ranks, the one with the greater version has the newer state.

    ``commits``: of the job, on whatever ranks. ``changes``: since the last commit, of a state that was saved at an
    interrupt, and steps that a failure kept.
    """

    commits: int = 0
    changes: int = 0


class State(ABC):
    """The state of a training that all ranks hold, and that new ranks receive.

    Subclasses define ``save``, ``restore`` and ``sync``, and ``reset`` where the number of ranks matters to them.
    """

    def __init__(self, bcast_object: Any = None, get_rank: Any = None) -> None:
        """Accept Horovod's two functions, which are not needed here."""
        self._host_messages: queue.Queue[Any] = queue.Queue()
        self._last_updated_timestamp = 0
        self._reset_callbacks: list[Callable[[], object]] = []
        self._agreement = InterruptAgreement()
        self._must_leave: Callable[[], bool] = lambda: False
        self._single_steps = 0  # commits in a row, each directly after a step, without an interrupt between
        self._is_copied = True  # what was saved last: also what optimizers change
        self._version = Version()  # of what was saved last

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
        if steps := max(self._steps(), default=0):
            self._single_steps = self._single_steps + 1 if steps == 1 else 0
        self.save()
        self._version = Version(self._version.commits + 1)
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise HostsUpdatedInterrupt on all ranks, at the same call, if some are to come or go.

        All ranks call it after the same step. In an elastic job of several ranks it costs a small allreduce, not more
        than four times a second: where calls follow each other quickly, an interrupt may come at a later one.
        """
        self._check_passes()
        launcher = elastic.launcher()
        if self._must_leave():
            raise leave_job()
        is_wanted = launcher is not None and launcher.is_interrupted()
        while not self._host_messages.empty():
            self._last_updated_timestamp, _ = self._host_messages.get()
            is_wanted = True
        if launcher is not None and runtime.topology().size > 1:
            is_wanted = self._agreement.on_any_rank(is_wanted)
        if is_wanted:
            raise HostsUpdatedInterrupt

    def _check_passes(self) -> None:
        """Raise ValueError between the backward passes of one step, whose gradients a failure would lose."""

    def _interrupt(self) -> None:
        """Save the state at an interrupt, so that a failure before ranks have met again loses no step."""
        steps = sum(self._steps())
        changes = self._version.changes + 1 + steps
        if steps:
            self._single_steps = 0
        self.save()
        self._version = self._version._replace(changes=changes)

    def _share(self) -> None:
        """Give to ranks that stay what each rank keeps for itself, after an interrupt. Collective."""

    def _go_back(self) -> None:
        """Restore the state after a failure. Steps that were applied since, and of which there is no copy, stay."""
        kept = self._kept_steps()
        self.restore()
        self._version = self._version._replace(changes=self._version.changes + kept)

    def _needs_copy(self) -> bool:
        """True unless the script commits each step: then a failed step changes nothing that optimizers change."""
        return self._single_steps < COMMITS_TO_LEARN

    def _steps(self) -> list[int]:
        """Return the number of steps since the last save of each optimizer whose steps are counted."""
        return []

    def _kept_steps(self) -> int:
        """Return the number of steps since the last save that ``restore`` does not take back."""
        return 0 if self._is_copied else sum(self._steps())

    def _tell_of_kept_steps(self) -> None:
        if self._kept_steps():
            logger.warning(
                "A step that was not committed is kept: the script commits each, so nothing was copied before."
            )

    def _can_send(self) -> bool:
        """True if ``_content`` is what ``sync`` sends; False where a user has another ``sync``."""
        return False

    def _content(self) -> Any:
        """Return the state for ranks that lack it, as an object to pickle."""
        raise NotImplementedError

    def _take(self, content: Any) -> None:
        """Replace the state by the ``_content`` of another rank, and save it."""
        raise NotImplementedError

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

    The states of Python's and NumPy's random generators are saved and restored with it.

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
        self._random = random.getstate(), np.random.get_state()

    def restore(self) -> None:
        for name, value in self._saved.items():
            setattr(self, name, copy.deepcopy(value))
        random.setstate(self._random[0])
        np.random.set_state(self._random[1])

    def sync(self) -> None:
        self._set(self._bcast_object(self._attributes()))

    def _can_send(self) -> bool:
        return type(self).sync is ObjectState.sync

    def _content(self) -> Any:
        return self._attributes()

    def _take(self, content: Any) -> None:
        self._set(content)

    def _attributes(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._names}

    def _set(self, values: dict[str, Any]) -> None:
        """Set the attributes, and save them."""
        for name, value in values.items():
            setattr(self, name, value)
        ObjectState.save(self)
