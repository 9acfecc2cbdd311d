"""The environment variables by which a NCCL process group is told how it is watched."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

# NCCL's watchdog may end a communicator, never the process: deadlines and errors are the engine's.
WATCHDOG = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2", "TORCH_NCCL_BLOCKING_WAIT": "0"}


@contextmanager
def watchdog_options() -> Iterator[None]:
    """WATCHDOG in the environment, for as long as it takes to make a process group; torch has no argument for it."""
    before = {name: os.environ.get(name) for name in WATCHDOG}
    os.environ.update(WATCHDOG)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
