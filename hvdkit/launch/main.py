"""``hvdkitrun -np 4 python train.py``: read the flags, start the ranks, tell how the job ended."""

from __future__ import annotations

import math
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from functools import partial

from hvdkit import as_horovod
from hvdkit.environments import limits
from hvdkit.environments.failure_record import ENDED, INIT
from hvdkit.launch import controller, failures, options
from hvdkit.launch.errors import NOT_EXECUTABLE_STATUS, CommandNotFoundError, LaunchError
from hvdkit.launch.hosts import Slot, assign_slots
from hvdkit.launch.job_environment import first_on_python_path, job_environment
from hvdkit.launch.options import Options
from hvdkit.launch.output import STREAMS, Output
from hvdkit.launch.starters import gloo, mpi
from hvdkit.launch.starters.mpirun_output import Failure, MpirunStream, find_failure, find_shortage
from hvdkit.launch.starters.ssh import Ssh, check_reachable, is_local
from hvdkit.launch.supervise import WORKER, Child, Outcome, supervise

_BROKEN_PIPE_STATUS = 128 + signal.SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``hvdkitrun``. Returns its exit status: that of the first rank that failed, 128 + n for a signal n."""
    try:
        chosen = options.parse(sys.argv[1:] if argv is None else argv)
        if chosen is None:
            from hvdkit.launch import doctor  # loads numpy, which jobs do without

            print(doctor.check_build(doctor.look()))
            return 0
        for note in chosen.notes:
            say(note)
        return run(chosen)
    except LaunchError as error:
        say(str(error))
        return error.status
    except BrokenPipeError:
        # Whoever read our output has gone, as in `hvdkitrun ... | head`. Python would fail again when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE_STATUS
    except OSError as error:
        words = limits.exhausted(error)
        if words is None:
            raise
        say(f"cannot start the job: {words}")
        return LaunchError.status


def say(text: str) -> None:
    """Print a message of the launcher's own."""
    print(f"hvdkitrun: {text}", file=sys.stderr, flush=True)


def run(chosen: Options) -> int:
    """Start the job and stay until it has ended."""
    slots = assign_slots(chosen.hosts, chosen.size)
    hosts = list(dict.fromkeys(slot.host for slot in slots))
    remote = {host for host in hosts if not is_local(host)}
    if not remote:
        check_command(chosen.command, chosen.size)
    check_files(chosen)
    way = controller.find(chosen.controller, chosen.transport, chosen.size)
    ranks_here = len([slot for slot in slots if slot.host not in remote])
    check_files(chosen, files_of_launchers(chosen, ranks_here, way.mpirun is not None))
    ssh = Ssh(chosen.ssh_port, chosen.ssh_identity_file, chosen.start_timeout)
    check_reachable([host for host in hosts if host in remote], ssh)
    settings = {**chosen.settings, "HVDKIT_TRANSPORT": way.transport}
    environment = job_environment(os.environ, settings, job=secrets.token_hex(8))
    if chosen.as_horovod:
        environment = first_on_python_path(environment, str(as_horovod.FOLDER))
    output = Output(chosen.size, chosen.output_folder, chosen.timestamps, chosen.verbose)
    if chosen.verbose:
        say(f"{chosen.size} ranks on {', '.join(f'{host} ({where(host, remote)})' for host in hosts)}")
        say(f"starting {way.reason}")
    if way.mpirun is None:
        return run_gloo(chosen, slots, remote, environment, ssh, output)
    return run_mpi(chosen, way.mpirun, slots, remote, environment, ssh, output)


def where(host: str, remote: set[str]) -> str:
    """How the host is reached, for ``--verbose``."""
    return "by ssh" if host in remote else "this machine"


def check_command(command: list[str], size: int) -> None:
    """A program that cannot be started is told once, not once a rank."""
    program = command[0]
    path = shutil.which(program)
    if path is not None and not lacks_interpreter(path):
        return
    is_python, line = program.endswith(".py"), shlex.join([path or program, *command[1:]])
    runs_as = f"script runs as: hvdkitrun -np {size}"
    if path is None:
        fact, check = f"cannot find the program {program!r}, or it is not executable", "check its name and PATH; "
        way = f"a Python {runs_as} python {line if is_python else 'train.py'}"
    else:
        fact, check = f"cannot start {program!r}: it is executable, but does not begin with #! and a program's path", ""
        way = f"a Python {runs_as} python {line}" if is_python else f"a shell's {runs_as} sh {line}"
    error = CommandNotFoundError(f"{fact}\nHINT: {check}{way}")
    if path is not None or os.path.exists(program):
        error.status = NOT_EXECUTABLE_STATUS
    raise error


