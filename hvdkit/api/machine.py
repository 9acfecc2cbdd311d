"""What decides how this rank's kernels round: two ranks that tell the same compute the same bits from the same."""

from __future__ import annotations

import functools
import os
import platform
import zlib
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


def processor_of(cpuinfo: str) -> str:
    """The first processor that Linux lists: its name, and a checksum of what it is and can do."""
    fields: dict[str, str] = {}
    for line in cpuinfo.split("\n\n")[0].splitlines():
        key, _, value = line.partition(":")
        fields[key.strip()] = value.strip()
    kinds = ("vendor_id", "cpu family", "model", "stepping", "flags", "CPU implementer", "CPU part", "Features")
    what = "; ".join(" ".join(sorted(fields.get(kind, "").split())) for kind in kinds)
    name = fields.get("model name") or f"{platform.machine()} part {fields.get('CPU part', '?')}"
    return f"{name} ({zlib.crc32(what.encode()):08x})"


@functools.cache
def processor() -> str:
    """This host's processor."""
    try:
        return processor_of(CPUINFO.read_text(errors="replace"))
    except OSError:  # no Linux
        return platform.processor() or platform.machine()


def machine(*more: str) -> str:
    """The processor, how many cores of it this process may use, and what a framework says."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return ", ".join([processor(), f"{cores} cores", *more])
