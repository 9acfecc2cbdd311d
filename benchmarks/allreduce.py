"""Latency of one synchronous allreduce, by size: hvdkit and its peers, every rank started anew in every round.

    python benchmarks/allreduce.py
    python benchmarks/allreduce.py --rounds 2 --largest 1048576        # a quick look

A call's time is that of the rank that took longest. hvdkit and Horovod return a new tensor, as hvd.allreduce does;
mpi4py writes into a buffer that is kept, Gloo into its input; --inplace lets all of them write into their input.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Callable
from typing import Any

import common
import numpy as np
from common import Peer

SMALLEST_BYTES = 4096


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Latency of a synchronous allreduce", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    common.add_common_flags(parser, rounds=5)
    parser.add_argument("--largest", type=int, default=64 << 20, help="bytes of the largest tensor")
    parser.add_argument("--calls", type=int, default=200, help="most timed calls per size and round")
    parser.add_argument(
        "--volume", type=int, default=512 << 20, help="bytes per size and round; large sizes get fewer calls"
    )
    parser.add_argument("--inplace", action="store_true", help="let every peer write the sum into its input")
    return parser.parse_args()


def sizes(largest: int) -> list[int]:
    """From 4 KB, each four times the one before."""
    found = [SMALLEST_BYTES]
    while found[-1] * 4 <= largest:
        found.append(found[-1] * 4)
    return found


def calls(size: int, args: argparse.Namespace) -> int:
    return max(5, min(args.calls, args.volume // size))


def open_peer(worker: str, inplace: bool) -> tuple[int, int, Callable[[Any], Any], Callable[[], None]]:
    """This rank, the number of ranks, a function that returns the sum of a tensor, and one that ends the job."""
    if worker in ("hvdkit", "horovod"):
        hvd = importlib.import_module(f"{worker}.torch")
        hvd.init()
        function = hvd.allreduce_ if inplace else hvd.allreduce
        return hvd.rank(), hvd.size(), lambda x: function(x, name=f"size.{x.numel()}", op=hvd.Sum), hvd.shutdown
    if worker == "mpi4py":
        from mpi4py import MPI

        world = MPI.COMM_WORLD
        kept: dict[int, Any] = {}

        def allreduce(x: Any) -> Any:
            if inplace:
                world.Allreduce(MPI.IN_PLACE, x.numpy())
                return x
            result = kept.setdefault(x.numel(), np.empty(x.numel(), dtype=np.float32))
            world.Allreduce(x.numpy(), result)
            return result

        return world.Get_rank(), world.Get_size(), allreduce, lambda: None
    import torch.distributed as dist

    dist.init_process_group("gloo")

    def all_reduce(x: Any) -> Any:
        dist.all_reduce(x)
        return x

    return dist.get_rank(), dist.get_world_size(), all_reduce, dist.destroy_process_group


def work(args: argparse.Namespace) -> None:
    """What a rank runs: seconds of every call, by size."""
    import torch

    torch.set_num_threads(args.threads)
    rank, ranks, allreduce, close = open_peer(args.worker, args.inplace)
    seconds: dict[int, list[float]] = {}
    for size in sizes(args.largest):
        tensor = torch.full((size // 4,), float(rank + 1))
        result = np.asarray(allreduce(tensor))
        assert (result == ranks * (ranks + 1) / 2).all(), f"wrong sum of {size} bytes"
        tensor.zero_()  # sums in place stay finite
        for _ in range(max(3, calls(size, args) // 10)):
            allreduce(tensor)
        seconds[size] = []
        for _ in range(calls(size, args)):
            began = time.perf_counter()
            allreduce(tensor)
            seconds[size].append(time.perf_counter() - began)
    common.report(args.report, rank, seconds)
    close()


def contestants() -> list[Peer]:
    peers = [*common.horovods(), Peer("Gloo", "gloo", "plain")]
    return [*peers, Peer("mpi4py", "mpi4py", "mpi")] if common.has_mpi() else peers


def name_of(size: int) -> str:
    return f"{size >> 20} MB" if size >= 1 << 20 else f"{size >> 10} KB"


def compare(args: argparse.Namespace) -> None:
    """What the script itself runs: rounds of jobs, then the table."""
    peers = common.chosen(contestants(), args.peers)
    flags = ["--threads", args.threads, "--largest", args.largest, "--calls", args.calls, "--volume", args.volume]
    flags += ["--inplace"] * args.inplace

    def job(peer: Peer) -> dict[str, list[float]]:
        reports = common.run_job(__file__, peer, flags, args.ranks, args.threads, args.timeout)
        return {size: np.max([one[size] for one in reports], axis=0).tolist() for size in reports[0]}

    rounds, errors = common.run_rounds(peers, args.rounds, job)
    names = [peer.name for peer in peers if peer.name not in errors]
    rows, summary = [], []
    for size in sizes(args.largest):
        medians = [{name: float(np.median(one[name][str(size)])) for name in one} for one in rounds]
        for name in names:
            pooled = common.spread(value * 1e6 for one in rounds for value in one[name][str(size)])
            ratios = {other: common.paired_ratio(medians, name, other) for other in ("mpi4py", "Gloo")}
            summary.append({"bytes": size, "peer": name, "microseconds": pooled, "time_ratio_to": ratios})
            rows.append(
                [
                    name_of(size),
                    name,
                    f"{pooled['median']:,.0f}",
                    f"{pooled['q1']:,.0f} to {pooled['q3']:,.0f}",
                    f"{pooled['p90']:,.0f}",
                    *(common.show_ratio(ratio) for ratio in ratios.values()),
                ]
            )
    headers = ["size", "peer", "median us", "quartiles us", "p90 us", "time / mpi4py", "time / Gloo"]
    print(f"\nsynchronous allreduce, {args.ranks} ranks; ratios: median [smallest, largest] of {args.rounds} rounds")
    print(common.table(headers, rows))
    common.save("allreduce", args, {"summary": summary, "rounds": rounds, "errors": errors}, draw(summary, names))
    common.finish(errors)


def draw(summary: list[dict[str, Any]], names: list[str]) -> Any:
    plt = common.pyplot()
    figure, axes = plt.subplots(figsize=(8, 5))
    for name in names:
        mine = [one for one in summary if one["peer"] == name]
        x = [one["bytes"] for one in mine]
        axes.plot(x, [one["microseconds"]["median"] for one in mine], marker="o", label=name)
        low, high = ([one["microseconds"][key] for one in mine] for key in ("q1", "q3"))
        axes.fill_between(x, low, high, alpha=0.15)
    axes.set(xscale="log", yscale="log", xlabel="bytes", ylabel="microseconds (median, quartiles)")
    axes.set_xticks(x, [name_of(size) for size in x])
    axes.minorticks_off()
    axes.set_title("Synchronous allreduce")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


if __name__ == "__main__":
    arguments = parse_arguments()
    if arguments.worker:
        work(arguments)
    else:
        compare(arguments)
