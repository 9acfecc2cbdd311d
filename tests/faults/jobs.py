"""Jobs of this host that a fault strikes: start one under hvdkitrun, end what the fault says, see what is left."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
import time

import psutil

from tests.faults.injection import Fault, Outcome
from tests.preloaded import preloaded, rank_name
from tests.ranks import FOR_OPEN_MPI, OF_OPEN_MPI, PIPES, SEGMENTS, TORCH, rank_environment

TIMEOUT_SECONDS = 3  # HVDKIT_TIMEOUT_SECONDS
START_TIMEOUT_SECONDS = 8  # which a slow rank must not exceed
# A job of this kind takes three seconds; whatever waits for a deadline a few more.
PATIENCE_SECONDS = 45
SETTLE_SECONDS = 5


def run_with_fault(fault: Fault, transport: str, ranks: int) -> Outcome:
    with (
        tempfile.TemporaryDirectory(prefix="fault-") as folder,
        tempfile.TemporaryDirectory(prefix=FOR_OPEN_MPI, dir=os.environ.get(SEGMENTS)) as segments,
    ):
        before = set(os.listdir("/dev/shm"))  # noqa: S108 (a look)
        environment = rank_environment(
            OMPI_MCA_btl_sm_backing_directory=segments,
            HVDKIT_TIMEOUT_SECONDS=str(TIMEOUT_SECONDS),
            HVDKIT_START_TIMEOUT_SECONDS=str(START_TIMEOUT_SECONDS),
            HOROVOD_STALL_CHECK_TIME_SECONDS="0.5",
            **({"HOROVOD_TIMELINE": "/dev/full"} if fault.kind == "full disk" else {}),
        )
        flag = {"mpi": "--mpi", "torch": "--gloo", "horovod": "--gloo"}[transport]
        if transport == "horovod":
            environment["HVDKIT_TRANSPORT"] = transport
        rank = [sys.executable, "-m", "tests.faults.struck", fault.dumps(), folder]
        command = [sys.executable, "-m", "hvdkit.launch", flag, "-np", str(ranks)]
        command += preloaded(rank, TORCH, environment)
        job = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, **PIPES)
        status, output, ended = watch(job, fault)
        left = left_behind(folder, before, segments)
    return Outcome(status, output, ended, left)


def watch(job: subprocess.Popen[str], fault: Fault) -> tuple[int | None, str, float]:
    """Read all that a job says until it has ended, and kill the launcher where it shall be: status, output, when."""
    lines: queue.Queue[str | None] = queue.Queue()
    assert job.stdout is not None
    stream = job.stdout

    def read() -> None:
        for line in stream:
            lines.put(line)
        lines.put(None)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    said: list[str] = []
    deadline = time.monotonic() + PATIENCE_SECONDS
    hangs = False
    while True:
        try:
            line = lines.get(timeout=max(0.01, deadline - time.monotonic()))
        except queue.Empty:
            hangs = True
            break
        if line is None:
            break
        # Without what the launcher puts in front of each line.
        said.append(re.sub(r"^\[\d+\]<std(out|err)>: ?", "", line))
        if fault.kind == "launcher killed" and line.rstrip().partition(": ")[2].startswith("STRIKES"):
            job.kill()
    if hangs:
        job.kill()
    status = job.wait()
    ended = time.monotonic()
    return None if hangs else status, "".join(said), ended


def left_behind(mark: str, shared_before: set[str], segments: str | None = None) -> list[str]:
    """What is there of a job that has ended: processes with an argument of its, ranks of this process, shared memory.

    ``shared_before``: the files in /dev/shm when it was started. ``segments``: its own folder for those of Open MPI.
    """
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        left = []
        for process in psutil.process_iter(["cmdline", "name", "status"]):
            line = process.info["cmdline"] or []
            is_its = mark in line or process.info["name"] == rank_name()
            if process.info["status"] != psutil.STATUS_ZOMBIE and is_its:
                left.append(f"{process.pid} {process.info['name']} {' '.join(line)[:100]}")
        new = set(os.listdir("/dev/shm")) - shared_before  # noqa: S108
        left += [f"/dev/shm/{name}" for name in new if not (name.startswith(OF_OPEN_MPI) or is_mapped(name))]  # noqa: S108
        left += [f"{segments}/{name}" for name in (os.listdir(segments) if segments else ())]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.02)


def is_mapped(name: str) -> bool:
    """Whether a process still has this shared memory: then it is another job's."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(part.path == f"/dev/shm/{name}" for part in process.memory_maps()):  # noqa: S108
                return True
    return False
