"""The agent: it runs the processes of an elastic job on one host, for the driver at the other end of its pipes.

``hvdkitrun`` starts this file on every host, here or by ssh; ``hvdkitrun --join`` has an agent with a connection in
place of the pipes. Frames travel over standard input and output: the driver's orders, and the processes' output, asks
and ends. A process is started by ``worker``, so that it ends with the agent,
and has one end of a socket, over which lines pass between it and the driver. The agent sends its time at regular
intervals, and the driver sends it back. If no such echo is younger than the deadline, this host is cut off, and the
agent ends its processes: the driver may have started others in their places by then. The file runs by its path, so it
imports the standard library alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
from typing import Any, NamedTuple

WORKER = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "worker.py")
SOCKET = "HVDKIT_ELASTIC_SOCKET"  # as in environments/elastic
ADDRESS = "HVDKIT_ELASTIC_ADDRESS"

# Orders of the driver, and news of the agent.
CONFIGURE, START, TELL, KILL, STOP, ECHO, END = range(7)
BEAT, OUTPUT, ERRORS, LINE, ENDED, LEAVES, JOIN = range(7)

BEAT_SECONDS = 1.0
END_SECONDS = 3.5  # for the workers to end their processes, which get SIGKILL after 2.5 s
MOST_AHEAD = 4 << 20  # bytes of output that the driver may not have printed yet
_HEADER = struct.Struct("!BII")  # kind, process, length
BEAT_FORMAT = struct.Struct("!dQ")  # the agent's time; in an echo also the bytes of output that were printed


class Frame(NamedTuple):
    """An order or a piece of news about a process."""

    kind: int
    process: int
    payload: bytes


class Channel:
    """Frames over two descriptors, which never block."""

    def __init__(self, reading: int, writing: int) -> None:
        self.reading, self.writing = reading, writing
        self._received, self._outgoing = b"", bytearray()
        for descriptor in (reading, writing):
            os.set_blocking(descriptor, False)

    @property
    def has_more(self) -> bool:
        """True if frames wait until ``writing`` takes them."""
        return bool(self._outgoing)

    def send(self, kind: int, process: int = 0, payload: bytes = b"") -> None:
        """Send a frame, now or when ``flush`` is called later. Raises BrokenPipeError."""
        self._outgoing += _HEADER.pack(kind, process, len(payload)) + payload
        self.flush()

    def flush(self) -> None:
        """Write as much as the other end takes. Raises BrokenPipeError."""
        while self._outgoing:
            try:
                del self._outgoing[: os.write(self.writing, self._outgoing)]
            except BlockingIOError:
                return

    def receive(self) -> list[Frame]:
        """Return the frames that have come. Raises EOFError if the other end is gone."""
        try:
            data = os.read(self.reading, 1 << 16)
        except BlockingIOError:
            return []
        if not data:
            raise EOFError
        self._received += data
        frames, start = [], 0
        while len(self._received) - start >= _HEADER.size:
            kind, process, length = _HEADER.unpack_from(self._received, start)
            end = start + _HEADER.size + length
            if end > len(self._received):
                break
            frames.append(Frame(kind, process, self._received[start + _HEADER.size : end]))
            start = end
        self._received = self._received[start:]
        return frames


class _Process:
    """A process of the job, which a worker runs. ``connection`` is this end of its socket."""

    def __init__(self, worker: subprocess.Popen[bytes], connection: socket.socket) -> None:
        self.worker, self.connection = worker, connection
        assert worker.stdout is not None
        assert worker.stderr is not None
        self.streams = {worker.stdout.fileno(): OUTPUT, worker.stderr.fileno(): ERRORS}
        self.received = b""

    def end(self) -> None:
        """Have the worker end its process."""
        assert self.worker.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.worker.stdin.close()

    def write(self, line: bytes) -> None:
        """Write to the worker's standard input."""
        assert self.worker.stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):
            self.worker.stdin.write(line)
            self.worker.stdin.flush()


