"""The training step of a 20.7 M parameter transformer: alone, under DDP, under hvdkit, under Horovod.

    python benchmarks/step.py
    python benchmarks/step.py --rounds 1 --steps 3         # a quick look

"alone" is the same step on all ranks at once with no communication: what the others would take if it were free. Each
peer runs in its own job, once a round. At the end of a job all ranks must hold the same weights, or the job has failed.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from typing import Any

import common
import numpy as np
from common import Peer

sys.path.insert(0, str(common.ROOT / "examples"))

ALONE, DDP = "alone", "DDP"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Step time of a transformer", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    common.add_common_flags(parser, rounds=5)
    parser.add_argument("--steps", type=int, default=10, help="timed steps per round")
    parser.add_argument("--warmup-steps", type=int, default=4, help="steps per round before the timed ones")
    parser.add_argument("--batch-size", type=int, default=4, help="sequences per rank and step")
    parser.add_argument("--context", type=int, default=128, help="bytes per sequence")
    parser.add_argument("--layers", type=int, default=6, help="transformer blocks")
    parser.add_argument("--width", type=int, default=512, help="width of the model")
    parser.add_argument(
        "--compression", choices=["none", "fp16"], default="none", help="hvdkit's and Horovod's gradients"
    )
    return parser.parse_args()


def work(args: argparse.Namespace) -> None:
    """What a rank runs: seconds of every timed step, and a fingerprint of the weights at the end."""
    import torch
    import torch.distributed as dist
    from pytorch_text import ByteTransformer, next_byte_loss

    torch.set_num_threads(args.threads)
    torch.manual_seed(42)
    model = ByteTransformer(args.context, args.layers, args.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    trained: torch.nn.Module = model
    if args.worker in ("hvdkit", "horovod"):
        hvd = importlib.import_module(f"{args.worker}.torch")
        hvd.init()
        rank, close = hvd.rank(), hvd.shutdown
        optimizer = hvd.DistributedOptimizer(
            optimizer,
            named_parameters=model.named_parameters(),
            compression=getattr(hvd.Compression, args.compression),
        )
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    else:
        dist.init_process_group("gloo")
        rank, close = dist.get_rank(), dist.destroy_process_group
        if args.worker == "ddp":
            trained = torch.nn.parallel.DistributedDataParallel(model)

    data = torch.Generator().manual_seed(rank)
    seconds = []
    for step in range(args.warmup_steps + args.steps):
        sequences = torch.randint(256, (args.batch_size, args.context + 1), generator=data)
        if step == args.warmup_steps and args.worker == "alone":
            dist.barrier()  # all ranks compute at the same time from here on
        began = time.perf_counter()
        optimizer.zero_grad()
        next_byte_loss(trained, sequences).backward()
        optimizer.step()
        if step >= args.warmup_steps:
            seconds.append(time.perf_counter() - began)
    weights = sum(parameter.detach().double().sum().item() for parameter in model.parameters())
    parameters = sum(parameter.numel() for parameter in model.parameters())
    common.report(args.report, rank, {"seconds": seconds, "weights": weights, "parameters": parameters})
    del trained  # DDP must let go of its process group before that is destroyed, or the exit may hang
    close()


def contestants() -> list[Peer]:
    return [Peer(ALONE, "alone", "plain"), Peer(DDP, "ddp", "plain"), *common.horovods()]


def compare(args: argparse.Namespace) -> None:
    """What the script itself runs: rounds of jobs, then the table."""
    peers = common.chosen(contestants(), args.peers)
    names = ("threads", "steps", "warmup_steps", "batch_size", "context", "layers", "width", "compression")
    flags = [word for name in names for word in (f"--{name.replace('_', '-')}", getattr(args, name))]
    parameters = 0

    def job(peer: Peer) -> list[float]:
        """Milliseconds of each step, averaged over the ranks."""
        nonlocal parameters
        reports = common.run_job(__file__, peer, flags, args.ranks, args.threads, args.timeout)
        if peer.name != ALONE and len({one["weights"] for one in reports}) > 1:
            raise RuntimeError(f"{peer.name}: the ranks ended with different weights")
        parameters = reports[0]["parameters"]
        return (1e3 * np.mean([one["seconds"] for one in reports], axis=0)).tolist()

    rounds, errors = common.run_rounds(peers, args.rounds, job)
    medians = [{name: float(np.median(steps)) for name, steps in one.items()} for one in rounds]
    rows, summary = [], []
    for name in [peer.name for peer in peers if peer.name not in errors]:
        pooled = common.spread(value for one in rounds for value in one[name])
        efficiency = common.paired_ratio(medians, ALONE, name)
        ratio = common.paired_ratio(medians, name, DDP)
        summary.append({"peer": name, "milliseconds": pooled, "efficiency": efficiency, "time_ratio_to_ddp": ratio})
        quartiles = f"{pooled['q1']:.0f} to {pooled['q3']:.0f}"
        rows.append(
            [name, f"{pooled['median']:.0f}", quartiles, common.show_ratio(efficiency), common.show_ratio(ratio)]
        )
    print(
        f"\nstep of a {parameters / 1e6:.1f} M parameter transformer, {args.ranks} ranks of {args.threads} thread(s); "
        f"ratios: median [smallest, largest] of {args.rounds} rounds"
    )
    print(common.table(["peer", "ms/step", "quartiles", "efficiency (alone / peer)", "time / DDP"], rows))
    payload = {"parameters": parameters, "summary": summary, "rounds": rounds, "errors": errors}
    common.save("step", args, payload, draw(summary))
    common.finish(errors)


def draw(summary: list[dict[str, Any]]) -> Any:
    plt = common.pyplot()
    figure, axes = plt.subplots(figsize=(8, 4.5))
    names = [one["peer"] for one in summary]
    times = [one["milliseconds"] for one in summary]
    middle = [one["median"] for one in times]
    bars = [[one["median"] - one["q1"] for one in times], [one["q3"] - one["median"] for one in times]]
    colours = ["tab:gray" if name == ALONE else "tab:blue" if name in common.HVDKIT else "tab:orange" for name in names]
    axes.bar(names, middle, yerr=bars, capsize=4, color=colours)
    axes.bar_label(axes.containers[-1], fmt="%.0f", label_type="center", color="white")
    axes.set_ylabel("ms per step (median, quartiles)")
    axes.set_title("Training step of a transformer")
    return figure


if __name__ == "__main__":
    arguments = parse_arguments()
    if arguments.worker:
        work(arguments)
    else:
        compare(arguments)
