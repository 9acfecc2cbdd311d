"""The flags of ``horovodrun`` that hvdkit has no use for, spelled as in Horovod 0.28.1 (``horovod/runner/launch.py``).

hvdkitrun accepts the flags that a job can do without, with a note on stderr, so that a command line for horovodrun
starts the same job. It refuses the flags that would change which processes run, with a way out.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial

from hvdkit.launch import UsageError

# The reason why flags have no effect, and the flags, with "=" where a value follows.
_NO_EFFECT = {
    "there is nothing to tune by trial: --fusion-threshold-mb and --cycle-time-ms stay as they are": "--autotune "
    "--no-autotune --autotune-log-file= --autotune-warmup-samples= --autotune-steps-per-sample= "
    "--autotune-bayes-opt-max-samples= --autotune-gaussian-process-noise=",
    "hvdkit chooses the algorithm itself": "--hierarchical-allreduce --no-hierarchical-allreduce "
    "--hierarchical-allgather --no-hierarchical-allgather --torus-allreduce --no-torus-allreduce",
    "hvdkit asks MPI for the thread support that it needs": "--mpi-threads-disable --no-mpi-threads-disable",
    "choose MPI's networks with --mpi-args, as in --mpi-args='--mca btl tcp,self'": "--tcp",
    "the program's own `logging` sets the format of hvdkit's lines; --prefix-output-with-timestamp stamps all lines": (
        "--log-with-timestamp --no-log-hide-timestamp"
    ),
    "every lane has a stream of its own": "--num-nccl-streams=",
    "the operating system places hvdkit's thread; taskset or mpirun's binding confine it": "--thread-affinity=",
    "set HVDKIT_TIMEOUT_SECONDS: how long a rank may give no sign of life": "--gloo-timeout-seconds=",
    "hand them to mpirun with --mpi-args": "--binding-args=",
}
# hvdkit always behaves in this way: it checks the hosts at each start, and its log lines have no time.
GRANTED = ("--disable-cache", "--log-without-timestamp", "--log-hide-timestamp")
# The reason why flags are refused, and what to do instead: the flags.
_REFUSED = {
    ("hvdkit does not start jobs by jsrun", "start with --mpi or --gloo, and name the hosts with -H"): "--jsrun",
    (
        "hvdkitrun reads no configuration file",
        "give its entries as flags, or as the environment variables that docs/settings.md lists",
    ): "--config-file",
}
REASONS = {flag.rstrip("="): why for why, flags in _NO_EFFECT.items() for flag in flags.split()}
REFUSALS = {flag: refusal for refusal, flags in _REFUSED.items() for flag in flags.split()}


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add these flags to the parser, which lists the given flags as ``without_effect`` and ``refused``."""
    add = partial(parser.add_argument, help=argparse.SUPPRESS)

    def itself(flag: str) -> Callable[[str], str]:
        return lambda value: flag

    for flag in " ".join(_NO_EFFECT.values()).split():
        if flag.endswith("="):
            add(flag[:-1], action="append", type=itself(flag[:-1]), dest="without_effect")
        else:
            add(flag, action="append_const", const=flag, dest="without_effect")
    for flag in REFUSALS:
        add(flag, action="append", nargs="?", const=flag, type=itself(flag), dest="refused")
    for flag in GRANTED:
        add(flag, action="store_true")
    parser.set_defaults(without_effect=[], refused=[])
    parser.epilog = (
        "The other flags of horovodrun are accepted with a note that they have no effect, except --jsrun and "
        "--config-file, which are errors."
    )


def notes(given: Sequence[str]) -> list[str]:
    """Return a line for stderr about each given flag without effect."""
    return [f"{flag} has no effect: {REASONS[flag]}" for flag in dict.fromkeys(given)]


def refuse(given: Sequence[str]) -> None:
    """Raise a single UsageError about all given flags, if there are any."""
    if given:
        flags_of: dict[tuple[str, str], list[str]] = {}
        for flag in dict.fromkeys(given):
            flags_of.setdefault(REFUSALS[flag], []).append(flag)
        facts = []
        for (fact, _), flags in flags_of.items():
            subject = f"{', '.join(flags[:-1])} and {flags[-1]} are" if len(flags) > 1 else f"{flags[0]} is"
            facts.append(f"{subject} not supported: {fact}")
        raise UsageError(f"{'; '.join(facts)}\nHINT: {'; '.join(instead for _, instead in flags_of)}")
