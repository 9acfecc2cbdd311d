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
from dataclasses import replace

from hvdkit import as_horovod
from hvdkit.environments import limits
from hvdkit.environments.failure_record import ENDED, INIT
from hvdkit.launch import CommandNotFoundError, LaunchError, failures, gloo, mpi, options
from hvdkit.launch.elastic.flags import JoinOptions
from hvdkit.launch.elastic.join import join
from hvdkit.launch.elastic.run import run_elastic
from hvdkit.launch.failures import exit_status, signal_name
from hvdkit.launch.function import FUNCTION_NAME, keep_failure, keep_results
from hvdkit.launch.hosts import assign_slots
from hvdkit.launch.job import LaunchJob, job_environment
from hvdkit.launch.mpirun_output import MpirunStream, RankFailure, find_failure, find_shortage
from hvdkit.launch.options import Options
from hvdkit.launch.out_of_memory import OTHER_CAUSES
from hvdkit.launch.output import STREAMS, Output
from hvdkit.launch.ssh import Ssh, check_reachable, is_local
from hvdkit.launch.supervise import Child, Outcome, supervise
from hvdkit.launch.worker import FUNCTION

# The signals by which a defect of its own ends a program.
CRASHES = (signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV)


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``hvdkitrun``. Return its exit status: that of the first rank that failed, 128 + n for a signal n."""
    try:
        chosen = options.parse(sys.argv[1:] if argv is None else argv)
        if chosen is None:
            from hvdkit.launch import doctor  # loads numpy, which jobs do without

            print(doctor.check_build(doctor.look()))
            return 0
        if isinstance(chosen, JoinOptions):
            return join(chosen, say)
        for note in chosen.notes:
            say(note)
        return run(chosen)
    except LaunchError as error:
        say(str(error))
        return error.status
    except BrokenPipeError:
        # The reader of our output has gone, as in `hvdkitrun ... | head`. Python would fail again when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return exit_status(-signal.SIGPIPE)
    except OSError as error:
        if (words := limits.exhausted(error)) is None:
            raise
        say(f"cannot start the job: {words}")
        return LaunchError.status


def say(text: str) -> None:
    """Print a message of the launcher's own."""
    print(f"hvdkitrun: {text}", file=sys.stderr, flush=True)


def run(chosen: Options) -> int:
    """Start the job and stay until it has ended. Return the exit status."""
    if chosen.elastic is not None:
        return run_elastic(chosen, environment_of(chosen, "torch"), say)
    placements = assign_slots(chosen.hosts, chosen.size)
    hosts = list(dict.fromkeys(placement.host for placement in placements))
    remote = [host for host in hosts if not is_local(host)]
    if not remote:
        check_command(chosen.command, chosen.size)
    check_files(chosen.size)
    controller = mpi.choose_controller(chosen.controller, chosen.transport, chosen.size)
    ranks_here = len([placement for placement in placements if placement.host not in remote])
    # Open files, as measured: of hvdkitrun, and of mpirun.
    files = 16 + (0 if chosen.output_folder is None else 2 * chosen.size)
    files = files + 3 * chosen.size if controller.mpirun is None else max(files, 24 + 4 * ranks_here)
    check_files(chosen.size, files)
    ssh = Ssh(chosen.ssh_port, chosen.ssh_identity_file, chosen.start_timeout)
    check_reachable(remote, ssh)
    environment = environment_of(chosen, controller.transport)
    output = Output(chosen.size, chosen.output_folder, chosen.timestamps, chosen.verbose)
    if chosen.verbose:
        ways = [f"{host} ({'by ssh' if host in remote else 'this machine'})" for host in hosts]
        say(f"{chosen.size} ranks on {', '.join(ways)}")
        say(f"starting {controller.reason}")
    job = LaunchJob(chosen, placements, set(remote), environment, ssh, output)
    if controller.mpirun is None:
        return run_gloo(job)
    environment = {**environment, **mpi.torch_meeting(job)}
    if chosen.function_folder is not None:
        if remote:
            hint = "give use_gloo=True, or start a script with hvdkitrun"
            raise LaunchError(f"hvdkit.run cannot send a function to other hosts by mpirun\nHINT: {hint}")
        environment[FUNCTION] = str(chosen.function_folder / FUNCTION_NAME)
    return run_mpi(replace(job, environment=environment), controller.mpirun)


