"""An outsider connects to every port that a running job has open: no sum is wrong, nobody gets in, nothing is left."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from hvdkit.environments.network import is_loopback
from tests.faults.outsider import ALL_INTERFACES, Port, Recorder, attack, holding, open_ports
from tests.launch.launching import outputs_of
from tests.preloaded import preloaded, rank_name
from tests.ranks import PIPES, TORCH, free_port, rank_environment
from tests.transports.shared import needs_native
from tests.waiting import until

START_SECONDS = 90
END_SECONDS = 60
RANKS = 2
RANK = [sys.executable, "-m", "tests.faults.steady"]
BY_HAND: list[list[str]] = [[]] * RANKS  # nothing starts them but the test
SETTLE_SECONDS = 10


class Job:
    """Processes that sum until they are told to end."""

    def __init__(
        self, folder: Path, launchers: list[list[str]], environments: list[dict[str, str]], *, preload: bool = True
    ) -> None:
        self.folder = folder
        rank = [*RANK, str(folder)]
        self.processes = [
            subprocess.Popen(
                [*launcher, *(preloaded(rank, TORCH, environment) if preload else rank)], env=environment, **PIPES
            )
            for launcher, environment in zip(launchers, environments, strict=True)
        ]

    def wait_for(self, what: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while len(list(self.folder.glob(f"{what}.*"))) < RANKS:
            assert time.monotonic() < deadline, f"the ranks are not {what}: {self.stop()}"
            assert all(process.poll() in (None, 0) for process in self.processes), self.stop()
            time.sleep(0.05)

    def ports(self) -> list[Port]:
        """Where a process listens that this one has started, or a rank that was forked for it."""
        return open_ports(*processes_of_tests())

    def end(self) -> None:
        """Tell the ranks to end, which they do well only if every sum was right."""
        Path(self.folder, "end").touch()
        self.wait_for("done", END_SECONDS)

    def check_ended_well(self) -> None:
        outputs = [process.communicate(timeout=END_SECONDS)[0] for process in self.processes]
        assert [process.returncode for process in self.processes] == [0] * len(self.processes), outputs

    def stop(self) -> list[str]:
        for process in self.processes:
            if process.poll() is None:
                process.terminate()
        return [process.communicate(timeout=END_SECONDS)[0] for process in self.processes]


@contextlib.contextmanager
def job(
    folder: Path, *launchers: list[str], environments: list[dict[str, str]] | None = None, preload: bool = True
) -> Iterator[Job]:
    """A job that has summed a few times; at its end nothing of it is left."""
    before = processes_of_tests()
    started = Job(folder, list(launchers), environments or [rank_environment()] * len(launchers), preload=preload)
    try:
        started.wait_for("started", START_SECONDS)
        yield started
    finally:
        started.stop()
    until(lambda: not processes_of_tests() - before, SETTLE_SECONDS, lambda: processes_of_tests() - before)


def processes_of_tests() -> set[int]:
    """All that this process has started, and the ranks that were forked for it."""
    forked = {one.pid for one in psutil.process_iter(["name"]) if one.info["name"] == rank_name()}
    started = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "tests.preloaded" not in process.cmdline():  # who forks stays for the next test
                started.add(process.pid)
    return forked | started


def hvdkitrun(flag: str) -> list[str]:
    return [sys.executable, "-m", "hvdkit.launch", flag, "-np", str(RANKS)]


def by_hand(address: str, *ports: int) -> list[dict[str, str]]:
    """The environments of ranks that were started by hand, with the port that each of them is told."""
    return [
        rank_environment(
            HVDKIT_TRANSPORT="torch", RANK=str(rank), WORLD_SIZE=str(RANKS), MASTER_ADDR=address, MASTER_PORT=str(port)
        )
        for rank, port in enumerate(ports)
    ]


def assert_stands_it(running: Job, *recorded: bytes) -> None:
    ports = running.ports()
    attack(ports, *recorded)
    with holding(ports):
        attack(ports[:1])
        running.end()
        running.check_ended_well()


@pytest.mark.parametrize("node_memory", [pytest.param("1", marks=needs_native), "0"])
def test_an_outsider_changes_nothing_in_a_job_of_hvdkitrun(node_memory, tmp_path):
    environments = [rank_environment(HVDKIT_NODE_MEMORY=node_memory)]
    with job(tmp_path, hvdkitrun("--gloo"), environments=environments) as running:
        ports = running.ports()
        # Two of each rank where ranks have nothing else to talk through; that where they met is closed.
        assert len({port.number for port in ports}) == (0 if node_memory == "1" else 2 * RANKS)
        assert all(is_loopback(port.address) for port in ports), ports
        assert_stands_it(running)


def test_what_listens_in_an_mpi_job_is_mpiruns_and_ranks_listen_nowhere(tmp_path):
    pytest.importorskip("mpi4py")
    with job(tmp_path, hvdkitrun("--mpi")) as running:
        ports = running.ports()
        assert {port.program for port in ports} == {"prterun"}
        # SECURITY.md says so: if this is no longer true, it can say less.
        assert {port.address for port in ports} & set(ALL_INTERFACES)
        attack(ports)
        with holding(ports):
            running.end()  # as far as the ranks; mpirun itself waits for who has connected to it
        running.check_ended_well()


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A file with a secret that only its user can read."""
    path = tmp_path / "secret"
    path.touch(mode=0o600)
    path.write_text("what only the ranks know")
    return path


