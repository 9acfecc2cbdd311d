"""Jobs over several hosts, started by every launcher that users have: ranks meet, sum, and know their place."""

from __future__ import annotations

import subprocess

import pytest

from tests.cluster.cluster import PATIENCE_SECONDS, PIPES, WORKERS, Cluster, Result

INTRODUCE = ["python", "/programs/introduce.py"]
INTRODUCE_TENSORFLOW = ["python", "/programs/introduce_tensorflow.py"]
EACH = ",".join(f"{host}:1" for host in WORKERS)
PAIRS = ",".join(f"{host}:2" for host in WORKERS)
SYSTEM_MPI = {
    # Debian's Open MPI 4.1, before the wheel's 5.0; mpi4py's wheel takes the library it is told.
    "PATH": "/usr/bin:/opt/hvdkit/bin:/bin:/usr/sbin",
    "MPI4PY_LIBMPI": "/usr/lib/x86_64-linux-gnu/libmpi.so.40",
}


def check(result: Result, size: int, transport: str, per_host: int = 1) -> list[dict[str, object]]:
    """All ranks came, on all workers, by this transport, and computed what one process would have."""
    assert result.status == 0, result.output
    told = result.records()
    assert [rank["rank"] for rank in told] == list(range(size)), result.output
    assert {rank["size"] for rank in told} == {size}
    assert {rank["transport"] for rank in told} == {transport}, result.output
    assert [rank["host"] for rank in told] == [host for host in WORKERS for _ in range(per_host)]
    mean = (size + 1) / 2
    assert [rank["weight"] for rank in told] == [[-mean]] * size
    for rank in told:
        if "sum" in rank:
            assert rank["sum"] == size * mean
            assert (rank["local_size"], rank["cross_size"]) == (per_host, len(WORKERS))
            assert rank["local_rank"] == rank["rank"] % per_host
            assert rank["cross_rank"] == rank["rank"] // per_host
    return told


@pytest.mark.parametrize(("controller", "transport"), [("--gloo", "torch"), ("--mpi", "mpi")])
def test_hvdkitrun(cluster: Cluster, controller, transport):
    result = cluster.run(["hvdkitrun", controller, "-np", "6", "-H", PAIRS, *INTRODUCE])
    told = check(result, 6, transport, per_host=2)
    if transport == "mpi":
        assert all(rank["mpi"].startswith("Open MPI v5") for rank in told)


@pytest.mark.thorough
@pytest.mark.parametrize("controller", ["--gloo", "--mpi"])
def test_hvdkitrun_from_one_of_the_hosts_with_a_hostfile(cluster: Cluster, controller):
    cluster.shell("printf 'w1 slots=1\\nw2 slots=1\\nw3 slots=1\\n' > /work/hosts", "w1")
    result = cluster.run(["hvdkitrun", controller, "-np", "3", "--hostfile", "/work/hosts", *INTRODUCE], host="w1")
    check(result, 3, "torch" if controller == "--gloo" else "mpi")


@pytest.mark.thorough
@pytest.mark.parametrize("controller", ["--gloo", "--mpi"])
def test_hvdkitrun_with_a_named_interface_and_port(cluster: Cluster, controller):
    flags = [controller, "-np", "3", "-H", EACH, "--network-interfaces", "eth0", "-p", "2222"]
    check(cluster.run(["hvdkitrun", *flags, *INTRODUCE]), 3, "torch" if controller == "--gloo" else "mpi")


def test_mpirun_of_the_wheel(cluster: Cluster):
    check(cluster.run(["mpirun", "-np", "3", "-H", EACH, *INTRODUCE]), 3, "mpi")


@pytest.mark.thorough
def test_mpirun_of_the_system(cluster: Cluster):
    command = ["mpirun", "-np", "3", "-H", EACH, "-x", "PATH", "-x", "MPI4PY_LIBMPI", *INTRODUCE]
    told = check(cluster.run(command, **SYSTEM_MPI), 3, "mpi")
    assert all(rank["mpi"].startswith("Open MPI v4.1") for rank in told)


def test_torchrun(cluster: Cluster):
    flags = ["--nnodes", "3", "--nproc-per-node", "1", "--master-addr", "w1", "--master-port", "29500"]
    jobs = [
        subprocess.Popen(
            cluster.argv(["torchrun", *flags, "--node-rank", str(number), *INTRODUCE[1:]], host=host), **PIPES
        )
        for number, host in enumerate(WORKERS)
    ]
    ended = [job.communicate(timeout=PATIENCE_SECONDS + 20)[0] for job in jobs]
    check(Result(max(job.returncode for job in jobs), "".join(ended)), 3, "torch")


@pytest.mark.thorough
def test_horovodrun_in_its_gloo_mode(cluster: Cluster):
    command = ["horovodrun", "--gloo", "-np", "3", "-H", EACH, *INTRODUCE]
    check(cluster.run(command), 3, "horovod")
    check(cluster.run(command, HVDKIT_TRANSPORT="torch"), 3, "torch")


@pytest.mark.thorough
@pytest.mark.parametrize(("asked", "transport"), [("auto", "mpi"), ("horovod", "horovod")])
def test_horovodrun_in_its_mpi_mode(cluster: Cluster, asked, transport):
    command = ["horovodrun", "--mpi", "-np", "3", "-H", EACH, *INTRODUCE]
    told = check(cluster.run(command, HVDKIT_TRANSPORT=asked, **SYSTEM_MPI), 3, transport)
    assert all(rank["mpi"].startswith("Open MPI v4.1") for rank in told)


@pytest.mark.thorough
def test_tensorflow_under_horovodrun_though_horovod_was_built_for_pytorch(cluster: Cluster):
    result = cluster.run(["horovodrun", "--gloo", "-np", "3", "-H", EACH, *INTRODUCE_TENSORFLOW])
    check(result, 3, "torch")


def test_ranks_of_a_host_share_memory_with_dockers_default_of_it(cluster: Cluster):
    assert cluster.shell("df --output=size -m /dev/shm | tail -n 1", "w1").strip() == "64"
    program = (
        "import torch, hvdkit.torch as hvd; hvd.init()\n"
        "from hvdkit.engine.session import runtime\n"
        "nodes = runtime.engine().transport.nodes\n"
        "assert list(map(list, nodes)) == [[0, 1], [2, 3]], nodes\n"
        "total = hvd.allreduce(torch.ones(64 << 20), op=hvd.Sum)\n"  # 256 MiB, four times as much as /dev/shm has
        "assert total.eq(4).all()\n"
    )
    result = cluster.run(["hvdkitrun", "--gloo", "-np", "4", "-H", "w1:2,w2:2", "python", "-c", program])
    assert result.status == 0, result.output


@pytest.mark.parametrize("transport", ["torch", pytest.param("horovod", marks=pytest.mark.thorough)])
def test_a_smaller_job_of_one_rank_of_each_host(cluster: Cluster, transport: str):
    # Two ranks, of which each host has two: they are on two hosts all the same.
    flags = ["-np", "4", "-H", "w1:2,w2:2"]
    result = cluster.run(
        ["hvdkitrun", "--gloo", *flags, "python", "/programs/part.py", "0", "2"], HVDKIT_TRANSPORT=transport
    )
    assert result.status == 0, result.output
    assert result.records() == [
        {"rank": rank, "host": host, "local_size": 1, "sum": 3.0} for rank, host in enumerate(["w1", "w2"])
    ], result.output
