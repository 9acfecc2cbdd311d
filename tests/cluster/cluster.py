"""A cluster of containers, started by compose: commands on its hosts, its links, and what is left on them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILES = [str(ROOT / "docker" / name) for name in ("compose.yaml", "compose.tests.yaml")]
WORKERS = ("w1", "w2", "w3")
HOSTS = (*WORKERS, "launcher")
PATIENCE_SECONDS = 120
SETTLE_SECONDS = 10
LINK = "eth0"
PIPES = {"text": True, "stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}


@dataclass(frozen=True)
class Result:
    """How a command ended."""

    status: int
    output: str  # of both streams

    def records(self) -> list[dict[str, object]]:
        found = [json.loads(text) for text in re.findall(r"^.*?(\{.*\})\s*$", self.output, re.MULTILINE)]
        return sorted(found, key=lambda record: record["rank"])


def compose_command() -> list[str]:
    """Compose, as a plug-in of Docker's or on its own."""
    plugin = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
    return ["docker", "compose"] if plugin.returncode == 0 else [shutil.which("docker-compose") or "docker-compose"]


class Cluster:
    """Workers and a launcher from ``image``, on a network of their own; use it in a ``with`` statement.

    Clusters of different names do not see each other.
    """

    def __init__(self, image: str, name: str) -> None:
        self._environment = {**os.environ, "IMAGE": image}
        self._compose = [*compose_command(), "-p", name, *(word for file in FILES for word in ("-f", file))]

    def __enter__(self) -> Cluster:
        self._call("down", "--volumes", "--remove-orphans")
        self._call("up", "--detach")
        return self

    def __exit__(self, *exception: object) -> None:
        self._call("down", "--volumes", "--remove-orphans", "--timeout", "1")

    def _call(self, *words: str) -> str:
        done = subprocess.run(
            [*self._compose, *words],
            env=self._environment,
            text=True,
            capture_output=True,  # warnings of compose are no part of what it was asked for
            check=False,
            timeout=PATIENCE_SECONDS,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    @cached_property
    def containers(self) -> dict[str, str]:
        """Each host's container."""
        return {host: self._call("ps", "-q", host).strip() for host in HOSTS}

    def argv(
        self,
        command: list[str],
        host: str = "launcher",
        user: str = "worker",
        seconds: float = PATIENCE_SECONDS,
        **environment: str,
    ) -> list[str]:
        """The command that runs ``command`` on a host, for so many seconds at the most."""
        variables = [word for name, value in environment.items() for word in ("-e", f"{name}={value}")]
        # The time limit is in there: what docker runs in a container goes on when docker itself is ended.
        limit = ["timeout", "--kill-after=5", str(seconds)]
        return ["docker", "exec", "-u", user, *variables, self.containers[host], *limit, *command]

    def run(
        self,
        command: list[str],
        host: str = "launcher",
        user: str = "worker",
        seconds: float = PATIENCE_SECONDS,
        **environment: str,
    ) -> Result:
        done = subprocess.run(
            self.argv(command, host, user, seconds, **environment), timeout=seconds + 20, check=False, **PIPES
        )
        return Result(done.returncode, done.stdout)

    @contextmanager
    def running(
        self, command: list[str], host: str = "launcher", **environment: str
    ) -> Iterator[subprocess.Popen[str]]:
        """A command that is at work on a host."""
        process = subprocess.Popen(self.argv(command, host, **environment), **PIPES)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()  # and what it runs in the container, which does not notice
                self.run(["pkill", "-KILL", "-u", "worker", "-f", "^timeout --kill-after"], host)
            process.communicate()

    def shell(self, script: str, host: str, user: str = "worker") -> str:
        """What a piece of shell prints; it must succeed."""
        result = self.run(["sh", "-ec", script], host, user)
        assert result.status == 0, f"{script} on {host}: {result.output}"
        return result.output

    @contextmanager
    def limited(self, rate: str) -> Iterator[None]:
        """All workers' links, slowed down to ``rate`` ("100mbit") in the direction out of them."""
        for host in WORKERS:
            self.shell(f"tc qdisc add dev {LINK} root tbf rate {rate} burst 256kb latency 200ms", host, "root")
        try:
            yield
        finally:
            for host in WORKERS:
                self.shell(f"tc qdisc del dev {LINK} root", host, "root")

    @contextmanager
    def cut(self, host: str) -> Iterator[None]:
        """A host that no packet reaches or leaves, with nobody being told."""
        self.shell(f"ip link set {LINK} down", host, "root")
        try:
            yield
        finally:
            self.shell(f"ip link set {LINK} up", host, "root")

    def sent(self, host: str) -> int:
        """Bytes that have left a host."""
        return int(self.shell(f"cat /sys/class/net/{LINK}/statistics/tx_bytes", host))

    def left_behind(self, host: str) -> str:
        """What is on a host that was not there when it started: processes, shared memory, ports, files of sessions.

        What PyTorch, TensorFlow, torchrun and Open MPI 4 leave in /tmp by themselves is not looked at, nor the file in
        which hvdkitrun keeps all tracebacks of a failed job, as it says.
        """
        script = """
        ps -eo pid=,args= | grep -vE '^ *[0-9]+ (sshd: /usr/sbin/sshd|/usr/sbin/sshd|timeout |sh -ec|ps |grep )' || true
        ls -A /dev/shm
        theirs="hvdkit-[a-z0-9_]+-failure[.]txt$|tmp[.]|torchinductor_|torchelastic_|__pycache__|__autograph|ompi[.]$(hostname)[.]1000$"
        ls -A /tmp | grep -vE "^($theirs)" || true
        ss -Hltn | grep -v ':2222 ' | grep -v '127[.]0[.]0[.]11:' || true
        """
        return self.shell(script, host).strip()

    def left_on_hosts(self) -> dict[str, str]:
        """What is left behind on each host, once it has had time to go."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while True:
            left = {host: text for host in HOSTS if (text := self.left_behind(host))}
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.2)
