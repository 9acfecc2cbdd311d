"""A host of an elastic job, as its driver sees it: the agent there, and whether it is within reach."""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from subprocess import PIPE
from typing import Any

from hvdkit.launch.elastic import agent
from hvdkit.launch.elastic.agent import BEAT_FORMAT, ECHO, END, END_SECONDS, Channel, Frame
from hvdkit.launch.elastic.sealed import SealedChannel

AGENT = (sys.executable, "-I", "-S", agent.__file__)
_LONGEST_ERRORS = 4000  # bytes


class StartedAgent:
    """An agent that this process starts: by the ssh command ``remote``, or on this machine where that is empty.

    Raises OSError if it cannot be started.
    """

    def __init__(self, remote: list[str]) -> None:
        self.is_remote = bool(remote)
        self._process = subprocess.Popen(remote or AGENT, stdin=PIPE, stdout=PIPE, stderr=PIPE, start_new_session=True)  # noqa: S603
        self._files = self._process.stdin, self._process.stdout, self._process.stderr
        writing, reading, errors = (file.fileno() for file in self._files if file is not None)
        self.channel, self.errors = Channel(reading, writing), [errors]
        os.set_blocking(errors, False)

    def kill(self) -> None:
        """Kill the agent, or ssh to it, and close its pipes."""
        self._process.kill()
        self._process.wait()
        for file in self._files:
            if file is not None:
                with contextlib.suppress(OSError):
                    file.close()


class JoinedAgent:
    """An agent that has connected to this process."""

    is_remote = True

    def __init__(self, channel: SealedChannel) -> None:
        self.channel = channel
        self.errors: list[int] = []

    def kill(self) -> None:
        """Close the connection, so that the agent ends its processes and itself."""
        self.channel.close()


class AgentHost:
    """A host and the agent that runs its processes. ``deadline``: the seconds of silence after which it is lost.

    ``is_leaving``: it joined by itself, and wants to leave. ``is_dismissed``: its agent was told to end before the job.
    """

    def __init__(
        self, name: str, link: StartedAgent | JoinedAgent, now: float, deadline: float, start_timeout: float
    ) -> None:
        self.name, self.link, self.channel, self.is_remote = name, link, link.channel, link.is_remote
        # An agent elsewhere ends its processes if no echo comes for so long; here both ends live and die together.
        self._deadline = deadline if self.is_remote else math.inf
        # From then on the host counts as lost, and its processes are dead.
        self.lost_at = now + start_timeout if self.is_remote else math.inf
        self.printed = 0  # bytes of its processes' output
        self.is_leaving = self.is_dismissed = False
        self.reason = ""  # for its loss
        self.messages = b""  # of ssh and of the agent
        self.send(agent.CONFIGURE, 0, {"deadline": self._deadline})

    @property
    def sources(self) -> list[int]:
        """The descriptors from which to read."""
        return [self.channel.reading, *self.link.errors]

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
        data = b"".join(os.read(source, 1 << 16) for source in self.link.errors)
        self.messages = (self.messages + data)[-_LONGEST_ERRORS:]
        return bool(data)

    def why(self) -> str:
        """Return the reason for the loss of this host: the last line of ssh or of the agent, if there is one."""
        lines = self.messages.decode(errors="replace").strip().splitlines()
        return self.reason or (lines[-1].strip() if lines else "its connection broke")

    def end(self, verdict: tuple[int, str]) -> None:
        """Have the agent end its processes and itself. An agent that has joined exits with this status and message."""
        self.send(END, values=verdict)

    def dismiss(self) -> None:
        """End the agent of a host that leaves, on which no process is left."""
        self.is_dismissed = True
        self.end((0, "this host has left the job"))


@dataclass
class HostedProcess:
    """A process of the job. ``rank``: in the generation of which it is a member."""

    host: AgentHost
    slot: int
    address: tuple[str, int] = ("", 0)  # where it listens, since it asked
    rank: int | None = None
    is_dismissed: bool = False
