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
from pathlib import Path

CLIENT = Path(__file__).with_name("preloaded_client.py")
HASH_SEEDS = ("1", "2")
READ_BY_IMPORTS = ("KERAS_BACKEND", "TF_USE_LEGACY_KERAS")  # variables that servers need too
ENDED_WITHIN_SECONDS = 30


def preloaded(command: list[str], modules: tuple[str, ...], environment: dict[str, str]) -> list[str]:
    """The command that runs ``python -m module arguments`` where ``modules`` are imported, in this environment."""
    python, option, *rest = command
    assert (python, option) == (sys.executable, "-m"), f"not a module of this Python: {command}"
    read = tuple((name, environment[name]) for name in READ_BY_IMPORTS if name in environment)
    return [python, "-I", "-S", str(CLIENT), *_servers(modules, read), *rest]


@functools.cache
def _servers(modules: tuple[str, ...], environment: tuple[tuple[str, str], ...]) -> list[str]:
    """Start the processes that load ``modules``; where they listen."""
    from tests.ranks import ROOT, rank_environment

    folder = tempfile.TemporaryDirectory(prefix="preloaded-")
    atexit.register(folder.cleanup)
    addresses = []
    for seed in HASH_SEEDS:
        addresses.append(os.path.join(folder.name, seed))
        others = {"PYTHONHASHSEED": seed, "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1"}
        # It ends when its standard input does, which this process holds open.
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.preloaded", addresses[-1], *modules],
            env=rank_environment(**others, **dict(environment)),
            cwd=ROOT,
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        atexit.register(process.wait, ENDED_WITHIN_SECONDS)
        assert process.stdin is not None
        atexit.register(process.stdin.close)
    return addresses


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
        request, streams, _, _ = socket.recv_fds(client, 1 << 20, 4)
        while not request.endswith(b"\0"):
            received = client.recv(1 << 20)
            if not received:  # it was killed before it could ask
                for stream in streams:
                    os.close(stream)
                client.close()
                return None
            request += received
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


if __name__ == "__main__":
    sys.argv[1:] = main(sys.argv[1], sys.argv[2:])
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
