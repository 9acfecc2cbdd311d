"""The generations of an elastic job: the session of a process ends and begins anew as ranks come and go."""

from __future__ import annotations

import gc
import traceback
from typing import Any

from hvdkit import config, environments
from hvdkit.arena import ARENA
from hvdkit.engine.session import runtime
from hvdkit.engine.session.process_sets import ProcessSet
from hvdkit.engine.session.session import Session
from hvdkit.environments.ticket import Launcher, Ticket
from hvdkit.transports.security.listening import addresses_for

# An engine is one large cycle, and a training that makes no new objects may not collect it. A generation leaves 0.4 MB;
# to collect takes 0.1 to 0.2 s.
GENERATIONS_OF_GARBAGE = 32

# Threads that are inside of Gloo end when the other members have left, so that nobody waits for them after a failure.
CLOSING_SECONDS = 0.02

_ticket: Ticket | None = None  # of the present generation
_transport: Any = None  # of the present generation


def enter_next(launcher: Launcher, failed: bool = False) -> Ticket:
    """Leave the present session, if any, and enter the next generation of an elastic job. Collective, and blocks.

    ``failed``: leave at once, since a rank is lost; else all ranks call this together. Process sets of which all
    members are in both generations stay, with the new numbers of their ranks.
    """
    global _ticket, _transport
    from hvdkit.transports.torch_distributed import open_by_ticket  # needs PyTorch

    if (session := runtime.replace_session(None)) is not None:
        if failed:
            _clear_frames(session.engine.mailbox.error)
            _transport.closing_seconds = CLOSING_SECONDS
            session.abandon()
        else:
            session.close()
    if _ticket is not None and _ticket.generation % GENERATIONS_OF_GARBAGE == 0:
        gc.collect()
    settings = config.from_environment()
    ticket, _transport = open_by_ticket(launcher, addresses_for(environments.detect()))
    ARENA.begin_generation()
    kept = [] if _ticket is None else _renumber(runtime.process_sets_of_init(), _ticket, ticket)
    ranks = [list(process_set.ranks or []) for process_set in kept]
    runtime.replace_session(Session(_transport, ticket.world, settings, ranks, is_elastic=True))
    for number, process_set in enumerate(kept, start=1):
        process_set.process_set_id = number
    runtime.process_sets_of_init()[:] = kept
    _ticket = ticket
    return ticket


def _clear_frames(error: BaseException | None) -> None:
    """Clear the frames that raised an error: their variables keep the gradients of a failed step."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _renumber(process_sets: list[ProcessSet], before: Ticket, now: Ticket) -> list[ProcessSet]:
    """Return the process sets of which all members are there, with their new ranks; end the others."""
    new_ranks = {(member.host, member.slot): rank for rank, member in enumerate(now.members)}
    kept = []
    for process_set in process_sets:
        members = [before.members[rank] for rank in process_set.ranks or []]
        lost = [member for member in members if (member.host, member.slot) not in new_ranks]
        if lost:
            process_set.process_set_id = None
            process_set.lost = f"slot {lost[0].slot} of {lost[0].host}"
        else:
            process_set.ranks = sorted(new_ranks[member.host, member.slot] for member in members)
            kept.append(process_set)
    return kept
