"""Where gradients are born, what becomes of that memory, and what happens where there can be no such memory."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.compiling import compile_one, some_compiler
from tests.launch.launching import run_to_end
from tests.ranks import TORCH, run_ranks
from tests.transports.shared import needs_memory_files, needs_native

pytestmark = [needs_native, needs_memory_files]

COMPLAINT = "are allocated in memory that the ranks of this host do not share"


def test_a_process_ends_well_with_tensors_in_the_arena():
    program = """
import threading
from tests.arena.blocks import MIB, born, lies_in_arena, served
from hvdkit.arena import ARENA
with served(MIB):
    kept = [born(MIB) for _ in range(8)]
    ARENA.pin(kept[0].data_ptr(), MIB)
    ARENA.make_private([ARENA.pin(kept[1].data_ptr(), MIB)])
    thread = threading.Thread(target=lambda: kept.append(born(MIB)))
    thread.start()
    thread.join()
assert all(map(lies_in_arena, kept))
class AtTheEnd:
    tensor = kept[2]
    def __del__(self):
        self.tensor.fill_(1)
last = AtTheEnd()
"""
    done = run_to_end([sys.executable, "-c", program], 120)
    assert done.status == 0, done.stderr
    assert done.stderr == ""


def test_where_it_is_switched_off_steps_are_right_and_nothing_is_said():
    assert COMPLAINT not in run_without("nothing", preload=TORCH, HVDKIT_ARENA="0")


def library(folder: Path, name: str) -> Path:
    """Compile a file that lies beside this one to a shared library."""
    made, source = folder / f"{name}.so", Path(__file__).with_name(f"{name}.cpp")
    compile_one([some_compiler(), "-shared", "-fPIC", "-O1", "-o", str(made)], source)
    return made


def run_without(*arguments: str, **options: Any) -> str:
    """Run the program on two ranks, whose steps are right. Returns what they print."""
    command = [sys.executable, "-m", "tests.arena.without", *arguments]
    status, output = run_ranks(command, 2, "torch", **options)
    assert status == 0, output
    assert output.count("STEPS ARE RIGHT") == 2, output
    return output


def check_staged_with_one_line(output: str, *reason: str, ranks: str = "this host's ranks") -> None:
    lines = [line for line in output.splitlines() if COMPLAINT in line]
    assert len(lines) == 1, output
    fact = (
        f"the gradients of {ranks} are allocated in memory that the ranks of this host do not share, and are "
        "summed in chunks, which is slower: "
    )
    hint = ". To accept this without a warning, set HVDKIT_ARENA=0"
    assert all(word in lines[0] for word in (*reason, fact, hint)), lines


def test_with_another_allocator_steps_are_right_and_one_line_says_why_they_are_slower(tmp_path):
    output = run_without("nothing", LD_PRELOAD=str(library(tmp_path, "otheralloc")))
    check_staged_with_one_line(output, "posix_memalign comes from otheralloc.so")


def test_where_somebody_has_replaced_an_entry_it_is_left_alone_and_one_line_says_why(tmp_path):
    output = run_without(str(library(tmp_path, "profiler")), preload=TORCH)
    check_staged_with_one_line(output, "posix_memalign comes from profiler.so")


@pytest.mark.parametrize("rank", [0, 1])
def test_where_one_rank_has_no_addresses_left_steps_are_right_and_one_line_names_it(rank):
    output = run_without("nothing", str(rank), preload=TORCH)
    check_staged_with_one_line(output, f"Cannot allocate memory on rank {rank}", ranks="the ranks [0, 1]")
