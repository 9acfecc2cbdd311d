"""Every setting: its default, its unit, its environment names, and the reason to change it."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

UNRESPONSIVE_TIMEOUTS = 10

# Horovod's names of log levels, each with the nearest level of Python's logging.
_LOG_LEVELS = {level: level for level in ("trace", "debug", "info", "warning", "error", "fatal")}
_LOG_LEVELS |= {"trace": "debug", "fatal": "critical"}
_BOOLEANS = {**dict.fromkeys(("1", "true", "yes", "on"), True), **dict.fromkeys(("0", "false", "no", "off"), False)}
_ALLREDUCES = ("auto", "all_to_all", "two_phase", "ring", "tree", "butterfly", "round_robin", "master_worker")
TRANSPORTS = ["auto", "mpi", "torch", "horovod", "solo"]  # registered transports are appended


_Kind = Callable[[Any, str, str], Any]  # makes a setting of its default, environment names and description


def _kind(unit: str, parse: Callable[[str], Any]) -> _Kind:
    """Return the constructor of the fields for settings in this unit."""

    def setting(default: Any, names: str, about: str) -> Any:
        return field(default=default, metadata={"parse": parse, "names": names.split(), "unit": unit, "about": about})

    return setting


def _number(
    unit: str, number: Callable[[str], Any], expected: str, *, positive: bool = False, or_auto: bool = False
) -> _Kind:
    """Return the constructor of fields for numbers of zero or more. With ``or_auto``, the word "auto" gives None."""

    def parse(text: str) -> Any:
        if or_auto and text.strip().lower() == "auto":
            return None
        try:
            value = number(text)
        except ValueError:
            raise ValueError(f"expected {expected}") from None
        if not 0 <= value < float("inf"):
            raise ValueError(f"expected {expected}")
        if positive and value == 0:
            raise ValueError("expected more than zero seconds")
        return value

    return _kind(unit, parse)


def _parse_threads(text: str) -> int:
    """Return OpenMP's first number; more numbers are for nested loops, and OpenMP itself reports invalid text."""
    first = text.split(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) else 1


def _one_of(choices: Collection[str], text: str) -> str:
    if text not in choices:
        raise ValueError(f"expected one of {', '.join(choices)}")
    return text


def _choice(choices: Collection[str]) -> _Kind:
    return _kind(", ".join(choices), partial(_one_of, choices))


def _count(unit: str) -> _Kind:
    return _number(unit, int, "a whole number, zero or more")


_path = _kind("path", str)
_switch = _kind("0 or 1", lambda text: _BOOLEANS[_one_of(_BOOLEANS, text.strip().lower())])
_threads = _kind("threads", _parse_threads)
_seconds = _number("s", float, "seconds, zero or more")
_positive_seconds = _number("s", float, "seconds, zero or more", positive=True)
_positive_seconds_or_auto = _number("s, auto", float, "seconds, zero or more", positive=True, or_auto=True)
_milliseconds = _number("ms", float, "milliseconds, zero or more")
_bytes_or_auto = _number("bytes, auto", int, "bytes, a whole number, zero or more, or auto", or_auto=True)
_log_level = _kind(", ".join(_LOG_LEVELS), lambda text: _LOG_LEVELS[_one_of(_LOG_LEVELS, text.strip().lower())])


