"""Jobs of ranks: the peers, the launchers that start their processes, and the reports of the ranks."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
SHUTDOWN_SECONDS = 20
FIND_KERNELS = """
import json, os, sys
del sys.path[0]  # the present folder, which a script would not look in
import hvdkit
problem = ""
try:
    import hvdkit.kernels._native
except ImportError as error:
    problem = str(error)
print(json.dumps([os.path.dirname(os.path.dirname(hvdkit.__file__)), problem]))
"""


@dataclass(frozen=True)
class Peer:
    """A contestant: the kind of its worker, the launcher of its ranks, and flags that only its worker has.

    ``launcher``: ``mpi`` and ``gloo`` are hvdkit's own launcher. ``plain`` starts one process per rank with torchrun's
    variables. ``horovod`` is Horovod's own launcher without MPI. ``mpi horovod`` and ``gloo horovod`` are hvdkit's
    launcher with Horovod's engine.
    """

    name: str
    worker: str
    launcher: str
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Task:
    """The processes that a launcher is to start: ``command`` on ``ranks`` ranks in ``environment``."""

    command: list[str]
    ranks: int
    environment: dict[str, str]
    output: Any

    def start(self, command: Sequence[str], **variables: str) -> subprocess.Popen[bytes]:
        """Start ``command`` in a session of its own, with more variables."""
        environment = {**self.environment, **variables}
        return subprocess.Popen(
            command, env=environment, cwd=ROOT, stdout=self.output, stderr=self.output, start_new_session=True
        )


# Starts the processes of a task for one of the launchers named in Peer.
Starter = Callable[[Task, str], list[subprocess.Popen[bytes]]]


@functools.cache
def horovod_engines() -> tuple[str, ...]:
    """Return the engines with which an installed Horovod was built. Another process asks, as the import loads MPI."""
    code = "import horovod.torch as h; print('mpi' * h.mpi_built(), 'gloo' * h.gloo_built())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return tuple(done.stdout.split()) if done.returncode == 0 else ()


def has_mpi() -> bool:
    """True if mpi4py is installed."""
    return importlib.util.find_spec("mpi4py") is not None


def horovods(variant: str = "", *flags: str) -> list[Peer]:
    """Return hvdkit over each of its engines, and Horovod over each of its own engines if it is installed.

    ``variant`` is added to the names, ``flags`` to the workers' commands.
    """
    engines = horovod_engines()
    found = [("hvdkit mpi", "hvdkit", "mpi")] if has_mpi() else []
    found.append(("hvdkit torch", "hvdkit", "gloo"))
    found += [("Horovod mpi", "horovod", "mpi")] * ("mpi" in engines)
    found += [("Horovod gloo", "horovod", "horovod")] * ("gloo" in engines)
    return [Peer(name + variant, worker, launcher, flags) for name, worker, launcher in found]


def on_horovod() -> list[Peer]:
    """Return hvdkit over Horovod, for each engine with which an installed Horovod was built."""
    return [Peer(f"hvdkit horovod {engine}", "hvdkit", f"{engine} horovod") for engine in horovod_engines()]


def environment(threads: int, launcher: str) -> dict[str, str]:
    """Return this process's environment for ``launcher``, without variables that another launcher may have left."""
    prefixes = ("OMPI_", "PMI", "PRTE_", "SLURM_", "HOROVOD_", "HVDKIT_", "TORCHELASTIC_")
    names = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    kept = {key: value for key, value in os.environ.items() if not key.startswith(prefixes) and key not in names}
    path = [str(ROOT), *filter(None, [kept.get("PYTHONPATH")])]
    kept.update(OMP_NUM_THREADS=str(threads), PYTHONPATH=os.pathsep.join(path))
    kept["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", os.defpath)])
    transports = {"mpi": "mpi", "gloo": "torch", "mpi horovod": "horovod", "gloo horovod": "horovod"}
    if launcher in transports:
        kept["HVDKIT_TRANSPORT"] = transports[launcher]
    return kept


