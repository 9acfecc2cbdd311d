"""Results of benchmarks as Markdown: names of peers, ratios, durations, and tables that state their origin."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
NAMES = {
    "alone": "compute alone, nothing sent",
    "alone with a barrier": "compute alone, with a barrier after each step",
    "DDP": "DistributedDataParallel (DDP) on Gloo",
    "DDP fp16": "DDP with its fp16 hook",
    "DDP PowerSGD": "DDP with its PowerSGD hook",
    "hvdkit under DDP": "**DDP on hvdkit's process group**",
    "one pass": "bound: one pass over memory that both ranks map",
    "memory": "bound: a copy in memory on each rank",
    "hvdkit fusion buffer": "**hvdkit, gradients in its fusion buffer**",
}
LIBRARIES = {"hvdkit horovod": "hvdkit on Horovod's engine", "mpi4py": "raw mpi4py", "Gloo": "raw Gloo"}
ENGINES = {None: "", "mpi": " on MPI", "gloo": " on Gloo", "torch": " on Gloo"}
VARIANTS = {"topk": "top-k 1 %", "powersgd": "PowerSGD", "2 links": "with two TCP connections"}
# By results file: the packages, besides those of all files, whose versions stand below its tables.
PACKAGES = {
    "keras_fit": {"tensorflow": "TensorFlow", "keras": "Keras"},
    "elastic": {"torchft-nightly": "torchft (nightly)"},
}
FLAGS = {"avx2": "AVX2", "avx512f": "AVX-512", "avx512_bf16": "AVX-512 BF16", "amx_tile": "AMX", "sve": "SVE"}


def result(name: str) -> dict[str, Any]:
    """Return the content of the results file ``name``, and its name as "file"."""
    return {**json.loads((RESULTS / f"{name}.json").read_text()), "file": name}


def origin(document: dict[str, Any]) -> str:
    """Return the line below a table: the machine, versions, commit and date of its results."""
    machine = document["machine"]
    features = [shown for flag, shown in FLAGS.items() if flag in machine.get("cpu_flags", ())]
    cpu = f"{machine['cpu']} ({', '.join([*features, str(machine['usable_cores']) + ' cores'])})"
    versions = [f"Python {machine['python']}", f"PyTorch {machine['torch']}", machine["mpi"]]
    packages = {"horovod": "Horovod", **PACKAGES.get(document["file"], {})}
    versions += [f"{name} {machine[key]}" for key, name in packages.items() if machine.get(key)]
    rounds = document["arguments"].get("rounds")
    parts = [cpu, *versions, *([f"{rounds} round{'s' * (rounds != 1)}"] if rounds else [])]
    commit = f"commit {machine['commit']}, " if machine.get("commit") else ""
    path = f"../benchmarks/results/{document['file']}.json"
    return f"*{', '.join(filter(None, parts))}; {commit}{document['date'][:10]} ([all values]({path})).*"


def table(headers: Sequence[str], rows: Iterable[Sequence[str]], document: dict[str, Any]) -> str:
    """Return a Markdown table of the figures in ``document``, with the line of its origin below it."""
    lines = [f"| {' | '.join(headers)} |", f"|---|{'---:|' * (len(headers) - 1)}"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([*lines, "", origin(document)])


def peer(name: str) -> str:
    """Return the name of a peer for readers; hvdkit's are bold."""
    if name in NAMES:
        return NAMES[name]
    found = re.fullmatch(r"(hvdkit horovod|hvdkit|Horovod|mpi4py|Gloo)\b(?: (mpi|torch|gloo)\b)?,? ?(.*)", name)
    if found is None:
        return name
    library, engine, variant = found.groups()
    words = LIBRARIES.get(library, library) + ENGINES[engine]
    if variant:
        words += f"{',' * (engine is not None or library != 'hvdkit')} {VARIANTS.get(variant, variant)}"
    return f"**{words}**" if library.startswith("hvdkit") else words


def ratio_of(pairs: Iterable[tuple[float, float]]) -> dict[str, float]:
    """Return the median, smallest and largest ratio of two times that were measured in the same round."""
    ratios = [time / base for time, base in pairs]
    return {"median": median(ratios), "min": min(ratios), "max": max(ratios)}


def spread(ratio: dict[str, float] | None, low: str = "min", high: str = "max") -> str:
    """Return "0.91 [0.89, 0.93]": the median, and the smallest and largest of several rounds, or the quartiles."""
    if ratio is None:
        return "-"
    between = "" if ratio[low] == ratio[high] else f" [{ratio[low]:.2f}, {ratio[high]:.2f}]"
    return f"{ratio['median']:.2f}{between}"


def percent(value: float) -> str:
    """Return a share with its sign and two digits, or without decimals from 10 % on."""
    return f"{value:.0f} %" if value >= 10 else f"{value:.2g} %"


def duration(milliseconds: float) -> str:
    """Return a duration with its unit and two or three digits."""
    if milliseconds < 1:
        return f"{1e3 * milliseconds:.0f} us"
    return f"{milliseconds:.1f} ms" if milliseconds < 20 else f"{milliseconds:,.0f} ms"
