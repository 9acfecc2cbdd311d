"""Whole jobs: the same bits where ranks lie on several nodes and where those of a node share no memory; a timeline."""

from __future__ import annotations

import functools
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import TORCH, run_ranks

STEPS = 4  # of each model that tests/torch/weights.py trains

WEIGHTS = [sys.executable, "-m", "tests.torch.weights"]


def hidden(statements: str) -> list[str]:
    """The same program, after something was taken from it."""
    return [sys.executable, "-m", "tests.torch.hidden_weights", statements]


# A kernel from before 3.17: the C library knows the call, the kernel does not.
OLD_KERNEL = """
def memfd_create(name, flags):
    raise OSError(38, "Function not implemented")
os.memfd_create = memfd_create
"""
# One rank of the two gets no memory for its gradients.
NO_ROOM = """
from hvdkit.transports.node.memory import NodeMemory
populate = NodeMemory.populate
def refuse(memory, *arguments):
    if memory.index == 1:
        raise OSError(12, "Cannot allocate memory")
    populate(memory, *arguments)
NodeMemory.populate = refuse
"""
# One rank of the two gets no addresses for the memory through which tensors are staged.
NO_ADDRESSES = """
from hvdkit.engine.ranks.groups import staging_segment
from hvdkit.transports.node.memory import NodeMemory
window = NodeMemory.window
def refuse(memory, segment, nbytes):
    if memory.index == 1 and segment == staging_segment(0):
        raise OSError(12, "Cannot allocate memory")
    return window(memory, segment, nbytes)
NodeMemory.window = refuse
"""
# What kernels before 5.14 answer: the memory is only set aside.
CANNOT_POPULATE = """
from hvdkit.kernels import _native
asked = []
_native.Window.populate = lambda window, begin, nbytes: asked.append(nbytes)
import atexit
atexit.register(lambda: print("ASKED", len(asked) > 0))
"""
# What stands in the way, as a command that starts the program, and what is said about it.
OBSTACLES = {
    "no native kernels": (
        hidden("sys.modules['hvdkit.kernels._native'] = None"),
        "the native kernels were not built when hvdkit was installed (no C++ compiler was found, or this is a source "
        "tree that was not installed: build them in it with python setup.py build_ext --inplace)",
    ),
    "a limit on the size of files": (
        hidden("import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000 << 10,) * 2)"),
        "no memory file can be made here",
    ),
    "no addresses on one rank": (
        hidden(NO_ADDRESSES),
        "rank 1 could not get the memory that rank 0 made ([Errno 12] Cannot allocate memory)",
    ),
    "a kernel without memfd_create": (
        hidden(OLD_KERNEL),
        "no memory file can be made here ([Errno 38] Function not implemented)",
    ),
}
# Prints what it is limited to, as proof.
NOTHING_LOCKED = hidden(
    "import resource; resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0)); "
    "print('LOCKED', *resource.getrlimit(resource.RLIMIT_MEMLOCK))"
)


def train(command: list[str], ranks: int, transport: str, **options: Any) -> tuple[list[str], str]:
    """All ranks' digests, and all that was printed."""
    status, output = run_ranks(command, ranks, transport, preload=TORCH, **options)
    assert status == 0, output
    digests = re.findall(r"DIGEST ([0-9a-f]{64})", output)
    assert len(digests) == ranks, output
    return digests, output


@functools.cache
def digest_in_shared_memory(transport: str) -> str:
    """Of two ranks of a node with nothing in the way."""
    digests, output = train(WEIGHTS, 2, transport)
    assert "share no memory" not in output
    assert len(set(digests)) == 1
    return digests[0]


@pytest.mark.essential(ranks=3, per_node=2)
@pytest.mark.parametrize(("ranks", "per_node"), [(2, 2), (3, 2), (4, 2), (4, 1)])
def test_all_ranks_on_all_transports_hold_the_same_bits(ranks: int, per_node: int) -> None:
    digests, compressed = [], []
    for transport in ("mpi", "torch"):
        of_ranks, output = train(WEIGHTS, ranks, transport, per_node=per_node)
        digests += of_ranks
        compressed += re.findall(r"COMPRESSED ([0-9a-f]{64})", output)
    assert len(set(digests)) == 1
    assert len(compressed) == 2 * ranks
    assert len(set(compressed)) == 1


@pytest.mark.essential(transport="torch")
@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_without_what_shared_memory_needs_it_is_slower_and_says_so_once_but_gives_the_same_bits(
    obstacle: str, transport: str
) -> None:
    command, reason = OBSTACLES[obstacle]
    digests, output = train(command, 2, transport)
    assert output.count("share no memory") == 1, output
    assert reason in output
    assert set(digests) == {digest_in_shared_memory(transport)}


def test_gradients_for_which_one_rank_has_no_room_are_reduced_elsewhere_with_the_same_bits(transport: str) -> None:
    digests, output = train(hidden(NO_ROOM), 2, transport)
    lines = [line for line in output.splitlines() if "are not in shared memory, which is slower" in line]
    optimizers = {re.search(r"the gradients of '([^']+)'", line).group(1) for line in lines}  # type: ignore[union-attr]
    assert len(lines) == len(optimizers) == 3, output  # once for each
    assert all("Cannot allocate memory" in line and "rank 1" in line for line in lines), output
    assert set(digests) == {digest_in_shared_memory(transport)}


@pytest.mark.essential(transport="torch")
@pytest.mark.parametrize(
    ("command", "proof"), [(hidden(CANNOT_POPULATE), "ASKED True"), (NOTHING_LOCKED, "LOCKED 0 0")]
)
def test_less_than_most_kernels_allow_is_enough_for_shared_memory(
    command: list[str], proof: str, transport: str
) -> None:
    digests, output = train(command, 2, transport)
    assert output.count(f"{proof}\n") == 2, output
    assert "shared memory" not in output
    assert "share no memory" not in output
    assert set(digests) == {digest_in_shared_memory(transport)}


@pytest.mark.essential(transport="mpi")
def test_horovod_timeline_writes_a_trace_of_what_rank_0_did(transport: str, tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    train(WEIGHTS, 2, transport, HOROVOD_TIMELINE=str(path), HOROVOD_TIMELINE_MARK_CYCLES="1")
    events = json.loads(path.read_text())
    rows = {event["tid"]: event["args"]["name"] for event in events if event.get("name") == "thread_name"}
    reductions = [
        event
        for event in events
        if event["ph"] == "B" and event["name"] == "ALLREDUCE" and re.match(r"SGD.*bucket", rows[event["tid"]])
    ]
    assert len(reductions) >= STEPS
    assert all(event["args"]["bytes"] > 0 for event in reductions)
    for row in rows:
        phases = [event["ph"] for event in events if event["tid"] == row and event["ph"] in "BE"]
        assert phases.count("B") == phases.count("E"), rows[row]
    names = {event["name"] for event in events if "name" in event}
    assert any(name.startswith("NEGOTIATE_") for name in names), names
    assert any("CYCLE" in name for name in names), names
