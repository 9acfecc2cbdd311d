"""The figures of the documentation. ``python -m docs.hooks.figures`` puts them between the marks of pages.

``<!-- figures: NAME -->`` begins a block that NAME in BLOCKS makes of ``benchmarks/results``, and ``<!-- /figures -->``
ends it. ``benchmarks/all.py`` measures all results anew, then writes the pages.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from docs.hooks import costs, measurements
from docs.hooks.results import ROOT, ratio_of, result

FASTER = 1.02  # the ratio of times from which a peer counts as faster than hvdkit
COLUMNS = ("hvdkit on MPI", "hvdkit on Gloo", "DDP or Gloo", "Horovod on MPI", "raw mpi4py", "compute alone")


def measured() -> dict[str, dict[str, float]]:
    """Return the rows of the overview: the time of each column as a multiple of DDP's or Gloo's."""
    rows = {
        **{f"step on one host, {label}": _in_turn(model) for model, label in MODELS.items()},
        "step on one host, transformer of 20.7 M, AdamW": _ratios(_steps(result("step")["models"]["transformer"])),
    }
    for rate in result("two_hosts")["rates"]:
        where, steps = f"two hosts, {rate['gigabits']:g} Gb/s", _steps(rate["step"])
        rows[f"step on {where}"] = _ratios(steps)
        for codec, base, label in CODECS:
            own = {"hvdkit on MPI": f"hvdkit mpi {codec}", "hvdkit on Gloo": f"hvdkit torch {codec}"}
            rows[f"step on {where}, {label}"] = _ratios(steps, {**own, BASE: base, "compute alone": "alone"})
        sums = [
            {name: median(times) for name, times in turn.items() if name != "wire"}
            for turn in rate["allreduce"]["rounds"]
        ]
        rows[f"allreduce of 100 MB on {where}"] = _ratios(sums, SUMS)
    in_place = {column: name if name == "Gloo" else f"{name} in place" for column, name in SUMS.items()}
    for size in (4096, 1 << 20, 100_000_000):
        sums = [
            {name: median(times[str(size)]) for name, times in turn.items()} for turn in result("allreduce")["rounds"]
        ]
        rows[f"allreduce of {measurements.SIZES[size]} on one host, in place"] = _ratios(sums, in_place)
    return rows


BASE = "DDP or Gloo"
MODELS = {"words": "transformer of 20.5 M, SGD", "convolution": "ResNet-50"}  # of benchmarks/beside.py
STEPS = {
    "hvdkit on MPI": "hvdkit mpi",
    "hvdkit on Gloo": "hvdkit torch",
    BASE: "DDP",
    "Horovod on MPI": "Horovod mpi",
    "compute alone": "alone",
}
SUMS = {  # without Horovod, whose allreduces differ up to 20-fold between two jobs
    "hvdkit on MPI": "hvdkit mpi",
    "hvdkit on Gloo": "hvdkit torch",
    BASE: "Gloo",
    "raw mpi4py": "mpi4py",
}
CODECS = (  # the codec, the peer beside it, and the words for both
    ("fp16", "DDP fp16", "both with fp16"),
    ("int8", "DDP", "int8 beside DDP without a codec"),
    ("topk", "DDP", "top-k 1 % beside DDP without a codec"),
)


def _steps(measured: dict[str, Any]) -> list[dict[str, float]]:
    """Return the milliseconds of the median step of each round and peer."""
    return [{name: median(job["milliseconds"]) for name, job in turn.items()} for turn in measured["rounds"]]


def _ratios(rounds: list[dict[str, float]], peers: dict[str, str] = STEPS) -> dict[str, float]:
    """Return the median ratio to the base within a round, for each column whose peer took part."""
    return {
        column: ratio_of((turn[name], turn[peers[BASE]]) for turn in rounds)["median"]
        for column, name in peers.items()
        if name in rounds[0]
    }


def _in_turn(model: str) -> dict[str, float]:
    """Return the row of a model of ``beside.py``, where the contestants take turns in the job of each engine."""
    row = {BASE: 1.0}
    for column, engine in STEPS.items():
        turns = [turn for each in result("beside")["models"][model]["rounds"] for turn in each.get(engine, ())]
        if turns:
            times = [{name: wall for name, (wall, _) in turn.items()} for turn in turns]
            row = _ratios(times, {column: "hvdkit", BASE: "DDP", "compute alone": "alone"}) | row
    return row


def summary() -> str:
    """Return the steps of hvdkit beside DDP's in words."""
    steps = {
        label.removeprefix("step on "): min(row[own] for own in COLUMNS[:2] if own in row)
        for label, row in measured().items()
        if label.startswith("step on ")
    }
    here = [time for label, time in steps.items() if label.startswith("one host")]
    return (
        f"On one host, a step of hvdkit takes {min(here):.2f} to {max(here):.2f} of the time of DDP's. On two hosts at "
        f"1 Gb/s it takes {steps['two hosts, 1 Gb/s']:.2f} without a codec and "
        f"{steps['two hosts, 1 Gb/s, int8 beside DDP without a codec']:.2f} with int8, and at 10 Gb/s "
        f"{steps['two hosts, 10 Gb/s']:.2f} without a codec (the better of hvdkit on MPI and on Gloo). A shorter step "
        "is not always a shorter training: with top-k, [a loss](#time-to-a-loss) may come later."
    )


