"""Processes that the tests of shared memory start: ``python -m tests.transports.shared_programs NAME ARGUMENTS``."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable

import numpy as np

from tests import measured
from tests.transports.shared import LINE, bells_in, message_rings, native, node_memory, settle

LONG = 1 << 17  # bytes of a message that takes a while
SECONDS = 10.0  # more than any wait of these programs takes, unless a ring was lost


def sleep(descriptor: int) -> None:
    """Sleeps at the first bell until it is rung; prints for how long."""
    bell = native.Bell(native.Window(descriptor, 0, LINE), 0)
    began = time.monotonic()
    bell.sleep(bell.count(), SECONDS)
    print(time.monotonic() - began, flush=True)


def play(descriptor: int, me: int, rounds: int) -> float:
    """Ping-pong between ranks 0 and 1: each waits for the other's counter. Prints and returns the longest sleep."""
    window = native.Window(descriptor, 0, 4 * LINE)
    bells, cells = bells_in(window, 2), native.Cells(window, 2 * LINE, 2)
    longest = 0.0
    for turn in range(1, rounds + 1):
        if me == 0:
            cells.set(0, turn)
            bells[1].ring()
        while True:
            seen = bells[me].count()
            if cells.get(1 - me) >= turn:
                break
            began = time.monotonic()
            bells[me].sleep(seen, SECONDS)
            longest = max(longest, time.monotonic() - began)
            assert longest < SECONDS, "a ring was lost, or the other process is"
        if me == 1:
            cells.set(1, turn)
            bells[0].ring()
    print(longest, flush=True)
    return longest


def give_back_buffers(messages: int) -> None:
    """Messages end, and receives fail, with nobody but the rings to keep their buffers, while a thread listens."""
    one, other = message_rings(2, ring=LONG)
    over = threading.Event()

    def listen() -> None:
        while not over.is_set():
            one.take_control()
            other.take_control()

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    sys.setswitchinterval(1e-5)
    for tag in range(messages):
        other.receive(0, messages + tag, np.zeros(LONG, np.uint8))
        one.send(1, messages + tag, np.zeros(LONG, np.uint8))
        one.send(1, tag, np.zeros(4, np.uint8))
        settle([one, other])
        assert other.receive(0, tag, np.zeros(5, np.uint8)).wrong_bytes() == 4
    over.set()
    listener.join()
    print("done", flush=True)


def guest(address: str, secret: str, index: int, count: int) -> None:
    """Fetches the node's memory, says so, and does what it is told."""
    try:
        descriptor, _ = node_memory.fetch(address, secret, SECONDS, 1)
    except OSError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        return
    memory = node_memory.NodeMemory(descriptor, index, count)
    print(f"here {np.frombuffer(memory.window(0, 4096), dtype=np.uint8)[0]}", flush=True)
    for line in sys.stdin:
        task = line.strip()
        if task == "gone":
            print(memory.gone(), flush=True)
        elif task == "fork":  # a child that stays
            child = os.fork()
            if child == 0:
                time.sleep(60)
                measured.exited(0)
            print(child, flush=True)
        elif task == "fork and wait":  # a child that closes what it inherited, and ends
            child = os.fork()
            if child == 0:
                memory.close()
                measured.exited(0)
            os.waitpid(child, 0)
            print("waited", flush=True)
        elif task == "close":
            memory.close()
            print("closed", flush=True)


def guest_of_another_user(address: str, secret: str) -> None:
    """Knows the secret, but is somebody else: what it is told, and how many descriptors it gets if it does not mind."""
    os.setuid(65534)
    guest(address, secret, 1, 2)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(SECONDS)
        connection.connect(f"\0{address}")
        try:
            connection.sendall(secret.encode())
            print(len(socket.recv_fds(connection, 1, 10)[1]), flush=True)
        except (ConnectionResetError, BrokenPipeError):  # it was not even read
            print(0, flush=True)


PROGRAMS: list[Callable[..., object]] = [sleep, play, give_back_buffers, guest, guest_of_another_user]


if __name__ == "__main__":
    (program,) = (program for program in PROGRAMS if program.__name__ == sys.argv[1])
    program(*(int(text) if text.isdigit() and len(text) < 20 else text for text in sys.argv[2:]))
