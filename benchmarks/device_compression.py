"""What codecs cost on a GPU: a whole encoded allreduce but for the wire, next to a copy of the gradient on the device.

    python benchmarks/device_compression.py
    python benchmarks/device_compression.py --device cpu --elements 1e5 --rounds 3         # without a GPU: does it run?

A step encodes a new gradient with what was kept, keeps the rest, and decodes. What would go to another rank comes back
as it is. "traffic" is the device's memory traffic at least: gradient and residual are read and written once. The share
of the bandwidth is that traffic a second, over the bandwidth that the copy reaches.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from typing import Any

import common
import torch
import training
from torch import Tensor
from tqdm import tqdm

import hvdkit.torch as hvd
from hvdkit.api.gradients.compression import codec_of
from hvdkit.compression import LossyCodec, TopK
from hvdkit.transports.gpu.device_compression import DeviceMemory, Exchange, reduce_encoded

COPY = "copy"
COLUMNS = 1024  # of the matrices that powersgd takes the gradient for


class Mirror:
    """A process group of one rank, whose collectives return what they are given."""

    def _allgather_base(self, everyones: Tensor, own: Tensor) -> None:
        everyones.copy_(own.view_as(everyones))

    def alltoall_base(self, incoming: Tensor, payloads: Tensor, *_: object) -> None:
        incoming.copy_(payloads)

    def allreduce(self, tensors: list[Tensor], options: object) -> None:
        pass


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Cost of codecs on a GPU", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where tensors are")
    parser.add_argument("--elements", type=float, default=25e6, help="float32 numbers in a gradient")
    parser.add_argument("--rounds", type=int, default=15, help="rounds; each runs every codec once")
    common.add_output_flag(parser)
    return common.parse(parser)


def operations(elements: int, device: torch.device) -> dict[str, Callable[[Tensor, int], None]]:
    """By name: what is timed, of a gradient and the number of the step."""
    out = torch.empty(elements, device=device)

    def copy(gradient: Tensor, turn: int) -> None:
        out.copy_(gradient)

    found: dict[str, Callable[[Tensor, int], None]] = {COPY: copy}
    for name in training.CODECS:
        codec = codec_of(training.codec(hvd, name))
        if isinstance(codec, LossyCodec) and codec.on_device:
            found[name] = _encoded(codec, elements, device)
    return found


def _encoded(codec: LossyCodec, elements: int, device: torch.device) -> Callable[[Tensor, int], None]:
    memory = DeviceMemory(elements, codec.keeps, [], device)
    rows = elements // COLUMNS
    matrices = [(0, rows, COLUMNS)] if rows else []
    way = "gather" if isinstance(codec, TopK) else codec.way(elements, 1)[0]

    def run(gradient: Tensor, turn: int) -> None:
        exchange = Exchange(Mirror(), 0, 1, 1.0, codec, way, turn, matrices, lambda work: None)
        reduce_encoded(exchange, gradient, memory)

    return run


def timed(run: Callable[[Tensor, int], None], gradient: Tensor, turn: int) -> float:
    """Milliseconds until the device is through."""
    _finish(gradient.device)
    began = time.perf_counter()
    run(gradient, turn)
    _finish(gradient.device)
    return 1e3 * (time.perf_counter() - began)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(args: argparse.Namespace) -> dict[str, list[float]]:
    device, elements = torch.device(args.device), int(args.elements)
    generator = torch.Generator(device).manual_seed(0)
    source = torch.randn(elements, generator=generator, device=device) * 1e-3
    chosen, found = operations(elements, device), {}
    order, shuffled = list(chosen), random.Random(0)
    for turn in tqdm(range(-3, args.rounds), unit="round"):  # the first three find memory
        for name in shuffled.sample(order, len(order)):
            gradient = source.roll(turn * 4099)
            milliseconds = timed(chosen[name], gradient, turn + 3)
            if turn >= 0:
                found.setdefault(name, []).append(milliseconds)
    return {name: found[name] for name in order}


def summarise(elements: int, found: dict[str, list[float]]) -> list[dict[str, Any]]:
    spreads = {name: common.spread(times) for name, times in found.items()}
    per_byte = spreads[COPY]["median"] / (8 * elements)
    return [
        {
            "peer": name,
            "milliseconds": one,
            "copies": one["median"] / spreads[COPY]["median"],
            "share_of_bandwidth": (8 if name == COPY else 16) * elements * per_byte / one["median"],
        }
        for name, one in spreads.items()
    ]


def draw(summary: list[dict[str, Any]], device: str) -> Any:
    plt = common.pyplot()
    figure, axes = plt.subplots(figsize=(7, 4))
    axes.barh([one["peer"] for one in summary], [one["copies"] for one in summary], color="tab:blue")
    axes.invert_yaxis()
    axes.set_xlabel("time, in copies of the gradient on the device")
    axes.set_title(f"Codecs with error feedback on {device}")
    return figure


def main() -> None:
    args = parse_arguments()
    found = measure(args)
    summary = summarise(int(args.elements), found)
    name = torch.cuda.get_device_name() if args.device.startswith("cuda") else args.device
    rows = [
        [
            one["peer"],
            f"{one['milliseconds']['median']:.2f}",
            f"{one['copies']:.1f}",
            f"{100 * one['share_of_bandwidth']:.0f}%",
        ]
        for one in summary
    ]
    print(f"\n{args.elements:.3g} float32 numbers on {name}")
    print(common.table(["codec, with feedback", "ms", "copies", "share of the bandwidth"], rows))
    common.save("device_compression", args, {"device": name, "summary": summary, "rounds": found}, draw(summary, name))


if __name__ == "__main__":
    main()
