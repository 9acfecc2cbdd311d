"""Which transport carries this job, and why: the first of a list that is there and suits, or the one asked for.

Imports no transport, for which see ``base``; ``hvdkitrun`` asks here too.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from hvdkit import config
from hvdkit.errors import TransportUnavailableError
from hvdkit.transports.candidates import AUTO, Candidate, Job, Mpi, Solo, Torch

if TYPE_CHECKING:
    from hvdkit.transports.base import Transport

__all__ = ["AUTO", "Candidate", "Job", "candidate", "choose", "open_transport", "register"]

_SOLO = Solo()
# In the order in which they are asked where nobody said which.
_candidates: list[Candidate] = [_SOLO, Mpi(), Torch()]


def register(new: Candidate) -> None:
    """Let ``HVDKIT_TRANSPORT`` name ``new``, which is also asked before all others.

    Before ``hvd.init()``, and on all ranks. ``hvdkitrun``, another process, knows what is built in.
    Raises ValueError where there is one of that name.
    """
    if new.name == AUTO or any(one.name == new.name for one in _candidates):
        raise ValueError(f"there is a transport {new.name!r} already")
    _candidates.insert(0, new)
    if new.name not in config.TRANSPORTS:
        config.TRANSPORTS.append(new.name)


def candidate(name: str) -> Candidate:
    """The one of that name. Raises TransportUnavailableError where nobody registered it."""
    for one in _candidates:
        if one.name == name:
            return one
    raise TransportUnavailableError(
        f"there is no transport {name!r}.\nHINT: import what registers it before hvd.init()."
    )


def choose(job: Job) -> tuple[Candidate, str]:
    """What carries ``job``, and why it. Raises TransportUnavailableError that says what is missing and what to do."""
    world = job.world
    if world.size == 1 and not (job.asked != AUTO and candidate(job.asked).carries_one_rank):
        return _SOLO, "one rank"
    if job.asked != AUTO:
        asked = candidate(job.asked)
        if problem := asked.unavailable(job):
            raise TransportUnavailableError(f"HVDKIT_TRANSPORT={asked.name} {problem}")
        return asked, "HVDKIT_TRANSPORT"
    suited = [(one, reason) for one in _candidates if (reason := one.suits(job))]
    for one, reason in suited:
        if one.unavailable(job) is None:
            return one, reason
    hint = "start the job with hvdkitrun, torchrun or mpirun."
    if not job.installed("torch"):
        hint = "pip install 'hvdkit[torch]' or start the job with mpirun and hvdkit[mpi]."
    problem = "".join(f": {one.name} {one.unavailable(job)}" for one, _ in suited[:1]) or f".\nHINT: {hint}"
    raise TransportUnavailableError(f"no transport for {world.size} ranks started by {world.launcher}{problem}")


def open_transport(job: Job, members: Sequence[int] | None = None) -> Transport:
    """Choose and open the transport; collective over ``members`` of the job's world (all ranks, if None).

    The ranks of the transport are the places in ``members``.
    """
    chosen, _ = choose(job)
    if members is not None:
        job = replace(job, world=job.world.part(members))
        if job.world.size == 1 and not (job.asked != AUTO and chosen.carries_one_rank):
            chosen = _SOLO
    return chosen.open(job)


importlib.import_module("hvdkit.plugins")  # here, so that its room may stand above this one