def environment_of(chosen: Options, transport: str) -> dict[str, str]:
    """Return the environment that all ranks share."""
    settings = {**chosen.settings, "HVDKIT_TRANSPORT": transport}
    environment = job_environment(os.environ, settings, job=secrets.token_hex(8))
    if chosen.as_horovod:  # ahead of installed packages
        folders = [str(as_horovod.FOLDER), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    return environment


def check_command(command: list[str], size: int) -> None:
    """Raise CommandNotFoundError once, instead of an error from each rank, if the program cannot be started."""
    program = command[0]
    path = shutil.which(program)
    if path is not None and not lacks_interpreter(path):
        return
    is_script = program.endswith(".py")
    line = shlex.join([path or program, *command[1:]])
    runs_as = f"script runs as: hvdkitrun -np {size}"
    if path is None:
        fact = f"cannot find the program {program!r}, or it is not executable"
        hint = f"check its name and PATH; a Python {runs_as} python {line if is_script else 'train.py'}"
    else:
        fact = f"cannot start {program!r}: it is executable, but does not begin with #! and a program's path"
        hint = f"a Python {runs_as} python {line}" if is_script else f"a shell's {runs_as} sh {line}"
    error = CommandNotFoundError(f"{fact}\nHINT: {hint}")
    if path is not None or os.path.exists(program):
        error.status = 126
    raise error


def lacks_interpreter(path: str) -> bool:
    """True for a text without ``#!``, which the kernel does not start; compiled programs have zero bytes."""
    try:
        with open(path, "rb") as file:
            begin = file.read(1024)
    except OSError:  # it may be executable and not readable
        return False
    return not begin.startswith(b"#!") and b"\0" not in begin


def check_files(size: int, needed: int = 0) -> None:
    """Raise LaunchError if the limit of open files is too low: Open MPI reports that by internal names."""
    if words := limits.too_few_files(max(needed, limits.FILES_OF_A_RANK)):
        raise LaunchError(f"cannot start {size} ranks: {words}")


def run_gloo(job: LaunchJob) -> int:
    """Run a worker for each rank. Return the exit status."""
    chosen = job.options
    with gloo.meeting_point(job) as point:
        children = gloo.children(job, point)
        if chosen.verbose:
            for placement, child in zip(job.placements, children, strict=True):
                say(f"rank {placement.rank} on {placement.host}: {shlex.join([*child.remote, *child.command])}")
        outcome = supervise(children, chosen.stop_grace)
    job.output.close()
    if outcome.failed is None:
        return report_end(job, outcome)
    tell_of_init(job, outcome)
    code = outcome.code
    if job.placements[outcome.failed].host in job.remote and code - 128 in set(signal.Signals):
        code = 128 - code  # ssh turns the end by a signal n into the shell's status 128 + n
    return report_failure(job, RankFailure(outcome.failed, code), outcome.at)


def run_mpi(job: LaunchJob, mpirun: str) -> int:
    """Run a single mpirun for all ranks. Return the exit status."""
    chosen, output = job.options, job.output
    mpi_args = mpi.split_mpi_args(chosen.mpi_args)
    argv = mpi.mpirun_argv(job, mpirun, mpi_args, mpi.needs_no_tcp(job, mpi_args))
    if chosen.verbose:
        say(shlex.join(argv))

    def write(rank: int, stream: str, data: bytes) -> None:
        if rank < chosen.size:  # a rank's text that looks like a tag may have any number
            output.write(rank, stream, data)

    streams = {stream: MpirunStream(write) for stream in STREAMS}
    variable = mpi.sessions(job.environment, mpi_args)
    # Its worker removes the folder too: either process may be killed.
    with tempfile.TemporaryDirectory(prefix="hvdkit-", ignore_cleanup_errors=True) as folder:
        child = Child(
            argv,
            {**job.environment, **({variable: folder} if variable else {})},
            receive=lambda stream, data: streams[stream].feed(data),
            scratch=folder,
            is_ending=lambda: any(stream.aborting for stream in streams.values()),
            has_ended=lambda: len(output.noted[ENDED]) == chosen.size,
        )
        outcome = supervise([child], chosen.stop_grace)
    for stream in streams.values():
        stream.close()
    output.close()
    return report_mpi(job, outcome, list(streams.values()))


def report_mpi(job: LaunchJob, outcome: Outcome, streams: list[MpirunStream]) -> int:
    """Print how the job under mpirun ended. Return the exit status."""
    own_words = b"".join(stream.own_words for stream in streams)
    text = own_words.decode(errors="replace").rstrip("\n")
    if outcome.failed is None:
        if text and outcome.signal is None:
            print(text, file=sys.stderr, flush=True)
        return report_end(job, outcome)
    status = exit_status(outcome.code)
    crashed = -outcome.code in CRASHES
    failure = find_failure(own_words, 1 if crashed else status)
    if crashed:  # mpirun may crash while it ends the ranks of a failed job, whose records are kept
        say(f"mpirun itself was killed by signal {signal_name(-outcome.code)} ({-outcome.code})")
        failure = failure or next((RankFailure(rank, 1, how="aborted") for rank in job.output.failures.records), None)
    elif failure is None:  # mpirun hung in its own end, or the last rank failed: it printed no report
        failure = next((stream.aborted for stream in streams if stream.aborted is not None), None)
        failure = failure or next((RankFailure(rank, code) for rank, code in job.output.codes.items()), None)
    shortage = find_shortage(own_words) if failure is None else None
    if failure is not None:  # else mpirun may have started no rank
        tell_of_init(job, outcome)
    if text and (job.options.verbose or (failure is None and shortage is None)):
        print(text, file=sys.stderr, flush=True)
    if failure is not None:
        return report_failure(job, failure, math.inf)  # records may be read after mpirun's end
    job.output.failures.show_rest(None, job.options.output_folder)
    say(f"mpirun ended with code {status}" if shortage is None else f"mpirun cannot start the ranks: {shortage}")
    return status


def report_end(job: LaunchJob, outcome: Outcome) -> int:
    """Tell of the end of a job of which no rank failed. Return the exit status."""
    tell_of_init(job, outcome)
    job.output.failures.show_rest(None, job.options.output_folder)
    if outcome.signal is None:
        if job.options.function_folder is not None:
            keep_results(job.options.function_folder, job.output.results, job.options.size)
        return 0
    say(f"ended all ranks after {signal_name(outcome.signal)}")
    return exit_status(-outcome.signal)


def tell_of_init(job: LaunchJob, outcome: Outcome) -> None:
    """Say that no rank joined the job, or which ranks of a failed job had not."""
    size = job.options.size
    absent = sorted(set(range(size)) - job.output.noted[INIT])
    if outcome.signal is not None or size == 1 or not absent:
        return
    if len(absent) < size:
        if outcome.failed is not None:
            say(f"{failures.named(absent)} had not called hvd.init() or init_process_group()")
    elif is_python(job.options.command[0]):
        if outcome.failed is None:
            say("no process called hvd.init() or init_process_group(): each trained alone")
        else:
            needs_flag = not job.options.as_horovod and failures.imports_horovod(job.options.command)
            hint = f"\n{failures.FOR_HOROVOD}" if needs_flag else ""
            say(f"no process had called hvd.init() or init_process_group(){hint}")


def is_python(program: str) -> bool:
    """True for an interpreter or a script of Python by its name. Another program may run Python too."""
    return re.fullmatch(r"(python|pypy)[\d.]*(\.exe)?|.*\.py", os.path.basename(program)) is not None


def report_failure(job: LaunchJob, failure: RankFailure, at: float) -> int:
    """Print which rank ended the job and how, at the monotonic time ``at``. Return the exit status."""
    code, records = failure.code, job.output.failures
    first = records.first(failure.rank, not 0 <= code <= 128, at)  # a shell reports a signal as 128 and more
    records.show_rest(first, job.options.output_folder)
    if job.options.function_folder is not None:
        keep_failure(job.options.function_folder, first, records.tracebacks.get(first, ""))
    host = failure.host if failure.host and first == failure.rank else job.placements[first].host
    cause = job.output.causes[failure.rank]
    if first != failure.rank:
        has_failed = first in records.records
        how = "failed, which ended the job" if has_failed else records.absence(first)
    elif code < 0:
        how = f"was killed by signal {signal_name(-code)} ({-code}){cause}, which ended the job"
    else:
        has_exited = failure.how in ("exited", "aborted")
        way = f"exited with code {code}" if has_exited else f"ended without MPI_Finalize (code {code})"
        how = f"{way}{cause}, which ended the job"
    hint = f"\n{OTHER_CAUSES}" if first == failure.rank and code == -signal.SIGKILL and not cause else ""
    # A host's name is that which its ranks print.
    say(f"rank {first} on {socket.gethostname() if is_local(host) else host} {how}{hint}")
    return exit_status(code)
