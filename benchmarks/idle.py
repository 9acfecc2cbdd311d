"""The cost of a rank that only waits: share of a core and wake-ups while it sleeps, or waits for a slow rank.

    python benchmarks/idle.py
    python benchmarks/idle.py --seconds 2 --rounds 1       # a quick look

asleep: the main thread of each rank sleeps. "torch" is a process that has imported PyTorch and sleeps: it shows the
readings of the measurement itself without an engine. waiting: all ranks but the last are in an allreduce that the last
rank joins only after a sleep; the figures are those of the ranks that wait.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import time
from pathlib import Path
from typing import Any

import allreduce
import common
import jobs
import numpy as np
from jobs import Peer

TITLES = {"asleep": "A rank whose main thread sleeps", "waiting": "A rank in an allreduce,\nwhile another sleeps"}
WARM_CALLS = 10
NUMBERS = 1000


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="CPU share of an idle rank", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    common.add_common_flags(parser, rounds=3)
    parser.add_argument("--mode", choices=[*TITLES, "both"], default="both", help="activity of the ranks")
    parser.add_argument("--seconds", type=float, default=10, help="asleep: seconds for which the main thread sleeps")
    parser.add_argument("--slow-seconds", type=float, default=2, help="waiting: seconds for which the last rank sleeps")
    return common.parse(parser)


class Meter:
    """A meter of the CPU time and wake-ups of all threads of this process, since the meter was made."""

    def __init__(self) -> None:
        self.cpu, self.wakes, self.began = time.process_time(), wake_ups(), time.perf_counter()

    def read(self) -> dict[str, float]:
        used, wall = time.process_time() - self.cpu, time.perf_counter() - self.began
        return {"cpu_percent": 100 * used / wall, "wakeups_per_second": (wake_ups() - self.wakes) / wall}


def wake_ups() -> int:
    """Return the number of times that threads of this process have gone to sleep so far."""
    texts = [path.read_text() for path in Path("/proc/self/task").glob("*/status")]
    return sum(int(re.search(r"^voluntary_ctxt_switches:\s*(\d+)", text, re.MULTILINE).group(1)) for text in texts)


def sleep(args: argparse.Namespace) -> None:
    """Run a sleeping rank, and report its meter: init, a few reductions, a second's rest, then the measured sleep."""
    import torch

    torch.set_num_threads(args.threads)
    rank, close = int(os.environ.get("RANK", 0)), None
    if args.worker != "torch":
        hvd = importlib.import_module(f"{args.worker}.torch")
        hvd.init()
        rank, close = hvd.rank(), hvd.shutdown
        for _ in range(WARM_CALLS):
            hvd.allreduce(torch.ones(NUMBERS), name="warm")
    time.sleep(1)
    meter = Meter()
    time.sleep(args.seconds)
    jobs.report(args.report, rank, meter.read())
    if close is not None:
        close()


def wait(args: argparse.Namespace) -> None:
    """Run a rank that waits, or is waited for, and report its meter: a few reductions, then the measured reduction."""
    import torch

    torch.set_num_threads(args.threads)
    peer = allreduce.WORKERS[args.worker](False)
    for _ in range(WARM_CALLS):
        peer.call(torch.ones(NUMBERS))
    meter = Meter()
    if peer.rank == peer.ranks - 1:
        time.sleep(args.slow_seconds)
    peer.call(torch.ones(NUMBERS))
    jobs.report(args.report, peer.rank, meter.read())
    peer.close()


def contestants(mode: str) -> list[Peer]:
    if mode == "asleep":
        return [Peer("torch", "torch", "plain"), *jobs.horovods()]
    return [peer for peer in allreduce.contestants() if not peer.flags and peer.name not in allreduce.BOUNDS]


def compare(args: argparse.Namespace) -> None:
    """Run the script itself: rounds of jobs for each mode, then the table."""
    modes = list(TITLES) if args.mode == "both" else [args.mode]
    common.chosen([peer for mode in modes for peer in contestants(mode)], args.peers)  # exits if a name is unknown
    results, errors = {}, {}
    for mode in modes:
        peers = [peer for peer in contestants(mode) if args.peers is None or peer.name in args.peers]
        if peers:
            results[mode] = measure(args, peers, mode)
            errors.update({f"{name}, {mode}": error for name, error in results[mode]["errors"].items()})
    common.save("idle", args, {"modes": results}, draw(results))
    common.finish(errors)


def measure(args: argparse.Namespace, peers: list[Peer], mode: str) -> dict[str, Any]:
    flags = ["--threads", args.threads, "--mode", mode]
    flags += ["--seconds", args.seconds, "--slow-seconds", args.slow_seconds]

    def job(peer: Peer) -> list[dict[str, float]]:
        reports = jobs.run_job(__file__, peer, flags, args.ranks, args.threads, args.timeout)
        return reports if mode == "asleep" else reports[:-1]

    rounds, errors = common.run_rounds(peers, args.rounds, job)
    rows, summary = [], []
    for name in [peer.name for peer in peers if peer.name not in errors]:
        per_rank = np.array([[rank["cpu_percent"] for rank in one[name]] for one in rounds])
        wakes = np.array([[rank["wakeups_per_second"] for rank in one[name]] for one in rounds])
        cpu = common.spread(per_rank.flat)
        by_rank = np.median(per_rank, axis=0).tolist()
        summary.append(
            {"peer": name, "cpu_percent": cpu, "by_rank": by_rank, "wakeups_per_second": common.spread(wakes.flat)}
        )
        rows.append(
            [
                name,
                f"{cpu['median']:.2f}",
                f"{per_rank.min():.2f} to {per_rank.max():.2f}",
                ", ".join(f"{value:.2f}" for value in by_rank),
                f"{np.median(wakes):.0f}",
            ]
        )
    seconds = args.seconds if mode == "asleep" else args.slow_seconds
    print(f"\n{mode}, {args.ranks} ranks, {seconds:g} s in each of {args.rounds} rounds")
    print(common.table(["peer", "% of a core", "smallest to largest", "by rank", "wake-ups/s"], rows))
    return {"summary": summary, "rounds": rounds, "errors": errors}


def draw(results: dict[str, Any]) -> Any:
    plt = common.pyplot()
    figure, panels = plt.subplots(1, len(results), figsize=(5.5 * len(results), 4), squeeze=False)
    for axes, (mode, one) in zip(panels[0], results.items(), strict=True):
        names = [entry["peer"] for entry in one["summary"]]
        axes.bar(names, [entry["cpu_percent"]["median"] for entry in one["summary"]], color=list(map(colour, names)))
        axes.bar_label(axes.containers[-1], fmt="%.2f")
        axes.set(ylabel="% of a core (median)", title=TITLES[mode])
    return figure


def colour(name: str) -> str:
    return "tab:gray" if name == "torch" else common.colour(name)


if __name__ == "__main__":
    arguments = parse_arguments()
    if arguments.worker:
        {"asleep": sleep, "waiting": wait}[arguments.mode](arguments)
    else:
        compare(arguments)
