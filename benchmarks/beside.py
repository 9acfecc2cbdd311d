"""The training step of a model alone, under DDP and under hvdkit, in turn within one job, a few steps at a time.

    python benchmarks/beside.py
    python benchmarks/beside.py --blocks 4 --models words        # a quick look

On a machine with other guests, successive jobs as in step.py differ by more than the effects that are to be measured
here. So each rank has a copy of the model for each contestant. All ranks go from contestant to contestant together, in
another order each turn; ratios are within a turn. "alone with a barrier" waits for the other ranks after each step.
"CPU ms over alone" is the CPU time of a rank and step, minus that of the step alone.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Callable
from typing import Any

import common
import jobs
import numpy as np
import training
from jobs import Peer

ALONE, BARRIER, DDP, HVDKIT = "alone", "alone with a barrier", "DDP", "hvdkit"
CONTESTANTS = (ALONE, BARRIER, DDP, HVDKIT)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Step time of some models, in turn", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    common.add_common_flags(parser, rounds=2)
    models = ["words", "words-adamw", "convolution", "tensors"]
    parser.add_argument("--models", nargs="+", choices=list(training.MODELS), default=models, help="models to train")
    parser.add_argument("--model", choices=training.MODELS, default="words", help=argparse.SUPPRESS)
    parser.add_argument("--blocks", type=int, default=12, help="turns of each contestant and job")
    parser.add_argument("--block", type=int, default=3, help="timed steps of a turn, after an untimed step")
    parser.add_argument("--batch-size", type=int, default=4, help="transformers: sequences per rank and step")
    parser.add_argument("--images", type=int, default=8, help="convolution: images per rank and step")
    parser.add_argument("--pixels", type=int, default=64, help="convolution: height and width of an image")
    parser.add_argument("--staged", action="store_true", help=argparse.SUPPRESS)
    return common.parse(parser)


def trainers(args: argparse.Namespace, hvd: Any) -> dict[str, tuple[Callable[[], None], Any]]:
    """Return for each contestant a function that trains for one step, and the model."""
    import models
    import torch
    import torch.distributed as dist

    found: dict[str, tuple[Callable[[], None], Any]] = {}
    for name in CONTESTANTS:
        torch.manual_seed(42)
        load = models.MODELS[args.model](args)
        trained, optimizer = load.model, load.optimizer
        if name == DDP:
            trained = training.data_parallel(load.model, "none")
        elif name == HVDKIT:
            optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=load.model.named_parameters())
        data = torch.Generator().manual_seed(hvd.rank())

        def step(
            load: Any = load, trained: Any = trained, optimizer: Any = optimizer, data: Any = data, name: str = name
        ) -> None:
            optimizer.zero_grad()
            load.loss(trained, *load.batch(data)).backward()
            optimizer.step()
            if name == BARRIER:
                dist.barrier()

        found[name] = step, load.model
    return found


def work(args: argparse.Namespace) -> None:
    """Run the turns on a rank, and report the seconds and CPU seconds of a step in each turn."""
    if args.staged:
        os.environ["HVDKIT_ARENA"] = "0"
    import torch
    import torch.distributed as dist

    import hvdkit.torch as hvd

    torch.set_num_threads(args.threads)
    hvd.init()
    store = os.path.join(args.report, "store")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=hvd.rank(), world_size=hvd.size())
    steps = trainers(args, hvd)
    for _ in range(3):
        for step, _ in steps.values():
            step()
    order, turns = random.Random(0), []
    for _ in range(args.blocks):
        turn = {}
        for name in order.sample(CONTESTANTS, len(CONTESTANTS)):
            step, _ = steps[name]
            step()  # untimed: caches and messages of the contestant before do not count
            dist.barrier()
            seconds = []
            for _ in range(args.block):
                before = time.perf_counter(), time.process_time()
                step()
                seconds.append((time.perf_counter() - before[0], time.process_time() - before[1]))
            turn[name] = np.mean(seconds, axis=0).tolist()
        turns.append(turn)
    weights = {
        name: sum(parameter.detach().double().sum().item() for parameter in model.parameters())
        for name, (_, model) in steps.items()
    }
    jobs.report(args.report, hvd.rank(), {"turns": turns, "weights": weights})
    del steps
    dist.destroy_process_group()
    hvd.shutdown()


def digest(reports: list[dict[str, Any]]) -> list[dict[str, list[float]]]:
    """Return the milliseconds and CPU milliseconds of each turn and contestant, averaged over the ranks."""
    for name in (DDP, HVDKIT):
        if len({one["weights"][name] for one in reports}) > 1:
            raise RuntimeError(f"{name}: the ranks ended with different weights")
    turns = zip(*(one["turns"] for one in reports), strict=True)
    return [
        {name: (1e3 * np.mean([one[name] for one in turn], axis=0)).tolist() for name in CONTESTANTS} for turn in turns
    ]


def summarise(turns: list[dict[str, list[float]]]) -> list[dict[str, Any]]:
    """Return an entry for each contestant."""
    wall = [{name: figures[0] for name, figures in turn.items()} for turn in turns]
    lost = {name: float(np.median([one[name] - one[ALONE] for one in wall])) for name in CONTESTANTS}
    return [
        {
            "peer": name,
            "milliseconds": common.spread(one[name] for one in wall),
            "efficiency": common.spread(one[ALONE] / one[name] for one in wall),
            "lost": lost[name],
            "share_of_ddps_loss_avoided": 1 - lost[name] / lost[DDP] if lost[DDP] > 0 else None,
            "processor_over_alone": common.spread(turn[name][1] - turn[ALONE][1] for turn in turns),
        }
        for name in CONTESTANTS
    ]


def compare(args: argparse.Namespace) -> None:
    """Run the script itself: rounds of jobs for each model, then the tables."""
    engines = [peer for peer in jobs.horovods() if peer.worker == "hvdkit"]
    engines.append(Peer(f"{engines[0].name} staged", "hvdkit", engines[0].launcher, ("--staged",)))
    peers = common.chosen(engines, args.peers)
    results = {model: measure(args, peers, model) for model in args.models}
    common.save("beside", args, {"models": results}, draw(results))
    common.finish({f"{name}, {model}": error for model in results for name, error in results[model]["errors"].items()})


def measure(args: argparse.Namespace, peers: list[Peer], model: str) -> dict[str, Any]:
    """Measure a model beside each engine, and print the tables."""
    names = ("threads", "blocks", "block", "batch_size", "images", "pixels")
    flags = [word for name in names for word in (f"--{name.replace('_', '-')}", getattr(args, name))]
    flags += ["--model", model]

    def job(peer: Peer) -> list[dict[str, list[float]]]:
        return digest(jobs.run_job(__file__, peer, flags, args.ranks, args.threads, args.timeout))

    rounds, errors = common.run_rounds(peers, args.rounds, job)
    summaries = {}
    for name in [peer.name for peer in peers if peer.name not in errors]:
        summary = summaries[name] = summarise([turn for one in rounds for turn in one[name]])
        print(
            f"\nstep of {training.MODELS[model]}, {args.ranks} ranks of {args.threads} thread(s), beside {name}; "
            f"median, [quartiles] of {args.rounds * args.blocks} turns"
        )
        print(common.table(HEADERS, [row(one) for one in summary]))
    return {"summary": summaries, "rounds": rounds, "errors": errors}


HEADERS = ["", "ms/step", "efficiency (alone / this)", "ms lost", "of DDP's loss avoided", "CPU ms over alone"]


def row(one: dict[str, Any]) -> list[str]:
    """Return the cells of an entry of ``summarise``, in the order of HEADERS."""
    efficiency, processor, avoided = one["efficiency"], one["processor_over_alone"], one["share_of_ddps_loss_avoided"]
    return [
        one["peer"],
        f"{one['milliseconds']['median']:.0f}",
        f"{efficiency['median']:.3f} [{efficiency['q1']:.3f}, {efficiency['q3']:.3f}]",
        f"{one['lost']:.0f}",
        "-" if avoided is None else f"{avoided:.0%}",
        f"{processor['median']:.0f} [{processor['q1']:.0f}, {processor['q3']:.0f}]",
    ]


def draw(results: dict[str, Any]) -> Any:
    """Draw a panel for each model, with a bar for each contestant and engine."""
    plt = common.pyplot()
    figure, panels = plt.subplots(1, len(results), figsize=(4.5 * len(results), 4), squeeze=False)
    for axes, (model, result) in zip(panels[0], results.items(), strict=True):
        bars = [
            (f"{one['peer']}, {engine.removeprefix('hvdkit ')}", one["efficiency"], common.colour(one["peer"]))
            for engine, summary in result["summary"].items()
            for one in summary
            if one["peer"] != ALONE
        ]
        middles = [one["median"] for _, one, _ in bars]
        whiskers = [
            [one["median"] - one["q1"] for _, one, _ in bars],
            [one["q3"] - one["median"] for _, one, _ in bars],
        ]
        axes.barh([name for name, _, _ in bars], middles, xerr=whiskers, capsize=3, color=[c for _, _, c in bars])
        axes.axvline(1, color="black", linewidth=0.8)
        axes.invert_yaxis()
        axes.set_xlim(0.5, 1.1)
        axes.set_xlabel("efficiency (alone / this)")
        axes.set_title(training.MODELS[model].replace(", with", "\nwith"), fontsize=10)
    return figure


if __name__ == "__main__":
    arguments = parse_arguments()
    if arguments.worker:
        work(arguments)
    else:
        compare(arguments)
