"""Test accuracy on handwritten digits, trained with each codec of hvdkit, next to fp32 with the same seeds.

    python benchmarks/accuracy.py
    python benchmarks/accuracy.py --rounds 1 --epochs 5 --peers none int8         # a quick look

The script trains the network of examples/pytorch_digits.py. All ranks encode their own gradients ("everywhere"), but
only of the tensors that codecs encode by default, not of biases and small tensors. A round is a seed of the weights and
of the order of the images; a job trains with all seeds of a codec. dgc has the momentum in the codec, the other codecs
have it in SGD.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common
import jobs
import numpy as np
import training
from jobs import Peer

DENSE = "none"
MOMENTUM = 0.9
# The most points by which a codec may end below fp32.
MOST_POINTS = 0.5
CASTS = ("none", "fp16", "bf16")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Accuracy with each codec", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    common.add_common_flags(parser, rounds=5)
    parser.add_argument("--epochs", type=int, default=20, help="passes over the training images")
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate of 1 rank; scaled by the number of ranks")
    parser.add_argument("--warmup-epochs", type=float, default=3, help="epochs until the learning rate is highest")
    parser.add_argument("--compression", choices=training.CODECS, default=DENSE, help=argparse.SUPPRESS)
    return common.parse(parser)


def contestants() -> list[Peer]:
    launcher = "mpi" if jobs.has_mpi() else "gloo"
    return [Peer(name, "hvdkit", launcher, ("--compression", name)) for name in training.CODECS]


def work(args: argparse.Namespace) -> None:
    """Train with each seed on a rank, and report the accuracies and losses."""
    import torch

    import hvdkit.torch as hvd

    hvd.init()
    torch.set_num_threads(args.threads)
    found = [train(args, hvd, seed) for seed in range(args.rounds)]
    print(hvd.compression_stats())
    jobs.report(args.report, hvd.rank(), found)
    hvd.shutdown()


def train(args: argparse.Namespace, hvd: Any, seed: int) -> dict[str, float]:
    """Train once, and return the accuracy on the test images in percent and the mean loss of the last epoch."""
    import torch
    from torch.nn.functional import cross_entropy
    from torch.utils.data import DataLoader
    from torch.utils.data.distributed import DistributedSampler

    sys.path.insert(0, str(jobs.ROOT / "examples"))
    from pytorch_digits import DigitsNet, learning_rate, load_data

    torch.manual_seed(1000 * seed + hvd.rank())
    images, test = load_data()
    sampler = DistributedSampler(images, num_replicas=hvd.size(), rank=hvd.rank(), seed=seed)
    loader = DataLoader(images, batch_size=args.batch_size, sampler=sampler)
    model, dgc = DigitsNet(), args.compression == "dgc"
    sgd = torch.optim.SGD(
        model.parameters(), lr=args.lr, momentum=0.0 if dgc else MOMENTUM, nesterov=not dgc, weight_decay=1e-4
    )
    optimizer = hvd.DistributedOptimizer(
        sgd, model.named_parameters(), compression=codec(args.compression, hvd, len(loader))
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    losses = []
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        losses.clear()
        for batch, (inputs, labels) in enumerate(loader):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(epoch + batch / len(loader), args)
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    model.eval()
    inputs, labels = test.tensors
    with torch.no_grad():
        right = (model(inputs).argmax(dim=1) == labels).float().mean().item()
    return {"accuracy": 100 * right, "loss": float(np.mean(losses))}


def codec(name: str, hvd: Any, steps_per_epoch: int) -> Any:
    """Return the codec, set to encode between ranks of one node, too."""
    if name in CASTS:
        return training.codec(hvd, name)
    more = {"compress": "everywhere"} | ({"steps_per_epoch": steps_per_epoch} if name == "dgc" else {})
    return training.codec(hvd, name, **more)


def summarise(found: dict[str, list[dict[str, float]]]) -> list[dict[str, Any]]:
    """Return an entry per codec: the mean accuracy, and its distance from fp32 with that distance's standard error."""
    summary = []
    for name, runs in found.items():
        accuracies = np.array([one["accuracy"] for one in runs])
        far = accuracies - [one["accuracy"] for one in found[DENSE]] if DENSE in found else None
        summary.append(
            {
                "peer": name,
                "accuracy": float(accuracies.mean()),
                "smallest": float(accuracies.min()),
                "largest": float(accuracies.max()),
                "loss": float(np.mean([one["loss"] for one in runs])),
                "points_from_dense": None if far is None else float(far.mean()),
                "standard_error": None
                if far is None
                else float(far.std(ddof=1) / math.sqrt(len(far)))
                if len(far) > 1
                else 0.0,
            }
        )
    return summary


