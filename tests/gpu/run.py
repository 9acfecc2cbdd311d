"""Run the parts of tests/gpu, some side by side, and save one table as they end. See run.sh."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.gpu.mps import Mps
from tests.gpu.parts import NCCL_WITH_MPS, Part, all_parts
from tests.gpu.telling import TELL

ROOT = Path(__file__).resolve().parents[2]
BESIDE = 4  # parts at a time
TAIL = 4000
LAST_SECONDS = 15  # for the table, and the parts that are stopped


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="what the parts run on")
    parser.add_argument("--only", nargs="+", metavar="PART", help="these parts")
    parser.add_argument("--list", action="store_true", help="name the parts")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results", help="where the table goes")
    parser.add_argument("--budget", type=float, default=470, help="seconds in all; what has not begun then is not run")
    return parser.parse_args()


@dataclass
class Running:
    """A part that has been started."""

    part: Part
    process: subprocess.Popen[bytes]
    began: float
    output: Any
    folder: Path
    is_stopped: bool = False


class Run:
    """All parts, and the results of those that have ended."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder, self.began = args, folder, time.monotonic()
        self.about = about(args.device)
        self.ended: list[dict[str, Any]] = []
        self.mps = Mps(folder)
        if args.device == "cuda":
            self.mps.start()

    def left(self) -> float:
        """Seconds of the budget."""
        return self.args.budget - (time.monotonic() - self.began)

    def start(self, part: Part) -> Running:
        folder = self.folder / part.name
        folder.mkdir()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        environment.update(part.environment)
        if part.wants_mps:
            environment.update(self.mps.variables())
        environment.update({"TESTS_DEVICE": self.args.device, TELL: str(folder / "cases")})
        of_figures = ("--output", str(folder), *(("--timeout", str(part.seconds - 10)) if part.starts_ranks else ()))
        command = [*part.command, *(of_figures if part.has_figures else ())]
        output = (folder / "output").open("wb")
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        return Running(part, process, time.monotonic(), output, folder)

    def is_over(self, running: Running) -> bool:
        """True if a part has ended or was stopped at its limit; then its result is saved."""
        seconds = time.monotonic() - running.began
        status = None if running.is_stopped else running.process.poll()
        if status is None and not running.is_stopped and seconds <= running.part.seconds:
            return False
        stop(running.process)
        running.output.close()
        self.ended.append(result(running, seconds, status))
        if running.part.wants_mps and not self.mps.reason:
            self.look_at_mps(running.part, self.ended[-1])
        self.save()
        with tarfile.open(self.path.with_name(f"{self.path.stem}-raw.tar.gz"), "w:gz") as raw:
            for file in sorted(self.folder.glob("*/*")):
                if file.is_file() and file.suffix in ("", ".json"):
                    raw.add(file, file.relative_to(self.folder))
        for picture in running.folder.glob("*.png"):
            shutil.copy(picture, self.path.with_name(f"{self.path.stem}-{running.part.name}.png"))
        print(line(self.ended[-1]), flush=True)
        return True

    def look_at_mps(self, part: Part, ended: dict[str, Any]) -> None:
        """Go on without MPS where it does not work, and with a new one after a part was killed in the middle of it."""
        if part.name == NCCL_WITH_MPS:
            if ended["outcome"] == "passed":
                self.mps.check()
            else:
                self.mps.reason = "it does not work here"
            if self.mps.reason:
                ended.update(outcome="failed", why=self.mps.reason)
        elif ended["outcome"] == "stopped" and self.left() > LAST_SECONDS:
            self.mps.start()

    def skip(self, part: Part, why: str) -> None:
        self.ended.append({"part": part.name, "outcome": "not run", "why": why, "seconds": 0.0, "cases": []})
        print(line(self.ended[-1]), flush=True)
        self.save()

    @property
    def path(self) -> Path:
        """The table's, in JSON."""
        card = re.sub(r"[^a-z0-9]+", "-", self.about["card"].lower()).strip("-")
        return Path(self.args.results / f"gpu-{card}.json")

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        seconds = round(time.monotonic() - self.began, 1)
        self.path.write_text(json.dumps({**self.about, "seconds": seconds, "parts": self.ended}, indent=1) + "\n")
        self.path.with_suffix(".txt").write_text(table(self.about, self.ended))


