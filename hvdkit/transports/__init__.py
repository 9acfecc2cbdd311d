"""The choice of the transport of a job: the one asked for, or the first candidate that suits and is available.

This module imports no transport, so that ``hvdkitrun`` can use it; the contract of transports is in ``base``.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from hvdkit import config
from hvdkit.errors import TransportUnavailableError
from hvdkit.transports.candidates import AUTO, Candidate, Job, Mpi, Solo, TorchDistributed

if TYPE_CHECKING:
    from hvdkit.transports.base import Transport

__all__ = ["AUTO", "Candidate", "Job", "candidate", "choose", "open_transport", "register"]

_SOLO = Solo()
# In the order of preference.
_candidates: list[Candidate] = [_SOLO, Mpi(), TorchDistributed()]


def register(new: Candidate) -> None:
    """Let ``HVDKIT_TRANSPORT`` name ``new``, and prefer it to all other candidates.

    Call this before ``hvd.init()`` on all ranks; ``hvdkitrun`` is another process and knows built-in candidates only.
    Raises ValueError if a candidate has this name.
    """
    if new.name == AUTO or any(other.name == new.name for other in _candidates):
        raise ValueError(f"there is a transport {new.name!r} already")
    _candidates.insert(0, new)
    if new.name not in config.TRANSPORTS:
        config.TRANSPORTS.append(new.name)


def candidate(name: str) -> Candidate:
    """Return the candidate of that name. Raises TransportUnavailableError if none is registered."""
    for registered in _candidates:
        if registered.name == name:
            return registered
    raise TransportUnavailableError(
        f"there is no transport {name!r}.\nHINT: import what registers it before hvd.init()."
    )


def choose(job: Job) -> tuple[Candidate, str]:
    """Return the candidate that carries ``job``, and the reason.

    Raises TransportUnavailableError that says what is missing and what to do.
    """
    world = job.world
    if world.size == 1 and not (job.requested != AUTO and candidate(job.requested).carries_one_rank):
        return _SOLO, "one rank"
    if job.requested != AUTO:
        requested = candidate(job.requested)
        if problem := requested.unavailable(job):
            raise TransportUnavailableError(f"HVDKIT_TRANSPORT={requested.name} {problem}")
        return requested, "HVDKIT_TRANSPORT"
    suited = [(other, reason) for other in _candidates if (reason := other.suits(job))]
    for other, reason in suited:
        if other.unavailable(job) is None:
            return other, reason
    hint = "start the job with hvdkitrun, torchrun or mpirun."
    if not job.installed("torch"):
        hint = "pip install 'hvdkit[torch]' or start the job with mpirun and hvdkit[mpi]."
    problem = "".join(f": {other.name} {other.unavailable(job)}" for other, _ in suited[:1]) or f".\nHINT: {hint}"
    raise TransportUnavailableError(f"no transport for {world.size} ranks started by {world.launcher}{problem}")


def open_transport(job: Job, members: Sequence[int] | None = None) -> Transport:
    """Choose and open the transport. Collective over ``members`` of the job's world (all ranks, if None).

    A rank of the transport is an index in ``members``.
    """
    chosen, _ = choose(job)
    if members is not None:
        job = replace(job, world=job.world.part(members))
        if job.world.size == 1 and not (job.requested != AUTO and chosen.carries_one_rank):
            chosen = _SOLO
    return chosen.open(job)


importlib.import_module("hvdkit.plugins")  # by name, since the plug-ins import this package
