"""Every setting: its default, each of its names, which name wins, and what a value that cannot be meant is answered."""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields

import pytest

from hvdkit import config
from hvdkit.config import Settings, from_environment


@dataclass(frozen=True)
class Case:
    """A text and what it stands for, another pair, and texts that are refused; names in the order in which they win."""

    names: str
    default: object
    first: tuple[str, object]
    second: tuple[str, object]
    bad: tuple[str, ...]


SWITCH = {"default": False, "first": ("1", True), "second": ("off", False), "bad": ("2", "maybe")}
CASES = {
    "transport": Case("HVDKIT_TRANSPORT", "auto", ("mpi", "mpi"), ("solo", "solo"), ("nccl", "MPI")),
    "timeout_seconds": Case(
        "HVDKIT_TIMEOUT_SECONDS", 60.0, ("2.5", 2.5), ("9", 9.0), ("0", "-1", "inf", "nan", "soon")
    ),
    "unresponsive_timeout_seconds": Case(
        "HVDKIT_UNRESPONSIVE_TIMEOUT_SECONDS", None, ("2.5", 2.5), ("9", 9.0), ("0", "-1", "inf", "ten")
    ),
    "start_timeout_seconds": Case(
        "HVDKIT_START_TIMEOUT_SECONDS HOROVOD_START_TIMEOUT", 30.0, ("5", 5.0), ("7", 7.0), ("0", "-1", "soon")
    ),
    "stop_grace_seconds": Case("HVDKIT_STOP_GRACE_SECONDS", 10.0, ("0", 0.0), ("2.5", 2.5), ("-1", "inf", "x")),
    "rescue": Case("HVDKIT_RESCUE", "", ("/shared/run", "/shared/run"), ("run", "run"), ()),
    "secret_file": Case("HVDKIT_SECRET_FILE", "", ("/run/secret", "/run/secret"), ("s", "s"), ()),
    "fusion_threshold": Case(
        "HVDKIT_FUSION_THRESHOLD HOROVOD_FUSION_THRESHOLD", None, ("0", 0), ("4096", 4096), ("-1", "1.5", "64MB")
    ),
    "cycle_time_ms": Case("HVDKIT_CYCLE_TIME HOROVOD_CYCLE_TIME", 1.0, ("3.5", 3.5), ("0", 0.0), ("-1", "inf", "x")),
    "spin_microseconds": Case("HVDKIT_SPIN_MICROSECONDS", 200, ("0", 0), ("50", 50), ("-1", "1.5")),
    "idle_poll_ms": Case("HVDKIT_IDLE_POLL_MS", 10.0, ("0.5", 0.5), ("20", 20.0), ("-1", "x")),
    "max_bytes_in_flight": Case("HVDKIT_MAX_BYTES_IN_FLIGHT", None, ("0", 0), ("4096", 4096), ("-1", "1.5", "many")),
    "allreduce": Case("HVDKIT_ALLREDUCE", "auto", ("ring", "ring"), ("tree", "tree"), ("star", "RING")),
    "node_memory": Case("HVDKIT_NODE_MEMORY", True, ("0", False), ("1", True), ("2", "maybe")),
    "arena": Case("HVDKIT_ARENA", True, ("0", False), ("1", True), ("2", "maybe")),
    "verify": Case("HVDKIT_VERIFY", 1000, ("0", 0), ("1", 1), ("-1", "1.5", "often")),
    "cache_capacity": Case("HVDKIT_CACHE_CAPACITY HOROVOD_CACHE_CAPACITY", 1024, ("0", 0), ("9", 9), ("-1", "x")),
    "stall_check_disable": Case("HVDKIT_STALL_CHECK_DISABLE HOROVOD_STALL_CHECK_DISABLE", **SWITCH),
    "compute_threads": Case("OMP_NUM_THREADS", 1, ("4", 4), ("2,1", 2), ()),
    "stall_check_seconds": Case(
        "HVDKIT_STALL_CHECK_TIME_SECONDS HOROVOD_STALL_CHECK_TIME_SECONDS", 60.0, ("0", 0.0), ("5", 5.0), ("-1", "x")
    ),
    "stall_shutdown_seconds": Case(
        "HVDKIT_STALL_SHUTDOWN_TIME_SECONDS HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 0.0, ("6", 6.0), ("1", 1.0), ("x",)
    ),
    "timeline": Case("HVDKIT_TIMELINE HOROVOD_TIMELINE", "", ("a.json", "a.json"), ("DYNAMIC", "DYNAMIC"), ()),
    "timeline_mark_cycles": Case("HVDKIT_TIMELINE_MARK_CYCLES HOROVOD_TIMELINE_MARK_CYCLES", **SWITCH),
    "dynamic_process_sets": Case("HVDKIT_DYNAMIC_PROCESS_SETS HOROVOD_DYNAMIC_PROCESS_SETS", **SWITCH),
    "log_level": Case(
        "HVDKIT_LOG_LEVEL HOROVOD_LOG_LEVEL", "warning", ("INFO", "info"), ("error", "error"), ("loud", "10")
    ),
}
NAMED = [(setting, name) for setting, case in CASES.items() for name in case.names.split()]
BAD = [(setting, name, text) for setting, name in NAMED for text in CASES[setting].bad]


