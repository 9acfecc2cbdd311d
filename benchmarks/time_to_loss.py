"""Seconds and bytes that training takes to reach a loss, with each kind of compression, over a wire of a known rate.

    sudo python benchmarks/time_to_loss.py
    sudo python benchmarks/time_to_loss.py --gigabits 1 --steps 50 --peers DDP "hvdkit int8"         # a quick look

The script trains the model of examples/pytorch_text.py on two hosts, namespaces on this machine (see namespaces.py),
with one rank each. All peers start from the same weights and see the same batches. Every few steps the loss of text
that is not trained on is measured; its seconds and bytes do not count. Bytes are those that a host's network card sent,
with headers. A loss is the mean of the last three measurements. "dense" is the last loss of fp32, and a little more
(--tolerance); "common" is the loss that all peers reach that do not diverge. dgc, and topk with "warm-up" in its name,
warm up for a fifth of the steps. dgc has its own momentum, so it trains with SGD, not with AdamW; it is compared with
DDP and hvdkit with SGD and that momentum. DDP's PowerSGD hook over Gloo may hang or abort with several buckets, so it
has a single bucket.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import arrival
import common
import jobs
import namespaces
import numpy as np
import training
import two_hosts
from arrival import COMPARED, DDP, GOALS, OWN_DENSE
from jobs import Peer

SCRIPT = Path(__file__).name
# Flags by the end of a name. With several buckets, PowerSGD's sums may meet other sums, and the job hangs or aborts.
HOOKS = {
    "fp16": ("--compression", "fp16"),
    "bf16": ("--compression", "bf16"),
    "PowerSGD": ("--compression", "powersgd", "--one-bucket"),
}
ONE_BUCKET_MB = 1 << 14
WARMUP_EPOCHS = 4  # together a fifth of the steps
SMOOTHED = 3


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Time to a loss over a wire", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    common.add_common_flags(parser, rounds=1, ranks=False)
    parser.add_argument("--gigabits", type=float, nargs="+", default=[1, 0.2], help="rates of the wire, in Gb/s")
    own = ["mpi", "torch"] if jobs.has_mpi() else ["torch"]
    parser.add_argument("--transport", choices=own, default=own[0], help="transport of hvdkit")
    parser.add_argument("--name", default="time_to_loss", help="file name of the results")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps")
    parser.add_argument("--evaluate-every", type=int, default=5, help="steps between two losses")
    parser.add_argument("--batch-size", type=int, default=4, help="sequences per rank and step")
    parser.add_argument("--held-out", type=int, default=32, help="sequences of which the loss is measured")
    parser.add_argument("--context", type=int, default=128, help="bytes per sequence")
    parser.add_argument("--layers", type=int, default=6, help="transformer blocks")
    parser.add_argument("--width", type=int, default=512, help="width of the model")
    parser.add_argument("--lr", type=float, default=3e-4, help="highest learning rate of AdamW")
    parser.add_argument("--sgd-lr", type=float, default=0.05, help="highest learning rate of SGD")
    parser.add_argument("--warmup-steps", type=int, default=20, help="steps over which the learning rate grows")
    parser.add_argument(
        "--clip", type=float, default=1.0, help="largest norm of the averaged gradient; dgc: of a rank's"
    )
    parser.add_argument("--max-bytes", type=int, default=8_000_000, help="read no more source code than this")
    parser.add_argument("--seed", type=int, default=42, help="seed of the weights and of the choice of sequences")
    parser.add_argument(
        "--tolerance", type=float, default=0.5, help="%% above the last loss of fp32 that still count as dense"
    )
    for name, default in (("compression", "none"), ("optimizer", "adamw")):
        parser.add_argument(f"--{name}", default=default, help=argparse.SUPPRESS)
    for flag in ("--one-bucket", "--warm-up"):
        parser.add_argument(flag, action="store_true", help=argparse.SUPPRESS)
    parser.set_defaults(timeout=1800.0, ranks_per_host=1, mpi_args="")
    return common.parse(parser)


_WORKER_FLAGS = (
    *("threads", "steps", "evaluate_every", "batch_size", "held_out", "context", "layers", "width"),
    *("lr", "sgd_lr", "warmup_steps", "clip", "max_bytes", "seed"),
)


def contestants(transport: str) -> list[Peer]:
    """Return DDP with and without its hooks, and hvdkit with its codecs."""
    sgd = ("--optimizer", "sgd")
    launcher = {"mpi": "mpi", "torch": "gloo"}[transport]
    found = [Peer(DDP, "ddp", "plain")]
    found += [Peer(f"{DDP} {hook}", "ddp", "plain", flags) for hook, flags in HOOKS.items()]
    for name in training.CODECS:
        flags = ("--compression", name, *(sgd if name == "dgc" else ()))
        found.append(Peer(f"hvdkit {name}", "hvdkit", launcher, flags))
    warm = ("--compression", "topk", "--warm-up")
    found += [
        Peer(f"hvdkit topk warm-up{name}", "hvdkit", launcher, flags)
        for name, flags in (("", warm), (" SGD", (*warm, *sgd)))
    ]
    return [*found, Peer(f"{DDP} SGD", "ddp", "plain", sgd), Peer(f"{OWN_DENSE} SGD", "hvdkit", launcher, sgd)]


@dataclass(frozen=True)
class Trainer:
    """This rank's end of a contestant: ``step`` applies the averaged gradients after ``backward`` was called."""

    rank: int
    ranks: int
    trained: Any
    optimizer: Any
    step: Callable[[], None]
    barrier: Callable[[], None]
    payload_bytes: Callable[[], int]
    close: Callable[[], None]


