"""The figures of the documentation. ``python -m docs.hooks.figures`` puts them between the marks of pages.

``<!-- figures: NAME -->`` begins a block that NAME in BLOCKS makes of ``benchmarks/results``, and ``<!-- /figures -->``
ends it. ``benchmarks/all.py`` measures all results anew, then writes the pages.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from statistics import median

from docs.hooks import costs, measurements
from docs.hooks.results import ROOT, result

FASTER = 1.02  # a peer counts as faster than hvdkit from this ratio of their times on
COLUMNS = ("hvdkit on MPI", "hvdkit on Gloo", "DDP or Gloo", "Horovod on MPI", "raw mpi4py", "compute alone")


def measured() -> dict[str, dict[str, float]]:
    """Return the milliseconds of each column of the overview, for each thing that was measured."""
    rows: dict[str, dict[str, float]] = {}
    for model, label in (("words", "transformer of 20.5 M, SGD"), ("convolution", "ResNet-50")):
        rounds = result("beside")["models"][model]["rounds"]
        engines = {name: [turn for each in rounds for turn in each[name]] for name in ("hvdkit mpi", "hvdkit torch")}
        # The contestants of an engine take turns in its own job: their ratios are taken there.
        base = median(turn["DDP"][0] for turns in engines.values() for turn in turns)
        row = rows[f"step on one host, {label}"] = {"DDP or Gloo": base}
        for column, turns in zip(COLUMNS, engines.values(), strict=False):
            row[column] = base * median(turn["hvdkit"][0] / turn["DDP"][0] for turn in turns)
        row["compute alone"] = base * median(
            turn["alone"][0] / turn["DDP"][0] for turns in engines.values() for turn in turns
        )
    steps = result("step")["models"]["transformer"]["summary"]
    rows["step on one host, transformer of 20.7 M, AdamW"] = _columns(steps, STEP_PEERS)
    for rate in result("two_hosts")["rates"]:
        where = f"two hosts, {rate['gigabits']:g} Gb/s"
        rows[f"step on {where}"] = _columns(rate["step"]["summary"], STEP_PEERS)
        for codec, label in (("fp16", "fp16"), ("int8", "int8"), ("topk", "top-k 1 %")):
            peers = {"hvdkit on MPI": f"hvdkit mpi {codec}", "hvdkit on Gloo": f"hvdkit torch {codec}"}
            hook = {"DDP or Gloo": "DDP fp16"} if codec == "fp16" else {"DDP or Gloo": "DDP"}
            columns = _columns(rate["step"]["summary"], peers | hook | {"compute alone": "alone"})
            codecs = "both with fp16" if codec == "fp16" else f"{label} beside DDP without a codec"
            rows[f"step on {where}, {codecs}"] = columns
        rows[f"allreduce of 100 MB on {where}"] = _columns(rate["allreduce"]["summary"], ALLREDUCE_PEERS)
    for size in (4096, 1 << 20, 100_000_000):
        summary = [each for each in result("allreduce")["summary"] if each["bytes"] == size]
        peers = {column: name + " in place" * (name != "Gloo") for column, name in ALLREDUCE_PEERS.items()}
        rows[f"allreduce of {measurements.SIZES[size]} on one host, in place"] = _columns(summary, peers)
    return rows


STEP_PEERS = {
    "hvdkit on MPI": "hvdkit mpi",
    "hvdkit on Gloo": "hvdkit torch",
    "DDP or Gloo": "DDP",
    "Horovod on MPI": "Horovod mpi",
    "compute alone": "alone",
}
ALLREDUCE_PEERS = {
    "hvdkit on MPI": "hvdkit mpi",
    "hvdkit on Gloo": "hvdkit torch",
    "DDP or Gloo": "Gloo",
    "Horovod on MPI": "Horovod mpi",
    "raw mpi4py": "mpi4py",
}


def _columns(summary: list[dict[str, dict[str, float]]], peers: dict[str, str]) -> dict[str, float]:
    """Return the median time of each column's peer that took part."""
    times = {str(each["peer"]): (each.get("milliseconds") or each["microseconds"])["median"] for each in summary}
    return {column: times[name] for column, name in peers.items() if name in times}


def overview() -> str:
    """Return the first table of the page, times as multiples of DDP's or Gloo's, and the sentence about it."""
    lines = [f"| time / DDP's or Gloo's | {' | '.join(COLUMNS)} |", "|---|---:|---:|---:|---:|---:|---:|"]
    faster = []
    for label, row in measured().items():
        base = row["DDP or Gloo"]
        own = min(row[column] for column in COLUMNS[:2] if column in row)
        rivals = {column: time for column, time in row.items() if column not in (*COLUMNS[:2], "compute alone")}
        best = min([own, *rivals.values()])
        cells = [_cell(row.get(column), base, best, column) for column in COLUMNS]
        lines.append(f"| {label} | {' | '.join(cells)} |")
        faster += [
            f"{label}: {_peer_of(column, label)} ({time / own:.2f} of hvdkit's time)"
            for column, time in rivals.items()
            if time * FASTER < own
        ]
    sentence = (
        f"A peer was more than {100 * (FASTER - 1):.0f} % faster than hvdkit in: {'; '.join(faster)}."
        if faster
        else f"No peer was more than {100 * (FASTER - 1):.0f} % faster than hvdkit in any row."
    )
    return "\n".join([*lines, "", sentence])


def _peer_of(column: str, label: str) -> str:
    """Return the peer of a column: DDP trains, and Gloo sums."""
    step, collective = column.split(" or ") if " or " in column else (column, column)
    return step if label.startswith("step") else collective


def _cell(time: float | None, base: float, best: float, column: str) -> str:
    if time is None:
        return "-"
    text = f"{time / base:.2f}"
    return f"**{text}**" if time <= best and column != "compute alone" else text


def start() -> str:
    """Return the sentence of the start pages."""
    document = result("step")
    times = _columns(document["models"]["transformer"]["summary"], STEP_PEERS)
    own, machine = times["hvdkit on MPI"], document["machine"]
    horovod = f", and {own / times['Horovod on MPI']:.2f} of Horovod's" if "Horovod on MPI" in times else ""
    return (
        "With hvdkit on MPI, a step of a transformer of 20.7 M parameters takes "
        f"{own / times['DDP or Gloo']:.2f} of the time of DistributedDataParallel{horovod}: {own:.0f} ms, where "
        f"compute alone takes {times['compute alone']:.0f} (2 ranks of 1 thread on {machine['usable_cores']} cores of "
        f"an {machine['cpu']}, {document['date'][:10]})."
    )


BLOCKS: dict[str, Callable[[], str]] = {
    "start": start,
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
