"""The command line of ``hvdkitrun``: horovodrun's flags, and the HOROVOD_ variables that they set."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import hvdkit
from hvdkit import config
from hvdkit.launch import horovod_flags
from hvdkit.launch.errors import UsageError
from hvdkit.launch.hosts import Host, parse_hostfile, parse_hosts

_LOG_LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL")


@dataclass(frozen=True)
class Options:
    """What the caller asked for. ``controller``: ``"mpi"``, ``"gloo"`` or None where no flag says which.

    ``transport`` is what HVDKIT_TRANSPORT says; ``notes`` are lines for stderr about flags without effect.
    """

    command: list[str]
    size: int
    hosts: list[Host]
    controller: str | None = None
    transport: str = "auto"
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    interfaces: list[str] = field(default_factory=list)
    mpi_args: str = ""
    settings: dict[str, str] = field(default_factory=dict)
    output_folder: Path | None = None
    timestamps: bool = False
    start_timeout: float = 30.0
    stop_grace: float = 10.0
    verbose: bool = False
    as_horovod: bool = False
    notes: list[str] = field(default_factory=list)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(
            f"{message}\nHINT: hvdkitrun --help lists all flags; hvdkitrun -np 4 python train.py is a start"
        )


def _at_least(lowest: float, kind: Callable[[str], float]) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value = kind(text)
        if not value >= lowest:
            raise argparse.ArgumentTypeError(f"{text} is smaller than {lowest}")
        if value == float("inf"):
            raise argparse.ArgumentTypeError(f"{text} is too large")
        return value

    # argparse puts this name into its message about text that is no number.
    parse.__name__ = "whole number" if kind is int else "number"
    return parse


def _above_zero(text: str) -> float:
    value = _at_least(0, float)(text)
    if value == 0:
        raise argparse.ArgumentTypeError("0 seconds are too few")
    return value


_above_zero.__name__ = "number"


def _add_switch(group: argparse._ArgumentGroup, on: str, off: str, name: str, variable: str, inverse: bool) -> None:
    """Two flags of which one may be given; None where neither is, which leaves the caller's environment alone."""
    which = group.add_mutually_exclusive_group()
    which.add_argument(on, action="store_true", dest=name, default=None, help=f"{variable}={int(not inverse)}")
    which.add_argument(off, action="store_false", dest=name, default=None, help=f"{variable}={int(inverse)}")