def without_native_kernels(environment: Mapping[str, str]) -> str | None:
    """Return the problem of the hvdkit that a script imports in ``environment``; None if it has its native kernels."""
    done = subprocess.run(
        [sys.executable, "-c", FIND_KERNELS], capture_output=True, text=True, check=False, env=environment
    )
    if done.returncode:
        return f"hvdkit cannot be imported here:\n{done.stderr.strip()}\nHINT: pip install -e '{ROOT}[torch,mpi,bench]'"
    where, problem = json.loads(done.stdout)
    if not problem:
        return None
    build = f"python setup.py build_ext --inplace in {where}" if Path(where, "setup.py").exists() else "pip install it"
    return (
        f"the hvdkit that this would measure, in {where}, has no native kernels: {problem}\n"
        f"HINT: have a C++17 compiler and build them ({build}); scripts that start ranks measure the hvdkit beside "
        "this folder before one that is installed."
    )


def start_here(task: Task, launcher: str) -> list[subprocess.Popen[bytes]]:
    """Start all ranks of a task on this machine, by ``launcher``."""
    if launcher != "plain":
        module = "horovod.runner.launch" if launcher == "horovod" else "hvdkit.launch"
        engine = "--mpi" if launcher.startswith("mpi") else "--gloo"
        return [task.start([sys.executable, "-m", module, "-np", str(task.ranks), engine, *task.command])]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(task.ranks)}
    return [task.start(task.command, **common, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(task.ranks)]


def run_job(
    script: str | Path,
    peer: Peer,
    flags: Sequence[object],
    ranks: int,
    threads: int,
    timeout: float,
    start: Starter = start_here,
) -> list[Any]:
    """Run ``script`` as a worker of ``peer`` on ``ranks`` ranks. Return the reports, by rank.

    Reports travel through files, because launchers may cut and mix long lines of output.
    Raises RuntimeError with the end of the output if a rank did not report within ``timeout`` seconds.
    """
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as output:
        command = [sys.executable, str(Path(script).resolve()), "--worker", peer.worker, "--report", folder]
        command += [*map(str, flags), *peer.flags]
        reports = [Path(folder, f"{rank}.json") for rank in range(ranks)]
        task = Task(command, ranks, environment(threads, peer.launcher), output)
        processes = start(task, peer.launcher)
        try:
            problem = _wait(processes, reports, timeout)
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        missing = [rank for rank, path in enumerate(reports) if not path.exists()]
        if missing:
            output.seek(0)
            text = output.read().decode(errors="replace")[-3000:]
            raise RuntimeError(f"{peer.name}: {problem or 'ended'}; no report of rank {missing}\n{text}")
        if problem:
            tqdm.write(f"{peer.name}: all ranks reported, then {problem}")
        return [json.loads(path.read_text()) for path in reports]


def _wait(processes: Sequence[subprocess.Popen[bytes]], reports: Sequence[Path], timeout: float) -> str | None:
    """Wait until a job has ended, or cannot end well any more. Return the problem of its end, or None.

    A rank that has reported has done its work: if an engine then hangs while it shuts down, the figures still hold.
    """
    deadline, reported = time.monotonic() + timeout, False
    while True:
        statuses = [process.poll() for process in processes]
        if failed := [status for status in statuses if status]:
            return f"exit status {failed[0]}"
        if None not in statuses:
            return None
        if not reported and all(path.exists() for path in reports):
            reported, deadline = True, time.monotonic() + SHUTDOWN_SECONDS
        if time.monotonic() > deadline:
            return f"did not end within {SHUTDOWN_SECONDS if reported else timeout:.0f} s"
        time.sleep(0.05)


def report(folder: Path, rank: int, payload: Any) -> None:
    """Write the report of a rank. A worker calls this at its end."""
    path = Path(folder, f"{rank}.json")
    path.with_suffix(".tmp").write_text(json.dumps(payload))
    path.with_suffix(".tmp").replace(path)
