"""torch.distributed on hvdkit and on Gloo: collectives by size, and steps of DDP and FSDP2, in turn in one process.

    python benchmarks/distributed.py
    python benchmarks/distributed.py --only ddp --batch-size 4 --words 64

A step is timed in several ways: "alone" (no communication), "floor" (DDP with a hook, or FSDP2 with collectives, that
communicate nothing: the cost of the framework itself), "Gloo", "hvdkit", and for DDP also "DistributedOptimizer",
hvdkit's own. Each rank runs all ways in every round; the times are those of rank 0. All ways that communicate end with
the same parameters.
"""

from __future__ import annotations

import argparse
import copy
import time
import warnings
from collections.abc import Callable
from typing import Any

import common
import jobs
import numpy as np
from jobs import Peer

SIZES = (4096, 1 << 20, 100_000_000)
COLLECTIVES = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
HERE = Peer("hvdkit torch.distributed", "torch", "plain")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=str(__doc__).splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    common.add_common_flags(parser, rounds=14)
    parser.add_argument("--only", choices=["collectives", "ddp", "fsdp"], nargs="+", help="only these parts")
    parser.add_argument("--batch-size", type=int, default=1, help="sequences of a step")
    parser.add_argument("--words", type=int, default=16, help="words of a sequence")
    return common.parse(parser)


def work(args: argparse.Namespace) -> None:
    """Run the parts on one rank."""
    import torch
    import torch.distributed as dist

    from hvdkit import autoload

    warnings.simplefilter("ignore")
    torch.set_num_threads(args.threads)
    autoload.register()
    dist.init_process_group("hvdkit")
    gloo = dist.new_group(list(range(args.ranks)), backend="gloo")
    parts: dict[str, Callable[..., Any]] = {"collectives": collectives, "ddp": ddp, "fsdp": fsdp}
    figures = {name: part(args, gloo) for name, part in parts.items() if args.only is None or name in args.only}
    jobs.report(args.report, dist.get_rank(), figures)
    dist.destroy_process_group()


