"""Where gradients are born, what becomes of that memory, and what happens where there can be no such memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.compiling import compile_one, some_compiler
from tests.ranks import ROOT, TORCH, rank_environment, run_ranks
from tests.transports.shared import needs_memory_files, needs_native

pytestmark = [needs_native, needs_memory_files]

WITHOUT = [sys.executable, "-m", "tests.arena.without"]
COMPLAINT = "are allocated where the ranks of this host do not share memory"

# Stands before the C library, as other allocators do, and does the same.
OTHER_ALLOCATOR = """
#include <dlfcn.h>
#include <cstddef>
extern "C" int posix_memalign(void** out, std::size_t alignment, std::size_t nbytes) noexcept {
    static auto* const next = reinterpret_cast<int (*)(void**, std::size_t, std::size_t)>(
        dlsym(RTLD_NEXT, "posix_memalign"));
    return next(out, alignment, nbytes);
}
extern "C" void free(void* address) noexcept {
    static auto* const next = reinterpret_cast<void (*)(void*)>(dlsym(RTLD_NEXT, "free"));
    next(address);
}
"""

# Replaces an entry in libc10's import table, as profilers do.
PROFILER = """
#include <elf.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>
#include <cstdint>
#include <cstdlib>
#include <cstring>

static int counted(void** out, std::size_t alignment, std::size_t nbytes) {
    return posix_memalign(out, alignment, nbytes);
}

static int visit(dl_phdr_info* info, std::size_t, void* data) {
    if (std::strstr(info->dlpi_name, "libc10.so") == nullptr) return 0;
    const ElfW(Dyn)* dynamic = nullptr;
    for (int i = 0; i < info->dlpi_phnum; ++i) {
        if (info->dlpi_phdr[i].p_type == PT_DYNAMIC) {
            dynamic = reinterpret_cast<const ElfW(Dyn)*>(info->dlpi_addr + info->dlpi_phdr[i].p_vaddr);
        }
    }
    const ElfW(Rela)* tables[2] = {};
    std::size_t bytes[2] = {};
    const ElfW(Sym)* symbols = nullptr;
    const char* names = nullptr;
    for (; dynamic->d_tag != DT_NULL; ++dynamic) {
        const std::uintptr_t at = dynamic->d_un.d_ptr;
        if (dynamic->d_tag == DT_JMPREL) tables[0] = reinterpret_cast<const ElfW(Rela)*>(at);
        if (dynamic->d_tag == DT_RELA) tables[1] = reinterpret_cast<const ElfW(Rela)*>(at);
        if (dynamic->d_tag == DT_PLTRELSZ) bytes[0] = dynamic->d_un.d_val;
        if (dynamic->d_tag == DT_RELASZ) bytes[1] = dynamic->d_un.d_val;
        if (dynamic->d_tag == DT_SYMTAB) symbols = reinterpret_cast<const ElfW(Sym)*>(at);
        if (dynamic->d_tag == DT_STRTAB) names = reinterpret_cast<const char*>(at);
    }
    const std::uintptr_t page = sysconf(_SC_PAGESIZE);
    for (int table = 0; table < 2; ++table) {
        for (std::size_t i = 0; i < bytes[table] / sizeof(ElfW(Rela)); ++i) {
            const ElfW(Rela)& entry = tables[table][i];
            if (std::strcmp(names + symbols[ELF64_R_SYM(entry.r_info)].st_name, "posix_memalign") != 0) continue;
            const std::uintptr_t at = info->dlpi_addr + entry.r_offset;
            mprotect(reinterpret_cast<void*>(at / page * page), page, PROT_READ | PROT_WRITE);
            *reinterpret_cast<void**>(at) = reinterpret_cast<void*>(&counted);
            ++*static_cast<int*>(data);
        }
    }
    return 1;
}

extern "C" int replace_entries() {
    int replaced = 0;
    dl_iterate_phdr(visit, &replaced);
    return replaced;
}
"""


def test_a_process_ends_well_with_tensors_in_the_arena():
    program = (
        "import threading\n"
        "from tests.arena.blocks import MIB, born, lies_in_arena, served\n"
        "from hvdkit.arena import ARENA\n"
        "with served(MIB):\n"
        "    kept = [born(MIB) for _ in range(8)]\n"
        "    ARENA.pin(kept[0].data_ptr(), MIB)\n"
        "    ARENA.make_private([ARENA.pin(kept[1].data_ptr(), MIB)])\n"
        "    thread = threading.Thread(target=lambda: kept.append(born(MIB)))\n"
        "    thread.start(); thread.join()\n"
        "assert all(map(lies_in_arena, kept))\n"
        "class AtTheEnd:\n"
        "    tensor = kept[2]\n"
        "    def __del__(self):\n"
        "        self.tensor.fill_(1)\n"
        "last = AtTheEnd()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=rank_environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


def test_where_it_is_switched_off_steps_are_right_and_nothing_is_said():
    status, output = run_ranks([*WITHOUT, "nothing"], 2, "torch", preload=TORCH, HVDKIT_ARENA="0")
    assert status == 0, output
    assert output.count("STEPS ARE RIGHT") == 2
    assert COMPLAINT not in output


def library(folder: Path, name: str, source: str) -> Path:
    """A shared library of a program text."""
    (folder / f"{name}.cpp").write_text(source)
    compile_one([some_compiler(), "-shared", "-fPIC", "-O1", "-o", str(folder / f"{name}.so")], folder / f"{name}.cpp")
    return folder / f"{name}.so"


def check_staged_with_one_line(output: str, status: int, *reason: str) -> None:
    assert status == 0, output
    assert output.count("STEPS ARE RIGHT") == 2, output
    lines = [line for line in output.splitlines() if COMPLAINT in line]
    assert len(lines) == 1, output
    assert all(word in lines[0] for word in (*reason, "HVDKIT_ARENA=0")), lines


def test_with_another_allocator_steps_are_right_and_one_line_says_why_they_are_slower(tmp_path):
    other = library(tmp_path, "otheralloc", OTHER_ALLOCATOR)
    status, output = run_ranks([*WITHOUT, "nothing"], 2, "torch", LD_PRELOAD=str(other))
    check_staged_with_one_line(output, status, "posix_memalign comes from otheralloc.so")


def test_where_somebody_has_replaced_an_entry_it_is_left_alone_and_one_line_says_why(tmp_path):
    profiler = library(tmp_path, "profiler", PROFILER)
    status, output = run_ranks([*WITHOUT, str(profiler)], 2, "torch", preload=TORCH)
    check_staged_with_one_line(output, status, "posix_memalign comes from profiler.so")


@pytest.mark.parametrize("rank", [0, 1])
def test_where_one_rank_has_no_addresses_left_steps_are_right_and_one_line_names_it(rank):
    status, output = run_ranks([*WITHOUT, "nothing", str(rank)], 2, "torch", preload=TORCH)
    check_staged_with_one_line(output, status, "rank", "Cannot allocate memory")
