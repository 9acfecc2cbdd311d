"""The cost of codecs on one core: encode and decode of each, next to a copy in memory and to torch and numpy.

    python benchmarks/compression.py
    python benchmarks/compression.py --elements 1e6 --rounds 5         # a quick look

"copy" is np.copyto and "add" is a += b, of as many float32 numbers between warm arrays: the bounds of memory. A codec
encodes another gradient each step, so that residuals and carried thresholds are as in training. "feedback" is with a
residual. "decode" adds the decoded numbers to an array. "fresh" casts write into newly allocated memory, other casts
into memory that is kept. dgc includes its momentum. Each operation runs once a round, in another order each round.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import common
import numpy as np
import torch
from tqdm import tqdm

from hvdkit import kernels
from hvdkit.compression import CASTS, DGC, CodecState, Int4, Int8, OneBit, PayloadCodec, RandomK, Threshold, TopK

COPY, ADD = "copy", "add"
RATIO = 0.01
BLOCK = 256
RANKS = 2  # the number that dgc is given
WARM = 2  # steps of each operation before the timed ones
# The places in a longer array, 16 elements apart, at which the gradient of a step can begin.
SHIFTS = 1 << 16
# The targets: top-k of 25 million values in 15 ms, 20 times as fast as torch; dense codecs in the time of two copies.
TARGET_MS_PER_ELEMENT = 15 / 25e6
TARGET_SPEEDUP = 20
TARGET_COPIES = 2
DENSE = ("fp16", "bf16", "int8", "onebit")
TORCH_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}

Array = np.ndarray[Any, np.dtype[Any]]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Cost of codecs on one core", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--elements", type=float, default=25e6, help="float32 numbers in a gradient")
    parser.add_argument("--rounds", type=int, default=15, help="rounds; each runs every operation once")
    parser.add_argument("--settle", type=int, default=60, help="untimed first steps of codecs with feedback")
    parser.add_argument("--kinds", nargs="+", choices=list(GRADIENTS), default=list(GRADIENTS), help="distributions")
    common.add_output_flag(parser)
    return common.parse(parser)


def normal(count: int, generator: np.random.Generator) -> Array:
    drawn: Array = generator.standard_normal(count, dtype=np.float32)
    drawn *= 1e-3
    return drawn


def heavy_tailed(count: int, generator: np.random.Generator) -> Array:
    """Draw Student's t with 3 degrees of freedom: its largest 1% are two to three times as far out as normal ones."""
    return (generator.standard_t(3, count) * 1e-3).astype(np.float32)


GRADIENTS = {"normal": normal, "heavy-tailed": heavy_tailed}


@dataclass(frozen=True)
class Operation:
    """A timed operation: ``run`` takes a gradient and returns the bytes of its payload, or None if it makes none.

    ``before`` is not timed. If ``settles``, untimed steps come first, because residuals grow in the first steps.
    """

    name: str
    run: Callable[[Array], int | None]
    before: Callable[[Array], object] = id
    settles: bool = False


def aligned(nbytes: int) -> Array:
    """Return zeroed bytes whose address is a multiple of 64."""
    memory = np.zeros(nbytes + 64, dtype=np.uint8)
    begin = -memory.ctypes.data % 64
    return memory[begin : begin + nbytes]


def bounds(out: Array) -> list[Operation]:
    def copy(gradient: Array) -> None:
        np.copyto(out, gradient)

    def add(gradient: Array) -> None:
        np.add(out, gradient, out=out)

    return [Operation(COPY, copy), Operation(ADD, add)]


def checksum() -> Operation:
    def run(gradient: Array) -> None:
        kernels.checksum(gradient.view(np.uint8))

    return Operation("hvdkit checksum", run)


def casts(name: str, out: Array) -> list[Operation]:
    """Return the casts into memory that is kept, into fresh memory, and back."""
    cast = CASTS[name]
    payload = cast.encode(out).copy()

    def kept(gradient: Array) -> int:
        kernels.convert_into(payload, gradient)
        return int(payload.nbytes)

    def decode(_: Array) -> None:
        cast.decode_reduce([payload], out, kernels.ReduceOp.SUM, 1.0)

    return [
        Operation(f"hvdkit {name}", kept),
        Operation(f"hvdkit {name} fresh", lambda gradient: cast.encode(gradient).nbytes),
        Operation(f"hvdkit {name} decode", decode),
    ]


