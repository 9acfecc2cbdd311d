"""How a process ends at once where coverage is measured: without clean-up, but with what it covered written."""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn


def killed() -> None:
    """End this process by SIGKILL."""
    _write()
    os.kill(os.getpid(), signal.SIGKILL)


def exited(status: int) -> NoReturn:
    """End this process without Python's clean-up, nor the C library's."""
    _write()
    os._exit(status)


def _write() -> None:
    coverage, native = sys.modules.get("coverage"), sys.modules.get("hvdkit.kernels._native")
    if coverage is not None and (measurement := coverage.Coverage.current()):
        measurement.save()
    if hasattr(native, "write_coverage"):
        native.write_coverage()
