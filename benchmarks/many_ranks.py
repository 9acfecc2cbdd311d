"""Many ranks on one machine: their time to meet, reduce once and leave, and the resources that each holds meanwhile.

    python benchmarks/many_ranks.py
    python benchmarks/many_ranks.py --ranks 8 --rounds 1       # a quick look

The time begins when all ranks have imported their modules, and is that of the slowest rank. Threads, sockets and memory
(PSS: memory that ranks share counts once) are those that a rank has after the reduction and did not have before init.
"Gloo" is torch.distributed's process group.
"""

from __future__ import annotations

import argparse
import os
import stat
import time
from pathlib import Path
from typing import Any

import common
import jobs
import numpy as np
from jobs import Peer

NUMBERS = 1000
FIGURES = ("seconds", "threads", "sockets", "memory_mb")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Many ranks on one machine", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    common.add_common_flags(parser, rounds=3)
    parser.set_defaults(ranks=64)
    return common.parse(parser)


def held() -> dict[str, float]:
    """Return the threads and sockets of this process, and its share of memory in MB."""
    descriptors = [one for one in Path("/proc/self/fd").iterdir() if one.exists()]
    shares = dict(line.split()[:2] for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "sockets": sum(stat.S_ISSOCK(one.stat().st_mode) for one in descriptors),
        "memory_mb": int(shares["Pss:"]) / 1024,
    }


def wait_for_all(folder: Path, what: str, ranks: int) -> None:
    """Wait until every rank has called this function with ``what``."""
    Path(folder, f"{what}.{os.getpid()}").touch()
    while len(list(folder.glob(f"{what}.*"))) < ranks:
        time.sleep(0.02)


def work(args: argparse.Namespace) -> None:
    """Run a rank that meets the others, reduces once and leaves, and report its figures."""
    import torch

    torch.set_num_threads(args.threads)
    numbers = torch.ones(NUMBERS)
    if args.worker == "hvdkit":
        import hvdkit.torch as hvd
    else:
        import torch.distributed as dist
    before = held()
    wait_for_all(args.report, "imported", args.ranks)
    began = time.perf_counter()
    if args.worker == "hvdkit":
        hvd.init()
        rank, total = hvd.rank(), hvd.allreduce(numbers, op=hvd.Sum)
    else:
        dist.init_process_group("gloo")
        dist.all_reduce(numbers)
        rank, total = dist.get_rank(), numbers
    assert total.tolist() == [args.ranks] * NUMBERS, total
    spent = time.perf_counter() - began
    wait_for_all(args.report, "reduced", args.ranks)
    after = held()
    wait_for_all(args.report, "looked", args.ranks)
    began = time.perf_counter()
    if args.worker == "hvdkit":
        hvd.shutdown()
    else:
        dist.destroy_process_group()
    seconds = spent + time.perf_counter() - began
    jobs.report(args.report, rank, {"seconds": seconds, **{name: after[name] - before[name] for name in after}})


def contestants() -> list[Peer]:
    return [*(peer for peer in jobs.horovods() if peer.worker == "hvdkit"), Peer("Gloo", "gloo", "plain")]


def compare(args: argparse.Namespace) -> None:
    """Run the script itself: rounds of jobs, then the table."""
    peers = common.chosen(contestants(), args.peers)
    flags = ["--ranks", args.ranks, "--threads", args.threads]

    def job(peer: Peer) -> Any:
        return jobs.run_job(__file__, peer, flags, args.ranks, args.threads, args.timeout)

    rounds, errors = common.run_rounds(peers, args.rounds, job)
    summary, rows = [], []
    for name in [peer.name for peer in peers if peer.name not in errors]:
        longest = common.spread(max(rank["seconds"] for rank in one[name]) for one in rounds)
        most = {what: max(rank[what] for one in rounds for rank in one[name]) for what in FIGURES[1:]}
        usual = {what: float(np.median([rank[what] for one in rounds for rank in one[name]])) for what in FIGURES[1:]}
        summary.append({"peer": name, "seconds": longest, "median": usual, "most": most})
        cells = [f"{usual[what]:.0f}; {most[what]:.0f}" for what in FIGURES[1:]]
        rows.append([name, f"{longest['median']:.1f}", *cells])
    print(f"\n{args.ranks} ranks, {args.rounds} rounds; of threads, sockets and MB a rank's median; the most of any")
    print(common.table(["peer", "s to meet, reduce and leave", "threads", "sockets", "MB"], rows))
    common.save("many_ranks", args, {"summary": summary, "rounds": rounds, "errors": errors}, draw(summary))
    common.finish(errors)


def draw(summary: list[dict[str, Any]]) -> Any:
    """Draw seconds and threads side by side."""
    plt = common.pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2))
    names = [one["peer"] for one in summary]
    colours = [common.colour(name) for name in names]
    axes[0].barh(names, [one["seconds"]["median"] for one in summary], color=colours)
    axes[0].set_xlabel("s to meet, reduce and leave")
    axes[1].barh(names, [one["most"]["threads"] for one in summary], color=colours)
    axes[1].set_xlabel("threads of a rank, beyond those before")
    return figure


if __name__ == "__main__":
    arguments = parse_arguments()
    if arguments.worker:
        work(arguments)
    else:
        compare(arguments)