def about(device: str) -> dict[str, str]:
    """Return the machine, its GPU and the versions of libraries."""
    facts = {
        "card": device,
        "python": sys.version.split()[0],
        "commit": said_by("git", "rev-parse", "--short", "HEAD"),
        "date": time.strftime("%Y-%m-%d"),
    }
    try:
        import torch

        facts.update(torch=torch.__version__, cuda=str(torch.version.cuda))
        if device == "cuda":
            facts["driver"] = said_by("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
            facts["card"] = torch.cuda.get_device_name()
            facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    except Exception as error:  # the parts will tell more of it
        facts["problem"] = f"{type(error).__name__}: {error}"
    return facts


def said_by(*command: str) -> str:
    """Return the output of a program; an empty text if it is missing or fails."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip()


def stop(process: subprocess.Popen[bytes]) -> None:
    """Kill what a part has started, with the ranks that have sessions of their own, and wait for it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def result(running: Running, seconds: float, status: int | None) -> dict[str, Any]:
    cases_file = running.folder / "cases"
    cases = [json.loads(case) for case in cases_file.read_text().splitlines()] if cases_file.exists() else []
    entry: dict[str, Any] = {
        "part": running.part.name,
        "outcome": "stopped" if status is None else "passed" if status == 0 else "failed",
        "seconds": round(seconds, 1),
        "cases": cases,
    }
    if running.part.is_tests and status == 5:
        entry["outcome"], entry["why"] = "not run", "no such test"
    for path in running.folder.glob("*.json"):
        with contextlib.suppress(json.JSONDecodeError):  # of a part that was stopped while it wrote
            entry["figures"] = json.loads(path.read_text())["summary"]
    if entry["outcome"] != "passed" or not cases:
        entry["output"] = (running.folder / "output").read_text(errors="replace")[-TAIL:]
    return entry


def line(entry: dict[str, Any]) -> str:
    counts = Counter(case["outcome"] for case in entry["cases"])
    cases = ", ".join(f"{counts[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped") if counts[outcome])
    return f"{entry['part']:18} {entry['outcome']:8} {entry['seconds']:6.1f} s  {cases or entry.get('why', '')}"


def table(about: dict[str, str], ended: list[dict[str, Any]]) -> str:
    lines = [", ".join(f"{name} {value}" for name, value in about.items()), ""]
    for entry in ended:
        lines.append(line(entry))
        for case in entry["cases"]:
            if case["outcome"] != "passed":
                last = [text for text in case["text"].splitlines() if text.strip()][-1:] or [""]
                lines.append(f"    {case['outcome']}: {case['case']}: {last[0].strip()[:200]}")
        for target in entry.get("figures", {}).get("targets", []):
            verdict = "met" if target["met"] else "MISSED"
            lines.append(f"    {verdict}: {target['what']}: {target['value']} (must: {target['must']})")
    return "\n".join(lines) + "\n"


def main() -> int:
    args = parse()
    parts = all_parts(args.device)
    if args.list:
        print("\n".join(part.name for part in parts))
        return 0
    if args.only:
        if unknown := set(args.only) - {part.name for part in parts}:
            sys.exit(f"no such part: {', '.join(sorted(unknown))}\nHINT: --list names all.")
        parts = [part for part in parts if part.name in args.only]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        run = Run(args, Path(folder))
        try:
            go_through(run, parts)
        finally:
            run.mps.stop()
    print(f"\n{table(run.about, run.ended)}")
    return int(any(entry["outcome"] != "passed" for entry in run.ended))


def go_through(run: Run, parts: Sequence[Part]) -> None:
    waiting, running = list(parts), []
    while waiting or running:
        if run.left() < LAST_SECONDS:
            for active in running:  # all at once, before any of them is reported
                if active.process.poll() is None:
                    active.is_stopped = True
                    stop(active.process)
        running = [active for active in running if not run.is_over(active)]
        if waiting and run.left() < LAST_SECONDS:
            for part in waiting:
                run.skip(part, "the time was up")
            waiting = []
        while waiting and len(running) < BESIDE and not any(active.part.is_alone for active in running):
            if waiting[0].is_alone and running:
                break
            part = waiting.pop(0)
            if part.name == NCCL_WITH_MPS and run.mps.reason:
                run.skip(part, run.mps.reason)
            else:
                running.append(run.start(part))
        time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(main())
