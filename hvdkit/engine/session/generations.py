"""The generations of an elastic job: the session of a process ends and begins anew as ranks come and go."""

from __future__ import annotations

import importlib.util
import logging
import traceback
from typing import Any, NamedTuple

from hvdkit.arena import ARENA
from hvdkit.engine.session import runtime
from hvdkit.engine.session.communicators import resolve_ranks
from hvdkit.engine.session.process_sets import ProcessSet
from hvdkit.engine.session.session import LEAVING, Session
from hvdkit.environments.ticket import Launcher, Report, Ticket
from hvdkit.errors import HorovodInternalError, PeerLostError, TransportUnavailableError

logger = logging.getLogger("hvdkit")

NEEDS_TORCH = (
    "an elastic job needs PyTorch, whose Gloo carries the bytes, also for TensorFlow.\nHINT: pip install torch"
)
# Threads that are inside of Gloo end when the other members have left, so that nobody waits for them after a failure.
CLOSING_SECONDS = 0.02


class _Generation(NamedTuple):
    ticket: Ticket
    transport: Any


_present: _Generation | None = None  # the last one that this process has entered
_missed: int | None = None  # the process for which this one waited in vain while the last generation formed


def enter_next(launcher: Launcher, failed: bool = False, steps: int | None = None) -> Ticket:
    """Leave the present session, if any, and enter the next generation of an elastic job. Collective, and blocks.

    ``failed``: leave at once, since a rank is lost; else all ranks call this together. ``steps``: those that the state
    of this process has seen, None if it has not received the state of the job. Process sets stay, with the new
    numbers of their ranks, where all their members are in both generations and no new process is; others end.
    Raises ForkedChildError in a forked child, HorovodInternalError if a library that the engine has called does not
    come back, TransportUnavailableError without PyTorch, and the errors of init if the ranks cannot meet. After an
    error this may be called again.
    """
    global _present, _missed
    if importlib.util.find_spec("torch") is None:
        raise TransportUnavailableError(NEEDS_TORCH)
    from hvdkit.transports.torch_distributed import open_by_ticket  # needs PyTorch

    runtime.check_not_forked()
    settings = runtime.read_settings()
    runtime.watch_end()
    lost = _leave(failed)
    ticket, transport = open_by_ticket(launcher, Report(steps, failed, _missed if lost is None else lost))
    _missed = None
    ARENA.begin_generation()
    sets = runtime.registered_process_sets()
    if _present is not None:
        ranks_of = _new_ranks(sets, _present.ticket, ticket)
    elif ticket.generation == 1:
        ranks_of = {id(process_set): resolve_ranks(process_set, len(ticket.members)) for process_set in sets}
    else:
        ranks_of = {}
    kept = [process_set for process_set in sets if id(process_set) in ranks_of]
    # Nothing is changed before the session stands: where a rank dies meanwhile, the next ticket counts.
    try:
        session = Session(transport, ticket.world, settings, [ranks_of[id(process_set)] for process_set in kept])
    except PeerLostError as error:
        _missed = None if error.rank is None else ticket.members[error.rank].process
        raise
    runtime.begin(session)
    for process_set in sets:
        if id(process_set) not in ranks_of:
            process_set.process_set_id = None
            process_set.lost = f"ranks have left the job or joined it before generation {ticket.generation}"
    for number, process_set in enumerate(kept, start=1):
        process_set.process_set_id, process_set.ranks = number, ranks_of[id(process_set)]
    sets[:] = kept
    _present = _Generation(ticket, transport)
    return ticket


def _leave(failed: bool) -> int | None:
    """End the present session, if there is one. Return the process that it called lost, None if there is none."""
    session = runtime.take_session()
    if session is None:
        return None
    mailbox, is_graceful, lost = session.engine.mailbox, False, None
    if not failed and mailbox.error is None:
        is_graceful, lost = session.say_goodbye(LEAVING)
    if mailbox.error is None and lost is not None:
        logger.warning("%s", lost)
    error = mailbox.error or lost
    if failed or error is not None:
        _clear_frames(error)
        if _present is not None:
            _present.transport.closing_seconds = CLOSING_SECONDS
    if not session.free(is_graceful) and (failed or error is not None):
        raise HorovodInternalError(
            f"{mailbox.me()} cannot enter another generation: a library that hvdkit has called does not return.\n"
            "HINT: end this process, so that a new process takes its place."
        )
    rank = error.rank if isinstance(error, PeerLostError) else None
    return None if rank is None or _present is None else _present.ticket.members[rank].process


def _clear_frames(error: BaseException | None) -> None:
    """Clear the frames that raised an error: their variables keep the gradients of a failed step."""
    seen: set[int] = set()  # an error may be the context of its own cause
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _new_ranks(process_sets: list[ProcessSet], before: Ticket, now: Ticket) -> dict[int, list[int]]:
    """Return the new ranks, by the id of its object, of each set that stays."""
    ranks = {member.process: rank for rank, member in enumerate(now.members)}
    former = [member.process for member in before.members]
    if not ranks.keys() <= set(former):
        return {}  # a new process knows none of the sets
    members_of = {id(each): [former[rank] for rank in each.ranks or []] for each in process_sets}
    return {
        key: sorted(ranks[process] for process in members)
        for key, members in members_of.items()
        if all(process in ranks for process in members)
    }
