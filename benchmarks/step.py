"""The training step of models of 20 to 26 million parameters: alone, under DDP, under hvdkit, under Horovod.

    python benchmarks/step.py
    python benchmarks/step.py --models transformer --rounds 1 --steps 3         # a quick look

"alone" is the same step on all ranks at once without communication: the other peers' time if communication were free.
In "alone with a barrier" the ranks wait for each other after each step, and for nothing else. "CPU ms" is the CPU time
of a rank and step. "staged" is hvdkit without its arena (HVDKIT_ARENA=0): gradients are copied into the memory where
the ranks meet. "fp16" sends gradients in half precision. "PowerSGD" is DDP's hook of that name, with rank 4. "hvdkit
horovod" is hvdkit with Horovod's engine, and shows the cost of the wrapper. Each peer runs in its own job, once a
round. A job fails if its ranks do not hold the same weights at its end.
"""

from __future__ import annotations

import argparse
from typing import Any

import common
import jobs
import training
from jobs import Peer


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Step time of some models", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    common.add_common_flags(parser, rounds=3)
    models = list(training.MODELS)
    parser.add_argument("--models", nargs="+", choices=models, default=models, help="models to train")
    parser.add_argument("--model", choices=models, default="words", help=argparse.SUPPRESS)
    training.add_flags(parser, steps=7)
    return common.parse(parser)


def compare(args: argparse.Namespace) -> None:
    """Run the script itself: rounds of jobs for each model, then the tables."""
    peers = common.chosen([*training.contestants(), *jobs.on_horovod()], args.peers)
    results, errors = {}, {}
    for model in args.models:
        results[model] = measure(args, peers, model)
        errors.update({f"{name}, {model}": error for name, error in results[model]["errors"].items()})
    common.save("step", args, {"models": results}, draw(results))
    common.finish(errors)


def measure(args: argparse.Namespace, peers: list[Peer], model: str) -> dict[str, Any]:
    flags = training.worker_flags(args, model)

    def job(peer: Peer) -> dict[str, Any]:
        reports = jobs.run_job(__file__, peer, flags, args.ranks, args.threads, args.timeout)
        return training.digest(peer, reports)

    rounds, errors = common.run_rounds(peers, args.rounds, job)
    names = [peer.name for peer in peers if peer.name not in errors]
    summary = training.summarise(rounds, names)
    parameters = rounds[0][names[0]]["parameters"] if names else 0
    print(
        f"\nstep of {training.MODELS[model]} of {parameters / 1e6:.1f} M parameters, {args.ranks} ranks of "
        f"{args.threads} thread(s); ratios: median [smallest, largest] of {args.rounds} rounds"
    )
    print(common.table(training.HEADERS, [training.row(one) for one in summary]))
    return {"parameters": parameters, "summary": summary, "rounds": rounds, "errors": errors}


def draw(results: dict[str, Any]) -> Any:
    plt = common.pyplot()
    figure, panels = plt.subplots(1, len(results), figsize=(6.5 * len(results), 4.5), squeeze=False)
    for axes, (model, one) in zip(panels[0], results.items(), strict=True):
        title = f"Training step of {training.MODELS[model]},\n{one['parameters'] / 1e6:.1f} M parameters"
        training.draw(axes, one["summary"], title)
    return figure


if __name__ == "__main__":
    arguments = parse_arguments()
    if arguments.worker:
        training.work(arguments)
    else:
        compare(arguments)
