"""Two hosts on one machine: Linux namespaces joined by a virtual cable whose rate is limited at both ends.

Each host has its own network, host name, shared memory and /etc/hosts; the hosts share files, processes and cores. No
part of the hosts has a name on the machine, so two runs do not meet. The hosts live as long as one process, the root
of a process namespace. The root ends when this process ends, for whatever reason. Then the kernel kills all processes
of that namespace and removes the rest.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from jobs import Starter, Task

INTERFACE = "wire"
ADDRESSES = ("198.18.0.1", "198.18.0.2")  # of the range that is kept for benchmarks (RFC 2544)
PORT = 29500
_TOOLS = {"unshare": "util-linux", "nsenter": "util-linux", "ip": "iproute2", "tc": "iproute2"}
# A burst of a millisecond at the rate lets the wire reach the rate although timers are late. No packet is larger than
# 64 KB, so that the kernel may hand a packet over whole.
_BURST_SECONDS, _SMALLEST_BURST = 1e-3, 128_000
_QUEUE = "20ms"
# Reads from a pipe until it closes. As the root of a process namespace, it takes all processes there with it.
_ROOT_SCRIPT = """
for name; do
    unshare --net --uts --ipc --mount sh -euc \
        'echo "$1" > /proc/sys/kernel/hostname; echo "$1 $$"; exec sleep infinity' host "$name" < /dev/null &
done
read -r end
"""
# Reno, since it is in every kernel and allowed in every namespace; BBR would slow down now and then to probe the wire.
_HOST_SCRIPT = """
ip link set lo up
ip address add "$1/24" dev wire
ip link set wire up
tc qdisc add dev wire root tbf rate "$2" burst "$3" latency "$4"
echo reno > /proc/sys/net/ipv4/tcp_congestion_control
mount -t sysfs sysfs /sys
mount -t tmpfs tmpfs /dev/shm
mount --bind "$5" /etc/hosts
"""
_AGENT_SCRIPT = """#!/bin/sh
# Open MPI calls this in place of ssh: a host's name, then the words of a shell command.
case "$1" in
    {names[0]}) pid={pids[0]} ;;
    {names[1]}) pid={pids[1]} ;;
