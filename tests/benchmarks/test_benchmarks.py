"""Every benchmark runs to its end with all of its peers that are here, at sizes that take no time.

What it measures is not looked at: these are sizes and a machine that say nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launch.launching import run_to_end
from tests.ranks import ROOT, rank_environment

sys.path.insert(0, str(ROOT / "benchmarks"))
import arrival
import jobs
import time_to_loss

SMALL_MODEL = ["--layers", "1", "--width", "32"]
SMALL_STEP = [*SMALL_MODEL, "--steps", "1", "--warmup-steps", "2", "--batch-size", "1", "--context", "16"]
# The flags, and the peers that take part.
BENCHMARKS = {
    "allreduce": (
        ["--smallest", "4096", "--largest", "65536", "--calls", "3"],
        ["hvdkit fusion buffer", "hvdkit torch in place", "one pass", "mpi4py", "Gloo"],
    ),
    "step": ([*SMALL_STEP, "--models", "transformer"], ["alone", "DDP fp16", "hvdkit mpi", "hvdkit torch fp16"]),
    "keras_fit": (SMALL_STEP, ["alone", "hvdkit"]),
    "idle": (["--seconds", "0.2", "--slow-seconds", "0.2"], ["torch", "hvdkit mpi"]),
    "memory": ([*SMALL_MODEL, "--steps", "1"], ["plain", "DDP", "hvdkit torch wrapped"]),
    "compression": (["--elements", "20000", "--rounds", "2", "--settle", "2"], []),
    "accuracy": (["--epochs", "1"], ["none", "int8", "dgc"]),
    "device_compression": (["--device", "cpu", "--elements", "50000", "--rounds", "2"], []),
    "many_ranks": (["--ranks", "2"], ["hvdkit torch", "Gloo"]),
    "coordinator": (["--sizes", "8", "32", "--operations", "3"], []),
    "overhead": (["--seconds", "0.5", "--block", "0.01", "--models", "small"], []),
}


def run(name: str, flags: list[str], folder: Path) -> tuple[dict[str, Any], str]:
    """What a benchmark wrote and printed."""
    done = run_to_end([sys.executable, f"benchmarks/{name}.py", *flags, "--output", str(folder)], 280)
    assert done.status == 0, done.stdout + done.stderr
    assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    return json.loads((folder / f"{name}.json").read_text()), done.stdout


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            yield from numbers(one)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield value


# One is enough for `make test`.
ESSENTIAL = ("device_compression",)


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[] if one in ESSENTIAL else [pytest.mark.thorough]) for one in BENCHMARKS]
)
def test_a_benchmark_runs_and_tells_of_every_peer(name: str, tmp_path: Path) -> None:
    flags, peers = BENCHMARKS[name]
    chosen = ["--rounds", "1", "--peers", *peers] if peers else []
    document, printed = run(name, [*flags, *chosen], tmp_path)
    assert document["benchmark"] == name
    assert document["machine"]["usable_cores"] >= 1
    found = list(numbers([value for key, value in document.items() if key not in ("machine", "arguments")]))
    assert len(found) > 5
    assert all(math.isfinite(number) for number in found)
    if name == "overhead":
        assert [(one["model"], one["same_weights"]) for one in document["summary"]] == [("small", True)]
    for peer in peers:
        assert re.search(rf"\| +{peer} +\|", printed), printed


@pytest.mark.thorough
def test_contestants_take_turns_in_one_job(tmp_path: Path) -> None:
    flags = ["--models", "words", "--batch-size", "1", "--blocks", "2", "--block", "1"]
    document, printed = run("beside", [*flags, "--rounds", "1", "--peers", "hvdkit torch"], tmp_path)
    (one,) = document["models"].values()
    assert not one["errors"]
    peers = [entry["peer"] for entry in one["summary"]["hvdkit torch"]]
    assert peers == ["alone", "alone with a barrier", "DDP", "hvdkit"]
    assert all(math.isfinite(number) and number for number in numbers(one["rounds"]))
    assert "of DDP's loss avoided" in printed


@pytest.mark.parametrize(
    ("name", "path"), [pytest.param("allreduce", ROOT, marks=pytest.mark.thorough), ("compression", None)]
)
def test_a_checkout_without_native_kernels_is_told_at_the_start(name: str, path: Path | None, tmp_path: Path) -> None:
    """Beside an hvdkit that has them, for the scripts that start ranks, which import the checkout's."""
    for part in ("benchmarks", "hvdkit"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("*.so", "results"))
    command = [sys.executable, f"{tmp_path}/benchmarks/{name}.py", "--rounds", "1", "--output", str(tmp_path)]
    done = run_to_end(command, PYTHONPATH=str(path or tmp_path))
    assert done.status == 1
    assert not done.stdout
    problem, hint = done.stderr.splitlines()
    assert f"in {tmp_path}, has no native kernels" in problem
    assert "HINT" in hint


