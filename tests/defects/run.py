"""Put each defect in, run the tests that ought to find it, and count.

    python -m tests.defects.run                         # all, written to tests/defects/SCORE.md
    python -m tests.defects.run 07 12 --revision HEAD~3 # some, in the tests and the code of another commit

The tests run in a clone of their own, first without a defect: what fails there says nothing about one.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
from tqdm import tqdm

from tests.defects.patches import FOLDER, Defect, all_defects

ROOT = FOLDER.parents[1]
SCORE = FOLDER / "SCORE.md"
KEPT = FOLDER / "score.json"
SUITE = "make test"
LIMIT_SECONDS = 900
ENDING_SECONDS = 60
NATIVE = "hvdkit/kernels"
CRASHES = (signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV)


@dataclass(frozen=True)
class Verdict:
    """What the tests said of a defect."""

    name: str
    found: bool
    by: str  # the first test that failed, or how it ended otherwise


class Tree:
    """A clone of this repository that defects are put into, one after the other."""

    def __init__(self, folder: Path, revision: str) -> None:
        self.folder = folder
        self._git("clone", "--quiet", "--shared", "--no-checkout", str(ROOT), str(folder), at=ROOT)
        self._git("checkout", "--quiet", "--detach", revision)
        built = list((ROOT / NATIVE).glob("_native*.so"))
        if not built:
            raise SystemExit("the native kernels are not built here: make .venv/.ready-test")
        for path in built:
            shutil.copy2(path, folder / NATIVE)

    def _git(self, *words: str, at: Path | None = None) -> None:
        subprocess.run(["git", *words], cwd=at or self.folder, check=True)

    def put_in(self, defect: Defect) -> None:
        """Apply the patch, and build where it must be compiled."""
        self._git("apply", str(defect.path))
        if defect.is_native:
            self._build()

    def take_out(self, defect: Defect) -> None:
        """Undo put_in."""
        self._git("checkout", "--quiet", ".")
        if defect.is_native:
            for path in (ROOT / NATIVE).glob("_native*.so"):
                shutil.copy2(path, self.folder / NATIVE)

    def _build(self) -> None:
        command = [sys.executable, "setup.py", "build_ext", "--inplace", "--force"]
        built = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, check=False)
        if built.returncode:
            raise SystemExit(f"a defect does not compile:\n{built.stdout}\n{built.stderr}")

    def run(self, tests: Sequence[str], options: Sequence[str] = ()) -> tuple[int | None, str]:
        """The exit status of pytest, None if it ran past its time limit, and what it printed."""
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *options, *tests]
        environment = {**os.environ, "PYTHONPATH": str(self.folder)}
        with tempfile.TemporaryFile("w+") as printed:
            process = subprocess.Popen(
                command, cwd=self.folder, env=environment, stdout=printed, stderr=printed, start_new_session=True
            )
            status = None
            try:
                with suppress(subprocess.TimeoutExpired):
                    status = process.wait(LIMIT_SECONDS)
            finally:
                end(process)
            printed.seek(0)
            return status, printed.read()


def end(process: subprocess.Popen[bytes]) -> None:
    """End a session that may still run, in such a way that it can clean up."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(ENDING_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def judge(defect: Defect, status: int | None, printed: str) -> Verdict:
    """What a run of pytest with a defect put in says of it."""
    if status is None:
        return Verdict(defect.name, True, f"did not end within {LIMIT_SECONDS} s")
    if status in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
        return Verdict(defect.name, False, "")
    if -status in CRASHES:  # and not by somebody who ends it
        return Verdict(defect.name, True, f"killed by signal {-status}")
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", printed, re.MULTILINE)
    if status != 1 or failed is None:
        raise SystemExit(f"{defect.name}: pytest {' '.join(defect.tests)} ended with {status}:\n{printed[-4000:]}")
    return Verdict(defect.name, True, failed[1])


