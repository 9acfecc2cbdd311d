"""The training step of models on one GPU, alone, under DDP and under hvdkit, in turn within one job.

    python benchmarks/device_step.py --ranks 1
    python benchmarks/device_step.py --way nccl                     # NCCL, which takes each rank for another host's
    python benchmarks/device_step.py --way host                     # through host memory: DDP's way is Gloo then
    python benchmarks/device_step.py --device cpu --small           # without a GPU: does it run?

Ranks share the GPU. Each rank has a copy of the model for each contestant. All ranks go from contestant to contestant
together, in another order each turn; ratios are within a turn. A turn is timed over several steps, from an idle GPU to
an idle GPU. "host ms" is the time in which a rank's thread trains, without its wait for the GPU at the end. Hooks are
timed by a backward pass of many small tensors: the host takes longer to launch it than the GPU to compute it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import common
import device_trace
import jobs
import numpy as np
import training
from jobs import Peer

ALONE, DDP, HVDKIT = "alone", "DDP", "hvdkit"
CODECS = ("fp16", "powersgd")
MODELS = {
    "transformer": "a transformer of 98 million parameters, 8 x 512 words, bf16, AdamW",
    "convolution": "ResNet-50, 32 images of 224 x 224, bf16, channels_last, SGD",
    "tensors": "160 tensors of 4 KB, SGD",
}
SMALL_TENSORS, SMALL_ELEMENTS = 160, 1024
# NCCL refuses ranks that share a GPU, unless it takes them for ranks of different hosts.
OVER_SOCKETS = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MNNVL_ENABLE": "0"}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Step time on a GPU, in turn", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    common.add_common_flags(parser, rounds=1)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="device of the models")
    parser.add_argument("--way", default="nccl", choices=["nccl", "host"], help="path between ranks that share a GPU")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), help="models to train")
    parser.add_argument("--turns", type=int, default=4, help="turns of each contestant")
    parser.add_argument("--block", type=int, default=3, help="timed steps of a turn, after an untimed step")
    parser.add_argument("--small", action="store_true", help="small models and few turns, to see if it runs")
    return common.parse(parser)


def names(args: argparse.Namespace, model: str) -> list[str]:
    """Return the names of a model's contestants."""
    found = [ALONE, DDP, HVDKIT]
    if args.ranks > 1 and model == "transformer":
        # On Gloo, DDP's hook for PowerSGD ends the process when the exchanges of two buckets meet.
        codecs = CODECS if args.device == "cuda" else CODECS[:1]
        found += [f"{peer} {codec}" for codec in codecs if args.way == "nccl" for peer in (DDP, HVDKIT)]
    return found


def load(args: argparse.Namespace, model: str) -> tuple[Any, Any, Callable[[Any], Any]]:
    """Return a model, its optimizer, and the loss of the model (or of a wrapper of it) on this rank's batch."""
    import models
    import torch
    from torch.nn import functional

    torch.manual_seed(42)
    device, data = torch.device(args.device), torch.Generator().manual_seed(int(os.environ["RANK"]))
    if model == "transformer":
        layers, width, batch, words = (2, 64, 2, 16) if args.small else (12, 768, 8, 512)
        trained = models.WordTransformer(layers, width, width // 64).to(device)
        inputs = torch.randint(models.VOCABULARY, (batch, words), generator=data).to(device)
        optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-4, fused=True)

        def transformer_loss(wrapped: Any) -> Any:
            with torch.autocast(device.type, torch.bfloat16):
                return functional.cross_entropy(wrapped(inputs).flatten(0, 1), inputs.flatten())

        return trained, optimizer, transformer_loss
    if model == "convolution":
        count, pixels = (2, 32) if args.small else (32, 224)
        trained = models.residual_network().to(device).to(memory_format=torch.channels_last)
        images = torch.randn(count, 3, pixels, pixels, generator=data).to(device).to(memory_format=torch.channels_last)
        labels = torch.randint(models.CLASSES, (count,), generator=data).to(device)
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.01, momentum=0.9)

        def image_loss(wrapped: Any) -> Any:
            with torch.autocast(device.type, torch.bfloat16):
                return functional.cross_entropy(wrapped(images), labels)

        return trained, optimizer, image_loss
    trained = models.Products([SMALL_ELEMENTS] * SMALL_TENSORS).to(device)
    numbers = torch.randn(SMALL_ELEMENTS, generator=data).to(device)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.01)
    return trained, optimizer, lambda wrapped: wrapped(numbers)