@pytest.mark.parametrize("has_secret", [False, True])
def test_an_outsider_who_replays_what_ranks_said_changes_nothing(has_secret, tmp_path, secret):
    port = free_port()
    recorder = Recorder(("127.0.0.1", port))
    knows = {"HVDKIT_SECRET_FILE": str(secret)} if has_secret else {}
    environments = [{**one, **knows} for one in by_hand("127.0.0.1", port, recorder.port)]
    try:
        with job(tmp_path, *BY_HAND, environments=environments) as running:
            ports = running.ports()
            assert port not in {one.number for one in ports}
            assert all(is_loopback(one.address) for one in ports), ports
            assert len(recorder.heard) > 100
            assert_stands_it(running, bytes(recorder.heard), bytes(recorder.heard) * 3)
    finally:
        recorder.close()


def resident_bytes(process: subprocess.Popen[str]) -> int:
    """The memory of a process and all that it has started."""
    started = psutil.Process(process.pid)
    return sum(one.memory_info().rss for one in [started, *started.children(recursive=True)])


@pytest.mark.parametrize(
    ("guess", "words"),
    [
        ("what somebody has guessed", "a peer claiming to be rank 0 does not know the job's secret"),
        (
            None,
            ", but another program answers there, or rank 0 asks for a secret that this rank lacks.\n"
            "HINT: if another program has the port, choose another MASTER_PORT. Give all ranks the same "
            "HVDKIT_SECRET_FILE, or none.",
        ),
    ],
    ids=["wrong secret", "no secret"],
)
def test_who_does_not_know_the_secret_does_not_become_a_rank(tmp_path, secret, guess, words):
    port = free_port()
    rank_0, rank_1 = ({**one, "HVDKIT_START_TIMEOUT_SECONDS": "20"} for one in by_hand("127.0.0.1", port, port))
    rank_0["HVDKIT_SECRET_FILE"] = str(secret)
    if guess:
        shutil.copy(secret, tmp_path / "other")  # with its permissions
        (tmp_path / "other").write_text(guess)
        rank_1["HVDKIT_SECRET_FILE"] = str(tmp_path / "other")
    ranks = Job(tmp_path, BY_HAND, [rank_0, rank_1])
    errors = [out for out, _ in outputs_of(ranks.processes)]
    assert all(process.returncode for process in ranks.processes), errors
    for error, said in zip(errors, ("a peer claiming to be rank 1 does not know the job's secret", words), strict=True):
        assert said in error[error.rindex("Error: ") :], errors
        assert "ive all ranks the same HVDKIT_SECRET_FILE, or none" in error


MEGABYTES = 200
SENDERS = 3


def test_nothing_is_kept_of_an_outsider_who_reaches_rank_0_before_all_ranks_have_come(tmp_path, secret):
    port = free_port()
    environments = [{**one, "HVDKIT_SECRET_FILE": str(secret)} for one in by_hand("127.0.0.1", port, port)]
    ranks = Job(tmp_path, [[]], environments[:1], preload=False)
    try:
        until(lambda: listens(port), START_SECONDS, ranks.stop)
        before = resident_bytes(ranks.processes[0])
        refused = sum(send_until_refused(port, MEGABYTES << 20) for _ in range(SENDERS))
        assert refused == SENDERS, "an outsider could say more than a greeting"
        assert resident_bytes(ranks.processes[0]) - before < MEGABYTES << 18
        with pytest.raises((RuntimeError, dist.DistError)):  # PyTorch's own store is not there
            TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=2)).set(
                "hvdkit", "nonsense"
            )
        ranks.processes += Job(tmp_path, [[]], environments[1:]).processes
        ranks.wait_for("started", START_SECONDS)
        assert not listens(port), "the port stays open when the job has formed"
        ranks.end()
        ranks.check_ended_well()
    finally:
        ranks.stop()


def listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
        return True
    return False


def send_until_refused(port: int, nbytes: int) -> bool:
    """Whether a connection that sends so many bytes, none of which proves anything, is broken before their end."""
    block = bytes(1 << 20)
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        for _ in range(nbytes // len(block)):
            connection.sendall(block)
        return False
    return True


def test_the_secret_of_hvdkitrun_is_in_no_command_line_and_no_environment(tmp_path):
    with job(tmp_path, hvdkitrun("--gloo"), preload=False) as running:
        processes = psutil.Process(running.processes[0].pid).children(recursive=True)
        paths = {process.environ().get("HVDKIT_SECRET_FILE") for process in processes} - {None}
        secrets = {Path(path).read_text() for path in paths}
        assert [len(bytes.fromhex(one)) for one in secrets] == [32]  # one, the same on all ranks
        shown = "".join(
            str((process.cmdline(), process.environ()))
            for process in [*processes, psutil.Process(running.processes[0].pid)]
        )
        assert "HVDKIT_JOB" in shown
        assert not any(one in shown for one in secrets)
        assert {Path(path).stat().st_mode & 0o777 for path in paths} == {0o600}
        running.end()
        running.check_ended_well()