def _optimizer(args: argparse.Namespace, model: Any) -> Any:
    import torch

    if args.optimizer == "sgd":
        momentum = 0.0 if args.compression == "dgc" else training.CODECS["dgc"][1]["momentum"]
        return torch.optim.SGD(model.parameters(), lr=args.sgd_lr, momentum=momentum)
    return torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)


def open_hvdkit(args: argparse.Namespace, model: Any) -> Trainer:
    import hvdkit.torch as hvd

    hvd.init()
    more: dict[str, Any] = {"clip": args.clip} if args.compression == "dgc" else {}
    if args.compression == "dgc" or args.warm_up:
        more |= {"warmup_epochs": WARMUP_EPOCHS, "steps_per_epoch": max(1, args.steps // (5 * WARMUP_EPOCHS))}
    optimizer = hvd.DistributedOptimizer(
        _optimizer(args, model),
        named_parameters=model.named_parameters(),
        compression=training.codec(hvd, args.compression, **more),
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    def step() -> None:
        optimizer.synchronize()
        if args.compression != "dgc":
            _clip(args, model)
        with optimizer.skip_synchronize():
            optimizer.step()

    def payload_bytes() -> int:
        return hvd.communication_stats().bytes_sent

    return Trainer(hvd.rank(), hvd.size(), model, optimizer, step, hvd.barrier, payload_bytes, hvd.shutdown)


def open_ddp(args: argparse.Namespace, model: Any) -> Trainer:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    optimizer = _optimizer(args, model)
    one_bucket = {"bucket_cap_mb": ONE_BUCKET_MB} if args.one_bucket else {}
    trained = training.data_parallel(model, args.compression, **one_bucket)

    def step() -> None:
        _clip(args, model)
        optimizer.step()

    rank, ranks = dist.get_rank(), dist.get_world_size()
    return Trainer(rank, ranks, trained, optimizer, step, dist.barrier, lambda: 0, dist.destroy_process_group)


def _clip(args: argparse.Namespace, model: Any) -> None:
    from torch.nn.utils import clip_grad_norm_

    clip_grad_norm_(model.parameters(), args.clip)


def wire_bytes() -> int:
    """Return the bytes that this host's network cards have sent so far."""
    cards = [card for card in Path("/sys/class/net").iterdir() if card.name != "lo"]
    return sum(int((card / "statistics" / "tx_bytes").read_text()) for card in cards)


def work(args: argparse.Namespace) -> None:
    """Train on a rank, and report the figures of its training."""
    import torch

    sys.path.insert(0, str(jobs.ROOT / "examples"))
    from pytorch_text import ByteTransformer

    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    model = ByteTransformer(args.context, args.layers, args.width)
    end = {"hvdkit": open_hvdkit, "ddp": open_ddp}[args.worker](args, model)
    jobs.report(args.report, end.rank, train(args, model, end))
    close = end.close
    del end  # DDP must let go of its process group before that is destroyed, or the exit may hang
    close()


def train(args: argparse.Namespace, model: Any, end: Trainer) -> dict[str, Any]:
    """Train; return loss, seconds and bytes of all steps, losses of other text, and a fingerprint of the weights."""
    import torch
    from pytorch_text import draw, learning_rate, load_sources, next_byte_loss

    text, other = load_sources(args.max_bytes, least=2 * args.context * end.ranks)
    share = text[len(text) * end.rank // end.ranks : len(text) * (end.rank + 1) // end.ranks]
    batches = torch.Generator().manual_seed(args.seed + end.rank)
    held_out = draw(other, args.held_out, args.context, torch.Generator().manual_seed(args.seed))[end.rank :: end.ranks]
    rates = argparse.Namespace(**{**vars(args), "lr": args.sgd_lr if args.optimizer == "sgd" else args.lr})
    steps, evaluations = [], []

    def evaluate() -> None:
        with torch.no_grad():
            evaluations.append(next_byte_loss(model, held_out).item())
        end.barrier()

    evaluate()
    for step in range(args.steps):
        batch = draw(share, args.batch_size, args.context, batches)
        for group in end.optimizer.param_groups:
            group["lr"] = learning_rate(step, rates)
        sent, payload, began = wire_bytes(), end.payload_bytes(), time.perf_counter()
        end.optimizer.zero_grad()
        loss = next_byte_loss(end.trained, batch)
        loss.backward()
        end.step()
        seconds = time.perf_counter() - began
        steps.append([loss.item(), seconds, wire_bytes() - sent, end.payload_bytes() - payload])
        if (step + 1) % args.evaluate_every == 0 or step + 1 == args.steps:
            evaluate()
    weights = sum(parameter.detach().double().sum().item() for parameter in model.parameters())
    return {"steps": steps, "evaluations": evaluations, "weights": weights}


def digest(args: argparse.Namespace, peer: Peer, reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge the reports of a job: figures per step, and the curve of the loss with seconds and bytes since the start.

    Raises RuntimeError if the ranks ended with different weights. NaN counts as equal to NaN.
    """
    if len({str(one["weights"]) for one in reports}) > 1:
        raise RuntimeError(f"{peer.name}: the ranks ended with different weights")
    by_rank = np.array([one["steps"] for one in reports])
    losses, sent, payload = (by_rank[..., column].mean(axis=0) for column in (0, 2, 3))
    seconds = by_rank[..., 1].max(axis=0)
    held_out = np.mean([one["evaluations"] for one in reports], axis=0)
    taken = [0, *(step for step in range(1, args.steps + 1) if step % args.evaluate_every == 0 or step == args.steps)]
    smoothed = [float(np.mean(held_out[max(0, index + 1 - SMOOTHED) : index + 1])) for index in range(len(taken))]
    diverged = not all(map(math.isfinite, [*losses, *held_out])) or smoothed[-1] >= smoothed[0]
    return {
        "diverged": bool(diverged),
        "milliseconds": (1e3 * seconds).tolist(),
        "wire_bytes": sent.tolist(),
        "payload_bytes": payload.tolist() if payload.any() else None,
        "losses": _numbers(losses),
        "held_out": _numbers(held_out),
        "curve": {
            "steps": taken,
            "seconds": np.concatenate([[0.0], np.cumsum(seconds)])[taken].tolist(),
            "bytes": np.concatenate([[0.0], np.cumsum(sent)])[taken].tolist(),
            "loss": _numbers(smoothed),
        },
    }


def _numbers(values: Any) -> list[float | None]:
    """Return the values for JSON: None for a value that is not finite."""
    return [float(value) if math.isfinite(value) else None for value in values]


def measure(args: argparse.Namespace, gigabits: float, peers: list[Peer]) -> dict[str, Any]:
    link = two_hosts.Link(args, gigabits)
    flags = [word for name in _WORKER_FLAGS for word in (f"--{name.replace('_', '-')}", getattr(args, name))]

    def job(peer: Peer) -> dict[str, Any]:
        return digest(args, peer, link.run(SCRIPT, peer, flags))

    rounds, errors = common.run_rounds(peers, args.rounds, job)
    able = arrival.groups([peer for peer in peers if peer.name not in errors])
    summary = [entry for names in able for entry in arrival.summarise(names, rounds, args.tolerance)]
    found = {"summary": summary, "verdicts": arrival.verdicts(gigabits, summary), "rounds": rounds, "errors": errors}
    return {"gigabits": gigabits, **found}


def show(args: argparse.Namespace, result: dict[str, Any]) -> None:
    """Print the table of a rate, and the verdicts on the targets."""

    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    rows = []
    for one in result["summary"]:
        seconds, sooner = one["seconds_to"], one["times_sooner_than"]
        rows.append(
            [
                one["peer"],
                "DIVERGED" if one["diverged"] else number(one["loss"], ".3f"),
                number(one["percent_from_dense"], "+.2f"),
                f"{one['milliseconds']['median']:.0f}",
                number(one["wire_bytes"] / 1e6, ".3f"),
                *(number(seconds[goal], ".1f") for goal in GOALS),
                *(common.show_ratio(sooner[goal][other]) for goal in GOALS for other in COMPARED),
            ]
        )
    headers = ["peer", "loss", "% from dense", "ms/step", "MB/step", *(f"s to {goal}" for goal in GOALS)]
    headers += [f"{goal}: {other} / peer" for goal in GOALS for other in COMPARED]
    print(
        f"\n{args.steps} steps over a wire of {result['gigabits']:g} Gb/s; dense: {args.tolerance:g}% above the last "
        f"loss of fp32; ratios of seconds: median [smallest, largest] of {args.rounds} rounds"
    )
    print(common.table(headers, rows))
    for one in result["verdicts"]:
        word = "not measured" if one["met"] is None else "met" if one["met"] else "MISSED"
        print(f"{word}: {one['target']}: {one['said']}")


def draw(results: Sequence[dict[str, Any]]) -> Any:
    """Draw for each rate the loss by seconds and by bytes, of the first round. Dashed: DDP; dotted: all with SGD."""
    plt = common.pyplot()
    figure, panels = plt.subplots(len(results), 2, figsize=(15, 6 * len(results)), squeeze=False)
    for row, result in zip(panels, results, strict=True):
        for axes, key, divisor, label in ((row[0], "seconds", 1, "seconds"), (row[1], "bytes", 1e6, "MB per host")):
            for index, one in enumerate(result["summary"]):
                run = result["rounds"][0][one["peer"]]
                shown = [pair for pair in zip(run["curve"][key], run["curve"]["loss"], strict=True) if pair[1]]
                axes.plot(
                    [x / divisor for x, _ in shown],
                    [loss for _, loss in shown],
                    color=plt.get_cmap("tab20")(index % 20),
                    linestyle=":" if one["peer"].endswith(" SGD") else "--" if one["peer"].startswith(DDP) else "-",
                    label=one["peer"] + " (diverged)" * one["diverged"],
                )
            axes.set(xlabel=label, ylabel="loss, nats per byte", title=f"wire of {result['gigabits']:g} Gb/s")
            axes.grid(alpha=0.3)
        row[1].set_xscale("log")
        row[1].legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    return figure


def compare(args: argparse.Namespace) -> None:
    """Run the script itself: for each rate, rounds of trainings, then the table."""
    if reason := namespaces.missing():
        raise SystemExit(f"cannot make two hosts: {reason}")
    peers = common.chosen(contestants(args.transport), args.peers)
    results = []
    for gigabits in args.gigabits:
        results.append(measure(args, gigabits, peers))
        show(args, results[-1])
    common.save(args.name, args, {"rates": results}, draw(results))
    common.finish(
        {f"{name}, {one['gigabits']:g} Gb/s": error for one in results for name, error in one["errors"].items()}
    )


if __name__ == "__main__":
    arguments = parse_arguments()
    if arguments.worker:
        work(arguments)
    else:
        compare(arguments)
