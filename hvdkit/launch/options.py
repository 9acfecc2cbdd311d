"""The command line of ``hvdkitrun``: horovodrun's flags, and the HOROVOD_ variables that they set."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import hvdkit
from hvdkit import config
from hvdkit.launch import UsageError, horovod_flags
from hvdkit.launch.elastic import flags as elastic_flags
from hvdkit.launch.function import FUNCTION_NAME
from hvdkit.launch.hosts import Host, parse_hostfile, parse_hosts

_LOG_LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL")


@dataclass(frozen=True)
class Options:
    """The job that the command line describes."""

    command: list[str]
    size: int
    hosts: list[Host]
    controller: str | None = None  # "mpi" or "gloo" if such a flag was given
    transport: str = "auto"  # the value of HVDKIT_TRANSPORT
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    interfaces: list[str] = field(default_factory=list)
    mpi_args: str = ""
    settings: dict[str, str] = field(default_factory=dict)  # HOROVOD_ variables that flags set
    output_folder: Path | None = None
    timestamps: bool = False
    start_timeout: float = 30.0  # seconds
    stop_grace: float = 10.0
    verbose: bool = False
    as_horovod: bool = False
    notes: list[str] = field(default_factory=list)  # for stderr, about flags without effect
    function: str = ""  # that hvdkit.run runs in place of a script, pickled and in base 64
    function_folder: Path | None = None  # where the launcher writes its results
    elastic: elastic_flags.ElasticOptions | None = None  # of a job whose processes come and go


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        hint = "hvdkitrun --help lists all flags; hvdkitrun -np 4 python train.py is a start"
        raise UsageError(f"{message}\nHINT: {hint}")


def _at_least(
    lowest: float, kind: Callable[[str], float], factor: int = 1, or_more: bool = True
) -> Callable[[str], float]:
    """Return a parser of numbers from ``lowest`` on (above it, if not ``or_more``), which multiplies by ``factor``."""

    def parse(text: str) -> float:
        value = kind(text)
        if not value >= lowest or (value == lowest and not or_more):
            raise argparse.ArgumentTypeError(f"{text} is {'smaller' if or_more else 'no larger'} than {lowest}")
        if value == float("inf"):
            raise argparse.ArgumentTypeError(f"{text} is too large")
        return value * factor

    # argparse puts this name into its message about text that is no number.
    parse.__name__ = "whole number" if kind is int else "number"
    return parse


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all flags, in groups as ``--help`` shows them."""
    parser = _Parser(
        prog="hvdkitrun",
        usage="hvdkitrun -np N [flags] command ...",
        description="Start the processes of a training job, print their output with the rank in front, and end all "
        "of them when one fails. The flags are those of horovodrun, and some more.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-v", "--version", action="version", version=hvdkit.__version__)
    add("-np", "--num-proc", dest="size", type=_at_least(1, int), metavar="N", help="number of processes to start")
    add(
        "-cb",
        "--check-build",
        action="store_true",
        help="show the frameworks and libraries that are installed, and exit",
    )
    add("--verbose", action="store_true", help="print more: hosts, command lines, the traceback of each rank")
    start_help = "seconds to reach all hosts, and for all processes to connect (default 30)"
    add("--start-timeout", type=_at_least(0, float, or_more=False), metavar="S", help=start_help)
    grace_help = "seconds that processes have after SIGTERM, to save their state, before SIGKILL (default 10)"
    add("--stop-grace", type=_at_least(0, float), metavar="S", help=grace_help)
    add("--output-filename", metavar="DIR", help="also write the output of each process to DIR/rank.N")
    about = "print the time in front of each line of output"
    add("-prefix-timestamp", "--prefix-output-with-timestamp", action="store_true", dest="timestamps", help=about)
    networks_help = "network interfaces that the job uses, for example eth1"
    flags = "--network-interfaces", "--network-interface"
    add(*flags, action="append", dest="interfaces", metavar="I1,I2", default=[], help=networks_help)
    add("--as-horovod", action="store_true", help="let scripts that import horovod use hvdkit, unedited")
    add("command", nargs=argparse.REMAINDER, help="command that every process runs, for example: python train.py")

    group = parser.add_argument_group("hosts")
    add = group.add_mutually_exclusive_group().add_argument
    hosts_help = "hosts and their numbers of processes, for example host1:2,host2:4 (default localhost:N)"
    add("-H", "--hosts", metavar="HOSTS", help=hosts_help)
    add("-hostfile", "--hostfile", metavar="FILE", help="file with a line for each host, for example: host1 slots=2")
    add = group.add_argument
    add("-p", "--ssh-port", type=_at_least(1, int), metavar="PORT", help="port of the ssh servers on the hosts")
    add("-i", "--ssh-identity-file", metavar="FILE", help="private key for ssh")

    decides = "without a flag or HVDKIT_TRANSPORT: MPI if an mpirun is installed, else Gloo"
    group = parser.add_argument_group("communication between processes", decides)
    add = group.add_mutually_exclusive_group().add_argument
    add(
        "--mpi",
        action="store_const",
        const="mpi",
        dest="controller",
        help="start the processes with mpirun, and use MPI",
    )
    add(
        "--gloo",
        action="store_const",
        const="gloo",
        dest="controller",
        help="start the processes without MPI, and use Gloo",
    )
    group.add_argument(
        "--mpi-args", metavar="ARGS", default="", help="further arguments for mpirun, quoted as one word"
    )

    group = parser.add_argument_group("settings for every process (docs/settings.md)")
    whole, number = _at_least(0, int), _at_least(0, float)
    mib = _at_least(0, int, factor=1 << 20)
    setting, switch = partial(_add_setting, group), partial(_add_switch, group)
    setting("--fusion-threshold-mb", "FUSION_THRESHOLD", "size of a fusion buffer in MiB", metavar="MIB", type=mib)
    setting("--cycle-time-ms", "CYCLE_TIME", "longest pause between two polls, in ms", metavar="MS", type=number)
    setting("--cache-capacity", "CACHE_CAPACITY", "number of operations to remember", metavar="N", type=whole)
    setting("--timeline-filename", "TIMELINE", "record a timeline of the job in FILE", metavar="FILE")
    flags = "--timeline-mark-cycles", "--no-timeline-mark-cycles"
    switch(flags, "TIMELINE_MARK_CYCLES", ("1", "0"), "mark the rounds of the engine in the timeline")
    switch(("--stall-check", "--no-stall-check"), "STALL_CHECK_DISABLE", ("0", "1"), "warn about late ranks")
    about = "seconds after which hvdkit warns about a late rank"
    setting("--stall-check-warning-time-seconds", "STALL_CHECK_TIME_SECONDS", about, metavar="S", type=whole)
    about = "seconds after which a late rank is an error; 0: never"
    setting("--stall-check-shutdown-time-seconds", "STALL_SHUTDOWN_TIME_SECONDS", about, metavar="S", type=whole)
    setting("--log-level", "LOG_LEVEL", "lowest level of hvdkit's log messages", choices=_LOG_LEVELS)
    about = "write the state of hvd.elastic.run there when the job must end; the next start continues from it"
    group.add_argument("--rescue", dest="HVDKIT_RESCUE", type=os.path.abspath, metavar="FOLDER", help=about)
    parser.add_argument("--function-folder", type=Path, help=argparse.SUPPRESS)  # of hvdkit.run
    elastic_flags.add_to(parser, _at_least(1, int), _at_least(0, int), _at_least(0, float, or_more=False))
    horovod_flags.add_to(parser)
    return parser