def show(args: argparse.Namespace, summary: Sequence[dict[str, Any]]) -> None:
    rows = [
        [
            one["peer"],
            f"{one['accuracy']:.2f} [{one['smallest']:.1f}, {one['largest']:.1f}]",
            "-"
            if one["points_from_dense"] is None
            else f"{one['points_from_dense']:+.2f} ± {one['standard_error']:.2f}",
            f"{one['loss']:.4f}",
        ]
        for one in summary
    ]
    print(f"\ndigits, {args.ranks} ranks, {args.epochs} epochs: mean [smallest, largest] of {args.rounds} seeds")
    print(common.table(["codec", "accuracy, %", "points from fp32", "last loss"], rows))
    for one in summary:
        if one["points_from_dense"] is not None and one["peer"] != DENSE:
            met = one["points_from_dense"] >= -MOST_POINTS
            print(f"{'met' if met else 'MISSED'}: {one['peer']}: {one['points_from_dense']:+.2f} points")


def draw(summary: Sequence[dict[str, Any]]) -> Any:
    plt = common.pyplot()
    figure, axes = plt.subplots(figsize=(7, 4))
    means = [one["accuracy"] for one in summary]
    bars = [
        [one["accuracy"] - one["smallest"] for one in summary],
        [one["largest"] - one["accuracy"] for one in summary],
    ]
    axes.errorbar(means, [one["peer"] for one in summary], xerr=bars, fmt="o", capsize=3, color="tab:blue")
    dense = [one["accuracy"] for one in summary if one["peer"] == DENSE]
    for value in dense:
        axes.axvspan(value - MOST_POINTS, value + MOST_POINTS, color="tab:gray", alpha=0.2, label="fp32 ± 0.5 points")
        axes.legend(loc="lower left", frameon=False)
    axes.invert_yaxis()
    axes.set_xlabel("test accuracy, % (mean, smallest, largest of the seeds)")
    axes.set_title("Handwritten digits with each codec")
    return figure


def compare(args: argparse.Namespace) -> None:
    """Run the script itself: a job for each codec, then the table."""
    peers = common.chosen(contestants(), args.peers)
    names = ("rounds", "epochs", "batch_size", "lr", "warmup_epochs", "threads")
    flags = [word for name in names for word in (f"--{name.replace('_', '-')}", getattr(args, name))]

    def job(peer: Peer) -> list[dict[str, float]]:
        reports = jobs.run_job(Path(__file__), peer, flags, args.ranks, args.threads, args.timeout)
        if len({tuple(one["accuracy"] for one in report) for report in reports}) > 1:
            raise RuntimeError(f"{peer.name}: the ranks ended with different weights")
        return reports[0]

    (found,), errors = common.run_rounds(peers, 1, job)
    summary = summarise({peer.name: found[peer.name] for peer in peers if peer.name in found})
    show(args, summary)
    common.save("accuracy", args, {"summary": summary, "runs": found, "errors": errors}, draw(summary))
    common.finish({f"hvdkit {name}": error for name, error in errors.items()})


if __name__ == "__main__":
    arguments = parse_arguments()
    if arguments.worker:
        work(arguments)
    else:
        compare(arguments)