def trainers(args: argparse.Namespace, hvd: Any, model: str) -> dict[str, tuple[Any, Any, Callable[[], Any], Any]]:
    """Return by contestant the wrapped model, its optimizer, its loss, and the plain model."""
    found = {}
    for name in names(args, model):
        plain, optimizer, loss = load(args, model)
        trained, codec = plain, name.partition(" ")[2]
        if name.startswith(DDP):
            trained = training.data_parallel(plain, codec or "none")
        elif name.startswith(HVDKIT):
            more = {"compress": "everywhere"} if codec == "powersgd" else {}
            compression = training.codec(hvd, codec or "none", **more)
            optimizer = hvd.DistributedOptimizer(optimizer, plain.named_parameters(), compression=compression)
        found[name] = trained, optimizer, partial(loss, trained), plain
    return found


def work(args: argparse.Namespace) -> None:
    """Run the turns of all models on a rank, and report their times, traces and weights."""
    if args.way == "nccl":
        os.environ.update(OVER_SOCKETS, NCCL_HOSTID=f"rank-{os.environ['RANK']}")
    import torch
    import torch.distributed as dist

    import hvdkit.torch as hvd

    hvd.init()
    backend = "nccl" if args.way == "nccl" and args.device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{args.report}/store", rank=hvd.rank(), world_size=hvd.size())
    together = dist.new_group(backend="gloo")
    wait = torch.cuda.synchronize if args.device == "cuda" else (lambda: None)
    reports = {}
    for model in args.models:
        found = trainers(args, hvd, model)

        def step(name: str, found: dict[str, Any] = found) -> tuple[float, float]:
            """Train for a step, and return the host's seconds of the backward pass and of the whole step."""
            _, optimizer, loss, _ = found[name]
            began = time.perf_counter()
            optimizer.zero_grad()
            value = loss()
            before = time.perf_counter()
            value.backward()
            after = time.perf_counter()
            optimizer.step()
            return after - before, time.perf_counter() - began

        for _ in range(4):
            for name in found:
                step(name)
        wait()
        order, turns = random.Random(0), []
        for _ in range(args.turns):
            turn = {}
            for name in order.sample(list(found), len(found)):
                step(name)
                wait()
                dist.barrier(together)
                began = time.perf_counter()
                hosts = [step(name) for _ in range(args.block)]
                wait()
                total = (time.perf_counter() - began) / args.block
                turn[name] = [total, *np.mean(hosts, axis=0).tolist()]
            turns.append(turn)
        reports[model] = {
            "turns": turns,
            "traces": device_trace.traces(args.device, partial(step), list(found)[:3], wait),
            "weights": {
                name: sum(parameter.detach().double().sum().item() for parameter in one[3].parameters())
                for name, one in found.items()
            },
        }
        if args.device == "cuda":
            reports[model]["peak_bytes"] = torch.cuda.max_memory_allocated()
        del found
        if args.device == "cuda":
            torch.cuda.empty_cache()
    jobs.report(args.report, hvd.rank(), reports)
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group()
    hvd.shutdown()