def test_every_setting_is_in_the_table_with_its_names_and_default():
    assert {setting.name for setting in fields(Settings)} == CASES.keys()
    for setting, case in CASES.items():
        assert config.names_of(setting) == case.names.split()
    assert from_environment({}) == Settings(**{setting: case.default for setting, case in CASES.items()})


@pytest.mark.parametrize(("setting", "name"), NAMED)
def test_each_name_sets_its_setting_and_no_other(setting, name):
    for text, value in (CASES[setting].first, CASES[setting].second):
        settings = from_environment({name: text, "UNKNOWN": "1"})
        assert from_environment({name: ""}) == Settings()
        assert settings == Settings(**{setting: value})
        assert type(getattr(settings, setting)) is type(CASES[setting].first[1])


@pytest.mark.parametrize("setting", [setting for setting, case in CASES.items() if " " in case.names])
def test_the_first_name_wins_unless_it_holds_nothing(setting):
    case = CASES[setting]
    ours, horovods = case.names.split()
    assert getattr(from_environment({ours: case.first[0], horovods: case.second[0]}), setting) == case.first[1]
    assert getattr(from_environment({horovods: case.first[0], ours: case.second[0]}), setting) == case.second[1]
    assert getattr(from_environment({ours: "", horovods: case.first[0]}), setting) == case.first[1]
    # what has lost is not read, so it may be anything
    assert getattr(from_environment({ours: case.first[0], horovods: "?"}), setting) == case.first[1]


@pytest.mark.parametrize(("setting", "name", "text"), BAD)
def test_a_value_that_cannot_be_meant_names_the_variable_what_is_expected_and_what_it_sets(setting, name, text):
    with pytest.raises(ValueError, match=f"^environment variable {name}: expected ") as caught:
        from_environment({name: text})
    message = str(caught.value)
    first, hint = message.splitlines()
    assert first.endswith(f", got {text!r}")
    assert hint.startswith(f"HINT: {name}: ")
    assert f"default: {CASES[setting].default}" in hint


@pytest.mark.parametrize("level", ["trace", "debug", "info", "warning", "error", "fatal"])
def test_horovods_log_levels_are_those_of_logging(level):
    pythons = {"trace": "debug", "fatal": "critical"}.get(level, level)
    assert isinstance(getattr(logging, pythons.upper()), int)
    for text in (level, level.upper()):
        assert from_environment({"HOROVOD_LOG_LEVEL": text}).log_level == pythons


def test_one_setting_can_be_read_alone():
    environ = {"HVDKIT_LOG_LEVEL": "loud", "HOROVOD_START_TIMEOUT": "4"}
    assert config.value_of("start_timeout_seconds", environ) == 4
    assert config.value_of("cycle_time_ms", environ) == 1
