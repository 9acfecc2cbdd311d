"""The shared parts of all benchmarks: peers in interleaved rounds, statistics, tables, flags, JSON and plots."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jobs
import numpy as np
import psutil
from jobs import Peer, has_mpi
from tqdm import tqdm

RESULTS = Path(__file__).resolve().parent / "results"
USUAL_RANKS = 2
KERNEL_FLAGS = {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_bf16", "amx_tile", "asimd", "asimdhp", "sve"}


def run_rounds(
    peers: Sequence[Peer], rounds: int, job: Callable[[Peer], Any]
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Run the job of each peer once a round, in another order each round, so that a slow minute hits all alike.

    Return the rounds, each with a result per peer, and the errors of the peers that failed. No round has a peer that
    failed in any round.
    """
    results: list[dict[str, Any]] = []
    errors: dict[str, str] = {}
    shuffled = random.Random(0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the running job, too
    with tqdm(total=rounds * len(peers), unit="job") as bar:
        for turn in range(rounds):
            results.append({})
            for peer in shuffled.sample(list(peers), len(peers)):
                bar.set_description(f"round {turn + 1}/{rounds}, {peer.name}")
                if peer.name not in errors:
                    try:
                        results[-1][peer.name] = job(peer)
                    except RuntimeError as error:
                        errors[peer.name] = str(error)
                        bar.write(f"left out: {error}")
                bar.update()
    # Only whole rounds can be compared.
    return [{name: value for name, value in one.items() if name not in errors} for one in results], errors


def spread(values: Iterable[float]) -> dict[str, float]:
    """Return the median, the quartiles, the 90th percentile and the count."""
    data = np.asarray(list(values), dtype=float)
    q1, median, q3, p90 = np.quantile(data, [0.25, 0.5, 0.75, 0.9])
    return {"median": median, "q1": q1, "q3": q3, "p90": p90, "n": len(data)}


def paired_ratio(rounds: Sequence[dict[str, float]], numerator: str, denominator: str) -> dict[str, float] | None:
    """Return the ratio of two peers by round: its median, smallest and largest. None if no round has both peers."""
    ratios = [one[numerator] / one[denominator] for one in rounds if numerator in one and denominator in one]
    if not ratios:
        return None
    return {"median": float(np.median(ratios)), "min": min(ratios), "max": max(ratios)}


def show_ratio(ratio: dict[str, float] | None) -> str:
    return "-" if ratio is None else f"{ratio['median']:.2f} [{ratio['min']:.2f}, {ratio['max']:.2f}]"


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table that also reads well in a terminal. The first column is flush left, the others right."""
    cells = [list(headers), *[[str(cell) for cell in row] for row in rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headers))]

    def line(row: Sequence[str]) -> str:
        padded = [
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return f"| {' | '.join(padded)} |"

    rule = [f"{'-' * (width - 1)}{':' if column else '-'}" for column, width in enumerate(widths)]
    return "\n".join([line(cells[0]), line(rule), *map(line, cells[1:])])


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _cpu_flags() -> list[str]:
    """Return the features of an x86 or ARM CPU on which the kernels depend."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return sorted(set(line.split(":", 1)[1].split()) & KERNEL_FLAGS)
    return []


def _commit() -> str | None:
    """Return the commit of this checkout; "+" marks changes of hvdkit that are not committed. None without git."""
    git = ["git", "-C", str(jobs.ROOT)]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        commit = subprocess.run([*git, "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True, check=True)
        changes = subprocess.run([*git, "status", "--porcelain", "hvdkit"], capture_output=True, text=True, check=True)
        return commit.stdout.strip() + "+" * bool(changes.stdout)
    return None


def _version(package: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def _mpi_library() -> str | None:
    if not has_mpi():
        return None
    code = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.split(",")[0].strip() or None


def machine() -> dict[str, Any]:
    """Return the machine, the versions and the commit that the figures hold for."""
    import hvdkit

    packages = ("torch", "numpy", "mpi4py", "horovod", "keras", "torchft-nightly")
    return {
        "cpu": _cpu_model(),
        "cpu_flags": _cpu_flags(),
        "cores": psutil.cpu_count(logical=False),
        "logical_cores": psutil.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "python": platform.python_version(),
        "hvdkit": hvdkit.__version__,
        "commit": _commit(),
        "mpi": _mpi_library(),
        **{package: _version(package) for package in packages},
        "tensorflow": _version("tensorflow") or _version("tensorflow-cpu"),
    }


def add_common_flags(parser: argparse.ArgumentParser, rounds: int, ranks: bool = True) -> None:
    """Add the flags of all benchmarks that run jobs, and two hidden flags that turn the script into a worker."""
    if ranks:
        parser.add_argument("--ranks", type=int, default=USUAL_RANKS, help="processes of each job")
    parser.add_argument("--threads", type=int, default=1, help="compute threads per rank")
    parser.add_argument("--rounds", type=int, default=rounds, help="rounds; each runs every peer once")
    parser.add_argument("--peers", nargs="+", metavar="NAME", help="only these peers, e.g. --peers 'hvdkit mpi' DDP")
    parser.add_argument("--timeout", type=float, default=300, help="seconds after which a job is ended")
    add_output_flag(parser)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)


def add_output_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="DIR", help="folder for JSON file and plot")


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Return the arguments. Exit with the reason if the hvdkit that is to be measured has no native kernels."""
    arguments = parser.parse_args()
    starts_ranks = hasattr(arguments, "worker")
    if not (starts_ranks and arguments.worker):
        problem = jobs.without_native_kernels(jobs.environment(1, "plain") if starts_ranks else dict(os.environ))
        if problem is not None:
            raise SystemExit(problem)
    return arguments


def chosen(peers: Sequence[Peer], names: Sequence[str] | None) -> list[Peer]:
    """Return the peers that ``--peers`` names, or all peers. Exit if it names an unknown peer."""
    unknown = sorted(set(names or []) - {peer.name for peer in peers})
    if unknown:
        raise SystemExit(
            f"no such peer: {', '.join(unknown)}; there are {', '.join(dict.fromkeys(peer.name for peer in peers))}"
        )
    return [peer for peer in peers if names is None or peer.name in names]


def colour(name: str) -> str:
    """Return the colour of a peer's bar: blue for hvdkit, orange for all other peers."""
    return "tab:blue" if name.startswith("hvdkit") else "tab:orange"


def pyplot() -> Any:
    """Return matplotlib.pyplot, which draws without a screen."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def save(name: str, args: argparse.Namespace, payload: dict[str, Any], figure: Any = None) -> None:
    """Write ``<name>.json``, and ``<name>.png`` of a ``figure``, and print their paths.

    The file names contain the number of ranks if it is not the usual number.
    """
    args.output.mkdir(parents=True, exist_ok=True)
    hidden = {"worker", "report", "output"}
    document = {
        "benchmark": name,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        "arguments": {key: value for key, value in vars(args).items() if key not in hidden},
        **payload,
    }
    ranks = getattr(args, "ranks", USUAL_RANKS)
    path = args.output / (f"{name}.json" if ranks == USUAL_RANKS else f"{name}_{ranks}_ranks.json")
    path.write_text(json.dumps(document, indent=1) + "\n")
    written = [path]
    if figure is not None:
        written.append(path.with_suffix(".png"))
        figure.tight_layout()
        figure.savefig(written[-1], dpi=150)
    print(f"\nwrote {' and '.join(os.path.relpath(each) for each in written)}")


def finish(errors: dict[str, str]) -> None:
    """Exit with status 1 if one of hvdkit's own jobs failed. Another peer that failed is only left out."""
    own = [name for name in errors if name.startswith("hvdkit")]
    if own:
        raise SystemExit(f"failed: {', '.join(own)}")