def test_one_command_measures_with_every_benchmark_that_needs_no_gpu() -> None:
    done = run_to_end([sys.executable, "benchmarks/all.py", "--list"], 60)
    assert done.status == 0, done.stderr
    listed = {line.split()[1] for line in done.stdout.splitlines()}
    paths = [path for path in (ROOT / "benchmarks").glob("*.py") if "common.parse(parser)" in path.read_text()]
    assert listed == {f"benchmarks/{path.name}" for path in paths if not path.name.startswith("device_")}


def test_a_part_that_does_not_exist_is_refused() -> None:
    done = run_to_end([sys.executable, "benchmarks/all.py", "beside", "steps"], 60)
    assert done.status == 2
    assert "no such part: steps; the parts are beside, step, two_hosts," in done.stderr


def test_all_scripts_look_for_native_kernels() -> None:
    paths = (ROOT / "benchmarks").glob("*.py")
    scripts = [path.read_text() for path in paths if path.name != "all.py"]  # it runs the others
    programs = [script for script in scripts if '__name__ == "__main__"' in script]
    assert len(programs) >= len(BENCHMARKS)
    assert all("common.parse(parser)" in program for program in programs)
    assert jobs.without_native_kernels(rank_environment()) is None


def _trained(*losses: float) -> dict[str, Any]:
    """The digest of a run of a step a second and of 10 bytes a step, with these losses before it and after each."""
    args = argparse.Namespace(steps=len(losses) - 1, evaluate_every=1)
    steps = [[loss, 1.0, 10, 0] for loss in losses[1:]]
    reports = [{"steps": steps, "evaluations": losses, "weights": losses[-1]}] * 2
    return time_to_loss.digest(args, jobs.Peer("peer", "ddp", "plain"), reports)


def test_the_time_to_a_loss_lies_on_the_line_between_two_smoothed_evaluations() -> None:
    run = _trained(6.0, 6.0, 6.0, 3.0, 3.0)
    assert run["curve"]["loss"] == [6.0, 6.0, 6.0, 5.0, 4.0]
    assert run["curve"]["bytes"] == [0, 10, 20, 30, 40]
    assert arrival.seconds_to(run, 5.5) == 2.5
    assert arrival.seconds_to(run, 4.0) == 4.0
    assert arrival.seconds_to(run, 3.9) is None


@pytest.mark.parametrize("losses", [(6.0, math.nan, math.nan), (6.0, 5.0, math.inf), (6.0, 7.0, 8.0)])
def test_a_run_that_diverged_is_told_and_reaches_no_loss(losses: tuple[float, ...]) -> None:
    names = ["DDP", "hvdkit int8"]
    rounds = [{"DDP": _trained(6.0, 5.0, 4.0), "hvdkit int8": _trained(*losses)}]
    dense, own = arrival.summarise(names, rounds, 0.5)
    assert not dense["diverged"]
    assert own["diverged"]
    assert own["seconds_to"] == {"dense": None, "common": None}
    (verdict,) = [one for one in arrival.verdicts(1, [dense, own]) if "hvdkit int8" in one["target"]]
    assert (verdict["said"], verdict["met"]) == ("diverged", False)
    json.dumps(rounds, allow_nan=False)
