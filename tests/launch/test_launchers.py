"""Ranks that each launcher really started, or as it would start them, meet, sum, and know their place."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from hvdkit.environments import Rendezvous, World, detect
from hvdkit.errors import AuthenticationError, TransportUnavailableError
from hvdkit.plugins.horovod.engine import find_native_part
from hvdkit.transports.security.credentials import Credentials
from hvdkit.transports.security.rendezvous import ADDRESS_LABEL, _rendezvous_by_http
from tests.launch.launching import PATIENCE_SECONDS, environment
from tests.preloaded import preloaded
from tests.ranks import ROOT, TORCH, free_port, mpirun

MODULE = "tests.launch.introduce"
RANK = [sys.executable, "-m", MODULE]
BY_HAND: list[list[str]] = [[], []]  # two ranks that nothing starts but this test
TORCHRUN = Path(sys.executable).with_name("torchrun")
UNDER_HOROVODRUN = "torch" if find_native_part() is None else "horovod"


def run(
    launchers: list[list[str]], environments: list[dict[str, str]], rank: list[str] | None = None
) -> dict[int, dict[str, object]]:
    """What the ranks say about themselves, by rank, when all of these launchers of ranks have ended well."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    processes = [
        subprocess.Popen([*launcher, *(rank or preloaded(RANK, TORCH, environ))], env=environ, **pipes)
        for launcher, environ in zip(launchers, environments, strict=True)
    ]
    try:
        ended = [process.communicate(timeout=PATIENCE_SECONDS) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate()
    assert [process.returncode for process in processes] == [0] * len(processes), ended
    lines = [line for out, _ in ended for line in out.splitlines()]
    reports = [json.loads(line[line.index("{") :]) for line in lines if "{" in line]  # hvdkitrun puts the rank in front
    return {rank["rank"]: rank for rank in reports}


def two_ranks(transport: str, one_host: bool = True) -> dict[int, dict[str, object]]:
    """What two ranks must say: on one host, or one each on two."""
    names = ["local_rank", "local_size", "cross_rank", "cross_size"]
    return {
        rank: {
            "transport": transport,
            "rank": rank,
            "size": 2,
            **dict(zip(names, (rank, 2, 0, 1) if one_host else (0, 1, rank, 2), strict=True)),
            "sum": 3.0,
        }
        for rank in (0, 1)
    }


@pytest.mark.skipif(not TORCHRUN.exists(), reason="torchrun is not beside this Python")
@pytest.mark.parametrize("kind", ["static", "standalone"])
def test_torchrun(kind):
    launcher = [str(TORCHRUN), "--nproc-per-node", "2"]
    if kind == "standalone":
        told = run([[*launcher, "--standalone", "--no-python"]], [environment()])
    else:
        told = run([[*launcher, "--master-port", str(free_port())]], [environment()], ["-m", MODULE])
    assert told == two_ranks("torch")


@pytest.mark.parametrize(
    ("asked", "transport"),
    [({}, "mpi"), ({"HVDKIT_TRANSPORT": "mpi"}, "mpi"), ({"HVDKIT_TRANSPORT": "torch"}, "torch")],
)
def test_plain_mpirun(asked, transport):
    pytest.importorskip("mpi4py")
    # Without a GPU: on CUDA nobody's wish is torch.
    told = run([mpirun(2)], [environment(CUDA_VISIBLE_DEVICES="", **asked)])
    assert told == two_ranks(transport)


@pytest.mark.parametrize(
    ("flags", "asked", "transport"),
    [
        (["--gloo"], {}, "torch"),
        (["--mpi"], {}, "mpi"),
        ([], {}, "mpi"),
        ([], {"HVDKIT_TRANSPORT": "torch"}, "torch"),
    ],
    ids=["--gloo", "--mpi", "no flag", "HVDKIT_TRANSPORT=torch"],
)
def test_hvdkitrun(flags, asked, transport):
    pytest.importorskip("mpi4py")
    launcher = [sys.executable, "-m", "hvdkit.launch", *flags, "-np", "2"]
    assert run([launcher], [environment(CUDA_VISIBLE_DEVICES="", **asked)]) == two_ranks(transport)


class _KeyValueHandler(BaseHTTPRequestHandler):
    """horovodrun's rendezvous server: PUT /scope/key stores, GET answers 404 until somebody has."""

    def do_PUT(self) -> None:
        value = self.rfile.read(int(self.headers["Content-Length"]))
        if self.server.hold_back:
            self.server.asked_in_vain.wait(PATIENCE_SECONDS)
        self.server.values[self.path] = value
        self.answer(200 if self.is_key() else 400)

    def do_GET(self) -> None:
        value = self.server.values.get(self.path)
        self.answer(400 if not self.is_key() else 404 if value is None else 200, value or b"")
        if value is None:
            self.server.asked_in_vain.set()

    def is_key(self) -> bool:
        return self.path.count("/") == 2  # Horovod's server takes a scope and a key, no deeper path

    def answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Nothing on stderr."""


@contextlib.contextmanager
def key_value_server(hold_back: bool = False) -> Iterator[ThreadingHTTPServer]:
    """The server at work. ``hold_back``: nothing is stored before somebody asked in vain."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _KeyValueHandler) as server:
        server.values, server.asked_in_vain, server.hold_back = {}, threading.Event(), hold_back
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def horovodrun_environment(server: ThreadingHTTPServer, rank: int, one_host: bool) -> dict[str, str]:
    """The variables of Horovod's runner/gloo_run.py."""
    local, cross = (rank, 0) if one_host else (0, rank)
    return environment(
        HOROVOD_GLOO_RENDEZVOUS_ADDR="127.0.0.1",
        HOROVOD_GLOO_RENDEZVOUS_PORT=str(server.server_address[1]),
        HOROVOD_CONTROLLER="gloo",
        HOROVOD_CPU_OPERATIONS="gloo",
        HOROVOD_GLOO_IFACE="lo",
        HOROVOD_HOSTNAME="localhost",
        HOROVOD_RANK=str(rank),
        HOROVOD_SIZE="2",
        HOROVOD_LOCAL_RANK=str(local),
        HOROVOD_LOCAL_SIZE="2" if one_host else "1",
        HOROVOD_CROSS_RANK=str(cross),
        HOROVOD_CROSS_SIZE="1" if one_host else "2",
    )


@pytest.mark.parametrize("one_host", [True, False], ids=["one host", "two hosts"])
def test_horovodruns_gloo_mode(one_host):
    with key_value_server() as server:
        told = run(BY_HAND, [horovodrun_environment(server, rank, one_host) for rank in (0, 1)])
        assert len(server.values) == 1  # rank 0 said where its store is
    assert told == two_ranks(UNDER_HOROVODRUN, one_host)


def test_under_horovodrun_a_rank_that_is_early_asks_until_rank_0_is_there():
    with key_value_server(hold_back=True) as server:
        told = run(BY_HAND, [horovodrun_environment(server, rank, one_host=True) for rank in (0, 1)])
        assert server.asked_in_vain.is_set()
    assert told == two_ranks(UNDER_HOROVODRUN)


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.touch(mode=0o600)
    path.write_text("what only the ranks know")
    return path


def test_under_horovodrun_ranks_with_a_secret_say_where_they_are_to_each_other(secret):
    with key_value_server() as server:
        environments = [
            {**horovodrun_environment(server, rank, one_host=True), "HVDKIT_SECRET_FILE": str(secret)}
            for rank in (0, 1)
        ]
        assert run(BY_HAND, environments) == two_ranks(UNDER_HOROVODRUN)


@pytest.mark.parametrize(
    "said", [b"127.0.0.1 1", b"", b"x" * 5000, Credentials(b"k" * 16, "0", 2).seal(ADDRESS_LABEL, b"a 1")]
)
def test_under_horovodrun_what_others_say_at_its_server_is_not_believed(said):
    with key_value_server() as server:
        server.values["/hvdkit.0.1/store"] = said
        rendezvous = Rendezvous("http", "127.0.0.1", server.server_address[1])
        world = World("horovodrun", 1, 2, rendezvous=rendezvous)
        with pytest.raises(AuthenticationError, match=r"not written by a rank[\s\S]*HINT: "):
            _rendezvous_by_http(world, rendezvous, "hvdkit/0/1", Credentials(b"k" * 16, "0", 1), 5.0)


@pytest.mark.parametrize("said", [b"", b"\xff\xfe 1", b"a b", b"x" * 5000])
def test_under_horovodrun_what_is_no_place_is_told_without_a_secret(said):
    with key_value_server() as server:
        server.values["/hvdkit.0.1/store"] = said
        rendezvous = Rendezvous("http", "127.0.0.1", server.server_address[1])
        with pytest.raises(TransportUnavailableError, match="where rank 0 should say where its store is"):
            _rendezvous_by_http(World("horovodrun", 1, 2, rendezvous=rendezvous), rendezvous, "hvdkit/0/1", None, 5.0)


def srun_environment(rank: int, job: int, **more: str) -> dict[str, str]:
    """What srun sets in the tasks of a step, as far as hvdkit needs it."""
    return environment(
        SLURM_JOB_ID=str(job),
        SLURM_STEP_ID="0",
        SLURM_PROCID=str(rank),
        SLURM_STEP_NUM_TASKS="2",
        SLURM_STEP_NODELIST="localhost",
        **more,
    )


def free_slurm_job() -> int:
    """A job number whose meeting port nobody uses now."""
    while True:
        job = random.randrange(1, 1_000_000)
        rendezvous = detect(srun_environment(0, job)).rendezvous
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", rendezvous.port))
            return job


@pytest.mark.parametrize("one_host", [True, False], ids=["one host", "two hosts"])
def test_srun(one_host):
    job = free_slurm_job()
    if one_host:
        environments = [srun_environment(rank, job, SLURM_LOCALID=str(rank)) for rank in (0, 1)]
    else:
        nodes = {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_LOCALID": "0"}
        environments = [srun_environment(rank, job, SLURM_NODEID=str(rank), **nodes) for rank in (0, 1)]
    assert run(BY_HAND, environments) == two_ranks("torch", one_host)
