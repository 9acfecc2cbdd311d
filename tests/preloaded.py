"""Ranks that start at once: forked from a process that has imported the framework already, which takes seconds.

Two such processes, whose strings have other hashes, serve a job's even and odd ranks: what depends on the order of a
set still differs between ranks. A rank is a process of its own with the environment, the folder, the arguments, the
standard streams, the listening socket and the exit status of the client that was started in its place (by mpirun, say);
it is killed when its client ends, and all are when the tests end.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Iterable, Sequence
from pathlib import Path

CLIENT = Path(__file__).with_name("preloaded_client.py")
HASH_SEEDS = ("1", "2")
READ_BY_IMPORTS = ("KERAS_BACKEND", "TF_USE_LEGACY_KERAS")  # variables that servers need too
ENDED_WITHIN_SECONDS = 60  # one that is asked to while it imports ends after that
ANSWERED_WITHIN_SECONDS = 60
ASKS_WITHIN_SECONDS = 5  # who has connected has all that it asks; others wait meanwhile
ASKED = "TESTS_PRELOADED"  # a variable: where who started this run of tests is asked for its servers


def preloaded(command: list[str], modules: tuple[str, ...], environment: dict[str, str]) -> list[str]:
    """The command that runs ``python -m module`` or ``python -c program`` where ``modules`` are imported already."""
    python, option, *rest = command
    assert python == sys.executable, f"another Python: {command}"
    assert option in RUN, f"neither a module nor a program: {command}"
    read = tuple((name, environment[name]) for name in READ_BY_IMPORTS if name in environment)
    return [python, "-I", "-S", str(CLIENT), *_addresses(modules, read), rank_name(), option, *rest]


def rank_name() -> str:
    """What the system calls ranks of jobs that this process starts; the server that forks them serves others, too."""
    return f"rank of {os.getpid()}"  # of at most 15 characters


@functools.cache
def _addresses(modules: tuple[str, ...], environment: tuple[tuple[str, str], ...]) -> list[str]:
    """Where servers listen that have loaded ``modules``: those of the run of tests, or else this process's own."""
    if (asked := os.environ.get(ASKED)) is None:
        return _own().started(modules, environment)
    with socket.socket(socket.AF_UNIX) as connection, connection.makefile("rw") as stream:
        connection.settimeout(ANSWERED_WITHIN_SECONDS)
        connection.connect(asked)
        stream.write(json.dumps([modules, environment]) + "\n")
        stream.flush()
        return list(json.loads(stream.readline()))


@functools.cache
def _own() -> Servers:
    servers = Servers()
    atexit.register(servers.close)
    return servers


