"""A host of an elastic job, as its driver sees it: the agent there, and whether it is within reach."""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
from subprocess import PIPE
from typing import Any

from hvdkit.launch.elastic import agent
from hvdkit.launch.elastic.agent import BEAT_FORMAT, ECHO, END_SECONDS, Channel, Frame

AGENT = (sys.executable, "-I", "-S", agent.__file__)
_LONGEST_ERRORS = 4000  # bytes


class AgentHost:
    """A host and the agent that runs its processes.

    ``remote``: the ssh command that starts the agent, empty on this machine. ``deadline``: the seconds without an echo
    after which an agent elsewhere ends its processes. Raises OSError if the agent cannot be started.
    """

    def __init__(self, name: str, remote: list[str], now: float, deadline: float, start_timeout: float) -> None:
        self.name, self.remote, self.is_remote = name, remote, bool(remote)
        self._agent = subprocess.Popen(remote or AGENT, stdin=PIPE, stdout=PIPE, stderr=PIPE, start_new_session=True)  # noqa: S603
        files = self._agent.stdin, self._agent.stdout, self._agent.stderr
        writing, reading, self.errors = (file.fileno() for file in files if file is not None)
        self.channel = Channel(reading, writing)
        os.set_blocking(self.errors, False)
        self._deadline = deadline if self.is_remote else math.inf  # on this machine both ends live and die together
        # From then on the host counts as lost, and its processes are dead.
        self.lost_at = now + start_timeout if self.is_remote else math.inf
        self.printed = 0  # bytes of its processes' output
        self.reason = ""  # for its loss
        self.messages = b""  # of ssh and of the agent
        self.send(agent.CONFIGURE, 0, {"deadline": self._deadline})

    def send(self, kind: int, process: int = 0, values: Any = None, payload: bytes = b"") -> None:
        """Send an order, with values as JSON or with a payload. The loss of the agent is noticed when reading."""
        with contextlib.suppress(BrokenPipeError):
            self.channel.send(kind, process, payload if values is None else json.dumps(values).encode())

    def receive(self, now: float) -> list[Frame]:
        """Return the news of the agent. Raises EOFError if it has ended, or the connection broke."""
        frames = self.channel.receive()
        for frame in frames:
            if frame.kind == agent.BEAT:
                sent_at, _ = BEAT_FORMAT.unpack(frame.payload)
                self.send(ECHO, payload=BEAT_FORMAT.pack(sent_at, self.printed))
                self.lost_at = now + self._deadline + END_SECONDS
        return frames

    def read_errors(self) -> bool:
        """Keep the last that ssh or the agent wrote to stderr. Return False at its end."""
        data = os.read(self.errors, 1 << 16)
        self.messages = (self.messages + data)[-_LONGEST_ERRORS:]
        return bool(data)

    def why(self) -> str:
        """Return the reason for the loss of this host: the last line of ssh or of the agent, if there is one."""
        lines = self.messages.decode(errors="replace").strip().splitlines()
        return self.reason or (lines[-1].strip() if lines else "its connection broke")

    def end(self) -> None:
        """Have the agent end its processes and itself."""
        assert self._agent.stdin is not None
        with contextlib.suppress(OSError):
            self._agent.stdin.close()

    def has_ended(self) -> bool:
        """True if the agent, or ssh to it, has ended."""
        return self._agent.poll() is not None

    def kill(self) -> None:
        """Kill the agent, or ssh to it, and close its pipes."""
        self._agent.kill()
        self._agent.wait()
        for file in (self._agent.stdin, self._agent.stdout, self._agent.stderr):
            if file is not None:
                with contextlib.suppress(OSError):
                    file.close()
