"""Every flag of horovodrun 0.28.1 is either accepted, with a note where it has no effect, or refused with a way out."""

from __future__ import annotations

import re
import sys

import pytest

from hvdkit.launch import UsageError
from hvdkit.launch.options import parse
from tests.launch.launching import call_bare

START = ["-np", "2"]
# As in horovod/runner/launch.py, each with a value where it takes one.
# One of each kind; which flags have an effect, all of them, is in docs/migration.md, with which they are compared.
EFFECTIVE = """
--num-proc=3 | --verbose | --network-interface a | -p 22 | --ssh-identity-file k | --hosts h:2 | --mpi-args=--x
--disable-cache | --no-timeline-mark-cycles | --log-level TRACE | --log-hide-timestamp | -prefix-timestamp
"""
WITHOUT_EFFECT = """
--no-hierarchical-allreduce | --autotune-log-file f | --autotune-gaussian-process-noise 0.8 | --tcp
--binding-args=--rankfile | --thread-affinity 0
"""
ELASTIC = """
--min-np 1 | --min-num-proc 1 | --max-np 4 | --max-num-proc 4 | --slots-per-host 2 | --elastic-timeout 600
--reset-limit 3 | --blacklist-cooldown-range 60 300 | --host-discovery-script s
"""
REFUSED = "--jsrun | --config-file f"


def flags_of(table: str) -> list[str]:
    return [flag.strip() for flag in re.split(r"[|\n]", table.strip())]


@pytest.mark.parametrize("flag", flags_of(EFFECTIVE))
def test_flags_that_mean_something_here_are_taken_without_a_word(flag):
    options = parse([*START, *flag.split(), "python", "-x"])
    assert (options.command, options.notes) == (["python", "-x"], [])


@pytest.mark.parametrize("flag", flags_of(WITHOUT_EFFECT))
def test_flags_without_a_counterpart_change_nothing_but_a_note(flag):
    options = parse([*START, *flag.split(), "python", "-x"])
    name = flag.replace("=", " ").split()[0]
    assert len(options.notes) == 1
    assert options.notes[0].startswith(f"{name} has no effect: ")
    assert (options.command, options.settings) == (["python", "-x"], {})


@pytest.mark.parametrize("flag", flags_of(ELASTIC))
def test_flags_of_elastic_jobs_start_one(flag):
    options = parse([*START, *flag.split(), "python"])
    assert (options.command, options.notes) == (["python"], [])
    assert options.elastic is not None
    assert parse([*START, "python"]).elastic is None


@pytest.mark.parametrize("flag", flags_of(REFUSED))
@pytest.mark.parametrize("ending", [["python"], []], ids=["with a command", "at the end"])
def test_flags_that_would_start_another_job_are_refused_with_a_way_out(flag, ending):
    name = flag.split()[0]
    with pytest.raises(UsageError, match=f"^{name} is not supported: .*\nHINT: "):
        parse([*START, *flag.split(), *ending])


def test_all_flags_that_are_refused_are_named_at_once():
    with pytest.raises(UsageError) as refused:
        parse(["--jsrun", "--config-file", "c", "-np", "2", "python", "train.py", "--jsrun"])
    assert str(refused.value) == (
        "--jsrun is not supported: hvdkit does not start jobs by jsrun; --config-file is not supported: hvdkitrun "
        "reads no configuration file\nHINT: start with --mpi or --gloo, and name the hosts with -H; give its entries "
        "as flags, or as the environment variables that docs/settings.md lists"
    )


def test_notes_are_lines_on_stderr_one_a_flag_and_the_job_runs():
    flags = ["--gloo", "-np", "1", "--autotune", "--num-nccl-streams", "2", "--autotune"]
    flags += ["--mpi-threads-disable", "--log-with-timestamp"]
    result = call_bare(*flags, sys.executable, "-c", "print('ran')")
    assert (result.status, result.stdout) == (0, "[0]<stdout>: ran\n")
    notes = [line.partition(" has no effect: ")[::2] for line in result.stderr.splitlines()]
    assert notes == [
        (
            "hvdkitrun: --autotune",
            "there is nothing to tune by trial: --fusion-threshold-mb and --cycle-time-ms stay as they are",
        ),
        ("hvdkitrun: --num-nccl-streams", "every lane has a stream of its own"),
        ("hvdkitrun: --mpi-threads-disable", "hvdkit asks MPI for the thread support that it needs"),
        (
            "hvdkitrun: --log-with-timestamp",
            "the program's own `logging` sets the format of hvdkit's lines; --prefix-output-with-timestamp stamps all "
            "lines",
        ),
    ]


@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        ("--disable-cache --cache-capacity 9", {"HOROVOD_CACHE_CAPACITY": "9"}),
        ("--stall-check", {"HOROVOD_STALL_CHECK_DISABLE": "0"}),
        ("--no-stall-check", {"HOROVOD_STALL_CHECK_DISABLE": "1"}),
        ("--timeline-mark-cycles", {"HOROVOD_TIMELINE_MARK_CYCLES": "1"}),
        ("--no-timeline-mark-cycles", {"HOROVOD_TIMELINE_MARK_CYCLES": "0"}),
        ("--log-without-timestamp", {}),
    ],
)
def test_switches_set_their_variable_also_back(flags, settings):
    assert parse([*START, *flags.split(), "python"]).settings == settings


def test_a_switch_and_its_opposite_are_refused():
    for flags in (["--stall-check", "--no-stall-check"], ["--timeline-mark-cycles", "--no-timeline-mark-cycles"]):
        with pytest.raises(UsageError, match="not allowed with"):
            parse([*START, *flags, "python"])
