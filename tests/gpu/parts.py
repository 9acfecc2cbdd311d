"""The parts of tests/gpu/run.sh: what each runs, for how long it may, and whether others may run beside it."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass, field

PYTEST = ("-m", "pytest", "-q", "--all", "-p", "tests.gpu.telling", "-p", "no:cacheprovider", "-p", "no:xdist")
DOCTOR = "import sys; from hvdkit.command import main; sys.exit(main(['doctor']))"
# Two ranks exchange a gradient by NCCL on one GPU: in turns on the GPU, and at the same time, if that works.
NCCL_IN_TURNS, NCCL_WITH_MPS = "nccl-in-turns", "nccl-with-mps"


@dataclass(frozen=True)
class Part:
    """``seconds``: its time limit. ``is_alone``: nothing runs beside it, since it measures or others need it first.

    ``has_figures``: it is a benchmark, which writes JSON and plots into the folder that ``--output`` names.
    """

    name: str
    command: tuple[str, ...]
    seconds: int
    is_alone: bool = False
    has_figures: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    is_tests: bool = False
    wants_mps: bool = False  # its ranks' kernels wait for each other
    starts_ranks: bool = False  # and has a time limit for that, ``--timeout``


def _tests(name: str, *arguments: str, wants_mps: bool = False) -> Part:
    return Part(name, (sys.executable, *PYTEST, *arguments), 150, is_tests=True, wants_mps=wants_mps)


def _on_card(subject: str, way: str, ranks: int = 2) -> Part:
    """The tests of a subject on one job, as tests/gpu/card.py names it."""
    module, job = f"tests/gpu/test_{subject}.py", f"{way}:{ranks}"
    return _tests(f"{subject}-{way}-{ranks}", module, "-k", job, wants_mps=way == "nccl")


def _figures(name: str, script: str, *arguments: str, seconds: int = 120) -> Part:
    command = (sys.executable, f"benchmarks/{script}.py", *arguments)
    wants_mps, starts_ranks = "nccl" in arguments, "--ranks" in arguments
    return Part(name, command, seconds, is_alone=True, has_figures=True, wants_mps=wants_mps, starts_ranks=starts_ranks)


def all_parts(device: str) -> list[Part]:
    """In the order in which they start: what others need, what tells most, then the rest and the figures."""
    python = sys.executable
    small = ("--device", "cpu", "--small") if device == "cpu" else ()
    checked = ("compute-sanitizer", "--tool=memcheck", "--error-exitcode=1", "--target-processes=application-only")
    checked = (*checked, "--report-api-errors=no")  # libraries try what may fail
    checker = checked if shutil.which("compute-sanitizer") and device == "cuda" else ()
    required = {"HVDKIT_REQUIRE_NATIVE": "1"}
    return [
        Part("build", (python, "setup.py", "build_ext", "--inplace"), 150, is_alone=True, environment=required),
        Part("doctor", (python, "-c", DOCTOR), 60),
        Part("kernels", (python, "-m", "tests.transports.kernels_beside_torch", device), 120),
        Part(NCCL_IN_TURNS, (python, "-m", "tests.gpu.one_step"), 90, is_alone=True),
        Part(NCCL_WITH_MPS, (python, "-m", "tests.gpu.one_step"), 90, is_alone=True, wants_mps=True),
        _tests("streams", "tests/gpu/test_streams.py"),
        _on_card("training", "nccl"),
        _on_card("training", "host"),
        _on_card("operations", "nccl"),
        _on_card("operations", "host"),
        _tests("codecs", "tests/transports/test_device_compression.py", "-k", device),
        _on_card("races", "nccl"),
        _on_card("races", "host"),
        _on_card("state", "nccl"),
        _on_card("state", "host"),
        _tests("failures", "tests/gpu/test_card.py"),
        _figures("codec-figures", "device_compression", *(("--device", "cpu", "--elements", "1e5") if small else ())),
        _figures("steps-1", "device_step", "--ranks", "1", *small),
        _figures("steps-2-nccl", "device_step", "--ranks", "2", "--way", "nccl", *small),
        _figures("steps-2-host", "device_step", "--ranks", "2", "--way", "host", *small),
        _on_card("operations", "nccl", 4),
        _on_card("training", "nccl", 4),
        _on_card("operations", "host", 4),
        _on_card("training", "host", 4),
        *(
            Part(
                f"sanitizer-{way}",
                (*checker, python, "-m", "tests.gpu.one_step"),
                150,
                # Each tensor has memory of its own then, beyond which an access is seen.
                environment={"TESTS_WAY": way, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "NCCL_MAX_NCHANNELS": "1"},
            )
            for way in ("nccl", "host")
        ),
    ]