def build_parser() -> argparse.ArgumentParser:
    """All flags, in groups as ``--help`` shows them."""
    parser = _Parser(
        prog="hvdkitrun", usage="hvdkitrun -np N [flags] command ...", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("-v", "--version", action="version", version=hvdkit.__version__)
    parser.add_argument(
        "-np", "--num-proc", dest="size", type=_at_least(1, int), metavar="N", help="number of processes"
    )
    parser.add_argument("-cb", "--check-build", action="store_true", help="show what is installed, and exit")
    parser.add_argument("--verbose", action="store_true", help="print hosts and command lines")
    parser.add_argument(
        "--start-timeout",
        type=_above_zero,
        metavar="S",
        help="seconds to reach all hosts, and for all processes to meet (30)",
    )
    parser.add_argument(
        "--stop-grace",
        type=_at_least(0, float),
        metavar="S",
        help="seconds that all processes have to save after SIGTERM, before SIGKILL (10)",
    )
    parser.add_argument("--output-filename", metavar="DIR", help="also write DIR/rank.N/stdout and stderr")
    parser.add_argument(
        "-prefix-timestamp",
        "--prefix-output-with-timestamp",
        action="store_true",
        dest="timestamps",
        help="begin each line of output with the time",
    )
    parser.add_argument(
        "--network-interfaces",
        "--network-interface",
        action="append",
        dest="interfaces",
        metavar="I1,I2",
        default=[],
        help="the networks that the job uses, as eth1",
    )
    parser.add_argument("--as-horovod", action="store_true", help="scripts that import horovod get hvdkit, as they are")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what every process runs")

    group = parser.add_argument_group("hosts")
    which = group.add_mutually_exclusive_group()
    which.add_argument(
        "-H", "--hosts", metavar="HOSTS", help="host1:2,host2:4: names and how many processes fit (localhost:NP)"
    )
    which.add_argument(
        "-hostfile", "--hostfile", metavar="FILE", help="a file with a line 'host1 slots=2' for each host"
    )
    group.add_argument("-p", "--ssh-port", type=_at_least(1, int), metavar="PORT", help="where hosts listen for ssh")
    group.add_argument("-i", "--ssh-identity-file", metavar="FILE", help="the key for ssh")

    group = parser.add_argument_group(
        "what carries the bytes", "without either flag HVDKIT_TRANSPORT decides, else whether there is an mpirun"
    )
    which = group.add_mutually_exclusive_group()
    which.add_argument("--mpi", action="store_const", const="mpi", dest="controller", help="start with mpirun")
    which.add_argument("--gloo", action="store_const", const="gloo", dest="controller", help="no MPI; uses Gloo")
    group.add_argument("--mpi-args", metavar="ARGS", default="", help="more arguments for mpirun, as one word")

    group = parser.add_argument_group("settings, handed to every process")
    group.add_argument(
        "--fusion-threshold-mb", type=_at_least(0, int), metavar="MIB", help="HOROVOD_FUSION_THRESHOLD, in MiB"
    )
    group.add_argument("--cycle-time-ms", type=_at_least(0, float), metavar="MS", help="HOROVOD_CYCLE_TIME")
    group.add_argument("--cache-capacity", type=_at_least(0, int), metavar="N", help="HOROVOD_CACHE_CAPACITY")
    group.add_argument("--timeline-filename", metavar="FILE", help="HOROVOD_TIMELINE")
    mark, check = "HOROVOD_TIMELINE_MARK_CYCLES", "HOROVOD_STALL_CHECK_DISABLE"
    _add_switch(group, "--timeline-mark-cycles", "--no-timeline-mark-cycles", "mark_cycles", mark, inverse=False)
    _add_switch(group, "--stall-check", "--no-stall-check", "stall_check", check, inverse=True)
    group.add_argument(
        "--stall-check-warning-time-seconds",
        type=_at_least(0, int),
        metavar="S",
        help="HOROVOD_STALL_CHECK_TIME_SECONDS",
    )
    group.add_argument(
        "--stall-check-shutdown-time-seconds",
        type=_at_least(0, int),
        metavar="S",
        help="HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
    )
    group.add_argument("--log-level", choices=_LOG_LEVELS, help="HOROVOD_LOG_LEVEL")
    horovod_flags.add_to(parser)
    return parser


def settings_environment(arguments: argparse.Namespace) -> dict[str, str]:
    """The variables that the settings' flags stand for, under the names and in the units of Horovod."""
    fusion_mb, start_timeout = arguments.fusion_threshold_mb, arguments.start_timeout
    mark, check = arguments.mark_cycles, arguments.stall_check
    values = {
        "HOROVOD_START_TIMEOUT": None if start_timeout is None else f"{start_timeout:g}",
        "HOROVOD_FUSION_THRESHOLD": None if fusion_mb is None else fusion_mb * 1024 * 1024,
        "HOROVOD_CYCLE_TIME": arguments.cycle_time_ms,
        "HOROVOD_CACHE_CAPACITY": arguments.cache_capacity,
        "HOROVOD_TIMELINE": arguments.timeline_filename,
        "HOROVOD_TIMELINE_MARK_CYCLES": None if mark is None else int(mark),
        "HOROVOD_STALL_CHECK_DISABLE": None if check is None else int(not check),
        "HOROVOD_STALL_CHECK_TIME_SECONDS": arguments.stall_check_warning_time_seconds,
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": arguments.stall_check_shutdown_time_seconds,
        "HOROVOD_LOG_LEVEL": arguments.log_level,
    }
    return {name: str(value) for name, value in values.items() if value is not None}


def parse(argv: Sequence[str]) -> Options | None:
    """The options, or None if ``--check-build`` asks for its table instead."""
    arguments = build_parser().parse_args(argv)
    horovod_flags.refuse(arguments.refused)
    if arguments.check_build:
        return None
    if arguments.size is None:
        raise UsageError("how many processes? -np is missing\nHINT: hvdkitrun -np 4 python train.py starts four")
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command:
        raise UsageError("what shall the processes run? The command is missing\nHINT: hvdkitrun -np 4 python train.py")
    return Options(
        command=command,
        size=arguments.size,
        hosts=_hosts(arguments),
        controller=arguments.controller,
        transport=_from_environment("transport"),
        ssh_port=arguments.ssh_port,
        ssh_identity_file=arguments.ssh_identity_file,
        interfaces=[name for piece in arguments.interfaces for name in piece.split(",") if name],
        mpi_args=arguments.mpi_args,
        settings=settings_environment(arguments),
        output_folder=None if arguments.output_filename is None else Path(arguments.output_filename),
        timestamps=arguments.timestamps,
        start_timeout=arguments.start_timeout or _from_environment("start_timeout_seconds"),
        stop_grace=_from_environment("stop_grace_seconds") if arguments.stop_grace is None else arguments.stop_grace,
        verbose=arguments.verbose,
        as_horovod=arguments.as_horovod,
        notes=arguments.notes,
    )


def _hosts(arguments: argparse.Namespace) -> list[Host]:
    if arguments.hosts is not None:
        return parse_hosts(arguments.hosts)
    if arguments.hostfile is not None:
        try:
            text = Path(arguments.hostfile).read_text()
        except OSError as error:
            raise UsageError(
                f"cannot read the host file: {error}\nHINT: give --hostfile a file with lines such as: host1 slots=2"
            ) from error
        return parse_hostfile(text, arguments.hostfile)
    return [Host("localhost", arguments.size)]


def _from_environment(setting: str) -> Any:
    """A setting that also matters to the launcher."""
    try:
        return config.value_of(setting, os.environ)
    except ValueError as error:
        raise UsageError(str(error)) from None
