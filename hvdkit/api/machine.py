"""The machine as far as it decides how kernels round: equal machines compute equal bits."""

from __future__ import annotations

import functools
import platform
import zlib
from pathlib import Path

from hvdkit.engine.loop.driver import usable_cores


def processor_of(cpuinfo: str) -> str:
    """Return the first processor in ``cpuinfo``: its name, and a checksum of its model and features."""
    fields: dict[str, str] = {}
    for line in cpuinfo.split("\n\n")[0].splitlines():
        key, _, value = line.partition(":")
        fields[key.strip()] = value.strip()
    kinds = ("vendor_id", "cpu family", "model", "stepping", "flags", "CPU implementer", "CPU part", "Features")
    features = "; ".join(" ".join(sorted(fields.get(kind, "").split())) for kind in kinds)
    name = fields.get("model name") or f"{platform.machine()} part {fields.get('CPU part', '?')}"
    return f"{name} ({zlib.crc32(features.encode()):08x})"


@functools.cache
def processor() -> str:
    """Return this host's processor."""
    try:
        return processor_of(Path("/proc/cpuinfo").read_text(errors="replace"))
    except OSError:  # no Linux
        return platform.processor() or platform.machine()


def machine(*more: str) -> str:
    """Return the processor, the number of cores that this process may use, and the words ``more``."""
    return ", ".join([processor(), f"{len(usable_cores())} cores", *more])
