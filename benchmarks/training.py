"""A training step under every peer: the peers, the work of a rank, and the table of the results."""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import resource
import time
from collections.abc import Sequence
from typing import Any

import common
import jobs
import numpy as np
from jobs import Peer

MODELS = {
    "words": "a transformer over 8192 words, with SGD",
    "words-adamw": "a transformer over 8192 words, with AdamW",
    "transformer": "a transformer over bytes, with AdamW",
    "convolution": "a convolutional network (ResNet-50), with SGD",
    "tensors": "2000 tensors of 1 to 100 KB, with SGD",
}
ALONE, DDP, DDP_ON_HVDKIT = "alone", "DDP", "hvdkit under DDP"
PHASES = ("forward", "backward", "optimizer")
COSTS = ("processor", "others", "switches")  # of a step; see ``costs``
POWERSGD_RANK = 4
# hvdkit's codecs by the names that they have here: the attribute of hvd.Compression, and its parameters.
CODECS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ("none", "fp16", "bf16", "int8", "int4", "onebit")},
    "topk": ("topk", {"ratio": 0.01}),
    "randomk": ("randomk", {"ratio": 0.1}),
    "powersgd": ("powersgd", {"rank": POWERSGD_RANK}),
    "dgc": ("dgc", {"ratio": 0.001, "momentum": 0.9, "warmup_epochs": 4}),
}
_WORKER_FLAGS = ("steps", "warmup_steps", "batch_size", "context", "layers", "width", "images", "pixels")


def contestants(codecs: Sequence[str] = ()) -> list[Peer]:
    """Return compute alone, DDP with and without its hooks, hvdkit and Horovod with fp32 and fp16 on the wire.

    ``codecs`` adds hvdkit with more codecs, by their names in CODECS.
    """
    return [
        Peer(ALONE, "alone", "plain"),
        Peer(f"{ALONE} with a barrier", "alone", "plain", ("--barrier",)),
        Peer(DDP, "ddp", "plain"),
        Peer(DDP_ON_HVDKIT, "ddp on hvdkit", "plain"),
        Peer(f"{DDP} fp16", "ddp", "plain", ("--compression", "fp16")),
        Peer(f"{DDP} PowerSGD", "ddp", "plain", ("--compression", "powersgd")),
        *jobs.horovods(),
        *(peer for peer in jobs.horovods(" staged", "--staged") if peer.worker == "hvdkit"),
        *jobs.horovods(" fp16", "--compression", "fp16"),
        *(
            peer
            for name in codecs
            for peer in jobs.horovods(f" {name}", "--compression", name)
            if peer.worker == "hvdkit"
        ),
    ]


def add_flags(parser: argparse.ArgumentParser, steps: int) -> None:
    """Add the flags of a timed job, with a default of ``steps``, and of the size of the models."""
    parser.add_argument("--steps", type=int, default=steps, help="timed steps per round")
    parser.add_argument("--warmup-steps", type=int, default=3, help="steps per round before the timed ones")
    parser.add_argument("--batch-size", type=int, default=4, help="transformer: sequences per rank and step")
    parser.add_argument("--context", type=int, default=128, help="transformer: bytes per sequence")
    parser.add_argument("--layers", type=int, default=6, help="transformer: blocks")
    parser.add_argument("--width", type=int, default=512, help="transformer: width of the model")
    parser.add_argument("--images", type=int, default=8, help="convolution: images per rank and step")
    parser.add_argument("--pixels", type=int, default=64, help="convolution: height and width of an image")
    parser.add_argument("--compression", choices=CODECS, default="none", help=argparse.SUPPRESS)
    parser.add_argument("--barrier", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--staged", action="store_true", help=argparse.SUPPRESS)


def worker_flags(args: argparse.Namespace, model: str) -> list[Any]:
    """Return the flags that a rank needs."""
    flags = [word for name in _WORKER_FLAGS for word in (f"--{name.replace('_', '-')}", getattr(args, name))]
    return ["--threads", args.threads, "--model", model, *flags]


def work(args: argparse.Namespace) -> None:
    """Train on a rank, and report seconds of each timed step by phase, costs, and a fingerprint of the weights."""
    import models
    import torch
    import torch.distributed as dist

    from hvdkit import autoload

    torch.set_num_threads(args.threads)
    torch.manual_seed(42)
    load = models.MODELS[args.model](args)
    model, optimizer = load.model, load.optimizer
    trained = model
    if args.worker in ("hvdkit", "horovod"):
        if args.staged:
            os.environ["HVDKIT_ARENA"] = "0"
        hvd = importlib.import_module(f"{args.worker}.torch")
        hvd.init()
        rank, close = hvd.rank(), hvd.shutdown
        optimizer = hvd.DistributedOptimizer(
            optimizer,
            named_parameters=model.named_parameters(),
            compression=codec(hvd, args.compression),
        )
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    else:
        autoload.register()  # as PyTorch does where hvdkit is installed
        dist.init_process_group("hvdkit" if args.worker == "ddp on hvdkit" else "gloo")
        rank, close = dist.get_rank(), dist.destroy_process_group
        if args.worker != "alone":
            trained = data_parallel(model, args.compression)

    data = torch.Generator().manual_seed(rank)
    seconds, before = [], [0.0, 0.0, 0.0]
    for step in range(args.warmup_steps + args.steps):
        batch = load.batch(data)
        if step == args.warmup_steps and args.worker == "alone":
            dist.barrier()  # all ranks compute at the same time from here on
        if step == args.warmup_steps:
            before = costs()
        times = [time.perf_counter()]
        optimizer.zero_grad()
        loss = load.loss(trained, *batch)
        times.append(time.perf_counter())
        loss.backward()
        times.append(time.perf_counter())
        optimizer.step()
        if args.barrier:
            dist.barrier()
        times.append(time.perf_counter())
        if step >= args.warmup_steps:
            seconds.append(np.diff(times).tolist())
    processor, others, switches = (np.subtract(costs(), before) / args.steps).tolist()
    weights = sum(parameter.detach().double().sum().item() for parameter in model.parameters())
    parameters = sum(parameter.numel() for parameter in model.parameters())
    figures = {
        "seconds": seconds,
        "processor": processor,
        "others": others,
        "switches": switches,
        "weights": weights,
        "parameters": parameters,
    }
    jobs.report(args.report, rank, figures)
    del trained  # DDP must let go of its process group before that is destroyed, or the exit may hang
    close()


def costs() -> list[float]:
    """Return the CPU seconds of this process, those of its threads other than this one, and voluntary switches."""
    seconds = time.process_time()
    return [seconds, seconds - time.thread_time(), float(resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw)]


def codec(hvd: Any, name: str, **more: Any) -> Any:
    """Return one of CODECS, with more parameters. ``hvd`` may be Horovod, which has ``none`` and ``fp16``."""
    attribute, parameters = CODECS[name]
    found, parameters = getattr(hvd.Compression, attribute), parameters | more
    return found(**parameters) if parameters else found


def data_parallel(model: Any, compression: str, **options: Any) -> Any:
    """Return DDP with the hook that PyTorch has for ``compression``, and with more of DDP's options.

    The other peers leave the statistics of batch normalisation to each rank, so DDP does not broadcast them either.
    """
    import torch
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    wrapper = torch.nn.parallel.DistributedDataParallel
    renamed = "forward_sync_buffers" in inspect.signature(wrapper).parameters  # in PyTorch 2.13
    options["forward_sync_buffers" if renamed else "broadcast_buffers"] = False
    trained = wrapper(model, **options)
    if compression == "fp16":
        trained.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif compression == "bf16":
        trained.register_comm_hook(None, default_hooks.bf16_compress_hook)
    elif compression == "powersgd":
        # The hook must see two uncompressed steps before it may start; both are steps to warm up.
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=POWERSGD_RANK, start_powerSGD_iter=2)
        trained.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return trained


