"""Latency of one synchronous allreduce, by size: hvdkit and its peers, every rank started anew in every round.

    python benchmarks/allreduce.py
    python benchmarks/allreduce.py --rounds 1 --largest 1048576        # a quick look

The time of a call is that of its slowest rank. hvdkit and Horovod return a new tensor, as hvd.allreduce does. mpi4py
writes into a second buffer that is kept. "in place" and Gloo write the sum into their input. "memory" is no allreduce
but a bound: all ranks at once copy as many bytes from one warm array to another, once. "fusion buffer" is the memory
that the ranks share for their gradients, and "one pass" is the bound for it.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import common
import jobs
import numpy as np
from jobs import Peer

MEMORY, ONE_PASS = "memory", "one pass"
BOUNDS = (MEMORY, ONE_PASS)
DENOMINATORS = ("mpi4py", "mpi4py in place", "Gloo", *BOUNDS)
TWO_LINKS = "mpi4py 2 links"
HUNDRED_MB = 100_000_000


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Latency of a synchronous allreduce", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    common.add_common_flags(parser, rounds=5)
    parser.add_argument("--smallest", type=int, default=4096, help="bytes of the smallest tensor")
    parser.add_argument("--largest", type=int, default=400_000_000, help="bytes of the largest tensor")
    parser.add_argument("--calls", type=int, default=200, help="most timed calls per size and round")
    parser.add_argument(
        "--volume",
        type=int,
        default=256 << 20,
        help="bytes per size and round; large sizes get fewer calls, at least 5",
    )
    parser.add_argument("--inplace", action="store_true", help=argparse.SUPPRESS)
    return common.parse(parser)


def sizes(smallest: int, largest: int) -> list[int]:
    """Return the smallest size, sizes that are each four times the size before, 100 MB, and the largest size."""
    found = [smallest]
    while found[-1] * 8 <= largest:
        found.append(found[-1] * 4)
    between = [HUNDRED_MB] if found[-1] < HUNDRED_MB < largest else []
    return found if smallest == largest else [*found, *between, largest]


def calls(size: int, args: argparse.Namespace) -> int:
    return max(5, min(args.calls, args.volume // size))


@dataclass(frozen=True)
class Opened:
    """This rank's end of a peer: ``call`` returns the sum of a tensor over all ranks."""

    rank: int
    ranks: int
    call: Callable[[Any], Any]
    close: Callable[[], None] = lambda: None


def open_horovod(library: str, inplace: bool) -> Opened:
    hvd = importlib.import_module(f"{library}.torch")
    hvd.init()
    function = hvd.allreduce_ if inplace else hvd.allreduce
    return Opened(hvd.rank(), hvd.size(), lambda x: function(x, name=f"size.{x.numel()}", op=hvd.Sum), hvd.shutdown)


def open_mpi4py(inplace: bool) -> Opened:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    kept: dict[int, Any] = {}

    def call(x: Any) -> Any:
        if inplace:
            world.Allreduce(MPI.IN_PLACE, x.numpy())
            return x
        result = kept.setdefault(x.numel(), np.empty(x.numel(), dtype=np.float32))
        world.Allreduce(x.numpy(), result)
        return result

    return Opened(world.Get_rank(), world.Get_size(), call)


def open_mpi4py_two_links(inplace: bool) -> Opened:
    """Open mpi4py with Open MPI set up as hvdkit does: with two TCP connections for each pair of ranks."""
    from hvdkit.environments.libraries import use_the_wire_both_ways

    use_the_wire_both_ways()
    return open_mpi4py(inplace)


def open_gloo(inplace: bool) -> Opened:
    import torch.distributed as dist

    dist.init_process_group("gloo")

    def call(x: Any) -> Any:
        dist.all_reduce(x)
        return x

    return Opened(dist.get_rank(), dist.get_world_size(), call, dist.destroy_process_group)


def open_memory(inplace: bool) -> Opened:
    """Open the bound "memory". The first call of a size allocates, warms and meets the other ranks; later ones copy."""
    gloo = open_gloo(inplace)
    kept: dict[int, tuple[Any, Any]] = {}

    def call(x: Any) -> Any:
        if x.numel() not in kept:
            kept[x.numel()] = x.numpy().copy(), x.numpy().copy()
            return gloo.call(x)
        np.copyto(*kept[x.numel()])
        return x

    return Opened(gloo.rank, gloo.ranks, call, gloo.close)


def open_shared(name: str, inplace: bool) -> Opened:
    return Opened(*getattr(importlib.import_module("fusion"), name)())


# The functions that open a peer on a rank, by the name of the worker.
WORKERS: dict[str, Callable[[bool], Opened]] = {
    "hvdkit": functools.partial(open_horovod, "hvdkit"),
    "horovod": functools.partial(open_horovod, "horovod"),
    "mpi4py": open_mpi4py,
    TWO_LINKS: open_mpi4py_two_links,
    "gloo": open_gloo,
    "fusion": functools.partial(open_shared, "open_fusion"),
    ONE_PASS: functools.partial(open_shared, "open_one_pass"),
    MEMORY: open_memory,
}


