"""Tables of steps, collectives and codecs, each made of the results of a script in ``benchmarks/``."""

from __future__ import annotations

import re
from statistics import median
from typing import Any

from docs.hooks.results import NAMES, VARIANTS, duration, peer, percent, ratio_of, result, spread, table

MODELS = {
    "words": "transformer, 20.5 M, SGD",
    "words-adamw": "the same, AdamW",
    "convolution": "ResNet-50, 25.6 M, SGD",
    "tensors": "2000 tensors of 1 to 100 KB",
    "transformer": "transformer over bytes, 20.7 M, AdamW",
}
SIZES = {4096: "4 KB", 65536: "64 KB", 1 << 20: "1 MB", 16 << 20: "16 MB", 100_000_000: "100 MB", 400_000_000: "400 MB"}
CODECS = {
    "none": "fp32, no codec",
    "topk": "top-k 1 %",
    "randomk": "randomk 10 %",
    "dgc": "dgc 0.1 %",
    "powersgd": "PowerSGD, rank 4",
}


def beside() -> str:
    """Return the steps on one host, whose contestants take turns within one job."""
    document, rows = result("beside"), []
    for model, measured in document["models"].items():
        for index, (engine, summary) in enumerate(measured["summary"].items()):
            turns = [turn for each in measured["rounds"] for turn in each[engine]]
            for entry in summary:
                name = entry["peer"]
                if name == "alone with a barrier" or (index and name != "hvdkit"):
                    continue
                rows.append(
                    [
                        MODELS[model] if name == "alone" else "",
                        peer(engine if name == "hvdkit" else name),
                        f"{median(turn[name][0] / turn['DDP'][0] for turn in turns):.2f}",
                        spread(entry["efficiency"], "q1", "q3"),
                        f"{entry['milliseconds']['median']:.0f}",
                        f"{entry['processor_over_alone']['median']:.0f}",
                    ]
                )
    headers = ["model", "2 ranks of 1 thread", "time / DDP", "efficiency [quartiles]", "ms", "CPU ms above alone"]
    return table(headers, rows, document)


def step() -> str:
    """Return the steps on one host beside Horovod, each peer in jobs of its own."""
    document, rows = result("step"), []
    for model, measured in document["models"].items():
        for index, entry in enumerate(measured["summary"]):
            ms = entry["milliseconds"]["median"]
            ratios = [spread(entry[key]) for key in ("time_ratio_to_ddp", "efficiency")]
            rows.append(["" if index else MODELS[model], peer(entry["peer"]), *ratios, f"{ms:.0f}"])
    return table(["model", "2 ranks of 1 thread", "time / DDP", "efficiency", "ms"], rows, document)


def horovod_engine() -> str:
    """Return the step of hvdkit on Horovod's engine beside Horovod's own."""
    document, rows = result("step"), []
    measured = document["models"]["transformer"]
    ms = {entry["peer"]: entry["milliseconds"]["median"] for entry in measured["summary"]}
    for library in ("mpi", "gloo"):
        own = f"Horovod {library}"
        for name in (own, f"hvdkit horovod {library}", "hvdkit mpi" if library == "mpi" else "hvdkit torch"):
            jobs = [
                (median(turn[name]["milliseconds"]), median(turn[own]["milliseconds"])) for turn in measured["rounds"]
            ]
            rows.append([peer(name), spread(ratio_of(jobs)), f"{ms[name]:.0f}"])
    return table(["2 ranks of 1 thread", "time / Horovod", "ms"], rows, document)


def two_hosts() -> str:
    """Return the steps between two hosts."""
    return _by_rate(
        "step", "step of the transformer, 1 rank of 1 thread on each host", "time_ratio_to_ddp", "time / DDP"
    )


def two_hosts_allreduce() -> str:
    """Return the allreduce of 100 MB between two hosts."""
    return _by_rate("allreduce", "allreduce of 100 MB, in place", "share_of_wire", "share of the wire")


def _by_rate(part: str, title: str, ratio: str, shown_as: str) -> str:
    """Return the table of a part of ``two_hosts.py``, with two columns for each rate of the wire."""
    document = result("two_hosts")
    headers, rows = [title], {entry["peer"]: [peer(entry["peer"])] for entry in document["rates"][0][part]["summary"]}
    for rate in document["rates"]:
        headers += [f"{rate['gigabits']:g} Gb/s: {shown_as}", "ms"]
        for entry in rate[part]["summary"]:
            rows[entry["peer"]] += [spread(entry[ratio]), f"{entry['milliseconds']['median']:.0f}"]
    return table(headers, rows.values(), document)


def allreduce() -> str:
    """Return the synchronous allreduce by size."""
    document = result("allreduce")
    found = {(entry["peer"], entry["bytes"]): entry for entry in document["summary"]}
    sizes = [size for size in SIZES if any(size == measured for _, measured in found)]
    names = list(dict.fromkeys(name for name, _ in found))
    order = ["one pass", "memory", *sorted((name for name in names if name.startswith("hvdkit")), key=len)]
    order += [name for name in names if name not in order]

    def shown(entry: dict[str, Any]) -> str:
        return f"{entry['time_ratio_to']['Gloo']['median']:.2f} ({duration(entry['microseconds']['median'] / 1e3)})"

    rows = [[peer(name), *(shown(found[name, size]) for size in sizes)] for name in order if name in names]
    return table(["2 ranks; time / raw Gloo (time)", *(SIZES[size] for size in sizes)], rows, document)


