"""Processes that ``torchrun`` started, or that were started by hand in its manner: RANK, WORLD_SIZE, MASTER_ADDR ..."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hvdkit.environments.base import World
from hvdkit.environments.variables import BY_HAND, Names, half_set, master_rendezvous, read_world

_NAME = "torchrun"

_NAMES = Names(
    rank=BY_HAND[0],
    size=BY_HAND[1],
    local_rank="LOCAL_RANK",
    local_size="LOCAL_WORLD_SIZE",
    cross_rank="GROUP_RANK",
    cross_size="GROUP_WORLD_SIZE",
)
_HINT = "set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in every process, or start with hvdkitrun, or unset them"


def detect(environ: Mapping[str, str]) -> World | None:
    """The World that RANK and WORLD_SIZE describe, None if they are not set."""
    world = read_world(_NAME, environ, _NAMES, _HINT)
    if world is None:
        return None
    rendezvous = master_rendezvous(environ)
    if rendezvous is None and world.size > 1:
        raise half_set(_NAME, environ, (_NAMES.rank, _NAMES.size, "MASTER_ADDR", "MASTER_PORT"), _HINT)
    if rendezvous is not None and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        rendezvous = replace(rendezvous, kind="agent")
    return replace(world, launcher=_NAME if _is_elastic(environ) else "by hand", rendezvous=rendezvous)


def detect_elastic(environ: Mapping[str, str]) -> World | None:
    """The same, where torchrun itself (torch's elastic agent) started this process, not a hand."""
    return detect(environ) if _is_elastic(environ) else None


def _is_elastic(environ: Mapping[str, str]) -> bool:
    return "TORCHELASTIC_RUN_ID" in environ and _NAMES.rank in environ