def collectives(args: argparse.Namespace, gloo: Any) -> list[dict[str, Any]]:
    """Time each collective on Gloo, on hvdkit, and on hvdkit with buffers out of the arena."""
    import torch
    import torch.distributed as dist

    memory = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]

    def buffers(name: str, nbytes: int, empty: Callable[[int], Any]) -> list[Any]:
        elements = nbytes // 4 // args.ranks * args.ranks
        counts = {
            "all_reduce": [elements],
            "all_gather_into_tensor": [elements, elements // args.ranks],
            "reduce_scatter_tensor": [elements // args.ranks, elements],
            "all_to_all_single": [elements, elements],
        }[name]
        return [empty(count).fill_(1.0) for count in counts]

    def in_arena(elements: int) -> Any:
        return memory.allocate_tensor(elements, dtype=torch.float32, device=torch.device("cpu"))

    figures = []
    for nbytes in SIZES:
        calls = max(2, min(60, 20_000_000 // nbytes))
        for name in COLLECTIVES:
            call = getattr(dist, name)
            options = {} if name.startswith(("all_to_all", "all_gather")) else {"op": dist.ReduceOp.MAX}
            ways = {
                "Gloo": (buffers(name, nbytes, torch.empty), gloo),
                "hvdkit": (buffers(name, nbytes, torch.empty), None),
                "hvdkit, arena": (buffers(name, nbytes, in_arena), None),
            }
            times: dict[str, list[float]] = {way: [] for way in ways}
            for _ in range(4):
                for way, (tensors, group) in ways.items():
                    dist.barrier(group=gloo)
                    for _ in range(calls):
                        began = time.perf_counter()
                        call(*tensors, group=group, **options)
                        times[way].append(time.perf_counter() - began)
            median = {way: float(np.median(seconds[calls:])) for way, seconds in times.items()}
            figures.append({"collective": name, "nbytes": nbytes, "seconds": median})
    return figures


def _model(args: argparse.Namespace) -> tuple[Any, Callable[[], Any], Callable[..., Any]]:
    import torch
    import torch.distributed as dist
    from models import VOCABULARY, WordTransformer
    from torch.nn import functional

    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(dist.get_rank())

    def batch() -> Any:
        return torch.randint(VOCABULARY, (args.batch_size, args.words), generator=generator)

    def loss(model: Any, words: Any) -> Any:
        return functional.cross_entropy(model(words).flatten(0, 1), words.flatten())

    return WordTransformer(), batch, loss


def _steps(args: argparse.Namespace, ways: dict[str, tuple[Any, Any]], gloo: Any, batch: Any, loss: Any) -> Any:
    """Return the seconds of each way's steps; the three steps before them do not count."""
    import torch.distributed as dist

    times: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(args.rounds + 3):
        words = batch()
        for way, (model, optimizer) in ways.items():
            dist.barrier(group=gloo)
            began = time.perf_counter()
            optimizer.zero_grad()
            loss(model, words).backward()
            optimizer.step()
            if turn >= 3:
                times[way].append(time.perf_counter() - began)
    return times


def ddp(args: argparse.Namespace, gloo: Any) -> Any:
    """Time a step of DistributedDataParallel each way, and of hvdkit's own DistributedOptimizer."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import hvdkit.torch as hvd

    base, batch, loss = _model(args)

    def communicate_nothing(state, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    def wrapped(group: Any) -> Any:
        return DistributedDataParallel(copy.deepcopy(base), process_group=group, gradient_as_bucket_view=True)

    models = {"alone": copy.deepcopy(base), "floor": wrapped(gloo), "Gloo": wrapped(gloo), "hvdkit": wrapped(None)}
    models["floor"].register_comm_hook(None, communicate_nothing)
    ways = {way: (model, torch.optim.SGD(model.parameters(), lr=1e-4)) for way, model in models.items()}
    hvd.init()
    model = copy.deepcopy(base)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    ways["DistributedOptimizer"] = model, hvd.DistributedOptimizer(optimizer, model.named_parameters())
    times = _steps(args, ways, gloo, batch, loss)
    for first, second in zip(models["Gloo"].parameters(), models["hvdkit"].parameters(), strict=True):
        torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-6)
    hvd.shutdown()
    assert dist.is_initialized()
    return times


def fsdp(args: argparse.Namespace, gloo: Any) -> Any:
    """Time a step of FSDP2 each way; the floor has collectives that do nothing."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    base, batch, loss = _model(args)

    class Nothing:
        """Collectives that leave their outputs as they are."""

        def allocate(self, size: Any, *, dtype: Any, device: Any) -> Any:
            return torch.empty(*size, dtype=dtype, device=device)

        def __call__(self, output_tensor: Any, *arguments: Any, **options: Any) -> None:
            return None

    ways = {}
    for way, group in (("floor", gloo), ("Gloo", gloo), ("hvdkit", dist.group.WORLD)):
        mesh, model = DeviceMesh.from_group(group, "cpu"), copy.deepcopy(base)
        shards = [fully_shard(layer, mesh=mesh) for layer in model.layers]
        shards.append(fully_shard(model, mesh=mesh))
        if way == "floor":
            for shard in shards:
                shard.set_custom_all_gather(Nothing())
                shard.set_custom_reduce_scatter(Nothing())
        ways[way] = model, torch.optim.SGD(model.parameters(), lr=0.0 if way == "floor" else 1e-4)
    alone = copy.deepcopy(base)
    ways["alone"] = alone, torch.optim.SGD(alone.parameters(), lr=1e-4)
    return _steps(args, ways, gloo, batch, loss)


def compare(args: argparse.Namespace) -> None:
    """Run the ranks, and show what they measured."""
    flags = ["--threads", args.threads, "--rounds", args.rounds, "--ranks", args.ranks]
    flags += ["--batch-size", args.batch_size, "--words", args.words]
    flags += ["--only", *args.only] if args.only else []
    figures = jobs.run_job(__file__, HERE, flags, args.ranks, args.threads, args.timeout)[0]
    if "collectives" in figures:
        rows = []
        for row in figures["collectives"]:
            seconds = row["seconds"]
            shown = [f"{1e3 * value:.3f}" for value in seconds.values()]
            times = [f"{seconds['Gloo'] / seconds[way]:.1f}" for way in ("hvdkit", "hvdkit, arena")]
            rows.append([row["collective"], row["nbytes"], *shown, *times])
        headers = ["collective", "bytes", "Gloo, ms", "hvdkit, ms", "arena, ms", "Gloo / hvdkit", "Gloo / arena"]
        print(common.table(headers, rows))
    for part in ("ddp", "fsdp"):
        if part in figures:
            show_steps(part, figures[part])
    common.save("distributed", args, {"figures": figures}, draw(figures))


def show_steps(part: str, times: dict[str, list[float]]) -> None:
    """Print the median time of each way, and its median time above the floor of the same round."""
    above = {way: [each - floor for each, floor in zip(times[way], times["floor"], strict=True)] for way in times}
    lost = float(np.median(above["Gloo"]))
    rows = [
        [
            way,
            f"{1e3 * np.median(seconds):.1f}",
            f"{1e3 * np.median(above[way]):.1f}",
            f"{np.median(above[way]) / lost:.2f}",
        ]
        for way, seconds in times.items()
    ]
    print(f"\n{part}")
    print(common.table(["way", "step, ms", "above the floor, ms", "of Gloo's"], rows))


def draw(figures: dict[str, Any]) -> Any:
    plt = common.pyplot()
    parts = [part for part in ("ddp", "fsdp") if part in figures]
    figure, axes = plt.subplots(1, 1 + len(parts), figsize=(5 * (1 + len(parts)), 4), squeeze=False)
    rows = figures.get("collectives", [])
    names = [f"{row['collective']}\n{row['nbytes']:,} bytes" for row in rows]
    axes[0][0].barh(names, [row["seconds"]["Gloo"] / row["seconds"]["hvdkit"] for row in rows])
    axes[0][0].axvline(1.0, color="black", linewidth=1)
    axes[0][0].set_xlabel("times faster than Gloo")
    for axis, part in zip(axes[0][1:], parts, strict=True):
        ways = list(figures[part])
        medians = [1e3 * float(np.median(figures[part][way])) for way in ways]
        axis.barh(ways, medians, color=[common.colour(way) for way in ways])
        axis.set_xlabel(f"{part.upper()}: ms a step")
    return figure


if __name__ == "__main__":
    arguments = parse_arguments()
    if arguments.worker:
        work(arguments)
    else:
        compare(arguments)
