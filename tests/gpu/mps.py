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


class Mps:
    """The daemons that were started, in folders of their own below ``root``; the last one serves what is started now.

    ``reason``: why it does not, or nothing.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._folders: list[Path] = []
        self.reason = "no daemon was started"

    def start(self) -> None:
        """Start a daemon. An earlier one goes on serving what uses it."""
        if shutil.which(CONTROL) is None:
            self.reason = f"no {CONTROL}"
            return
        folder = self._root / f"mps-{len(self._folders)}"
        for path in _variables(folder).values():
            Path(path).mkdir(parents=True)
        self._folders.append(folder)
        status, said = _call(folder, ["-d"], "")
        self.reason = "" if status == 0 else said[-200:] or f"{CONTROL} ended with status {status}"

    def variables(self) -> dict[str, str]:
        """Return what a process that shall use it has in its environment."""
        return {} if self.reason else _variables(self._folders[-1])

    def check(self) -> None:
        """See whether a process has used it, which has a server started; else nothing shall use it any more."""
        status, said = _call(self._folders[-1], [], "get_server_list\n")
        if status != 0 or not any(word.isdigit() for word in said.split()):
            self.reason = "MPS has served nobody"

    def stop(self) -> None:
        """End all daemons and their servers."""
        for folder in self._folders:
            _call(folder, [], "quit\n")


def _variables(folder: Path) -> dict[str, str]:
    return {"CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"), "CUDA_MPS_LOG_DIRECTORY": str(folder / "log")}


def _call(folder: Path, arguments: list[str], said: str) -> tuple[int, str]:
    """The status of the program and what it prints, into a file: the daemon would keep a pipe open."""
    environment, output = {**os.environ, **_variables(folder)}, folder / "said"
    with output.open("wb") as file:
        try:
            done = subprocess.run(
                [CONTROL, *arguments],
                input=said.encode(), env=environment, stdout=file, stderr=file, timeout=SECONDS, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return 1, f"did not answer in {SECONDS} s"
    return done.returncode, output.read_text(errors="replace").strip()
