"""The flags of ``horovodrun`` that hvdkit has no use for: accepted with a word on stderr, or refused with a way out.

What a job can do without is accepted, so that a command line for horovodrun starts the same job here. What would change
which processes run is refused: a job that silently starts others than were asked for is worse than none.
Spelled as in Horovod 0.28.1, ``horovod/runner/launch.py``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from hvdkit.launch.errors import UsageError

_TUNING = "there is nothing to tune by trial: --fusion-threshold-mb and --cycle-time-ms stay as they are"
_ALGORITHM = "hvdkit chooses the algorithm itself"
_THREADS = "hvdkit asks MPI for what its threads need"
_STAMP = "the program's own `logging` says how hvdkit's lines look; --prefix-output-with-timestamp stamps all lines"

# Flags without a value, each with why it has no effect.
_SWITCHES = {
    "--autotune": _TUNING,
    "--no-autotune": _TUNING,
    "--hierarchical-allreduce": _ALGORITHM,
    "--no-hierarchical-allreduce": _ALGORITHM,
    "--hierarchical-allgather": _ALGORITHM,
    "--no-hierarchical-allgather": _ALGORITHM,
    "--torus-allreduce": _ALGORITHM,
    "--no-torus-allreduce": _ALGORITHM,
    "--mpi-threads-disable": _THREADS,
    "--no-mpi-threads-disable": _THREADS,
    "--tcp": "choose MPI's networks with --mpi-args, as in --mpi-args='--mca btl tcp,self'",
    "--log-with-timestamp": _STAMP,
    "--no-log-hide-timestamp": _STAMP,
}
# The same with a value.
_VALUES = {
    "--autotune-log-file": _TUNING,
    "--autotune-warmup-samples": _TUNING,
    "--autotune-steps-per-sample": _TUNING,
    "--autotune-bayes-opt-max-samples": _TUNING,
    "--autotune-gaussian-process-noise": _TUNING,
    "--num-nccl-streams": "every lane has a stream of its own",
    "--thread-affinity": "the operating system places hvdkit's thread; taskset or mpirun's binding confine it",
    "--gloo-timeout-seconds": "set HVDKIT_TIMEOUT_SECONDS: how long a rank may give no sign of life",
    "--binding-args": "hand them to mpirun with --mpi-args",
}
# What is so already: hvdkit's log lines carry no time of their own.
_GRANTED = ("--disable-cache", "--log-without-timestamp", "--log-hide-timestamp")

_COOLDOWN = "--blacklist-cooldown-range"  # the only one with two values
_ELASTIC = (
    "a job keeps the ranks it started with",
    "give the size with -np and the hosts with -H; save checkpoints and start again to change them",
)
# Flags that are refused: the fact, and what to do instead.
_REFUSED = {
    "--jsrun": ("hvdkit does not start jobs by jsrun", "start with --mpi or --gloo, and name the hosts with -H"),
    "--config-file": (
        "hvdkitrun reads no configuration file",
        "give its entries as flags, or as the environment variables that docs/settings.md lists",
    ),
    **dict.fromkeys(
        (
            "--min-np",
            "--min-num-proc",
            "--max-np",
            "--max-num-proc",
            "--slots-per-host",
            "--elastic-timeout",
            "--reset-limit",
            _COOLDOWN,
            "--host-discovery-script",
        ),
        _ELASTIC,
    ),
}


class _NoEffect(argparse.Action):
    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        assert option is not None
        line = f"{option} has no effect: {(_SWITCHES | _VALUES)[option]}"
        if line not in namespace.notes:
            namespace.notes = [*namespace.notes, line]


class _Refuse(argparse.Action):
    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        assert option is not None
        namespace.refused = [*namespace.refused, option]


def add_to(parser: argparse.ArgumentParser) -> None:
    """Let the parser know them.

    Lines for stderr about those that were given come out as ``notes``, and for refuse() as ``refused``.
    """
    _add(parser, _SWITCHES, _NoEffect, 0)
    _add(parser, _VALUES, _NoEffect, None)
    for flag in _REFUSED:
        _add(parser, [flag], _Refuse, 2 if flag == _COOLDOWN else "?")
    for name in _GRANTED:
        parser.add_argument(name, action="store_true", help=argparse.SUPPRESS)
    parser.set_defaults(notes=[], refused=[])
    parser.epilog = (
        "All other flags of horovodrun are known too: those for tuning what hvdkit need not tune are accepted with "
        "a note that they have no effect; elastic jobs, --jsrun and --config-file are not supported."
    )


def refuse(given: Sequence[str]) -> None:
    """Raise UsageError about these flags, all in one message, so that nobody meets them one after the other."""
    if given:
        alike: dict[tuple[str, str], list[str]] = {}
        for flag in dict.fromkeys(given):
            alike.setdefault(_REFUSED[flag], []).append(flag)
        facts = "; ".join(f"{_listed(flags)} not supported: {fact}" for (fact, _), flags in alike.items())
        raise UsageError(f"{facts}\nHINT: {'; '.join(instead for _, instead in alike)}")


def _listed(flags: list[str]) -> str:
    return f"{', '.join(flags[:-1])} and {flags[-1]} are" if len(flags) > 1 else f"{flags[0]} is"


def reasons() -> dict[str, str]:
    """Each of these flags, and what becomes of it."""
    without_effect = {flag: f"no effect: {reason}" for flag, reason in (_SWITCHES | _VALUES).items()}
    granted = dict.fromkeys(_GRANTED, "is so already")
    refused = {flag: f"refused: {fact}; {instead}" for flag, (fact, instead) in _REFUSED.items()}
    return without_effect | granted | refused


def _add(
    parser: argparse.ArgumentParser, names: Sequence[str] | dict[str, Any], action: type[argparse.Action], nargs: Any
) -> None:
    for name in names:
        parser.add_argument(name, action=action, nargs=nargs, dest="notes", help=argparse.SUPPRESS)