# Open files of hvdkitrun and mpirun, as measured: of itself, and for each rank.
_FILES_OF_HVDKITRUN, _FILES_OF_MPIRUN = (16, 3), (24, 4)


def check_files(chosen: Options, needed: int = limits.FILES_OF_A_RANK) -> None:
    """Raise LaunchError where the limit of open files is too low: Open MPI says that in words of its own."""
    if words := limits.too_few_files(max(needed, limits.FILES_OF_A_RANK)):
        raise LaunchError(f"cannot start {chosen.size} ranks: {words}")


def files_of_launchers(chosen: Options, ranks_here: int, by_mpirun: bool) -> int:
    """The open files of the process that has most of them."""
    (own, for_each), (of_mpirun, for_each_here) = _FILES_OF_HVDKITRUN, _FILES_OF_MPIRUN
    written = 0 if chosen.output_folder is None else 2 * chosen.size
    if by_mpirun:
        return max(own + written, of_mpirun + for_each_here * ranks_here)
    return own + for_each * chosen.size + written


def lacks_interpreter(path: str) -> bool:
    """Whether it is a text without ``#!``, which the kernel does not start; programs of the machine have zero bytes."""
    try:
        with open(path, "rb") as file:
            begin = file.read(1024)
    except OSError:  # may be run, not read
        return False
    return not begin.startswith(b"#!") and b"\0" not in begin


# What ends a program by a defect of its own.
CRASHES = (signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV)


def run_gloo(
    chosen: Options, slots: list[Slot], remote: set[str], environment: dict[str, str], ssh: Ssh, output: Output
) -> int:
    """One worker a rank."""
    with gloo.meeting_point(slots, remote, chosen.interfaces, ssh.port or 22) as point:
        children = gloo.children(chosen.command, slots, environment, point, remote, chosen.interfaces, ssh, output)
        if chosen.verbose:
            for slot, child in zip(slots, children, strict=True):
                say(f"rank {slot.rank} on {slot.host}: {shlex.join([*child.remote, *child.command])}")
        outcome = supervise(children, chosen.stop_grace)
    output.close()
    tell_of_init(outcome, output, chosen)
    if outcome.failed is None:
        output.failures.show_rest(None, chosen.output_folder)
        return 0 if outcome.signal is None else ended_by(outcome.signal)
    slot = slots[outcome.failed]
    # What ends by a signal at the other end of ssh comes back as the shell's 128 + n.
    code = signal_from_status(outcome.code) if slot.host in remote else outcome.code
    return failed(Failure(slot.rank, code), outcome.at, slots, output, chosen)


def run_mpi(
    chosen: Options,
    mpirun: str,
    slots: list[Slot],
    remote: set[str],
    environment: dict[str, str],
    ssh: Ssh,
    output: Output,
) -> int:
    """One mpirun for all ranks."""
    mpi_args = mpi.split_mpi_args(chosen.mpi_args)
    without_tcp = mpi.needs_no_tcp(slots, remote, environment, mpi_args)
    command = [*WORKER, f"{chosen.stop_grace:g}", *chosen.command]
    argv = mpi.mpirun_argv(mpirun, command, slots, environment, chosen.interfaces, ssh, mpi_args, without_tcp)
    if chosen.verbose:
        say(shlex.join(argv))
    streams = {stream: MpirunStream(partial(write_known, output, chosen.size)) for stream in STREAMS}
    variable = mpi.sessions(environment, mpi_args)
    # Its worker removes the folder too: of the two, one may be killed.
    with tempfile.TemporaryDirectory(prefix="hvdkit-", ignore_cleanup_errors=True) as folder:
        child = Child(
            argv,
            {**environment, **({variable: folder} if variable else {})},
            receive=lambda stream, data: streams[stream].feed(data),
            scratch=folder,
            is_ending=lambda: any(stream.aborting for stream in streams.values()),
            has_ended=lambda: len(output.have_noted(ENDED)) == chosen.size,
        )
        outcome = supervise([child], chosen.stop_grace)
    for stream in streams.values():
        stream.close()
    output.close()
    own_words = b"".join(stream.own_words for stream in streams.values())
    status = outcome.code if outcome.code >= 0 else 128 - outcome.code
    crashed = outcome.signal is None and -outcome.code in CRASHES
    failure = find_failure(own_words, 1 if crashed else status) if outcome.failed is not None else None
    if crashed:  # as it does, seldom, while it ends the ranks of a job that failed: what these told is kept
        say(f"mpirun itself was killed by signal {signal_name(-outcome.code)} ({-outcome.code})")
        failure = failure or next((Failure(rank, 1, how="aborted") for rank in output.failures.records), None)
    elif failure is None and outcome.failed is not None:  # mpirun hung in its own end and printed no report
        failure = next((stream.aborted for stream in streams.values() if stream.aborted is not None), None)
    if outcome.failed is None or failure is not None:  # else mpirun may not have come to start ranks
        tell_of_init(outcome, output, chosen)
    shortage = None if failure is not None or outcome.failed is None else find_shortage(own_words)
    if shortage is not None and not chosen.verbose:
        own_words = b""
    if own_words and (failure is None or chosen.verbose) and outcome.signal is None:
        print(own_words.decode(errors="replace").rstrip("\n"), file=sys.stderr, flush=True)
    if failure is not None and outcome.signal is None:
        return failed(failure, math.inf, slots, output, chosen)  # what ranks told may be read after mpirun's end
    output.failures.show_rest(None, chosen.output_folder)
    if outcome.signal is not None:
        return ended_by(outcome.signal)
    if shortage is not None:
        say(f"mpirun cannot start the ranks: {shortage}")
    elif outcome.failed is not None:
        say(f"mpirun ended with code {status}")
    return status


