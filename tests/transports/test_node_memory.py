"""The node's memory: who gets it, who is seen to be gone, and that nothing is left of it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.transports.shared import (
    answer,
    bytes_of,
    mapped_memory_files,
    needs_memory_files,
    needs_native,
    node_memory,
    open_descriptors,
    program,
)
from tests.waiting import until

pytestmark = [needs_native, needs_memory_files]

PAGE = 4096
SECONDS = 30.0


class Serving:
    """An invitation that a thread of this process serves."""

    def __init__(self, guests: int, seconds: float = SECONDS) -> None:
        self.invitation = node_memory.Invitation()
        self.address, self.secret = self.invitation.address, self.invitation.secret
        self._descriptor = -1
        self._thread = threading.Thread(target=self._serve, args=(guests, seconds))
        self._thread.start()

    def _serve(self, guests: int, seconds: float) -> None:
        self._descriptor, _ = self.invitation.serve(guests, seconds)

    def serving(self) -> bool:
        return self._thread.is_alive()

    def descriptor(self) -> int:
        self._thread.join()
        return self._descriptor


@contextmanager
def node(guests: int) -> Iterator[tuple[Any, list[subprocess.Popen[str]]]]:
    """Rank 0's memory, and other processes as ranks 1, 2, ..."""
    with ExitStack() as stack:
        serving = Serving(guests)
        others = [
            stack.enter_context(program("guest", serving.address, serving.secret, rank, guests + 1))
            for rank in range(1, guests + 1)
        ]
        memory = node_memory.NodeMemory(serving.descriptor(), 0, guests + 1)
        stack.callback(memory.close)
        for other in others:
            assert answer(other) == "here 0"
        yield memory, others


@contextmanager
def served_after_all() -> Iterator[Serving]:
    """Serve an invitation that is still open after the block, until a process that knows the secret has come."""
    serving = Serving(1)
    try:
        yield serving
        assert serving.serving()
    finally:
        for descriptor in (node_memory.fetch(serving.address, serving.secret, SECONDS, 1)[0], serving.descriptor()):
            assert not os.get_inheritable(descriptor)
            os.close(descriptor)
    with pytest.raises(ConnectionRefusedError):  # all that were invited have come
        node_memory.fetch(serving.address, serving.secret, SECONDS, 1)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda secret: "",
        lambda secret: "0",
        lambda secret: secret[:-1],
        lambda secret: secret[:-1] + ("0" if secret[-1] != "0" else "1"),
        lambda secret: "00" * 32,
        lambda secret: "\0" * 1000,
    ],
    ids=["nothing", "too short", "less its end", "another end", "another", "too long"],
)
def test_nothing_is_handed_out_for_a_wrong_secret(wrong):
    with served_after_all() as serving, socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(SECONDS)
        connection.connect(f"\0{serving.address}")
        connection.sendall(wrong(serving.secret).encode())
        connection.shutdown(socket.SHUT_WR)
        with suppress(ConnectionResetError):  # it did not read all of it
            data, descriptors, _, _ = socket.recv_fds(connection, 100, 10)
            assert (data, list(descriptors)) == (b"", [])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_who_knows_the_secret_gets_nothing():
    with served_after_all() as serving, program("guest_of_another_user", serving.address, serving.secret) as stranger:
        assert answer(stranger).startswith("PermissionError")
        assert answer(stranger) == "0"


def test_guests_that_do_not_come_are_a_time_out():
    before = open_descriptors()
    invitation = node_memory.Invitation()
    with pytest.raises(TimeoutError):
        invitation.serve(1, 0.1)
    with pytest.raises(OSError, match="refused"):
        node_memory.fetch(invitation.address, invitation.secret, 1.0, 1)
    assert open_descriptors() == before


