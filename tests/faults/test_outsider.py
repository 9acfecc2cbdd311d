"""An outsider connects to every port that a running job has open: no sum is wrong, nobody gets in, nothing is left."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from hvdkit.environments.network import is_loopback, own_address
from tests.faults.outsider import ALL_INTERFACES, Port, Recorder, attack, holding, open_ports
from tests.ranks import ROOT, free_port, rank_environment

START_SECONDS = 90
END_SECONDS = 60
RANKS = 2
RANK = [sys.executable, "-m", "tests.faults.steady"]


class Job:
    """Processes that sum until they are told to end."""

    def __init__(self, folder: Path, commands: list[list[str]], environments: list[dict[str, str]]) -> None:
        self.folder = folder
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": ROOT}
        self.processes = [
            subprocess.Popen([*command, str(folder)], env=environment, **pipes)
            for command, environment in zip(commands, environments, strict=True)
        ]

    def wait_for(self, what: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while len(list(self.folder.glob(f"{what}.*"))) < RANKS:
            assert time.monotonic() < deadline, f"the ranks are not {what}: {self.stop()}"
            assert all(process.poll() in (None, 0) for process in self.processes), self.stop()
            time.sleep(0.05)

    def ports(self) -> list[Port]:
        return open_ports(*(process.pid for process in self.processes))

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
def job(folder: Path, *commands: list[str], environments: list[dict[str, str]] | None = None) -> Iterator[Job]:
    """A job that has summed a few times; at its end nothing of it is left."""
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    started = Job(folder, list(commands), environments or [rank_environment()] * len(commands))
    try:
        started.wait_for("started", START_SECONDS)
        yield started
    finally:
        started.stop()
    left = [process for process in psutil.Process().children(recursive=True) if process.pid not in before]
    assert left == []


def hvdkitrun(flag: str) -> list[str]:
    return [sys.executable, "-m", "hvdkit.launch", flag, "-np", str(RANKS), *RANK]


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


def test_an_outsider_changes_nothing_in_a_job_of_hvdkitrun(tmp_path):
    with job(tmp_path, hvdkitrun("--gloo")) as running:
        ports = running.ports()
        assert len({port.number for port in ports}) == RANKS + 1  # the store's, and Gloo's of each rank
        assert all(is_loopback(port.address) for port in ports), ports
        assert_stands_it(running)


def test_an_outsider_who_replays_what_ranks_said_changes_nothing(tmp_path):
    port = free_port()
    recorder = Recorder(("127.0.0.1", port))
    try:
        with job(tmp_path, RANK, RANK, environments=by_hand("127.0.0.1", port, recorder.port)) as running:
            ports = running.ports()
            assert port in {one.number for one in ports}
            assert all(is_loopback(one.address) for one in ports), ports
            assert len(recorder.heard) > 100
            assert_stands_it(running, bytes(recorder.heard), bytes(recorder.heard) * 3)
    finally:
        recorder.close()


def test_a_job_that_meets_on_a_network_listens_there_only(tmp_path):
    address = own_address()
    if is_loopback(address):
        pytest.skip("this host has no network")
    port = free_port()
    with job(tmp_path, RANK, RANK, environments=by_hand(address, port, port)) as running:
        assert {one.address for one in running.ports()} == {address}
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