def _add_setting(group: argparse._ArgumentGroup, flag: str, name: str, about: str, **how: Any) -> None:
    group.add_argument(flag, dest=f"HOROVOD_{name}", help=f"{about} (sets HOROVOD_{name})", **how)


def _add_switch(
    group: argparse._ArgumentGroup, flags: tuple[str, str], name: str, values: tuple[str, str], about: str
) -> None:
    """Add two flags of which at most one may be given. Without either, the caller's environment stays as it is."""
    which = group.add_mutually_exclusive_group()
    for flag, value, words in zip(flags, values, (about, f"do not {about}"), strict=True):
        text = f"{words} (sets HOROVOD_{name}={value})"
        which.add_argument(flag, action="store_const", const=value, dest=f"HOROVOD_{name}", help=text)


def parse(argv: Sequence[str]) -> Options | elastic_flags.JoinOptions | None:
    """Return the options, or None for ``--check-build``, which starts no job."""
    arguments = build_parser().parse_args(argv)
    horovod_flags.refuse(arguments.refused)
    if arguments.check_build:
        return None
    start_timeout = arguments.start_timeout or _from_environment("start_timeout_seconds")
    if arguments.join is not None:
        return elastic_flags.join_options_of(arguments, start_timeout)
    named_hosts = _named_hosts(arguments)
    rescues = bool(arguments.HVDKIT_RESCUE or _from_environment("rescue"))
    elastic = elastic_flags.options_of(arguments, named_hosts, rescues)
    size = arguments.size if elastic is None else elastic.limits.start
    if size is None:
        raise UsageError(
            "the number of processes, -np, is missing before the command\n"
            "HINT: hvdkitrun -np 4 python train.py starts four; flags after the command are the script's"
        )
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command:
        raise UsageError("the command for the processes is missing\nHINT: hvdkitrun -np 4 python train.py")
    given = {name: value for name, value in vars(arguments).items() if name.startswith(("HOROVOD_", "HVDKIT_"))}
    settings = {name: str(value) for name, value in given.items() if value is not None}
    if arguments.start_timeout is not None:
        settings["HOROVOD_START_TIMEOUT"] = f"{arguments.start_timeout:g}"
    folder = arguments.function_folder
    return Options(
        command=command,
        function="" if folder is None else (folder / FUNCTION_NAME).read_text(),
        function_folder=folder,
        size=size,
        hosts=named_hosts or _hosts_here(size, elastic),
        elastic=elastic,
        controller=arguments.controller,
        transport=_from_environment("transport"),
        ssh_port=arguments.ssh_port,
        ssh_identity_file=arguments.ssh_identity_file,
        interfaces=[name for names in arguments.interfaces for name in names.split(",") if name],
        mpi_args=arguments.mpi_args,
        settings=settings,
        output_folder=None if arguments.output_filename is None else Path(arguments.output_filename),
        timestamps=arguments.timestamps,
        start_timeout=start_timeout,
        stop_grace=_from_environment("stop_grace_seconds") if arguments.stop_grace is None else arguments.stop_grace,
        verbose=arguments.verbose,
        as_horovod=arguments.as_horovod,
        notes=horovod_flags.notes(arguments.without_effect),
    )


def _hosts_here(size: int, elastic: elastic_flags.ElasticOptions | None) -> list[Host]:
    """Return the hosts of a job whose user named none: this one, unless others are to join."""
    if elastic is None:
        return [Host("localhost", size)]
    return [] if elastic.listen is not None else [Host("localhost", elastic.limits.most)]


def _named_hosts(arguments: argparse.Namespace) -> list[Host] | None:
    if arguments.hosts is not None:
        return parse_hosts(arguments.hosts)
    if arguments.hostfile is None:
        return None
    try:
        return parse_hostfile(Path(arguments.hostfile).read_text(), arguments.hostfile)
    except OSError as error:
        hint = "give --hostfile a file with lines such as: host1 slots=2"
        raise UsageError(f"cannot read the host file: {error}\nHINT: {hint}") from error


def _from_environment(setting: str) -> Any:
    """Return a setting that the launcher uses too."""
    try:
        return config.value_of(setting, os.environ)
    except ValueError as error:
        raise UsageError(str(error)) from None
