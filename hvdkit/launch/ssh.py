"""Other hosts: which names are this machine, which hosts can be reached, and the command that runs a worker there."""

from __future__ import annotations

import contextlib
import shlex
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import IO

from hvdkit.environments import network
from hvdkit.launch import LaunchError


@dataclass(frozen=True)
class Ssh:
    """The options of ssh calls. ``connect_timeout`` is in seconds."""

    port: int | None = None
    identity_file: str | None = None
    connect_timeout: float = 30.0

    def login_options(self) -> list[str]:
        """Return the options for port and key."""
        options = [] if self.port is None else ["-p", str(self.port)]
        return options if self.identity_file is None else [*options, "-i", self.identity_file]

    def argv(self, host: str, command: Iterable[str]) -> list[str]:
        """Return the ssh command that runs ``command`` on ``host``, every word quoted for the shell there."""
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
    """True if the name means this machine."""
    if host in ("localhost", socket.gethostname()):
        return True
    try:
        return any(map(network.is_own, network.addresses_of(host)))
    except OSError:
        return False  # ssh may know the host by its own configuration, or will say why not


def check_reachable(hosts: Iterable[str], ssh: Ssh) -> None:
    """Log in to all hosts at the same time. Raises LaunchError with every unreachable host and ssh's reason."""
    with contextlib.ExitStack() as stack:
        logins = {host: stack.enter_context(_login(host, ssh)) for host in hosts}
        deadline = time.monotonic() + ssh.connect_timeout
        reasons = {host: _problem(*login, deadline, ssh.connect_timeout) for host, login in logins.items()}
    if unreachable := {host: reason for host, reason in reasons.items() if reason}:
        problems = [f"cannot reach host {host} by ssh: {reason}" for host, reason in unreachable.items()]
        command = shlex.join(["ssh", "-o", "BatchMode=yes", *ssh.login_options(), next(iter(unreachable)), "true"])
        hint = f"HINT: make `{command}` work from this host without a prompt"
        raise LaunchError("\n".join([*problems, f"{hint}; --ssh-port and --start-timeout may help"]))


@contextlib.contextmanager
def _login(host: str, ssh: Ssh) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    """Begin to log in. Yield the call, which ends with the ``with`` block, and the file of its messages."""
    null = subprocess.DEVNULL
    # No pipe: a connection that ssh leaves open for later calls would keep it open.
    with tempfile.TemporaryFile() as messages:
        try:
            call = subprocess.Popen(ssh.argv(host, ["true"]), stdin=null, stdout=null, stderr=messages)  # noqa: S603
        except OSError as error:
            raise LaunchError(f"cannot run ssh: {error}\nHINT: install an ssh client, or use one host") from error
        try:
            yield call, messages
        finally:
            call.kill()
            call.wait()


def _problem(call: subprocess.Popen[bytes], messages: IO[bytes], deadline: float, timeout: float) -> str:
    """Return why a login failed, "" if it succeeded."""
    try:
        status = call.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return f"no answer within {timeout:g} s"
    if status == 0:
        return ""
    messages.seek(0)
    lines = messages.read().decode(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else f"ssh ended with status {status}"
