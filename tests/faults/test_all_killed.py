"""All ranks killed at once while they train: they cannot clean up, and still nothing of the node's memory is left."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from tests.ranks import TORCH, start_ranks
from tests.transports.shared import gone_within, needs_memory_files, needs_native, shared_files

pytestmark = [needs_native, needs_memory_files]

START_SECONDS = 90
SETTLE_SECONDS = 10


def processes_of_ranks(folder: Path, ranks: int) -> list[int]:
    """The processes of all ranks, once they are in the middle of training."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        told = [path.read_text() for path in folder.iterdir()]
        if len(told) == ranks and all(text.endswith("\n") for text in told):
            return [int(text) for text in told]
        assert time.monotonic() < deadline, "the ranks did not come to train"
        time.sleep(0.05)


def memory_of(process: int) -> set[str]:
    """The memory files of hvdkit that a process maps, by device and number."""
    try:
        maps = Path(f"/proc/{process}/maps").read_text()
    except OSError:  # it has ended, or is none of ours
        return set()
    return set(re.findall(r"^\S+ \S+ \S+ (\S+ \d+) +/memfd:hvdkit", maps, re.MULTILINE))


def holders(memory: set[str]) -> list[int]:
    """The processes that map one of these files."""
    return [int(name) for name in os.listdir("/proc") if name.isdecimal() and memory_of(int(name)) & memory]


def sockets(process: int) -> set[str]:
    """The sockets that a process has open, by number."""
    found = set()
    for one in Path(f"/proc/{process}/fd").iterdir():
        with suppress(FileNotFoundError):  # just closed
            found |= set(re.findall(r"^socket:\[(\d+)\]", os.readlink(one)))
    return found


def abstract_sockets() -> set[str]:
    """Of this machine, by number: where hvdkit hands out memory they have names without files."""
    lines = Path("/proc/net/unix").read_text().splitlines()[1:]
    return {line.split()[6] for line in lines if line.split()[7:] and line.split()[7].startswith("@hvdkit")}


def test_nothing_is_left_when_all_ranks_are_killed(transport, tmp_path):
    files = shared_files()
    starters = start_ranks([sys.executable, "-m", "tests.faults.endless", str(tmp_path)], 2, transport, preload=TORCH)
    try:
        ranks = processes_of_ranks(tmp_path, 2)
        memory = set.union(*(memory_of(rank) for rank in ranks))
        assert len(memory) == 1 + len(ranks)  # the node's, and each rank's arena, which both have
        assert sorted(holders(memory)) == sorted(ranks)
        own = set.union(*(sockets(rank) for rank in ranks))
        for rank in ranks:
            with suppress(ProcessLookupError):  # mpirun ends a rank when another one has gone
                os.kill(rank, signal.SIGKILL)
        for starter in starters:
            starter.communicate(timeout=60)
            assert starter.returncode != 0
    finally:
        for starter in starters:
            if starter.poll() is None:
                starter.terminate()  # mpirun then ends its ranks
                starter.communicate()
    assert gone_within(SETTLE_SECONDS, lambda: set(map(str, holders(memory)))), holders(memory)
    assert gone_within(SETTLE_SECONDS, lambda: shared_files() - files), shared_files() - files
    assert gone_within(SETTLE_SECONDS, lambda: abstract_sockets() & own), abstract_sockets() & own