def codec(name: str, codec: PayloadCodec, out: Array, decodes: bool) -> list[Operation]:
    """Return the operations of a codec, in a training whose steps go on through all rounds."""
    memory, payload = CodecState(out.size, codec.keeps), aligned(codec.most_bytes(out.size))
    written = payload

    def encode(gradient: Array) -> int:
        nonlocal written
        written = payload[: codec.encode_into(payload, gradient, memory)]
        memory.turn += 1
        return written.nbytes

    def decode(_: Array) -> None:
        codec.decode_into(written, out, 1.0, True)

    decoding = [Operation(f"hvdkit {name.removesuffix(' feedback')} decode", decode)] if decodes else []
    if not isinstance(codec, DGC):
        return [Operation(f"hvdkit {name}", encode, settles=codec.feedback), *decoding]
    own = np.empty_like(out)  # dgc clears the gradient in place

    def prepare_and_encode(_: Array) -> int:
        codec.prepare(own, memory, RANKS)
        return encode(own)

    def take(gradient: Array) -> None:
        np.copyto(own, gradient)

    return [Operation(f"hvdkit {name}", prepare_and_encode, take, settles=True), *decoding]


def codecs(gradient: Array, out: Array) -> list[Operation]:
    sample = np.abs(gradient[: 1 << 20])
    classes: dict[str, Callable[[bool], PayloadCodec]] = {
        "int8": lambda feedback: Int8(feedback=feedback),
        "int8 stochastic": lambda feedback: Int8(feedback=feedback, stochastic=True),
        "int4": lambda feedback: Int4(feedback=feedback),
        "onebit": lambda feedback: OneBit(feedback=feedback),
        "topk 1%": lambda feedback: TopK(feedback=feedback, ratio=RATIO),
        "threshold": lambda feedback: Threshold(feedback=feedback, threshold=float(np.quantile(sample, 1 - RATIO))),
        "randomk 1%": lambda feedback: RandomK(feedback=feedback, ratio=RATIO),
    }
    found = []
    for name, build in classes.items():
        found += codec(name, build(False), out, decodes=False)
        found += codec(f"{name} feedback", build(True), out, decodes=True)
    return [*found, *codec("dgc 0.1% feedback", DGC(ratio=0.001), out, decodes=True)]


def peers(count: int) -> list[Operation]:
    """Return the same operations in torch and numpy, as users would write them."""
    wanted = max(1, round(RATIO * count))

    def topk(gradient: Array) -> int:
        values = torch.from_numpy(gradient)
        indices = torch.topk(values.abs(), wanted, sorted=False).indices
        return (values[indices].numel() + indices.numel()) * 4

    def argpartition(gradient: Array) -> int:
        indices = np.argpartition(np.abs(gradient), count - wanted)[count - wanted :]
        return (gradient[indices].size + indices.size) * 4

    def int8(gradient: Array) -> int:
        blocks = torch.from_numpy(gradient).view(-1, BLOCK)
        scales = blocks.abs().amax(dim=1, keepdim=True) / 127
        codes = (blocks / scales).round_().to(torch.int8)
        return codes.numel() + 4 * scales.numel()

    found = [Operation("torch topk 1%", topk), Operation("numpy argpartition 1%", argpartition)]
    for name, dtype in TORCH_DTYPES.items():
        found += torch_casts(name, torch.zeros(count, dtype=dtype))
    return [*found, Operation("torch int8", int8)]


def torch_casts(name: str, kept: torch.Tensor) -> list[Operation]:
    def into_kept(gradient: Array) -> int:
        return int(kept.copy_(torch.from_numpy(gradient)).nbytes)

    def into_fresh(gradient: Array) -> int:
        return torch.from_numpy(gradient).to(kept.dtype).nbytes

    return [Operation(f"torch {name}", into_kept), Operation(f"torch {name} fresh", into_fresh)]


