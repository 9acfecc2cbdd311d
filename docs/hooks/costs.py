"""Tables of all costs beside the time of a step: changes of the ranks, waiting, memory, many ranks."""

from __future__ import annotations

from statistics import median

from docs.hooks.results import duration, peer, percent, result, spread, table


def elastic() -> str:
    """Return the time from the SIGKILL of a rank to the next step of the others."""
    document, rows = result("elastic"), []
    for name, figure in document["figures"].items():
        rounds = [turn[name] for turn in document["rounds"]]
        step = median(turn["step"] for turn in rounds)
        worst = max(turn["seconds"] for turn in rounds)
        label = "torchrun, which restarts all ranks" if name == "torchrun" else peer(name)
        times = figure["median"] / document["figures"]["hvdkit"]["median"]
        rows.append([label, f"{times:.1f} x", f"{figure['median']:.2f} s", f"{worst:.2f} s", f"{step:.2f} s"])
    rows.sort(key=lambda row: float(row[1].removesuffix(" x")))
    headers = ["SIGKILL of one of 4 ranks, 20.5 M parameters", "time / hvdkit", "median", "worst", "a usual step"]
    return table(headers, rows, document)


def generations() -> str:
    """Return the times of an elastic job's changes."""
    document = result("generations")
    rows = [
        [f"{case}: {figure}", f"{middle:g} ms", f"{worst:g} ms"]
        for case, figures in document["cases"].items()
        for figure, (middle, worst) in figures.items()
        if figure != "1000 x ratio"
    ]
    return table(["a change of the ranks", "median", "worst"], rows, document)


def idle() -> str:
    """Return the share of a core that a rank takes which sleeps, and which waits for a late rank."""
    document = result("idle")
    modes = {
        mode: {entry["peer"]: entry["cpu_percent"]["median"] for entry in measured["summary"]}
        for mode, measured in document["modes"].items()
    }
    names = dict.fromkeys(name for figures in modes.values() for name in figures)
    rows = [
        [
            "PyTorch alone" if name == "torch" else peer(name),
            *(percent(modes[mode][name]) if name in modes[mode] else "-" for mode in ("asleep", "waiting")),
        ]
        for name in names
        if name != "hvdkit fusion buffer"
    ]
    headers = ["share of a core", "a rank that sleeps", "a rank in an allreduce that waits for a late rank"]
    return table(headers, rows, document)


def memory() -> str:
    """Return the memory that a training rank holds above training alone, in multiples of its gradients."""
    document = result("memory")
    rows = [
        [
            peer(entry["peer"].removesuffix(" wrapped")),
            *(spread(entry["extra_in_gradients"][key], "q1", "q3") for key in ("pss", "peak")),
        ]
        for entry in document["summary"]
        if entry["peer"] != "plain" and not entry["peer"].endswith("+ init")
    ]
    headers = ["memory above training alone, / gradients", "held (PSS)", "at the peak"]
    return table(headers, rows, document)


def overhead() -> str:
    """Return the cost of the wrapped optimizer on one rank."""
    document = result("overhead")
    rows = [
        [
            f"{entry['parameters'] / 1e6:.1f} M parameters",
            "{median:+.1f} % [{low:+.1f}, {high:+.1f}]".format(**entry["overhead_percent"]),
            f"{entry['plain_ms']['median']:.0f} ms",
        ]
        for entry in document["summary"]
    ]
    return table(["the wrapped optimizer on one rank", "step above plain PyTorch", "plain"], rows, document)


def many_ranks() -> str:
    """Return the time and the resources of many ranks on one machine."""
    document = result("many_ranks_64_ranks")
    rows = [
        [
            peer(entry["peer"]),
            f"{entry['seconds']['median']:.1f} s",
            *(f"{entry['median'][key]:.0f}; {entry['most'][key]:.0f}" for key in ("threads", "sockets", "memory_mb")),
        ]
        for entry in document["summary"]
    ]
    headers = ["64 ranks on one host", "meet, reduce once, leave", "threads of a rank: median; most", "sockets", "MB"]
    return table(headers, rows, document)


def coordinator() -> str:
    """Return the time of the coordinator for an operation."""
    document = result("coordinator")
    rows = [[f"{entry['ranks']}", duration(entry["milliseconds"]["median"])] for entry in document["summary"]]
    return table(["ranks", "one operation on rank 0"], rows, document)
