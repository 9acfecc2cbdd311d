"""What a rank costs that only waits: share of a core and wake-ups while its main thread sleeps.

    python benchmarks/idle.py
    python benchmarks/idle.py --seconds 2 --rounds 1       # a quick look

"torch" is a process that has imported PyTorch and sleeps: what the measurement itself reads when there is no engine.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import time
from pathlib import Path
from typing import Any

import common
import numpy as np
from common import Peer


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="CPU share of an idle rank", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    common.add_common_flags(parser, rounds=3)
    parser.add_argument("--seconds", type=float, default=10, help="how long the main thread sleeps")
    return parser.parse_args()


def wake_ups() -> int:
    """How often any thread of this process has gone to sleep so far."""
    texts = [path.read_text() for path in Path("/proc/self/task").glob("*/status")]
    return sum(int(re.search(r"^voluntary_ctxt_switches:\s*(\d+)", text, re.MULTILINE).group(1)) for text in texts)


def work(args: argparse.Namespace) -> None:
    """What a rank runs: init, a few reductions, a second's rest, then the measured sleep."""
    import torch

    torch.set_num_threads(args.threads)
    rank, close = int(os.environ.get("RANK", 0)), None
    if args.worker != "torch":
        hvd = importlib.import_module(f"{args.worker}.torch")
        hvd.init()
        rank, close = hvd.rank(), hvd.shutdown
        for _ in range(10):
            hvd.allreduce(torch.ones(1000), name="warm")
    time.sleep(1)
    before, wakes, began = time.process_time(), wake_ups(), time.perf_counter()
    time.sleep(args.seconds)
    used, wall = time.process_time() - before, time.perf_counter() - began  # of all threads of this process
    wakes = wake_ups() - wakes
    common.report(args.report, rank, {"cpu_percent": 100 * used / wall, "wakeups_per_second": wakes / wall})
    if close is not None:
        close()


def compare(args: argparse.Namespace) -> None:
    """What the script itself runs: rounds of jobs, then the table."""
    peers = common.chosen([Peer("torch", "torch", "plain"), *common.horovods()], args.peers)
    flags = ["--threads", args.threads, "--seconds", args.seconds]

    def job(peer: Peer) -> list[dict[str, float]]:
        return common.run_job(__file__, peer, flags, args.ranks, args.threads, args.timeout)

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
    print(f"\nidle rank, {args.ranks} ranks, {args.seconds:g} s asleep in each of {args.rounds} rounds")
    print(common.table(["peer", "% of a core", "smallest to largest", "by rank", "wake-ups/s"], rows))
    common.save("idle", args, {"summary": summary, "rounds": rounds, "errors": errors}, draw(summary))
    common.finish(errors)


def draw(summary: list[dict[str, Any]]) -> Any:
    plt = common.pyplot()
    figure, axes = plt.subplots(figsize=(7, 4))
    axes.bar([one["peer"] for one in summary], [one["cpu_percent"]["median"] for one in summary])
    axes.bar_label(axes.containers[-1], fmt="%.2f")
    axes.set(ylabel="% of a core (median)", title="A rank whose main thread sleeps")
    return figure


if __name__ == "__main__":
    arguments = parse_arguments()
    if arguments.worker:
        work(arguments)
    else:
        compare(arguments)
