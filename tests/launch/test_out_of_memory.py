"""A rank that is killed for want of memory: hvdkitrun names memory, and the causes of SIGKILL where it was none."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdkit.launch.elastic.job import ElasticJob
from hvdkit.launch.out_of_memory import MemoryWatch, explain
from hvdkit.launch.output import Output
from tests.launch.launching import PATIENCE_SECONDS, RANK, argv
from tests.ranks import rank_environment

GIB = 1 << 30
# Layouts of cgroups: the file with the count, and that with the limit.
LAYOUTS = {
    "version 2": ("0::/job/step", "sys/fs/cgroup/job/step/memory.events", "sys/fs/cgroup/job/memory.max"),
    "version 2, in a container": ("0::/", "sys/fs/cgroup/memory.events", "sys/fs/cgroup/memory.max"),
    "version 1": (
        "9:pids:/\n4:memory:/job", "sys/fs/cgroup/memory/job/memory.oom_control",
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes",
    ),
    "version 1, in a container": (
        "4:cpu,memory:/docker/1f", "sys/fs/cgroup/memory/memory.oom_control",
        "sys/fs/cgroup/memory/memory.limit_in_bytes",
    ),
}  # fmt: skip


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_kills_are_counted_in_the_cgroup_and_the_limit_is_the_lowest(tmp_path, layout):
    groups, count, limit = LAYOUTS[layout]
    write(tmp_path / "proc" / "self" / "cgroup", f"{groups}\n")
    write(tmp_path / "proc" / "meminfo", f"MemTotal: {16 * GIB // 1024} kB\nMemFree: 1 kB\n")
    write(tmp_path / "proc" / "vmstat", "oom_kill 100\n")
    write(tmp_path / count, "under_oom 0\noom_kill 3\n")
    write(tmp_path / limit, f"{4 * GIB}\n")
    watch = MemoryWatch(str(tmp_path))
    name, kills, peak, most = watch.note().split()
    assert (name, kills, most) == ("memory", "0", str(4 * GIB))
    assert int(peak) >= 0
    write(tmp_path / count, "under_oom 0\noom_kill 5\n")
    assert watch.note().split()[1] == "2"


def test_without_a_cgroup_the_host_is_asked(tmp_path):
    write(tmp_path / "proc" / "meminfo", f"MemTotal: {16 * GIB // 1024} kB\n")
    write(tmp_path / "proc" / "vmstat", "nr_free 1\noom_kill 100\n")
    watch = MemoryWatch(str(tmp_path))
    write(tmp_path / "proc" / "vmstat", "nr_free 1\noom_kill 101\n")
    assert watch.note().split()[1::2] == ["1", str(16 * GIB)]
    assert MemoryWatch(str(tmp_path / "none")).note().split()[1::2] == ["0", "0"]


@pytest.mark.parametrize(
    ("note", "words"),
    [
        (f"1 {39 * GIB // 10} {4 * GIB}", ", probably out of memory (peak 3.9 of 4 GiB)"),
        (f"1 {GIB} {4 * GIB}", ", probably out of memory (peak 1 of 4 GiB)"),  # other ranks had the rest
        (f"0 {39 * GIB // 10} {4 * GIB}", ", probably out of memory (peak 3.9 of 4 GiB)"),
        (f"0 {280 << 20} {300 << 20}", ", probably out of memory (peak 280 of 300 MiB)"),
        (f"0 {GIB} {4 * GIB}", ""),
    ],
)
def test_memory_is_named_where_the_kernel_killed_or_the_process_was_large(note, words):
    assert explain(note) == words


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A memory cgroup of 300 MiB, below that of this process."""
    with open("/proc/self/cgroup", encoding="ascii") as file:
        paths = {controllers: path for _, controllers, path in (line.rstrip().split(":", 2) for line in file)}
    version_1 = "memory" in paths
    base = Path(
        "/sys/fs/cgroup", *(["memory"] if version_1 else []), paths.get("memory", paths.get("", "/")).strip("/")
    )
    group = base / f"hvdkit-{secrets.token_hex(4)}"
    try:
        group.mkdir()
        (group / ("memory.limit_in_bytes" if version_1 else "memory.max")).write_text(str(300 << 20))
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    yield group
    group.rmdir()


def last_lines(flags: list[str], code: str, group: Path | None = None) -> list[str]:
    """Run a job, in a cgroup. Return hvdkitrun's own lines."""
    move = None if group is None else lambda: (group / "cgroup.procs").write_text(str(os.getpid()))
    done = subprocess.run(
        argv(flags, code), preexec_fn=move, env=rank_environment(), capture_output=True, text=True,
        timeout=PATIENCE_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 128 + signal.SIGKILL, done.stderr
    lines = done.stderr.splitlines()
    return lines[next(index for index, line in enumerate(lines) if line.startswith("hvdkitrun: rank 1 ")) :]


def test_a_rank_that_takes_more_memory_than_there_is_is_named_with_the_cause(controller, small_group):
    eats = f"{RANK}\nblocks = []\nwhile rank == '1': blocks.append(os.urandom(1 << 20))\ntime.sleep(600)"
    (line,) = last_lines([controller, "-np", "2"], eats, small_group)
    before, _, rest = line.partition(", probably out of memory (peak ")
    assert before.endswith("was killed by signal SIGKILL (9)")
    assert rest.endswith(" of 300 MiB), which ended the job")


def test_a_rank_that_was_killed_otherwise_gets_the_causes_of_the_signal(controller):
    kills = f"{RANK}\nif rank == '1': os.kill(os.getpid(), 9)\ntime.sleep(600)"
    line, hint = last_lines([controller, "-np", "2"], kills)
    assert line.endswith(" was killed by signal SIGKILL (9), which ended the job")
    assert hint == (
        "HINT: find the sender of SIGKILL: the kernel when the host ran out of memory (see dmesg), SLURM, Kubernetes "
        "or Docker at one of their limits, or kill -9"
    )


def test_an_elastic_job_names_memory_too():
    output = Output(2, is_elastic=True)
    output.write(1, "stderr", f"\x1ehvdkit note memory 1 {3 * GIB} {4 * GIB}\n".encode())
    job = object.__new__(ElasticJob)
    object.__setattr__(job, "output", output)
    assert job.with_error("rank 1 was killed", 1) == "rank 1 was killed, probably out of memory (peak 3 of 4 GiB)"
    assert job.with_error("rank 0 was killed", 0) == "rank 0 was killed"
