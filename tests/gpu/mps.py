"""NVIDIA's MPS: processes that share a GPU run their kernels at the same time, where else they take turns.

NCCL's kernels wait for each other on the GPU, so that turns make each exchange last for milliseconds.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
SECONDS = 10


def variables(folder: Path) -> dict[str, str]:
    """The environment of the daemon and of the processes that use it."""
    return {"CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"), "CUDA_MPS_LOG_DIRECTORY": str(folder / "log")}


def start(folder: Path) -> str:
    """Start the daemon. Returns why it does not run, or nothing."""
    if shutil.which(CONTROL) is None:
        return f"no {CONTROL}"
    for path in variables(folder).values():
        Path(path).mkdir(parents=True, exist_ok=True)
    status, said = _call(folder, ["-d"], "")
    return "" if status == 0 else said[-200:] or f"{CONTROL} ended with status {status}"


def is_used(folder: Path) -> bool:
    """Whether it has a server, which it starts for the first process that uses it."""
    status, said = _call(folder, [], "get_server_list\n")
    return status == 0 and any(word.isdigit() for word in said.split())


def stop(folder: Path) -> None:
    """End the daemon and its servers."""
    _call(folder, [], "quit\n")


def _call(folder: Path, arguments: list[str], said: str) -> tuple[int, str]:
    """The status of the program and what it prints, into a file: the daemon would keep a pipe open."""
    environment, output = {**os.environ, **variables(folder)}, folder / "said"
    with output.open("wb") as file:
        try:
            done = subprocess.run(
                [CONTROL, *arguments],
                input=said.encode(), env=environment, stdout=file, stderr=file, timeout=SECONDS, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return 1, f"did not answer in {SECONDS} s"
    return done.returncode, output.read_text(errors="replace").strip()