def overview() -> str:
    """Return the first table of the page, and the list of the peers that are faster than hvdkit."""
    lines = [f"| time / DDP's or Gloo's | {' | '.join(COLUMNS)} |", "|---|---:|---:|---:|---:|---:|---:|"]
    faster = []
    for label, row in measured().items():
        best = min(time for column, time in row.items() if column != "compute alone")
        cells = [_cell(row.get(column), best if column != "compute alone" else 0) for column in COLUMNS]
        lines.append(f"| {label} | {' | '.join(cells)} |")
        faster += [
            f"- {label}: {_peer_of(rival, label)} takes {row[rival] / row[own]:.2f} of the time of {own}"
            for own in COLUMNS[:2]
            for rival in COLUMNS[2:-1]
            if own in row and rival in row and row[rival] * FASTER < row[own]
        ]
    percent = f"more than {100 * (FASTER - 1):.0f} % faster than hvdkit"
    if not faster:
        return "\n".join([*lines, "", f"No peer was {percent} in any row."])
    return "\n".join([*lines, "", f"A peer was {percent} in these rows:", "", *faster])


def _peer_of(column: str, label: str) -> str:
    """Return the peer of a column: DDP trains, and Gloo sums."""
    step, collective = column.split(" or ") if " or " in column else (column, column)
    return step if label.startswith("step") else collective


def _cell(time: float | None, best: float) -> str:
    """Return a cell of the overview, in bold if no time of the row is shorter."""
    if time is None:
        return "-"
    return f"**{time:.2f}**" if time <= best else f"{time:.2f}"


def start() -> str:
    """Return the sentence of the start pages."""
    document = result("step")
    measured = document["models"]["transformer"]
    rounds, machine = _steps(measured), document["machine"]
    milliseconds = {entry["peer"]: entry["milliseconds"]["median"] for entry in measured["summary"]}

    def ratio(name: str) -> str:
        return f"{ratio_of((turn['hvdkit mpi'], turn[name]) for turn in rounds)['median']:.2f}"

    horovod = f", and {ratio('Horovod mpi')} of Horovod's" if "Horovod mpi" in milliseconds else ""
    return (
        f"With hvdkit on MPI, a step of a transformer of 20.7 M parameters takes {ratio('DDP')} of the time of "
        f"DistributedDataParallel{horovod}: {milliseconds['hvdkit mpi']:.0f} ms. Compute alone takes "
        f"{milliseconds['alone']:.0f} ms in jobs of its own, and such jobs differ by a few per cent (2 ranks of 1 "
        f"thread on {machine['usable_cores']} cores of an {machine['cpu']}, {document['date'][:10]})."
    )


BLOCKS: dict[str, Callable[[], str]] = {
    "start": start,
    "summary": summary,
    "overview": overview,
    "beside": measurements.beside,
    "step": measurements.step,
    "horovod-engine": measurements.horovod_engine,
    "two-hosts": measurements.two_hosts,
    "two-hosts-allreduce": measurements.two_hosts_allreduce,
    "allreduce": measurements.allreduce,
    "codecs": measurements.codecs,
    "time-to-loss": measurements.time_to_loss,
    "accuracy": measurements.accuracy,
    "keras": measurements.keras,
    "collectives": measurements.collectives,
    "distributed-steps": measurements.distributed_steps,
    "elastic": costs.elastic,
    "generations": costs.generations,
    "idle": costs.idle,
    "memory": costs.memory,
    "overhead": costs.overhead,
    "many-ranks": costs.many_ranks,
    "coordinator": costs.coordinator,
}
_BLOCK = re.compile(r"<!-- figures: ([\w-]+) -->\n.*?<!-- /figures -->", re.DOTALL)


def filled(page: Path) -> str:
    """Return the text of ``page`` with each of its blocks made anew."""
    is_in_docs = "docs" in page.relative_to(ROOT).parts

    def block(found: re.Match[str]) -> str:
        text = BLOCKS[found[1]]()
        return f"{found[0].splitlines()[0]}\n{text if is_in_docs else text.replace('](../', '](')}\n<!-- /figures -->"

    return _BLOCK.sub(block, page.read_text())


def blocks(page: Path) -> list[str]:
    """Return the names of the blocks of ``page``."""
    return _BLOCK.findall(page.read_text())


def pages() -> list[Path]:
    """Return the pages that have blocks."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in found if _BLOCK.search(page.read_text())]


if __name__ == "__main__":
    for page in pages():
        page.write_text(filled(page))
