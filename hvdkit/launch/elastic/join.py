"""``hvdkitrun --join HOST:PORT``: the agent of this host, over a connection that it makes to the launcher itself."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable

import hvdkit
from hvdkit import config
from hvdkit.launch import LaunchError, worker
from hvdkit.launch.elastic.agent import CONFIGURE, JOIN, Agent, Frame
from hvdkit.launch.elastic.flags import JoinOptions
from hvdkit.launch.elastic.listener import GREETING_SECONDS, read_secret
from hvdkit.launch.elastic.sealed import SealedChannel, prove
from hvdkit.launch.elastic.slots import slots_in_words
from hvdkit.launch.job import without_place
from hvdkit.transports.security.credentials import NotAuthenticError

AGAIN_SECONDS = 0.5  # between two attempts to connect
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)


def join(chosen: JoinOptions, say: Callable[[str], None]) -> int:
    """Run the processes of an elastic job on this host until it ends or this host leaves. Return the exit status.

    Raises LaunchError if the launcher cannot be found in time, or does not know the secret.
    """
    host, where = chosen.host, f"{chosen.address[0]}:{chosen.address[1]}"
    secret = read_secret(chosen.secret_file, may_create=False)
    channel, own_address = _connect(chosen.address, secret, chosen.start_timeout, where)
    say(f"host {host.name} joins the job of hvdkitrun at {where} with {slots_in_words(host.slots)}")
    for name in os.environ.keys() - without_place(os.environ).keys():
        del os.environ[name]  # as of SLURM's step, or of an operator of Kubernetes
    agent = Agent(channel, worker.wake_on_signals(SIGNALS), own_address)
    deadline = config.value_of("timeout_seconds", os.environ)  # until the launcher tells that of the job
    agent.obey(Frame(CONFIGURE, 0, json.dumps({"deadline": deadline}).encode()))
    facts = {"version": hvdkit.__version__, "name": host.name, "slots": host.slots}
    channel.send(JOIN, payload=json.dumps(facts).encode())
    agent.run()
    channel.close()
    status, text = agent.verdict or (1, f"the connection to hvdkitrun at {where} has ended, as have all processes here")
    say(text)
    return status


def _connect(address: tuple[str, int], secret: bytes, seconds: float, where: str) -> tuple[SealedChannel, str]:
    """Return the channel to the launcher, and the address of this host on it."""
    gives_up_at = time.monotonic() + seconds
    while True:
        connection = None
        try:
            connection = socket.create_connection(address, max(0.1, gives_up_at - time.monotonic()))
            return prove(connection, secret, False, GREETING_SECONDS), connection.getsockname()[0]
        except NotAuthenticError as error:
            raise LaunchError(
                f"the process that answers at {where} does not know the secret of --secret-file\n"
                "HINT: copy the file of hvdkitrun --listen to this host"
            ) from error
        except OSError as error:
            if connection is not None:
                connection.close()
            if time.monotonic() + AGAIN_SECONDS > gives_up_at:
                hint = "check that hvdkitrun --listen runs there, behind no firewall; --start-timeout waits longer"
                fact = f"cannot reach hvdkitrun at {where} within {seconds:g} s"
                raise LaunchError(f"{fact}: {error.strerror or error}\nHINT: {hint}") from error
            time.sleep(AGAIN_SECONDS)