def tell_of_init(outcome: Outcome, output: Output, chosen: Options) -> None:
    """Say that no rank called hvd.init(), or which ranks of a failed job had not."""
    absent = sorted(set(range(chosen.size)) - output.have_noted(INIT))
    if outcome.signal is not None or chosen.size == 1 or not absent:
        return
    if len(absent) < chosen.size:
        if outcome.failed is not None:
            say(f"rank{'s' if len(absent) > 1 else ''} {failures.spans(absent)} had not called hvd.init()")
    elif is_python(chosen.command[0]):
        say("no process called hvd.init(): each trained alone")


def is_python(program: str) -> bool:
    """True for an interpreter or a script of Python by its name; what another program runs is unknown."""
    return re.fullmatch(r"(python|pypy)[\d.]*(\.exe)?|.*\.py", os.path.basename(program)) is not None


def write_known(output: Output, size: int, rank: int, stream: str, data: bytes) -> None:
    """Hand on what a rank of this job wrote; text of a rank that only looks like a tag belongs to no file."""
    if rank < size:
        output.write(rank, stream, data)


def signal_from_status(status: int) -> int:
    """A shell's exit status as subprocess has it: 137 is signal 9, -9."""
    return 128 - status if status - 128 in set(signal.Signals) else status


def failed(failure: Failure, at: float, slots: list[Slot], output: Output, chosen: Options) -> int:
    """Print which rank ended the job and how. ``at``: the monotonic time of that. Returns the exit status."""
    by_signal = failure.code < 0 or failure.code > 128  # which is how a shell tells of one
    first = output.failures.first(failure.rank, by_signal, at)
    output.failures.show_rest(first, chosen.output_folder)
    if first != failure.rank:
        has_failed = first in output.failures.records
        how = "failed, which ended the job" if has_failed else "left the job before the others, which ended it"
        say(f"rank {first} on {as_ranks_say(slots[first].host)} {how}")
        return failure.code if failure.code >= 0 else 128 - failure.code
    host = as_ranks_say(failure.host or slots[failure.rank].host)
    if failure.code < 0:
        number = -failure.code
        how, status = f"was killed by signal {signal_name(number)} ({number})", 128 + number
    else:
        how = {
            "exited": f"exited with code {failure.code}",
            "aborted": f"failed with code {failure.code}",
        }.get(failure.how, f"ended without MPI_Finalize (code {failure.code})")
        status = failure.code
    say(f"rank {failure.rank} on {host} {how}, which ended the job")
    return status


def as_ranks_say(host: str) -> str:
    """A host by the name that stands in what ranks print, so that the report of a failed job calls it by one name."""
    return socket.gethostname() if is_local(host) else host


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9; real-time signals have no names."""
    return signal.Signals(number).name if number in set(signal.Signals) else "with no name"


def ended_by(number: int) -> int:
    """Say that the caller ended the job; the exit status."""
    say(f"ended all ranks after {signal_name(number)}")
    return 128 + number
