"""The worker: it starts a command in a session of its own, and ends it when its standard input closes.

``hvdkitrun`` runs this file between itself and every rank, here or by ssh, and holds the other end of standard input:
the rank and its processes end too when it stops the job, is killed, or the connection breaks. The first line is a JSON
object with the command and its environment, which ``ps`` therefore does not show. A second line, ``stop``, gives the
command time to save: SIGTERM goes to the command alone, since a training whose data loaders are killed cannot save, and
then to the processes that it leaves behind, such as the program that a shell ran. SIGKILL ends the rest afterwards.

Under mpirun the file also runs between mpirun and each rank (``python worker.py GRACE RANKS_OF_HOSTS COMMAND ...``),
since mpirun itself kills ranks 0.25 s after SIGTERM. There mpirun forwards SIGURG, which stands for ``stop`` and which
others ignore. The worker of an ended rank says so and stays: mpirun would end the other ranks otherwise. The worker
also sets the variables of torch.distributed that mpirun does not set. The file runs by its path, so it imports the
standard library and two files beside it alone.
"""

from __future__ import annotations

import bisect
import errno
import itertools
import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or __package__:
    from hvdkit.launch import out_of_memory, process_tree
else:  # run by its path, in the isolated mode, which leaves out the folder of the file
    sys.path.append(os.path.dirname(os.path.abspath(__file__)))
    import out_of_memory
    import process_tree

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
STOP = b"stop\n"
# The lines on stderr that hvdkitrun takes out, and the variables, are those of environments/ and launch/function.
NOTE = "\x1ehvdkit note "
INIT, ENDED = f"{NOTE}init\n".encode(), f"{NOTE}ended\n".encode()
INIT_PIPE = "HVDKIT_INIT_PIPE"
TORCH_PLACE, FUNCTION = "HVDKIT_TORCH_PLACE", "HVDKIT_FUNCTION_FILE"
RELAY = signal.SIGURG
LOOK_SECONDS = 0.5  # between two looks at what is left, and two signals to an mpirun that may not listen yet
# Signals that mpirun forwards to the process group of a rank, and that its worker must survive.
FORWARDED = "TERM INT HUP QUIT USR1 USR2 ABRT ALRM VTALRM PROF PWR XCPU XFSZ SYS"


def read_header() -> dict[str, Any] | None:
    """Read the first line of standard input without a buffer; return None if hvdkitrun stops the job before."""
    data = b""
    while b"\n" not in data:
        if not (more := os.read(0, 1 << 20)):
            return None
        data += more
    header: dict[str, Any] = json.loads(data.partition(b"\n")[0])
    return header if data.endswith(b"}\n") else None


def nameless_file(content: str) -> str:
    """Return the path of a nameless file, which ends with this process and only its user can read."""
    descriptor = os.memfd_create("hvdkit")
    os.fchmod(descriptor, 0o600)
    os.write(descriptor, content.encode())
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def start(header: dict[str, Any]) -> subprocess.Popen[bytes]:
    """Start the command in its own session, so that signals of a terminal or a group do not reach it."""
    environment = {**(os.environ if header["is_remote"] else {}), **header["environment"]}
    if INIT_PIPE in os.environ:
        environment[INIT_PIPE] = os.environ[INIT_PIPE]
    if header["secret"] and hasattr(os, "memfd_create"):  # Python may have been built for a system without it
        environment["HVDKIT_SECRET_FILE"] = nameless_file(header["secret"])
    if header["function"]:
        environment[FUNCTION] = nameless_file(header["function"])
    try:
        os.chdir(header["folder"])
    except OSError as error:
        print(f"hvdkitrun: starting in {os.getcwd()}, not in {header['folder']}: {error}", file=sys.stderr)
    options = {"stdin": subprocess.DEVNULL, "start_new_session": True, "pass_fds": header["pass_fds"]}
    return popen(header["command"], env=environment, **options)


def popen(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a command. If it does not start, say why and exit with the shell's status for that."""
    try:
        return subprocess.Popen(command, **options)  # noqa: S603 (the caller's own command, as an argv list)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE):
            hint = "raise this host's limits of processes, memory and open files (ulimit -a shows them)"
        else:
            hint = "check that the program is installed on this host and on its PATH"
        print(f"hvdkitrun: cannot start {command[0]!r}: {error}\nHINT: {hint}", file=sys.stderr)
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)


def init_pipe() -> int:
    """Put a pipe into the environment for a rank's word on hvd.init(); return the end to read."""
    reading, writing = os.pipe()
    os.environ[INIT_PIPE] = f"/proc/{os.getpid()}/fd/{writing}"
    return reading