def test_nobody_waits_for_a_guest_that_is_lost():
    looks: list[int] = []

    def is_hopeless() -> bool:
        looks.append(len(looks))
        return len(looks) == 3

    before, for_ever = open_descriptors(), 1e6
    with pytest.raises(TimeoutError):
        node_memory.Invitation().serve(1, for_ever, is_hopeless=is_hopeless)
    assert looks == [0, 1, 2]
    assert open_descriptors() == before


def test_a_rank_that_is_killed_is_gone():
    with node(3) as (memory, others):
        assert memory.gone() == []
        others[1].kill()
        until(lambda: memory.gone() == [2], 10.0)
        assert answer(others[0], "gone") == answer(others[2], "gone") == "[2]"


def test_a_rank_that_ends_or_closes_the_memory_is_gone():
    with node(2) as (memory, others):
        assert answer(others[0], "close") == "closed"
        until(lambda: memory.gone() == [1], 10.0)
        assert others[1].stdin is not None
        others[1].stdin.close()
        until(lambda: memory.gone() == [1, 2], 10.0)


def test_a_rank_that_lives_or_is_stopped_is_not_gone():
    with node(2) as (memory, others):
        others[0].send_signal(signal.SIGSTOP)
        time.sleep(1.0)
        assert memory.gone() == []
        assert answer(others[1], "gone") == "[]"
        others[0].kill()
        until(lambda: memory.gone() == [1], 10.0)


def test_a_rank_whose_children_end_is_not_gone_and_one_whose_children_outlive_it_is():
    with node(1) as (memory, others):
        assert answer(others[0], "fork and wait") == "waited"
        assert answer(others[0], "gone") == "[]"
        child = int(answer(others[0], "fork"))
        try:
            assert memory.gone() == []
            others[0].kill()
            until(lambda: memory.gone() == [1], 10.0)
        finally:
            os.kill(child, signal.SIGKILL)


def test_nothing_is_left_after_close():
    def use() -> None:
        with node(1) as (memory, _):
            bytes_of(memory.window(0, 100 * PAGE))[:] = 1

    use()  # whatever the first use of sockets and threads opens for good
    before = open_descriptors(), mapped_memory_files()
    use()
    assert (open_descriptors(), mapped_memory_files()) == before
    assert [name for name in os.listdir("/dev/shm") if "hvdkit" in name] == []  # noqa: S108


# Two ranks of a job, each with a /dev/shm of its own that has hardly any room; their memory is shared all the same.
CROWDED = """
import numpy as np
import torch
import hvdkit.torch as hvd
from hvdkit.engine.session import runtime
hvd.init()
transport = type(runtime.engine().transport).__name__
tensor = torch.full((1 << 20,), 1.0 + hvd.rank())
print(transport, hvd.allreduce(tensor, op=hvd.Sum).unique().tolist())
weight = torch.nn.Parameter(torch.zeros(1 << 21))
optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=hvd.Sum)
for _ in range(2):
    optimizer.zero_grad()
    (weight * (1.0 + hvd.rank())).sum().backward()
    optimizer.step()
reducer = optimizer._synchronizer._agreement.planned.lane.reducer
print(type(reducer).__name__, reducer.reason, weight.detach().unique().tolist(), flush=True)
hvd.shutdown()
"""
MOUNT = 'mount -t tmpfs -o size=1m none /dev/shm && exec "$@"'


def test_a_tiny_dev_shm_is_enough():
    own_mounts = ["unshare", "-m", "sh", "-c", MOUNT, "sh"]
    tried = shutil.which("unshare") and subprocess.run([*own_mounts, "true"], capture_output=True, text=True)
    if not tried or tried.returncode:
        pytest.skip(f"no /dev/shm of our own can be mounted here: {tried.stderr.strip() if tried else 'no unshare'}")
    command = [*own_mounts, sys.executable, "-c", CROWDED]
    status, output = run_ranks(command, 2, "torch", 60)
    assert status == 0, output
    assert output.count("NodeTransport [3.0]\nHostReducer one pass over the memory of 2 ranks [-6.0]\n") == 2, output