def summarise(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Return by contestant the milliseconds of a step, their ratio to the step alone and DDP's, and the host's part."""
    turns = [
        {name: (1e3 * np.mean([one[name] for one in turn], axis=0)).tolist() for name in turn[0]}
        for turn in zip(*(one["turns"] for one in reports), strict=True)
    ]
    total = [{name: one[0] for name, one in turn.items()} for turn in turns]
    found = {}
    for name in turns[0]:
        ddp = f"{DDP} {name.partition(' ')[2]}".strip()
        found[name] = {
            "milliseconds": common.spread(turn[name] for turn in total),
            "over_alone": common.paired_ratio(total, name, ALONE),
            "over_ddp": common.paired_ratio(total, name, ddp),
            "host_milliseconds": float(np.median([turn[name][2] for turn in turns])),
            "backward_host_milliseconds": float(np.median([turn[name][1] for turn in turns])),
            **{what: value for what, value in reports[0]["traces"].get(name, {}).items() if what != "spans"},
        }
        weights = {one["weights"][name] for one in reports}
        if name != ALONE and len(weights) > 1:
            raise RuntimeError(f"{name}: the ranks ended with different weights {weights}")
    return found


def targets(args: argparse.Namespace, results: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the targets that this run measures, with their values and verdicts."""
    found = []

    def target(what: str, value: float, limit: float) -> None:
        found.append({"what": what, "value": round(float(value), 4), "must": limit, "met": bool(value <= limit)})

    for model, summary in results.items():
        ours = summary[HVDKIT]
        if args.ranks == 1 and model != "tensors":
            target(f"{model}: step over alone, 1 rank", ours["over_alone"]["median"], 1.005)
        if args.ranks > 1 and args.way == "nccl" and model != "tensors":
            target(f"{model}: step over DDP's, {args.ranks} ranks", ours["over_ddp"]["median"], 1.0)
        if args.ranks > 1 and f"{HVDKIT} powersgd" in summary:
            target(f"{model}: powersgd over DDP's hook", summary[f"{HVDKIT} powersgd"]["over_ddp"]["median"], 1.0)
        if args.ranks > 1 and model == "tensors":
            hooks = ours["backward_host_milliseconds"] - summary[ALONE]["backward_host_milliseconds"]
            target(f"hooks of {SMALL_TENSORS} gradients, ms", hooks, 1.5)
    return found


def row(name: str, one: dict[str, Any]) -> list[str]:
    launches = one.get("launches")
    overlap = one.get("overlap")
    return [
        name,
        f"{one['milliseconds']['median']:.2f}",
        common.show_ratio(one["over_alone"]),
        common.show_ratio(one["over_ddp"]),
        f"{one['host_milliseconds']:.2f}",
        "-" if launches is None else str(launches),
        "-" if overlap is None else f"{overlap:.0%}",
    ]


HEADERS = ["", "ms/step", "over alone", "over DDP", "host ms", "launches", "of communication beside compute"]


def compare(args: argparse.Namespace) -> None:
    """Run the script itself: one job, then the tables."""
    if args.small:
        args.turns, args.block = 2, 1
    flags = ["--device", args.device, "--way", args.way, "--turns", args.turns, "--block", args.block]
    flags += ["--ranks", args.ranks, "--models", *args.models, *(["--small"] if args.small else [])]
    peer = Peer(HVDKIT, "hvdkit", "plain")
    reports = jobs.run_job(__file__, peer, flags, args.ranks, args.threads, args.timeout)
    results = {model: summarise([one[model] for one in reports]) for model in args.models}
    for model, summary in results.items():
        print(f"\n{MODELS[model]}, {args.ranks} rank(s) on one {args.device} device by {args.way}")
        print(common.table(HEADERS, [row(name, one) for name, one in summary.items()]))
    verdicts = targets(args, results)
    for one in verdicts:
        print(f"{one['what']}: {one['value']} (must be at most {one['must']}): {'met' if one['met'] else 'MISSED'}")
    payload = {"summary": {"targets": verdicts, "models": results}, "rounds": reports}
    common.save(f"device_step_{args.way}", args, payload, device_trace.draw(reports[0], HVDKIT))


if __name__ == "__main__":
    arguments = parse_arguments()
    work(arguments) if arguments.worker else compare(arguments)