def digest(peer: Peer, reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge the reports of a job: milliseconds of each step and of each phase, averaged over the ranks.

    Raises RuntimeError if the ranks were to train the same weights and did not.
    """
    if peer.worker != "alone" and len({one["weights"] for one in reports}) > 1:
        raise RuntimeError(f"{peer.name}: the ranks ended with different weights")
    phases = 1e3 * np.mean([one["seconds"] for one in reports], axis=0)
    return {
        "parameters": reports[0]["parameters"],
        "milliseconds": phases.sum(axis=1).tolist(),
        "processor": 1e3 * float(np.mean([one["processor"] for one in reports])),
        "others": 1e3 * float(np.mean([one["others"] for one in reports])),
        "switches": float(np.mean([one["switches"] for one in reports])),
        "phases": dict(zip(PHASES, np.median(phases, axis=0).tolist(), strict=True)),
    }


def medians(rounds: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    """Return the milliseconds of the median step of each round and peer."""
    return [{name: float(np.median(job["milliseconds"])) for name, job in one.items()} for one in rounds]


def summarise(rounds: Sequence[dict[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    """Return an entry per peer: its step, its costs, its share of compute alone, and its time over DDP's."""
    by_round = medians(rounds)
    return [
        {
            "peer": name,
            "milliseconds": common.spread(value for one in rounds for value in one[name]["milliseconds"]),
            "phases": {key: float(np.median([one[name]["phases"][key] for one in rounds])) for key in PHASES},
            **{key: float(np.median([one[name][key] for one in rounds])) for key in COSTS},
            "efficiency": common.paired_ratio(by_round, ALONE, name),
            "time_ratio_to_ddp": common.paired_ratio(by_round, name, DDP),
        }
        for name in names
    ]


HEADERS = [
    "peer",
    "ms/step",
    "quartiles",
    "CPU ms",
    "of other threads",
    "switches",
    "efficiency (alone / peer)",
    "time / DDP",
]


def row(entry: dict[str, Any]) -> list[str]:
    """Return the cells of an entry of ``summarise``, in the order of HEADERS."""
    pooled = entry["milliseconds"]
    return [
        entry["peer"],
        f"{pooled['median']:.0f}",
        f"{pooled['q1']:.0f} to {pooled['q3']:.0f}",
        *(f"{entry[key]:.0f}" for key in COSTS),
        common.show_ratio(entry["efficiency"]),
        common.show_ratio(entry["time_ratio_to_ddp"]),
    ]


def draw(axes: Any, summary: Sequence[dict[str, Any]], title: str, what: str = "step") -> None:
    """Draw a bar per peer with its quartiles."""
    names = [one["peer"] for one in summary]
    times = [one["milliseconds"] for one in summary]
    bars = [[one["median"] - one["q1"] for one in times], [one["q3"] - one["median"] for one in times]]
    colours = ["tab:gray" if name == ALONE else common.colour(name) for name in names]
    axes.barh(names, [one["median"] for one in times], xerr=bars, capsize=3, color=colours)
    for index, one in enumerate(times):
        axes.text(0, index, f" {one['median']:.0f}", color="white", va="center")
    axes.invert_yaxis()
    axes.set_xlabel(f"ms per {what} (median, quartiles)")
    axes.set_title(title)