def measure(kind: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the milliseconds of every operation in every round, a summary of them, and the targets."""
    count = max(1, int(args.elements) // 2048) * 2048
    base = GRADIENTS[kind](count + 16 * SHIFTS, np.random.default_rng(0))
    out = np.zeros(count, dtype=np.float32)
    operations = [*bounds(out), *(one for name in TORCH_DTYPES for one in casts(name, out))]
    operations += [*codecs(base[:count], out), checksum(), *peers(count)]
    order = random.Random(0)

    def step(operation: Operation) -> tuple[float, int | None]:
        begin = 16 * order.randrange(SHIFTS)  # another gradient
        gradient = base[begin : begin + count]
        operation.before(gradient)
        began = time.perf_counter()
        nbytes = operation.run(gradient)
        return 1e3 * (time.perf_counter() - began), nbytes

    rounds: list[dict[str, float]] = []
    payloads: dict[str, list[int]] = {}
    with tqdm(total=(1 + args.rounds) * len(operations), unit="operation", desc=kind) as bar:
        for operation in operations:  # encoders before their decoders
            for _ in range(max(WARM, args.settle) if operation.settles else WARM):
                step(operation)
            bar.update()
        for _ in range(args.rounds):
            rounds.append({})
            for operation in order.sample(operations, len(operations)):
                rounds[-1][operation.name], nbytes = step(operation)
                if nbytes is not None:
                    payloads.setdefault(operation.name, []).append(nbytes)
                bar.update()
    summary = [
        {
            "operation": one.name,
            "milliseconds": common.spread(turn[one.name] for turn in rounds),
            "time_ratio_to_copy": common.paired_ratio(rounds, one.name, COPY),
            "payload_ratio": float(np.median(payloads[one.name])) / out.nbytes if one.name in payloads else None,
        }
        for one in operations
    ]
    return {"elements": count, "summary": summary, "targets": targets(rounds, count), "rounds": rounds}


def targets(rounds: list[dict[str, float]], count: int) -> list[dict[str, Any]]:
    """Return the targets with their measured values and verdicts."""
    topk = "hvdkit topk 1% feedback"
    milliseconds = float(np.median([one[topk] for one in rounds]))
    speedup = common.paired_ratio(rounds, "torch topk 1%", topk)
    assert speedup is not None
    limit = TARGET_MS_PER_ELEMENT * count
    faster = speedup["median"]
    found = [
        _target(f"{topk}: at most {limit:.3g} ms", milliseconds, "ms", milliseconds <= limit),
        _target(f"{topk}: {TARGET_SPEEDUP} times as fast as torch", faster, "times", faster >= TARGET_SPEEDUP),
    ]
    for name in (f"hvdkit {one}{ending}" for one in DENSE for ending in ("", " feedback")):
        ratio = common.paired_ratio(rounds, name, COPY)
        if ratio is not None:
            what = f"{name}: at most {TARGET_COPIES} copies"
            found.append(_target(what, ratio["median"], "copies", ratio["median"] <= TARGET_COPIES))
    return found


def _target(what: str, value: float, unit: str, met: bool) -> dict[str, Any]:
    return {"target": what, "value": value, "unit": unit, "met": met}


def show(kind: str, result: dict[str, Any]) -> None:
    count = result["elements"]
    rows = []
    for one in result["summary"]:
        pooled, payload = one["milliseconds"], one["payload_ratio"]
        rows.append(
            [
                one["operation"],
                f"{pooled['median']:.3g}",
                f"{pooled['q1']:.3g} to {pooled['q3']:.3g}",
                f"{pooled['p90']:.3g}",
                f"{4e-6 * count / pooled['median']:.2f}",
                common.show_ratio(one["time_ratio_to_copy"]),
                "-" if payload is None else f"{100 * payload:.2f}%",
            ]
        )
    print(f"\n{kind} gradients of {count / 1e6:g} M float32 numbers, one core, {kernels.backend()} kernels")
    headers = ["operation", "ms", "quartiles", "p90", "GB/s of input", "time / copy", "payload / input"]
    print(common.table(headers, rows))
    for one in result["targets"]:
        print(f"{'met   ' if one['met'] else 'MISSED'} {one['target']}: {one['value']:.3g} {one['unit']}")


def draw(results: dict[str, Any]) -> Any:
    """Draw a bar for each operation with its quartiles, and a line at the time of the copy."""
    plt = common.pyplot()
    figure, panels = plt.subplots(1, len(results), figsize=(7.5 * len(results), 10), squeeze=False)
    for axes, (kind, result) in zip(panels[0], results.items(), strict=True):
        names = [one["operation"] for one in result["summary"]]
        times = [one["milliseconds"] for one in result["summary"]]
        middle = [one["median"] for one in times]
        bars = [[one["median"] - one["q1"] for one in times], [one["q3"] - one["median"] for one in times]]
        colours = ["tab:gray" if name in (COPY, ADD) else common.colour(name) for name in names]
        axes.barh(names, middle, xerr=bars, capsize=2, color=colours)
        for index, value in enumerate(middle):
            at_left = axes.get_yaxis_transform()
            axes.text(0.01, index, f"{value:.3g}", va="center", fontsize=8, color="white", transform=at_left)
        copy = middle[names.index(COPY)]
        axes.axvline(copy, color="black", linestyle="--", label=f"copy: {copy:.3g} ms")
        axes.invert_yaxis()
        axes.set(
            xscale="log", xlabel="ms (median, quartiles)", title=f"{kind} gradients, {result['elements']:,} numbers"
        )
        axes.margins(y=0.01)
        axes.legend()
    return figure


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(1)
    results = {}
    for kind in args.kinds:
        results[kind] = measure(kind, args)
        show(kind, results[kind])
    common.save("compression", args, {"kernels": kernels.backend(), "kinds": results}, draw(results))


if __name__ == "__main__":
    main()
