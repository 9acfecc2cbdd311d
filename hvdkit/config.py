"""Every setting: its default, its unit, the environment names that set it, and why one would change it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

MEBIBYTE = 1024 * 1024
UNRESPONSIVE_TIMEOUTS = 10


# What Horovod calls a level, and what Python's logging calls the nearest one.
_LOG_LEVELS = {
    "trace": "debug",
    "debug": "debug",
    "info": "info",
    "warning": "warning",
    "error": "error",
    "fatal": "critical",
}
_ALLREDUCES = ("auto", "all_to_all", "two_phase", "ring", "tree", "butterfly", "round_robin", "master_worker")
TRANSPORTS = ["auto", "mpi", "torch", "horovod", "solo"]  # and what is registered besides


def _boolean(text: str) -> bool:
    if text.strip().lower() in ("1", "true", "yes", "on"):
        return True
    if text.strip().lower() in ("0", "false", "no", "off"):
        return False
    raise ValueError("expected 0 or 1")


def _zero_or_more(kind: Callable[[str], Any], expected: str) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            raise ValueError(expected) from None
        if not 0 <= value < float("inf"):
            raise ValueError(expected)
        return value

    return parse


_seconds = _zero_or_more(float, "expected seconds, zero or more")
_milliseconds = _zero_or_more(float, "expected milliseconds, zero or more")
_not_negative = _zero_or_more(int, "expected a whole number, zero or more")
_bytes = _zero_or_more(int, "expected bytes, a whole number, zero or more, or auto")


def _positive_seconds(text: str) -> Any:
    value = _seconds(text)
    if value == 0:
        raise ValueError("expected more than zero seconds")
    return value


def _or_auto(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """None for ``auto``."""
    return lambda text: None if text.strip().lower() == "auto" else parse(text)


def _threads(text: str) -> int:
    """The first of OpenMP's numbers, which are for levels of nested loops; what is none is OpenMP's to complain of."""
    first = text.split(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) else 1


def _one_of(choices: Collection[str]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"expected one of {', '.join(choices)}")
        return text

    return parse


def _log_level(text: str) -> str:
    return _LOG_LEVELS[_one_of(_LOG_LEVELS)(text.strip().lower())]


def _setting(default: Any, parse: Callable[[str], Any], names: str, unit: str, about: str) -> Any:
    return field(default=default, metadata={"parse": parse, "names": names.split(), "unit": unit, "about": about})


@dataclass(frozen=True)
class Settings:
    """The run-time options of one process. Where a setting has several names, the first that is set wins.

    A variable that holds nothing ("") counts as not set.
    """

    transport: str = _setting(
        "auto",
        _one_of(TRANSPORTS),
        "HVDKIT_TRANSPORT",
        ", ".join(TRANSPORTS),
        "what carries the bytes; `auto` follows the launcher and the device",
    )
    timeout_seconds: float = _setting(
        60.0,
        _positive_seconds,
        "HVDKIT_TIMEOUT_SECONDS",
        "s",
        "how long a rank may give no sign of life before the ranks that wait for it raise an error",
    )
    unresponsive_timeout_seconds: float | None = _setting(
        None,
        _or_auto(_positive_seconds),
        "HVDKIT_UNRESPONSIVE_TIMEOUT_SECONDS",
        "s, auto",
        "how long a rank whose process lives may not answer, since a library keeps Python's lock (GIL) or its threads "
        "wait for each other; `auto` is ten times `HVDKIT_TIMEOUT_SECONDS`, below which it cannot be",
    )
    start_timeout_seconds: float = _setting(
        30.0,
        _positive_seconds,
        "HVDKIT_START_TIMEOUT_SECONDS HOROVOD_START_TIMEOUT",
        "s",
        "how long `hvd.init()` waits for all ranks; raise it on clusters that start slowly",
    )
    stop_grace_seconds: float = _setting(
        10.0,
        _seconds,
        "HVDKIT_STOP_GRACE_SECONDS",
        "s",
        "how long ranks may save after SIGTERM to `hvdkitrun`, before SIGKILL ends them",
    )
    secret_file: str = _setting(
        "",
        str,
        "HVDKIT_SECRET_FILE",
        "path",
        "ranks of the torch transport prove to each other that they know what is in this file, which only its user may "
        "read; `hvdkitrun` makes one for each job",
    )
    fusion_threshold: int | None = _setting(
        None,
        _or_auto(_bytes),
        "HVDKIT_FUSION_THRESHOLD HOROVOD_FUSION_THRESHOLD",
        "bytes, auto",
        "size of a fusion buffer; larger ones save latency, smaller ones start earlier; 0 sends each tensor alone; "
        "`auto` measures the network at init; where the ranks' threads have every core of their one host, it is "
        "128 MiB, and gradients are summed after the backward pass",
    )
    cycle_time_ms: float = _setting(
        1.0,
        _milliseconds,
        "HVDKIT_CYCLE_TIME HOROVOD_CYCLE_TIME",
        "ms",
        "longest pause between two looks at a polling transport while something is pending",
    )
    spin_microseconds: int = _setting(
        200,
        _not_negative,
        "HVDKIT_SPIN_MICROSECONDS",
        "us",
        "how long a waiting thread polls without pause; 0 leaves the core to the computation at once",
    )
    idle_poll_ms: float = _setting(
        10.0,
        _milliseconds,
        "HVDKIT_IDLE_POLL_MS",
        "ms",
        "pause between two looks at a polling transport while nothing is pending",
    )
    max_bytes_in_flight: int | None = _setting(
        None,
        _or_auto(_bytes),
        "HVDKIT_MAX_BYTES_IN_FLIGHT",
        "bytes, auto",
        "how much of a plan is on the wire at once, which takes as much scratch memory; 0 is one bucket at a time; "
        "`auto` is four buckets, or what the network holds",
    )
    allreduce: str = _setting(
        "auto",
        _one_of(_ALLREDUCES),
        "HVDKIT_ALLREDUCE",
        ", ".join(_ALLREDUCES),
        "the algorithm between ranks that share no memory; `auto` takes the quickest that sums in rank order. ring, "
        "tree and butterfly round half precision at each hop",
    )
    verify: int = _setting(
        1000,
        _not_negative,
        "HVDKIT_VERIFY",
        "steps",
        "after steps 1, 10, 100 and every so many, ranks compare hashes of the parameters and raise if they differ; "
        "after step 1, which a broadcast may follow, they warn; 0 is off",
    )
    cache_capacity: int = _setting(
        1024,
        _not_negative,
        "HVDKIT_CACHE_CAPACITY HOROVOD_CACHE_CAPACITY",
        "signatures",
        "how many signatures of named operations are remembered; a remembered one costs one small message; 0 is off",
    )
    node_memory: bool = _setting(
        True,
        _boolean,
        "HVDKIT_NODE_MEMORY",
        "0 or 1",
        "0 lets ranks of one host talk over the transport instead of memory that they share",
    )
    arena: bool = _setting(
        True,
        _boolean,
        "HVDKIT_ARENA",
        "0 or 1",
        "whether PyTorch's gradients are allocated in memory that the ranks of a node share, so that they are summed "
        "where they lie; else, and with the aarch64 wheels of PyTorch, they go there in chunks",
    )
    compute_threads: int = _setting(
        1,
        _threads,
        "OMP_NUM_THREADS",
        "threads",
        "OpenMP's own: how many of the host's cores a rank computes on",
    )
    stall_check_disable: bool = _setting(
        False,
        _boolean,
        "HVDKIT_STALL_CHECK_DISABLE HOROVOD_STALL_CHECK_DISABLE",
        "0 or 1",
        "1 silences the warnings about ranks that fall behind",
    )
    stall_check_seconds: float = _setting(
        60.0,
        _seconds,
        "HVDKIT_STALL_CHECK_TIME_SECONDS HOROVOD_STALL_CHECK_TIME_SECONDS",
        "s",
        "after how long a tensor that some ranks have not submitted is warned about; 0 never warns",
    )
    stall_shutdown_seconds: float = _setting(
        0.0,
        _seconds,
        "HVDKIT_STALL_SHUTDOWN_TIME_SECONDS HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
        "s",
        "after how long such a tensor becomes an error on the ranks that wait; 0 never",
    )
    timeline: str = _setting(
        "",
        str,
        "HVDKIT_TIMELINE HOROVOD_TIMELINE",
        "path",
        "rank 0 writes a Chrome trace here; `DYNAMIC` waits for `hvd.start_timeline()`",
    )
    timeline_mark_cycles: bool = _setting(
        False,
        _boolean,
        "HVDKIT_TIMELINE_MARK_CYCLES HOROVOD_TIMELINE_MARK_CYCLES",
        "0 or 1",
        "1 marks every round of the engine in the timeline",
    )
    dynamic_process_sets: bool = _setting(
        False,
        _boolean,
        "HVDKIT_DYNAMIC_PROCESS_SETS HOROVOD_DYNAMIC_PROCESS_SETS",
        "0 or 1",
        "1 allows `hvd.add_process_set()` and `hvd.remove_process_set()` after `hvd.init()`",
    )
    log_level: str = _setting(
        "warning",
        _log_level,
        "HVDKIT_LOG_LEVEL HOROVOD_LOG_LEVEL",
        ", ".join(_LOG_LEVELS),
        "what the `hvdkit` logger lets through; Python calls `trace` debug and `fatal` critical",
    )

    @property
    def longest_unresponsive_seconds(self) -> float:
        """``unresponsive_timeout_seconds``, decided."""
        asked = self.unresponsive_timeout_seconds
        return max(self.timeout_seconds, UNRESPONSIVE_TIMEOUTS * self.timeout_seconds if asked is None else asked)


def names_of(setting: str) -> list[str]:
    """The environment names of a setting, the one that wins first."""
    return list(Settings.__dataclass_fields__[setting].metadata["names"])


def value_of(setting: str, environ: Mapping[str, str]) -> Any:
    """One setting as the environment has it, or its default. Raises as ``from_environment`` does."""
    entry = Settings.__dataclass_fields__[setting]
    for name in entry.metadata["names"]:
        if not environ.get(name):
            continue
        try:
            return entry.metadata["parse"](environ[name])
        except ValueError as error:
            raise ValueError(
                f"environment variable {name}: {error}, got {environ[name]!r}\n"
                f"HINT: {name} sets {entry.metadata['about']} (unit: {entry.metadata['unit']}, "
                f"default: {entry.default})."
            ) from None
    return entry.default


def from_environment(environ: Mapping[str, str] | None = None) -> Settings:
    """The settings that the environment asks for. Raises ValueError that names the variable and what is allowed."""
    environ = os.environ if environ is None else environ
    return Settings(**{setting.name: value_of(setting.name, environ) for setting in fields(Settings)})


def markdown_table() -> str:
    """The settings as the table that docs/settings.md shows."""
    lines = ["| variable | default | unit | what it does |", "|---|---|---|---|"]
    for setting in fields(Settings):
        assert setting.default is not MISSING
        default = "auto" if setting.default is None else setting.default
        names = "<br>".join(f"`{name}`" for name in setting.metadata["names"])
        default = str(int(default) if isinstance(default, bool) else default) or "(none)"
        lines.append(f"| {names} | {default} | {setting.metadata['unit']} | {setting.metadata['about']} |")
    return "\n".join(lines)


def write_into(path: Path, mark: str, text: str) -> None:
    """Put a generated text between a file's two marks ``<!-- mark -->`` and ``<!-- /mark -->``."""
    before, rest = path.read_text().split(f"<!-- {mark} -->")
    after = rest.split(f"<!-- /{mark} -->")[1]
    path.write_text(f"{before}<!-- {mark} -->\n{text}\n<!-- /{mark} -->{after}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--write"]:
        write_into(Path(sys.argv[2]), "settings", markdown_table())
    else:
        print(markdown_table())
