"""The cost of the wrapped optimizer if there is nothing to communicate: one rank, plain and wrapped in turn.

    python benchmarks/overhead.py
    python benchmarks/overhead.py --seconds 5          # a quick look

Both optimizers train the same model on the same data in one process, in short blocks: plain, wrapped, wrapped, plain,
and so on. "small" has many tiny tensors, so that the cost per tensor shows; "large" is the model of step.py.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import common
import jobs
import numpy as np
from tqdm import tqdm

sys.path.insert(0, str(jobs.ROOT / "examples"))

MODELS = {"small": {"layers": 6, "width": 64}, "large": {"layers": 6, "width": 512}}
CONTEXT = 128


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Overhead of the wrapped optimizer on one rank",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), help="models to train")
    parser.add_argument("--seconds", type=float, default=60, help="time for each model")
    parser.add_argument("--block", type=float, default=0.1, help="least seconds of a block of steps")
    parser.add_argument("--batch-size", type=int, default=2, help="sequences per step")
    parser.add_argument("--threads", type=int, default=1, help="compute threads")
    common.add_output_flag(parser)
    return common.parse(parser)


def build(kind: str, wrapped: bool, batch_size: int) -> tuple[Any, Callable[[], None]]:
    """Return a model, and a function that trains it for one step. Plain and wrapped models see the same data."""
    import torch
    from pytorch_text import ByteTransformer, next_byte_loss

    import hvdkit.torch as hvd

    torch.manual_seed(42)
    model = ByteTransformer(CONTEXT, **MODELS[kind])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if wrapped:
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    data = torch.Generator().manual_seed(0)

    def step() -> None:
        sequences = torch.randint(256, (batch_size, CONTEXT + 1), generator=data)
        optimizer.zero_grad()
        next_byte_loss(model, sequences).backward()
        optimizer.step()

    return model, step


def timed(step: Callable[[], None], count: int) -> float:
    """Run ``count`` steps, and return the seconds per step."""
    began = time.perf_counter()
    for _ in range(count):
        step()
    return (time.perf_counter() - began) / count


def median_interval(values: np.ndarray) -> tuple[float, float, float]:
    """Return the median and its 95% confidence interval, by bootstrap (Efron 1979)."""
    draws = np.random.default_rng(0).choice(values, (2000, len(values)))
    low, high = np.quantile(np.median(draws, axis=1), [0.025, 0.975])
    return float(np.median(values)), float(low), float(high)


def measure(kind: str, args: argparse.Namespace) -> dict[str, Any]:
    plain_model, plain = build(kind, False, args.batch_size)
    wrapped_model, wrapped = build(kind, True, args.batch_size)
    for step in (plain, wrapped):
        timed(step, 3)
    count = max(1, round(args.block / min(timed(plain, 3), timed(wrapped, 3))))
    pairs: list[tuple[float, float]] = []
    began = time.perf_counter()
    with tqdm(desc=f"{kind}, blocks of {count} steps", unit="pair") as bar:
        while time.perf_counter() - began < args.seconds or len(pairs) < 10:
            if len(pairs) % 2:
                after, before = timed(wrapped, count), timed(plain, count)
            else:
                before, after = timed(plain, count), timed(wrapped, count)
            pairs.append((before, after))
            bar.update()
    before, after = np.array(pairs).T
    parameters = list(plain_model.parameters())
    tensors = len(parameters)
    relative = median_interval(100 * (after / before - 1))
    absolute = median_interval(1e6 * (after - before))
    return {
        "model": kind,
        "parameters": sum(parameter.numel() for parameter in parameters),
        "tensors": tensors,
        "steps_per_block": count,
        "plain_ms": common.spread(1e3 * before),
        "wrapped_ms": common.spread(1e3 * after),
        "overhead_percent": dict(zip(("median", "low", "high"), relative, strict=True)),
        "overhead_us_per_step": dict(zip(("median", "low", "high"), absolute, strict=True)),
        "same_weights": all((a == b).all().item() for a, b in zip(parameters, wrapped_model.parameters(), strict=True)),
        "pairs": pairs,
    }


def main() -> None:
    args = parse_arguments()
    import torch

    import hvdkit.torch as hvd

    torch.set_num_threads(args.threads)
    hvd.init()
    if hvd.size() != 1:
        raise SystemExit("this benchmark is for one rank: run it without a launcher")
    results = [measure(kind, args) for kind in args.models]
    hvd.shutdown()

    def interval(values: dict[str, float], digits: int) -> str:
        return f"{values['median']:.{digits}f} [{values['low']:.{digits}f}, {values['high']:.{digits}f}]"

    rows = [
        [
            one["model"],
            f"{one['parameters'] / 1e6:.1f} M",
            one["tensors"],
            f"{one['plain_ms']['median']:.2f}",
            f"{one['wrapped_ms']['median']:.2f}",
            interval(one["overhead_percent"], 2),
            interval(one["overhead_us_per_step"], 0),
            f"{one['overhead_us_per_step']['median'] / one['tensors']:.1f}",
            "yes" if one["same_weights"] else "NO",
        ]
        for one in results
    ]
    headers = [
        "model",
        "parameters",
        "tensors",
        "plain ms",
        "wrapped ms",
        "overhead %",
        "us/step",
        "us/tensor",
        "same weights",
    ]
    print("\noverhead of the wrapped optimizer on one rank; median [95% confidence interval] over pairs of blocks")
    print(common.table(headers, rows))

    plt = common.pyplot()
    figure, axes = plt.subplots(figsize=(6, 4))
    middle = [one["overhead_percent"]["median"] for one in results]
    low = [one["overhead_percent"]["median"] - one["overhead_percent"]["low"] for one in results]
    high = [one["overhead_percent"]["high"] - one["overhead_percent"]["median"] for one in results]
    axes.errorbar([one["model"] for one in results], middle, yerr=[low, high], fmt="o", capsize=6)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.margins(x=0.5)
    axes.set(ylabel="overhead in % (median, 95% interval)", title="Wrapped against plain optimizer, one rank")
    common.save("overhead", args, {"summary": results}, figure)


if __name__ == "__main__":
    main()
