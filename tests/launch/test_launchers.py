"""Ranks that each launcher really started, or as it would start them, meet, sum, and know their place."""

from __future__ import annotations

import contextlib
import json
import random
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hvdkit.environments import World, detect
from hvdkit.environments.network import own_addresses
from hvdkit.plugins.horovod.engine import find_native_part
from hvdkit.transports.security.key_value_server import KeyValueServer
from tests.launch.launching import outputs_of
from tests.preloaded import preloaded
from tests.ranks import ROOT, TORCH, free_port, mpirun, rank_environment

MODULE = "tests.cluster.programs.introduce"
PLACE = ("local_rank", "local_size", "cross_rank", "cross_size")
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
    ended = outputs_of(processes)
    assert [process.returncode for process in processes] == [0] * len(processes), ended
    lines = [line for out, _ in ended for line in out.splitlines()]
    reports = [json.loads(line[line.index("{") :]) for line in lines if "{" in line]  # hvdkitrun puts the rank in front
    names = ("transport", "rank", "size", *PLACE, "sum", "weight")
    return {report["rank"]: {name: report[name] for name in names} for report in reports}


def two_ranks(transport: str, one_host: bool = True) -> dict[int, dict[str, object]]:
    """What two ranks must say: on one host, or one each on two."""
    return {
        rank: {
            "transport": transport,
            "rank": rank,
            "size": 2,
            **dict(zip(PLACE, (rank, 2, 0, 1) if one_host else (0, 1, rank, 2), strict=True)),
            "sum": 3.0,
            "weight": [-1.5],
        }
        for rank in (0, 1)
    }


@pytest.mark.skipif(not TORCHRUN.exists(), reason="torchrun is not beside this Python")
@pytest.mark.parametrize("kind", ["static", "standalone"])
def test_torchrun(kind):
    launcher = [str(TORCHRUN), "--nproc-per-node", "2"]
    if kind == "standalone":
        reports = run([[*launcher, "--standalone", "--no-python"]], [rank_environment()])
    else:
        reports = run([[*launcher, "--master-port", str(free_port())]], [rank_environment()], ["-m", MODULE])
    assert reports == two_ranks("torch")


HVDKITRUN = [sys.executable, "-m", "hvdkit.launch", "-np", "2"]


@pytest.mark.parametrize(
    ("launcher", "wish", "transport"),
    [
        (mpirun(2), "", "mpi"),
        (mpirun(2), "mpi", "mpi"),
        (mpirun(2), "torch", "torch"),
        ([*HVDKITRUN, "--gloo"], "", "torch"),
        (HVDKITRUN, "", "mpi"),
        (HVDKITRUN, "torch", "torch"),
    ],
    ids=["mpirun", "mpirun-mpi", "mpirun-torch", "--gloo", "no flag", "HVDKIT_TRANSPORT=torch"],
)
def test_plain_mpirun_and_hvdkitrun(launcher, wish, transport):
    pytest.importorskip("mpi4py")
    # Without a GPU: on CUDA nobody's wish is torch.
    environment = rank_environment(CUDA_VISIBLE_DEVICES="", HVDKIT_TRANSPORT=wish)
    assert run([launcher], [environment]) == two_ranks(transport)


def horovodrun_environment(port: int, rank: int, one_host: bool) -> dict[str, str]:
    """The variables of Horovod's runner/gloo_run.py."""
    local, cross = (rank, 0) if one_host else (0, rank)
    place = {"RANK": rank, "SIZE": 2, "LOCAL_RANK": local, "LOCAL_SIZE": 2 if one_host else 1}
    place |= {"CROSS_RANK": cross, "CROSS_SIZE": 1 if one_host else 2, "GLOO_RENDEZVOUS_PORT": port}
    return rank_environment(
        HOROVOD_GLOO_RENDEZVOUS_ADDR="127.0.0.1",
        HOROVOD_CONTROLLER="gloo",
        HOROVOD_CPU_OPERATIONS="gloo",
        HOROVOD_GLOO_IFACE="lo",
        HOROVOD_HOSTNAME="localhost",
        **{f"HOROVOD_{name}": str(value) for name, value in place.items()},
    )


@pytest.mark.parametrize("has_secret", [False, True])
@pytest.mark.parametrize("one_host", [True, False], ids=["one host", "two hosts"])
def test_horovodruns_gloo_mode(one_host, has_secret, tmp_path: Path):
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_text("what only the ranks know")
    knows = {"HVDKIT_SECRET_FILE": str(secret)} if has_secret else {}
    server = KeyValueServer(World("horovodrun", 0, 2, 0, 2))
    server.admit(own_addresses())
    try:
        environments = [{**horovodrun_environment(server.address[1], rank, one_host), **knows} for rank in (0, 1)]
        assert run(BY_HAND, environments) == two_ranks(UNDER_HOROVODRUN, one_host)
    finally:
        server.close()


def srun_environment(rank: int, job: int, **more: str) -> dict[str, str]:
    """What srun sets in the tasks of a step, as far as hvdkit needs it."""
    return rank_environment(
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


PORT_IS_TAKEN = """\
Traceback (most recent call last):
  File "<string>", line 1, in <module>
FRAMES
hvdkit.errors.TransportUnavailableError: this rank cannot listen on 127.0.0.1 port <port>: Address already in use
HINT: another program, or another job, has the port; choose another MASTER_PORT, or let hvdkitrun choose.
"""


def test_a_taken_port_is_told_without_a_traceback_of_hvdkits_inside():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        environment = {**rank_environment(), "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        program = "import hvdkit.torch as hvd; hvd.init()"
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60, check=False
        )
    assert done.returncode == 1
    begin, end = PORT_IS_TAKEN.replace("<port>", port).split("FRAMES\n")
    assert done.stderr.startswith(begin)
    assert done.stderr.endswith(end)
    frames = re.findall(r'File "(.*?)", line \d+, in (\w+)', done.stderr)
    assert [name for _, name in frames] == ["init", "init"]  # of hvd.init() alone