@dataclass(frozen=True)
class Settings:
    """The run-time options of a process. If a setting has several names, the first that is set wins.

    An empty variable ("") counts as not set.
    """

    transport: str = _choice(TRANSPORTS)(
        "auto",
        "HVDKIT_TRANSPORT",
        "the transport that carries the bytes: `mpi` (mpi4py), `torch` (PyTorch's Gloo and NCCL), `horovod` (the "
        "engine of an installed Horovod), `solo` (one process); `auto` chooses it by the launcher and the device",
    )
    timeout_seconds: float = _positive_seconds(
        60.0,
        "HVDKIT_TIMEOUT_SECONDS",
        "how long a rank may give no sign of life before the ranks that wait for it raise an error",
    )
    unresponsive_timeout_seconds: float | None = _positive_seconds_or_auto(
        None,
        "HVDKIT_UNRESPONSIVE_TIMEOUT_SECONDS",
        "how long a rank whose process is alive may fail to answer, because a library keeps Python's lock (GIL) or "
        "threads wait for each other; at least `HVDKIT_TIMEOUT_SECONDS`; `auto` is ten times as long",
    )
    start_timeout_seconds: float = _positive_seconds(
        30.0,
        "HVDKIT_START_TIMEOUT_SECONDS HOROVOD_START_TIMEOUT",
        "how long `hvd.init()` waits for all ranks to connect; raise it on clusters that start slowly",
    )
    stop_grace_seconds: float = _seconds(
        10.0,
        "HVDKIT_STOP_GRACE_SECONDS",
        "how long ranks may save after SIGTERM to `hvdkitrun`, before SIGKILL ends them",
    )
    rescue: str = _path(
        "",
        "HVDKIT_RESCUE",
        "the folder to which a training under `hvd.elastic.run` writes its state when the job must end; the next start "
        "continues from this state; `hvdkitrun --rescue` sets the folder",
    )
    secret_file: str = _path(
        "",
        "HVDKIT_SECRET_FILE",
        "a file with a secret, which no other user may read; ranks of the torch transport prove to each other that "
        "they know the secret; `hvdkitrun` makes a secret for each job",
    )
    fusion_threshold: int | None = _bytes_or_auto(
        None,
        "HVDKIT_FUSION_THRESHOLD HOROVOD_FUSION_THRESHOLD",
        "size of a fusion buffer: a larger buffer needs fewer messages, a smaller buffer starts earlier; 0 sends each "
        "tensor alone; `auto` derives the size from a measurement of the network at init, or takes 128 MiB if all "
        "ranks are on one host and their threads use every core (gradients are then summed after the backward pass)",
    )
    cycle_time_ms: float = _milliseconds(
        1.0,
        "HVDKIT_CYCLE_TIME HOROVOD_CYCLE_TIME",
        "longest pause between two polls of a transport that must be polled (MPI), while something is pending",
    )
    spin_microseconds: int = _count("us")(
        200,
        "HVDKIT_SPIN_MICROSECONDS",
        "how long a waiting thread polls without pause; 0 leaves the core to the computation at once",
    )
    idle_poll_ms: float = _milliseconds(
        10.0,
        "HVDKIT_IDLE_POLL_MS",
        "pause between two polls of a transport that must be polled (MPI), while nothing is pending",
    )
    max_bytes_in_flight: int | None = _bytes_or_auto(
        None,
        "HVDKIT_MAX_BYTES_IN_FLIGHT",
        "most bytes of gradients that are sent at the same time, which need scratch memory of that size; 0 sends one "
        "bucket at a time; `auto` is four buckets, or the number of bytes that are under way on the network",
    )
    allreduce: str = _choice(_ALLREDUCES)(
        "auto",
        "HVDKIT_ALLREDUCE",
        "the algorithm of an allreduce between ranks that share no memory; `auto` takes the quickest algorithm that "
        "sums in rank order; ring, tree and butterfly round half precision at each rank on the way",
    )
    verify: int = _count("steps")(
        1000,
        "HVDKIT_VERIFY",
        "ranks compare hashes of the parameters after steps 1, 10, 100 and each multiple of this number, and raise an "
        "error if they differ; after step 1 they only warn, since a broadcast may follow; 0 is off",
    )
    cache_capacity: int = _count("signatures")(
        1024,
        "HVDKIT_CACHE_CAPACITY HOROVOD_CACHE_CAPACITY",
        "how many signatures of named operations are remembered; an operation with a remembered signature costs one "
        "small message; 0 is off",
    )
    node_memory: bool = _switch(
        True,
        "HVDKIT_NODE_MEMORY",
        "0 makes ranks of one host communicate over the transport instead of shared memory",
    )
    arena: bool = _switch(
        True,
        "HVDKIT_ARENA",
        "1 allocates PyTorch's gradients in memory that the ranks of a node share, so that they are summed in place; "
        "with 0, and with the aarch64 wheels of PyTorch, `step()` copies them there in chunks",
    )
    compute_threads: int = _threads(
        1,
        "OMP_NUM_THREADS",
        "OpenMP's own variable: the number of the host's cores on which a rank computes. If it is not set, hvdkit "
        "assumes 1, and frameworks choose for themselves; `hvdkitrun` does not set it",
    )
    stall_check_disable: bool = _switch(
        False,
        "HVDKIT_STALL_CHECK_DISABLE HOROVOD_STALL_CHECK_DISABLE",
        "1 silences the warnings about ranks that fall behind",
    )
    stall_check_seconds: float = _seconds(
        60.0,
        "HVDKIT_STALL_CHECK_TIME_SECONDS HOROVOD_STALL_CHECK_TIME_SECONDS",
        "time after which hvdkit warns about a tensor that some ranks have not submitted; 0 never warns",
    )
    stall_shutdown_seconds: float = _seconds(
        0.0,
        "HVDKIT_STALL_SHUTDOWN_TIME_SECONDS HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
        "time after which a tensor that some ranks have not submitted is an error on the waiting ranks; 0 means never",
    )
    timeline: str = _path(
        "",
        "HVDKIT_TIMELINE HOROVOD_TIMELINE",
        "rank 0 writes a Chrome trace here; `DYNAMIC` waits for `hvd.start_timeline()`",
    )
    timeline_mark_cycles: bool = _switch(
        False,
        "HVDKIT_TIMELINE_MARK_CYCLES HOROVOD_TIMELINE_MARK_CYCLES",
        "1 marks every round of the engine (each pass of its loop) in the timeline",
    )
    dynamic_process_sets: bool = _switch(
        False,
        "HVDKIT_DYNAMIC_PROCESS_SETS HOROVOD_DYNAMIC_PROCESS_SETS",
        "1 allows `hvd.add_process_set()` and `hvd.remove_process_set()` after `hvd.init()`",
    )
    log_level: str = _log_level(
        "warning",
        "HVDKIT_LOG_LEVEL HOROVOD_LOG_LEVEL",
        "lowest level of the messages of the `hvdkit` logger; Python calls `trace` debug and `fatal` critical",
    )

    @property
    def longest_unresponsive_seconds(self) -> float:
        """Return ``unresponsive_timeout_seconds`` with ``auto`` and its lower limit applied."""
        chosen = self.unresponsive_timeout_seconds
        return max(self.timeout_seconds, UNRESPONSIVE_TIMEOUTS * self.timeout_seconds if chosen is None else chosen)


def names_of(setting: str) -> list[str]:
    """Return the environment names of a setting, the winning name first."""
    return list(Settings.__dataclass_fields__[setting].metadata["names"])


def value_of(setting: str, environ: Mapping[str, str]) -> Any:
    """Return a setting's value in the environment, or its default. Raises ValueError as ``from_environment`` does."""
    entry = Settings.__dataclass_fields__[setting]
    for name in entry.metadata["names"]:
        if not environ.get(name):
            continue
        try:
            return entry.metadata["parse"](environ[name])
        except ValueError as error:
            fact = f"environment variable {name}: {error}, got {environ[name]!r}"
            about = f"{entry.metadata['about']} (unit: {entry.metadata['unit']}, default: {entry.default})"
            raise ValueError(f"{fact}\nHINT: {name}: {about}.") from None
    return entry.default


def from_environment(environ: Mapping[str, str] | None = None) -> Settings:
    """Return the settings in the environment. Raises ValueError that names the variable and the allowed values."""
    environ = os.environ if environ is None else environ
    return Settings(**{setting.name: value_of(setting.name, environ) for setting in fields(Settings)})