def codecs() -> str:
    """Return the time of each codec on one core."""
    document = result("compression")
    found = {entry["operation"]: entry for entry in document["kinds"]["normal"]["summary"]}

    def shown(operation: str) -> str:
        entry = found.get(operation)
        return (
            f"{entry['time_ratio_to_copy']['median']:.1f} ({entry['milliseconds']['median']:.1f} ms)" if entry else "-"
        )

    rows = []
    for name in dict.fromkeys(re.sub(r" (feedback|decode|fresh|stochastic)\b", "", each) for each in found):
        if name in ("copy", "add", "hvdkit checksum", "hvdkit threshold"):
            continue
        entry = found.get(name) or found[f"{name} feedback"]
        library, codec, *ratio = name.split()
        label = " ".join([VARIANTS.get(codec, codec).removesuffix(" 1 %"), *ratio]).replace("%", " %")
        label = f"**{label}**" if library == "hvdkit" else f"{library}: {label}"
        payload = percent(100 * entry["payload_ratio"])
        rows.append([label, payload, shown(name), shown(f"{name} feedback"), shown(f"{name} decode")])
    millions = document["arguments"]["elements"] / 1e6
    headers = [f"{millions:.0f} M fp32 numbers, one core; times / a copy", "payload", "encode", "with error feedback"]
    return table([*headers, "decode"], rows, document)


def keras() -> str:
    """Return the steps of Keras's ``model.fit``."""
    document, rows = result("keras_fit"), []
    rounds = document["rounds"]
    for backend, suffix in (("TensorFlow", ""), ("PyTorch", ", torch")):
        for name, label in (("one process", "one process alone"), ("alone", NAMES["alone"]), ("hvdkit", "**hvdkit**")):
            jobs = [(each[f"{name}{suffix}"]["ms"], each[f"alone{suffix}"]["ms"]) for each in rounds]
            ms = f"{median(time for time, _ in jobs):.0f}"
            rows.append([backend if name == "one process" else "", label, spread(ratio_of(jobs)), ms])
        if backend == "TensorFlow":
            rows += [["", f"{name}: does not run", "-", "-"] for name in document["errors"]]
    return table(["backend", "`model.fit`", "time / compute alone", "ms"], rows, document)


def collectives() -> str:
    """Return the collectives of torch.distributed on hvdkit and on Gloo."""
    document, rows = result("distributed"), []
    for row in document["figures"]["collectives"]:
        seconds = row["seconds"]
        times = f"{seconds['hvdkit'] / seconds['Gloo']:.2f}"
        size = SIZES.get(row["nbytes"], f"{row['nbytes'] / 1e6:.0f} MB")
        rows.append([f"`{row['collective']}`", size, times, *(duration(1e3 * each) for each in seconds.values())])
    headers = ["collective", "bytes", "hvdkit / Gloo", "Gloo", "hvdkit", "hvdkit, arena"]
    return table(headers, rows, document)


def distributed_steps() -> str:
    """Return the steps of DDP and FSDP2 on hvdkit and on Gloo."""
    document, rows = result("distributed"), []
    for part, label in (("ddp", "DDP"), ("fsdp", "FSDP2")):
        times = document["figures"][part]
        above = {
            way: median(each - floor for each, floor in zip(times[way], times["floor"], strict=True)) for way in times
        }
        for way in ("hvdkit", "DistributedOptimizer"):
            if way in times:
                shown = [duration(1e3 * median(times[each])) for each in ("alone", "floor", "Gloo", way)]
                name = label if way == "hvdkit" else "`hvd.DistributedOptimizer` in place of DDP on hvdkit"
                rows.append([name, f"{above[way] / above['Gloo']:.2f}", *shown])
    headers = ["a step", "hvdkit / Gloo, above the floor", "compute alone", "floor", "Gloo", "hvdkit"]
    return table(headers, rows, document)


def time_to_loss() -> str:
    """Return the time that a training needs to reach a loss, between two hosts."""
    document = result("time_to_loss")
    rates = document["rates"]
    rows = []
    for entry in rates[0]["summary"]:
        row = [peer(entry["peer"]), f"{entry['wire_bytes'] / 1e6:.1f}"]
        for rate in rates:
            (found,) = [each for each in rate["summary"] if each["peer"] == entry["peer"]]
            sooner = found["times_sooner_than"]["common"]["DDP fp32"]
            row += [f"{sooner['median']:.2f} x" if sooner else "-", f"{found['milliseconds']['median']:.0f}"]
        rows.append([*row, "diverged" if entry["diverged"] else f"{entry['percent_from_dense']:+.1f} %"])
    headers = ["2 hosts, 1 rank on each", "MB a step"]
    for rate in rates:
        headers += [f"{rate['gigabits']:g} Gb/s: sooner than DDP", "ms a step"]
    return table([*headers, "last loss, from fp32's"], rows, document)


def accuracy() -> str:
    """Return the test accuracy with each codec."""
    document = result("accuracy")
    rows = [
        [
            f"**{CODECS.get(entry['peer'], entry['peer'])}**",
            f"{entry['points_from_dense']:+.1f}",
            f"{entry['accuracy']:.1f} %",
        ]
        for entry in document["summary"]
    ]
    headers = ["handwritten digits, 2 ranks, mean of the seeds", "points from fp32", "test accuracy"]
    return table(headers, rows, document)
