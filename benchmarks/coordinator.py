"""The time of rank 0's coordinator for one named operation, by the number of ranks.

    python benchmarks/coordinator.py
    python benchmarks/coordinator.py --sizes 64 256        # a quick look

The operation is an allreduce that is repeated. The coordinator decodes and takes the requests of all other ranks,
and encodes the answers for all ranks. No rank is started: messages are bytes in memory. The figures do not include the
time of a network, nor a transport's calls to send.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterable
from time import perf_counter
from typing import Any

import common
import numpy as np

from hvdkit.engine.loop.coordinator import Coordinator
from hvdkit.engine.loop.messages import Ask, NewSignature, decode, encode

SIGNATURE = {
    "kind": "allreduce", "ps": 0, "dtype": ["float32"], "shape": [[1024]], "op": 0,
    "prescale": 1.0, "postscale": 1.0, "device": "cpu",
}  # fmt: skip
THRESHOLD = 128 * 2**20
WARM_OPERATIONS = 3


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Time of the coordinator for one operation", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 256, 1024, 4096], help="ranks of the jobs")
    parser.add_argument("--operations", type=int, default=50, help="timed operations of each size")
    common.add_output_flag(parser)
    return common.parse(parser)


def operations(ranks: int, count: int) -> Iterable[float]:
    """Yield the seconds of each of ``count`` operations of a job of ``ranks`` ranks."""
    coordinator = Coordinator(ranks, THRESHOLD)
    for rank in range(1, ranks):
        coordinator.receive(rank, decode(encode(NewSignature(0, SIGNATURE))), 0.0)
    asked = [encode(Ask(0, "gradient", None)) for _ in range(1, ranks)]
    for _ in range(count):
        began = perf_counter()
        coordinator.receive(0, Ask(SIGNATURE, "gradient", None), 0.0)
        for rank, payload in enumerate(asked, 1):
            coordinator.receive(rank, decode(payload), 0.0)
        sent = [(to, encode(message)) for to, message in coordinator.take_outgoing()]
        yield perf_counter() - began
        assert sum(len(to) for to, _ in sent) == ranks, sent


def measure(args: argparse.Namespace) -> None:
    summary = []
    for ranks in args.sizes:
        gc.collect()
        seconds = list(operations(ranks, args.operations + WARM_OPERATIONS))[WARM_OPERATIONS:]
        summary.append({"ranks": ranks, "milliseconds": common.spread(1e3 * one for one in seconds)})
    figures = [(entry["ranks"], entry["milliseconds"]) for entry in summary]
    rows = [[ranks, *(f"{spread[key]:.2f}" for key in ("median", "q1", "q3"))] for ranks, spread in figures]
    print(common.table(["ranks", "ms, median", "first quartile", "third"], rows))
    exponent = None
    if len(figures) > 1:
        (few, fast), (many, slow) = figures[0], figures[-1]
        exponent = float(np.log(slow["median"] / fast["median"]) / np.log(many / few))
        print(f"\nfrom {few} to {many} ranks it grows by the power of {exponent:.2f}")
    common.save("coordinator", args, {"summary": summary, "exponent": exponent}, draw(figures))


def draw(figures: list[tuple[int, dict[str, float]]]) -> Any:
    figure, axes = common.pyplot().subplots(figsize=(5.5, 4))
    axes.loglog(*zip(*((ranks, spread["median"]) for ranks, spread in figures), strict=True), "o-", label="hvdkit")
    axes.set(xlabel="ranks", ylabel="ms for one operation", title="The coordinator on rank 0")
    axes.grid(True, which="both", alpha=0.3)
    axes.legend()
    return figure


if __name__ == "__main__":
    measure(parse_arguments())