esac
shift
exec nsenter --target "$pid" --net --uts --ipc --mount sh -c "$*"
"""


def missing() -> str | None:
    """Return the reason why hosts cannot be made here, and the remedy; None if they can be made."""
    if sys.platform != "linux":
        return "two hosts on one machine take Linux's namespaces"
    absent = sorted({package for tool, package in _TOOLS.items() if shutil.which(tool) is None})
    if absent:
        return f"tools are missing: apt-get install {' '.join(absent)}"
    if os.geteuid() != 0:
        return "namespaces and the rate of a wire take root: run this with sudo, or as root of a privileged container"
    return None


@dataclass(frozen=True)
class Hosts:
    """Two hosts that are up.

    ``pids`` are a process of each host, as numbered within their process namespace. ``root`` is the first process of
    that namespace, as numbered outside. ``folder`` is for temporary files.
    """

    names: tuple[str, ...]
    pids: tuple[int, ...]
    root: int
    folder: Path

    @property
    def agent(self) -> Path:
        """Return the script that Open MPI may call in place of ssh."""
        return self.folder / "agent"

    def enter(self, host: int) -> list[str]:
        """Return the words before a command that make it run on a host. The command starts in ``/``."""
        namespaces = ["--net", "--uts", "--ipc", "--mount"]
        return [*self.enter_both(), "nsenter", "--target", str(self.pids[host]), *namespaces]

    def enter_both(self) -> list[str]:
        """Return the words before a command that make it see the processes of both hosts, but run on neither."""
        return ["nsenter", "--target", str(self.root), "--mount", "--pid"]


@contextlib.contextmanager
def two_hosts(gigabits: float) -> Iterator[Hosts]:
    """Make two hosts with a wire of ``gigabits`` Gb/s in each direction. Raise RuntimeError if that fails."""
    names = tuple(f"hvdkit-{os.getpid()}-{index}" for index in range(2))
    command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-uc", _ROOT_SCRIPT]
    with tempfile.TemporaryDirectory() as folder:
        root = subprocess.Popen(
            [*command, "root", *names],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            pids = _pids(root, names)
            hosts = Hosts(names, pids, psutil.Process(root.pid).children()[0].pid, Path(folder))
            hosts.agent.write_text(_AGENT_SCRIPT.format(names=names, pids=pids))
            hosts.agent.chmod(0o700)
            _connect(hosts, gigabits)
            yield hosts
        finally:
            root.communicate()  # closes the pipe that the root reads from, and returns when all processes there end


def _pids(root: subprocess.Popen[str], names: Sequence[str]) -> tuple[int, ...]:
    """Return the process of each host. It prints its name and number when its namespaces exist."""
    assert root.stdout is not None
    assert root.stderr is not None
    found: dict[str, int] = {}
    for _ in names:
        name, _, pid = root.stdout.readline().partition(" ")
        if not pid:
            root.kill()
            raise RuntimeError(f"cannot make namespaces: {root.stderr.read().strip()}")
        found[name] = int(pid)
    return tuple(found[name] for name in names)


def _connect(hosts: Hosts, gigabits: float) -> None:
    """Lay the wire, set its rate, and let the hosts know each other's names."""
    lines = [f"{address} {name}\n" for address, name in zip(ADDRESSES, hosts.names, strict=True)]
    names = hosts.folder / "hosts"
    names.write_text("".join(["127.0.0.1 localhost\n", *lines]))
    first, second = map(str, hosts.pids)
    peer = ["type", "veth", "peer", "name", INTERFACE, "netns", second]
    _run([*hosts.enter_both(), "ip", "link", "add", INTERFACE, "netns", first, *peer])
    burst = round(max(_SMALLEST_BURST, gigabits * 1e9 / 8 * _BURST_SECONDS))
    for host, address in enumerate(ADDRESSES):
        words = [address, f"{round(gigabits * 1e9)}bit", str(burst), _QUEUE, str(names)]
        _run([*hosts.enter(host), "sh", "-euc", _HOST_SCRIPT, "host", *words])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"cannot set up the hosts: {done.stderr.strip()}")


def starter(hosts: Hosts, ranks_per_host: int, mpi_args: Sequence[str] = ()) -> Starter:
    """Return a starter of ranks in blocks on both hosts.

    It uses mpirun with ``mpi_args``, or torchrun's variables and no launcher.
    """

    def start(task: Task, launcher: str) -> list[subprocess.Popen[bytes]]:
        temporary = {"TMPDIR": str(hosts.folder)}  # files that are left there go with the hosts
        if launcher == "mpi":
            mpirun = [*_mpirun(hosts, ranks_per_host), *mpi_args]
            return [task.start([*hosts.enter(0), *mpirun, *task.command], **temporary)]
        place = {
            "MASTER_ADDR": ADDRESSES[0],
            "MASTER_PORT": str(PORT),
            "WORLD_SIZE": str(task.ranks),
            "LOCAL_WORLD_SIZE": str(ranks_per_host),
            "GLOO_SOCKET_IFNAME": INTERFACE,
        }
        processes = []
        for rank in range(task.ranks):
            host, local_rank = divmod(rank, ranks_per_host)
            mine = {"RANK": str(rank), "LOCAL_RANK": str(local_rank)}
            processes.append(task.start([*hosts.enter(host), *task.command], **place, **mine, **temporary))
        return processes

    return start


def _mpirun(hosts: Hosts, ranks_per_host: int) -> list[str]:
    """Return Open MPI's mpirun and its flags. mpirun starts on the first host and has no ssh to reach the second."""
    mpirun = Path(sys.executable).with_name("mpirun")
    command = [str(mpirun) if mpirun.exists() else "mpirun", "--allow-run-as-root", "-np", str(2 * ranks_per_host)]
    command += ["--host", ",".join(f"{name}:{ranks_per_host}" for name in hosts.names)]
    command += ["--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none", "--prtemca", "plm_ssh_agent", str(hosts.agent)]
    return [*command, "--mca", "pml", "ob1", "--mca", "btl", "tcp,sm,self", "--mca", "btl_tcp_if_include", INTERFACE]