class Servers:
    """The servers of one run of tests, whose workers share them; they end with the process that starts them."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="preloaded-")
        self._started: dict[str, list[str]] = {}
        self._processes: list[subprocess.Popen[bytes]] = []
        self._errors = Path(self._folder.name, "errors")  # TensorFlow says much there while it is imported
        self._listener: socket.socket | None = None

    def listen(self) -> str:
        """Be asked for servers by other processes, too. Returns where."""
        address = os.path.join(self._folder.name, "asked")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address)
        self._listener.listen()
        threading.Thread(target=self._answer, args=(self._listener,), daemon=True).start()
        return address

    def _answer(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # closed
                return
            # Who asked may have ended.
            with connection, contextlib.suppress(ConnectionError), connection.makefile("rw") as stream:
                if line := stream.readline():
                    modules, environment = json.loads(line)
                    stream.write(json.dumps(self.started(modules, environment)) + "\n")

    def started(self, modules: Sequence[str], environment: Iterable[tuple[str, str]]) -> list[str]:
        """Start the processes that load ``modules``, unless they have been; where they listen."""
        from tests.ranks import ROOT, rank_environment

        key = json.dumps([modules, environment])
        if key not in self._started:
            addresses = [os.path.join(self._folder.name, f"{len(self._started)}-{seed}") for seed in HASH_SEEDS]
            for seed, address in zip(HASH_SEEDS, addresses, strict=True):
                others = {"PYTHONHASHSEED": seed, "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1"}
                # It ends when its standard input does, which this process holds open.
                with self._errors.open("a") as errors:
                    process = subprocess.Popen(
                        [sys.executable, "-m", "tests.preloaded", address, *modules],
                        env=rank_environment(**others, **dict(environment)),
                        cwd=ROOT,
                        stdin=subprocess.PIPE,
                        stderr=errors,
                        start_new_session=True,
                    )
                self._processes.append(process)
            self._started[key] = addresses
        return self._started[key]

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        try:
            statuses = [process.wait(ENDED_WITHIN_SECONDS) for process in self._processes]
            if any(statuses):
                raise RuntimeError(f"a process that forks ranks has failed:\n{self._errors.read_text()}")
        finally:
            for process in self._processes:
                process.kill()
                process.wait()
            self._folder.cleanup()


class Server:
    """Forks a rank for each client that connects, and tells the client how it ended."""

    def __init__(self, address: str) -> None:
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(address)
        self.listener.listen()
        self.events = selectors.DefaultSelector()
        self.events.register(self.listener, selectors.EVENT_READ)
        self.events.register(sys.stdin, selectors.EVENT_READ)
        self.ranks: dict[socket.socket, tuple[int, int]] = {}

    def serve(self) -> list[str]:
        """Serve until standard input ends. Returns only in a rank: its module and arguments."""
        while True:
            for key, _ in self.events.select():
                if key.fileobj is sys.stdin:
                    for client in list(self.ranks):
                        self._end(client)
                    sys.exit()
                elif key.fileobj is self.listener:
                    if arguments := self._start():
                        return arguments
                elif key.fileobj in self.ranks or key.data in self.ranks:
                    self._end(key.data or key.fileobj)

    def _start(self) -> list[str] | None:
        """Fork a rank. Returns its arguments in the rank, None in the server."""
        client, _ = self.listener.accept()
        client.settimeout(ASKS_WITHIN_SECONDS)
        request, streams = b"", []
        try:
            request, streams, _, _ = socket.recv_fds(client, 1 << 20, 4)
            while not request.endswith(b"\0"):
                if not (received := client.recv(1 << 20)):
                    raise ConnectionError
                request += received
        except (ConnectionError, TimeoutError):  # it was killed before it could ask, or stopped
            for stream in streams:
                os.close(stream)
            client.close()
            return None
        client.settimeout(None)
        place = json.loads(request[:-1])
        child = os.fork()
        if child:
            for stream in streams:
                os.close(stream)
            handle = os.pidfd_open(child)
            self.ranks[client] = (child, handle)
            self.events.register(client, selectors.EVENT_READ)
            self.events.register(handle, selectors.EVENT_READ, data=client)
            return None
        self._forget()
        client.close()
        for target, stream in enumerate(streams[:3]):
            os.dup2(stream, target)
            os.close(stream)
        Path("/proc/self/comm").write_text(place["name"])
        os.chdir(place["folder"])
        os.environ.clear()
        os.environ.update(place["environment"])
        for listener in streams[3:]:
            os.environ["HVDKIT_RENDEZVOUS_FD"] = str(listener)
        return list(place["arguments"])

    def _forget(self) -> None:
        """Close in a rank what is the server's."""
        self.events.close()
        self.listener.close()
        for client, (_, handle) in self.ranks.items():
            client.close()
            os.close(handle)

    def _end(self, client: socket.socket) -> None:
        """The rank has ended, or its client has: end the rank, and tell its status if anybody is there to hear it."""
        child, handle = self.ranks.pop(client)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        with contextlib.suppress(OSError):
            client.sendall(struct.pack("i", os.waitstatus_to_exitcode(status)))
        self.events.unregister(client)
        self.events.unregister(handle)
        client.close()
        os.close(handle)


def main(address: str, modules: list[str]) -> list[str]:
    for module in modules:
        importlib.import_module(module)
    assert len(os.listdir("/proc/self/task")) == 1, f"one of {modules} starts threads, which a fork would lose"
    gc.freeze()  # ranks share what is loaded, unlooked at by their garbage collectors
    return Server(address).serve()


def run_module() -> None:
    """As ``python -m module`` does."""
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)


def run_program() -> None:
    """As ``python -c program`` does."""
    program, sys.argv[:2] = sys.argv[1], ["-c"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(program, "<string>", "exec"), vars(sys.modules["__main__"]))  # noqa: S102 (a test's own)


RUN = {"-m": run_module, "-c": run_program}

if __name__ == "__main__":
    option, *sys.argv[1:] = main(sys.argv[1], sys.argv[2:])
    RUN[option]()