def contestants() -> list[Peer]:
    mpi4py = [Peer("mpi4py", "mpi4py", "mpi"), Peer("mpi4py in place", "mpi4py", "mpi", ("--inplace",))]
    return [
        *jobs.horovods(),
        *jobs.horovods(" in place", "--inplace"),
        Peer("hvdkit fusion buffer", "fusion", "mpi" if jobs.has_mpi() else "gloo"),
        Peer(ONE_PASS, ONE_PASS, "gloo"),
        Peer("Gloo", "gloo", "plain"),
        *(mpi4py if jobs.has_mpi() else []),
        Peer(MEMORY, MEMORY, "plain"),
    ]


def work(args: argparse.Namespace) -> None:
    """Run the calls on a rank, and report the seconds of every call, by size."""
    import torch

    torch.set_num_threads(args.threads)
    peer = WORKERS[args.worker](args.inplace)
    seconds: dict[int, list[float]] = {}
    for size in sizes(args.smallest, args.largest):
        tensor = torch.full((size // 4,), float(peer.rank + 1))
        result = np.asarray(peer.call(tensor))
        assert (result == peer.ranks * (peer.ranks + 1) / 2).all(), f"wrong sum of {size} bytes"
        tensor.zero_()  # sums in place stay finite
        for _ in range(max(3, calls(size, args) // 10)):
            peer.call(tensor)
        seconds[size] = []
        for _ in range(calls(size, args)):
            began = time.perf_counter()
            peer.call(tensor)
            seconds[size].append(time.perf_counter() - began)
    jobs.report(args.report, peer.rank, seconds)
    peer.close()


def name_of(size: int) -> str:
    if size % 1_000_000 == 0:
        return f"{size // 1_000_000} MB"
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def worker_flags(args: argparse.Namespace, smallest: int, largest: int) -> list[Any]:
    """Return the flags that a rank needs."""
    flags = ["--threads", args.threads, "--calls", args.calls, "--volume", args.volume]
    return [*flags, "--smallest", smallest, "--largest", largest]


def slowest(reports: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    """Return the seconds of each call on its slowest rank, by size."""
    return {size: np.max([one[size] for one in reports], axis=0).tolist() for size in reports[0]}


def compare(args: argparse.Namespace) -> None:
    """Run the script itself: rounds of jobs, then the table."""
    peers = common.chosen(contestants(), args.peers)
    flags = worker_flags(args, args.smallest, args.largest)

    def job(peer: Peer) -> dict[str, list[float]]:
        return slowest(jobs.run_job(__file__, peer, flags, args.ranks, args.threads, args.timeout))

    rounds, errors = common.run_rounds(peers, args.rounds, job)
    names = [peer.name for peer in peers if peer.name not in errors]
    rows, summary = [], []
    for size in sizes(args.smallest, args.largest):
        medians = [{name: float(np.median(one[name][str(size)])) for name in one} for one in rounds]
        for name in names:
            pooled = common.spread(value * 1e6 for one in rounds for value in one[name][str(size)])
            ratios = {other: common.paired_ratio(medians, name, other) for other in DENOMINATORS}
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
    headers = ["size", "peer", "median us", "quartiles us", "p90 us", *(f"time / {name}" for name in DENOMINATORS)]
    print(f"\nsynchronous allreduce, {args.ranks} ranks; ratios: median [smallest, largest] of {args.rounds} rounds")
    print(common.table(headers, rows))
    common.save("allreduce", args, {"summary": summary, "rounds": rounds, "errors": errors}, draw(summary, names))
    common.finish(errors)


def draw(summary: list[dict[str, Any]], names: list[str]) -> Any:
    """Draw a line per peer. The same peer in place has a dashed line of the same colour; bounds are dotted."""
    plt = common.pyplot()
    figure, axes = plt.subplots(figsize=(9, 6))
    plain = [name for name in dict.fromkeys(name.removesuffix(" in place") for name in names) if name not in BOUNDS]
    colours = {name: f"C{index}" for index, name in enumerate(plain)} | {MEMORY: "black", ONE_PASS: "gray"}
    for name in names:
        mine = [one for one in summary if one["peer"] == name]
        x = [one["bytes"] for one in mine]
        style = {"linestyle": ":" if name in BOUNDS else "--" if name.endswith(" in place") else "-"}
        style["color"] = colours[name.removesuffix(" in place")]
        axes.plot(x, [one["microseconds"]["median"] for one in mine], marker="o", markersize=3, label=name, **style)
        low, high = ([one["microseconds"][key] for one in mine] for key in ("q1", "q3"))
        axes.fill_between(x, low, high, alpha=0.12, color=style["color"])
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