class Agent:
    """The processes of this host, which listen at ``address``. ``verdict``: the status and the words of END."""

    def __init__(self, channel: Channel, wake: int, address: str) -> None:
        self._channel, self._wake, self._address = channel, wake, address
        self.verdict: tuple[int, str] | None = None
        self._processes: dict[int, _Process] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(channel.reading, selectors.EVENT_READ)
        self._selector.register(wake, selectors.EVENT_READ)
        self._deadline, self._echoed_at = float("inf"), time.monotonic()
        self._sent = self._printed = 0  # bytes of output
        self._is_ending = False

    def run(self) -> None:
        """Serve the driver until it ends the job, or is out of reach."""
        next_beat = 0.0
        while not self._is_ending:
            now = time.monotonic()
            if now >= next_beat:
                next_beat = now + BEAT_SECONDS
                self._send(BEAT, 0, BEAT_FORMAT.pack(now, 0))
            if now - self._echoed_at > self._deadline:
                break
            self._watch_writing()
            self._look(min(next_beat, self._echoed_at + self._deadline) - now)
        self._end_all()

    def _send(self, kind: int, process: int = 0, payload: bytes = b"") -> None:
        try:
            self._channel.send(kind, process, payload)
        except BrokenPipeError:
            self._is_ending = True

    def _watch_writing(self) -> None:
        """Have the selector tell when the driver takes more, and stop reading output while it lags behind."""
        registered = self._selector.get_map()
        if self._channel.has_more != (self._channel.writing in registered):
            if self._channel.has_more:
                self._selector.register(self._channel.writing, selectors.EVENT_WRITE)
            else:
                self._selector.unregister(self._channel.writing)
        may_read = self._sent - self._printed < MOST_AHEAD
        for number, process in self._processes.items():
            for stream in process.streams:
                if may_read and stream not in registered:
                    self._selector.register(stream, selectors.EVENT_READ, number)
                elif not may_read and stream in registered:
                    self._selector.unregister(stream)

    def _look(self, seconds: float) -> None:
        for key, _ in self._selector.select(max(0.0, seconds)):
            if key.fd == self._wake:
                self._note_signals(os.read(self._wake, 512))
            elif key.fd == self._channel.writing:
                try:
                    self._channel.flush()
                except BrokenPipeError:
                    self._is_ending = True
            elif key.fd == self._channel.reading:
                try:
                    for frame in self._channel.receive():
                        self.obey(frame)
                except EOFError:
                    self._is_ending = True
            elif key.data in self._processes:
                self._read(key.data, key.fd)

    def _note_signals(self, numbers: bytes) -> None:
        if not {signal.SIGTERM, signal.SIGUSR1}.isdisjoint(numbers):
            self._send(LEAVES)
        self._is_ending |= not {signal.SIGINT, signal.SIGHUP}.isdisjoint(numbers)
        for number, process in list(self._processes.items()):
            if process.worker.poll() is not None:
                self._finish(number)

    def obey(self, frame: Frame) -> None:
        """Carry out an order."""
        process = self._processes.get(frame.process)
        if frame.kind == CONFIGURE:
            self._deadline = json.loads(frame.payload)["deadline"]
            self._echoed_at = time.monotonic()
        elif frame.kind == ECHO:
            self._echoed_at, self._printed = BEAT_FORMAT.unpack(frame.payload)
        elif frame.kind == START:
            self._start(frame.process, json.loads(frame.payload))
        elif frame.kind == END:
            self.verdict, self._is_ending = json.loads(frame.payload), True
        elif frame.kind == STOP:
            for each in self._processes.values():
                each.write(b"stop\n")  # gives its process time to save
        elif process is not None and frame.kind == KILL:
            process.end()
        elif process is not None and frame.kind == TELL:
            # A process that is stopped does not read; it is killed when the others miss it.
            with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
                process.connection.send(frame.payload, socket.MSG_DONTWAIT)

    def _start(self, number: int, header: dict[str, Any]) -> None:
        connection, inherited = socket.socketpair()
        with inherited:
            descriptor = inherited.fileno()
            header["environment"][SOCKET] = str(descriptor)
            header["environment"].setdefault(ADDRESS, self._address)
            header["pass_fds"] = [descriptor]
            pipe = subprocess.PIPE
            worker = subprocess.Popen(  # noqa: S603 (the worker)
                [sys.executable, "-I", "-S", WORKER],
                stdin=pipe, stdout=pipe, stderr=pipe, pass_fds=[descriptor], start_new_session=True,
            )  # fmt: skip
        self._processes[number] = process = _Process(worker, connection)
        process.write(json.dumps(header).encode() + b"\n")
        for source in (*process.streams, connection.fileno()):
            self._selector.register(source, selectors.EVENT_READ, number)

    def _read(self, number: int, source: int) -> bool:
        """Pass on a process's output, or the lines of its socket. Return False at the end of it."""
        process = self._processes[number]
        try:
            data = os.read(source, 1 << 16)
        except ConnectionResetError:
            data = b""
        if not data:
            self._forget(source)
            process.streams.pop(source, None)
        elif source in process.streams:
            self._sent += len(data)
            self._send(process.streams[source], number, data)
        else:
            *lines, process.received = (process.received + data).split(b"\n")
            for line in lines:
                self._send(LINE, number, line)
        return bool(data)

    def _forget(self, source: int) -> None:
        if source in self._selector.get_map():
            self._selector.unregister(source)

    def _finish(self, number: int) -> None:
        """Tell of the end of a process, after its last output."""
        process = self._processes[number]
        for source in (process.connection.fileno(), *process.streams):
            os.set_blocking(source, False)
            with contextlib.suppress(BlockingIOError):  # a process that it left behind may hold the other end
                while self._read(number, source):
                    pass
            self._forget(source)
        del self._processes[number]
        process.end()
        for file in (process.connection, process.worker.stdout, process.worker.stderr):
            assert file is not None
            file.close()
        self._send(ENDED, number, json.dumps(process.worker.returncode).encode())

    def _end_all(self) -> None:
        """End all processes, and wait for that."""
        for process in self._processes.values():
            process.end()
        until = time.monotonic() + END_SECONDS
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.worker.wait(max(0.0, until - time.monotonic()))


def main() -> None:
    """Run the agent between standard input and output."""
    wake, sending = os.pipe()
    os.set_blocking(sending, False)
    signal.set_wakeup_fd(sending, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: None)
    for number in (signal.SIGINT, signal.SIGHUP):  # standard input closes then
        signal.signal(number, signal.SIG_IGN)
    words = os.environ.get("SSH_CONNECTION", "").split()
    address = words[2] if len(words) == 4 else "127.0.0.1"  # by which ssh reached this host
    Agent(Channel(0, 1), wake, address).run()


if __name__ == "__main__":
    main()
