"""Other hosts: which are this machine, can the rest be reached, and the command that runs a worker there."""

from __future__ import annotations

import shlex
import socket
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from hvdkit.environments.network import addresses_of, is_own
from hvdkit.launch.errors import LaunchError


@dataclass(frozen=True)
class Ssh:
    """How to call ssh. ``connect_timeout`` is in seconds."""

    port: int | None = None
    identity_file: str | None = None
    connect_timeout: float = 30.0

    def login_options(self) -> list[str]:
        """The options that say where and as whom."""
        options = [] if self.port is None else ["-p", str(self.port)]
        return options if self.identity_file is None else [*options, "-i", self.identity_file]

    def argv(self, host: str, command: Iterable[str]) -> list[str]:
        """The ssh command that runs ``command`` on ``host``, every word quoted for the shell there."""
        settings = (
            "BatchMode=yes",  # never ask: nobody would see the question
            "StrictHostKeyChecking=accept-new",  # a key that changed is still refused
            f"ConnectTimeout={max(1, round(self.connect_timeout))}",
            "ServerAliveInterval=10",  # a host that vanished is noticed after 30 s
            "ServerAliveCountMax=3",
        )
        options = [word for setting in settings for word in ("-o", setting)]
        return ["ssh", *options, *self.login_options(), host, shlex.join(command)]


def is_local(host: str) -> bool:
    """Whether the name means this machine: only an address of its own can be bound here."""
    if host in ("localhost", socket.gethostname()):
        return True
    try:
        return any(map(is_own, addresses_of(host)))
    except OSError:
        return False  # ssh may know it by its own configuration, or will say why not


def check_reachable(hosts: Sequence[str], ssh: Ssh) -> None:
    """Log in to all hosts at the same time.

    Raises:
        LaunchError: it names every host that cannot be reached, and ssh's reason.
    """
    with ThreadPoolExecutor(max(1, len(hosts))) as pool:
        reasons = pool.map(partial(_problem, ssh), hosts)
        unreachable = {host: reason for host, reason in zip(hosts, reasons, strict=True) if reason is not None}
    if unreachable:
        problems = [f"cannot reach host {host} by ssh: {reason}" for host, reason in unreachable.items()]
        command = shlex.join(["ssh", "-o", "BatchMode=yes", *ssh.login_options(), next(iter(unreachable)), "true"])
        hint = f"HINT: make `{command}` work from this host without a question"
        raise LaunchError("\n".join([*problems, f"{hint}; --ssh-port and --start-timeout may help"]))


def _problem(ssh: Ssh, host: str) -> str | None:
    """Why one attempt to log in failed, None if it worked."""
    null = subprocess.DEVNULL
    # No pipe: what ssh has started, and is not killed with it, may hold that open.
    with tempfile.TemporaryFile() as errors:
        try:
            status = subprocess.call(  # noqa: S603 (argv list; host names cannot start with a dash)
                ssh.argv(host, ["true"]), stdin=null, stdout=null, stderr=errors, timeout=ssh.connect_timeout
            )
        except subprocess.TimeoutExpired:
            return f"no answer within {ssh.connect_timeout:g} s"
        except OSError as error:
            raise LaunchError(f"cannot run ssh: {error}\nHINT: install an ssh client, or use one host") from error
        if status == 0:
            return None
        errors.seek(0)
        lines = errors.read().decode(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else f"ssh ended with status {status}"