def run(
    defects: Sequence[Defect], revision: str, side_by_side: int, known_to_pass: bool, options: Sequence[str] = ()
) -> Iterator[Verdict]:
    """Put in each defect, after the tests were seen to pass without."""
    with (
        tempfile.TemporaryDirectory(prefix="hvdkit-defects-") as folder,
        ThreadPoolExecutor(side_by_side) as pool,
        tqdm(total=(1 if known_to_pass else 2) * len(defects), unit="run") as bar,
    ):
        trees: queue.SimpleQueue[Tree] = queue.SimpleQueue()
        for number in range(side_by_side):
            trees.put(Tree(Path(folder, str(number)), revision))

        @contextmanager
        def a_tree() -> Iterator[Tree]:
            tree = trees.get()
            try:
                yield tree
            finally:
                trees.put(tree)

        def without(tests: tuple[str, ...]) -> None:
            with a_tree() as tree:
                status, printed = tree.run(tests, options)
            if status not in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
                raise SystemExit(f"pytest {' '.join(tests)} fails without any defect:\n{printed[-4000:]}")
            bar.update()

        def put_in(defect: Defect) -> Verdict:
            with a_tree() as tree:
                try:
                    tree.put_in(defect)
                    verdict = judge(defect, *tree.run(defect.tests, options))
                finally:
                    tree.take_out(defect)
            bar.update()
            if not verdict.found:
                tqdm.write(f"not found: {defect.name}: {defect.what}")
            return verdict

        if not known_to_pass:
            list(pool.map(without, [defect.tests for defect in defects]))
        yield from pool.map(put_in, defects)


def table(defects: Sequence[Defect], verdicts: dict[str, list[Verdict]]) -> str:
    """The score for people: ``verdicts`` by the name of a suite, the oldest first."""
    lines = ["# What the tests find", "", "Written by `make test-defects`.", ""]
    for suite, told in verdicts.items():
        lines.append(f"- {suite}: {sum(one.found for one in told)} of {len(told)} defects found")
    lines += [
        "",
        f"| defect | from | {' | '.join(verdicts)} | first test that fails |",
        "|---" * (3 + len(verdicts)) + "|",
    ]
    by_name = {suite: {one.name: one for one in told} for suite, told in verdicts.items()}
    for defect in defects:
        cells = [one.get(defect.name) for one in by_name.values()]
        said = ["-" if one is None else "found" if one.found else "**not found**" for one in cells]
        by = next((one.by for one in reversed(cells) if one is not None), "")
        lines.append(
            f"| {defect.name}: {defect.what} | {defect.origin} | {' | '.join(said)} | {by} |".replace("  ", " ")
        )
    return "\n".join(lines) + "\n"


def keep(suite: str, verdict: Verdict) -> None:
    """Add to the score, at once: what comes later may take an hour."""
    known = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    entries = {one["name"]: one for one in known.get(suite, [])} | {verdict.name: asdict(verdict)}
    known[suite] = [entries[one.name] for one in all_defects() if one.name in entries]
    KEPT.write_text(json.dumps(known, indent=1) + "\n")
    SCORE.write_text(table(all_defects(), {name: [Verdict(**one) for one in told] for name, told in known.items()}))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="beginnings of names; all, if there are none")
    parser.add_argument("--revision", default="HEAD", help="whose tests and code are used")
    parser.add_argument("--suite", default=SUITE, help="what this run is called in the score")
    parser.add_argument("--known-to-pass", action="store_true", help="the tests were run without any defect already")
    parser.add_argument("--side-by-side", type=int, default=2, help="how many defects at a time")
    parser.add_argument("--all", action="store_true", help="also tests that make test leaves out")
    args = parser.parse_args(argv)
    defects = [one for one in all_defects() if not args.names or one.name.startswith(tuple(args.names))]
    found = {one["name"] for one in json.loads(KEPT.read_text()).get(args.suite, []) if one["found"]}
    verdicts = []
    for verdict in run(defects, args.revision, args.side_by_side, args.known_to_pass, ["--all"] * args.all):
        verdicts.append(verdict)
        keep(args.suite, verdict)
    print(f"{sum(one.found for one in verdicts)} of {len(verdicts)} found; wrote {SCORE}")
    lost = [one.name for one in verdicts if one.name in found and not one.found]
    if lost:
        print(f"no longer found: {', '.join(lost)}")
    return int(bool(lost))


if __name__ == "__main__":
    sys.exit(main())