class Leash:
    """The end of a command: quickly, or gently with time to save."""

    def __init__(self, child: subprocess.Popen[bytes], init: int | None, graces: tuple[float, float], relays: bool):
        """Take the pipe of ``init_pipe``, the seconds for a quick and for a gentle end, and True for mpirun."""
        self._child, self._init, self._relays = child, init, relays
        self._grace, self._stop_grace = graces
        self._kill_at: float | None = None
        self._terminated: set[int] = set()  # processes that have each got SIGTERM
        self._memory = out_of_memory.MemoryWatch()
        self.is_stopped = False  # gently

    def wait(self, sources: list[int], wake: int, gently: int, quickly: Collection[int] = ()) -> int:
        """Wait for the command, and end it if standard input closes or such a signal comes. Return Popen's code."""
        sources = sources if self._init is None else [*sources, self._init]
        while (code := self._child.poll()) is None or (self._terminated and process_tree.own_children()):
            pauses = [LOOK_SECONDS] if self.is_stopped else []
            if self._kill_at is not None:
                pauses.append(max(0.0, self._kill_at - time.monotonic()))
            ready, _, _ = select.select(sources, [], [], min(pauses, default=None))
            if 0 in ready:
                if os.read(0, 65536):
                    self._end_gently()
                else:
                    sources.remove(0)
                    self._end_quickly()
            if self._init in ready:
                self._tell_init(sources)
            if wake in ready:
                numbers = os.read(wake, 512)
                process_tree.bury_orphans(self._child)
                if gently in numbers:
                    self._end_gently()
                elif not set(numbers).isdisjoint(quickly):
                    self._end_quickly()
            self._go_on_ending()
        self._tell_init(sources)
        if code in out_of_memory.KILLED and self._kill_at is None:
            os.write(2, f"{NOTE}{self._memory.note()}\n".encode())
        # The command's processes end with it; after success, those may stay that left its group on purpose.
        process_tree.send(self._child.pid, signal.SIGKILL, to_group=True)
        if code != 0 or self.is_stopped or self._kill_at is not None:
            process_tree.sweep()
        return code

    def _tell_init(self, sources: list[int]) -> None:
        if self._init in sources and select.select([self._init], [], [], 0)[0]:
            sources.remove(self._init)
            os.write(2, INIT)

    def _end_quickly(self) -> None:
        if self._terminated:  # it has had its time
            self._kill_at = time.monotonic()
        elif self._kill_at is None:
            self._kill_at = time.monotonic() + self._grace
            process_tree.send(self._child.pid, signal.SIGTERM, to_group=True)

    def _end_gently(self) -> None:
        if self._kill_at is None:
            self.is_stopped = True
            if not self._relays:  # hvdkitrun learns from each rank when mpirun can end
                self._kill_at = time.monotonic() + self._stop_grace

    def _go_on_ending(self) -> None:
        if self._kill_at is not None and time.monotonic() >= self._kill_at:
            self._kill_at += LOOK_SECONDS  # processes that are not gone by then are killed again
            process_tree.send(self._child.pid, signal.SIGKILL, to_group=True)
            if self.is_stopped:
                process_tree.sweep()
        elif self.is_stopped and not self._relays:
            targets = {self._child.pid} if self._child.poll() is None else set(process_tree.own_children())
            for pid in targets - self._terminated:
                process_tree.send(pid, signal.SIGTERM)
            self._terminated |= targets
        elif self.is_stopped and self._kill_at is None:
            process_tree.send(self._child.pid, RELAY)


def wake_on_signals(numbers: Iterable[int] = STOP_SIGNALS) -> int:
    """Have SIGCHLD and these signals arrive as bytes at a descriptor, so that none falls between two system calls."""
    receiving, sending = os.pipe()
    os.set_blocking(sending, False)
    signal.set_wakeup_fd(sending, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, *numbers):
        signal.signal(number, lambda number, frame: None)
    return receiving


def end_like(code: int, by_signal: bool) -> None:
    """End as the command ended: by its signal if the parent can see a signal, else with 128 plus its number."""
    if code >= 0:
        sys.exit(code)
    if by_signal:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the command's own core is the useful core
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(128 - code)


def main() -> None:
    """Run the command of the header, and end as it ended."""
    wake = wake_on_signals()
    process_tree.adopt_orphans()
    header = read_header()
    if header is None:
        return
    init = None if header["relays"] else init_pipe()
    try:
        child = start(header)
        for descriptor in header["pass_fds"]:
            os.close(descriptor)
        leash = Leash(child, init, header["graces"], header["relays"])
        code = leash.wait([0, wake], wake, signal.SIGTERM, (signal.SIGINT, signal.SIGHUP))
    finally:
        if header["scratch"]:  # a command that must be killed cannot clean up behind itself
            import shutil  # takes longer to load than all else here, and most commands have no such folder

            shutil.rmtree(header["scratch"], ignore_errors=True)
    end_like(code, by_signal=not header["is_remote"])


def torch_place(place: Sequence[int], ranks_of_hosts: Iterable[int]) -> dict[str, str]:
    """Return torchrun's variables for a place: rank, size, local rank and size. Ranks fill one host after the other."""
    host = bisect.bisect_right(list(itertools.accumulate(ranks_of_hosts)), place[0])
    names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"
    return {name: str(number) for name, number in zip(names, (*place, host), strict=True)}


def run_under_mpirun(stop_grace: float, ranks_of_hosts: list[int], command: list[str]) -> None:
    """Run a rank's command in the process group that mpirun made for it, which mpirun signals as a whole."""
    mpirun = os.getppid()
    names = (f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
    place = torch_place([int(os.environ[name]) for name in names], ranks_of_hosts)
    os.environ.update(place, **{TORCH_PLACE: f"{place['RANK']}/{place['WORLD_SIZE']}"})
    forwarded = [signal.Signals[f"SIG{name}"] for name in FORWARDED.split()]
    wake = wake_on_signals([RELAY, *forwarded])
    process_tree.adopt_orphans()
    init = init_pipe()  # before the command starts
    leash = Leash(popen(command), init, (0.0, stop_grace), relays=False)
    code = leash.wait([wake], wake, RELAY)
    if leash.is_stopped or code == 0:
        os.write(2, ENDED)  # also if the rank ended before: hvdkitrun waits for all ranks when it is stopped
    else:
        os.write(2, f"{NOTE}code {code}\n".encode())  # mpirun says nothing of the last rank to end
    if leash.is_stopped:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        while os.getppid() == mpirun:  # mpirun ends this process, unless it is killed itself
            time.sleep(LOOK_SECONDS)
    end_like(code, by_signal=True)


if __name__ == "__main__":
    if sys.argv[1:]:
        run_under_mpirun(float(sys.argv[1]), [int(count) for count in sys.argv[2].split(",")], sys.argv[3:])
    else:
        main()
