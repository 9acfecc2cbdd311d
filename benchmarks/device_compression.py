"""The cost of codecs on a GPU, next to a copy of the gradient on the device: encoding, decoding, and a whole allreduce.

    python benchmarks/device_compression.py
    python benchmarks/device_compression.py --device cpu --elements 1e5 --rounds 3         # without a GPU: does it run?

"whole" is an encoded allreduce with feedback but without a wire: data for other ranks come back as they are. The rate
is the least number of bytes that must be moved, divided by the time, as a fraction of the copy's rate. The copy reads
and writes each byte once. A time is the mean of several calls in a row, by events of the GPU.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import common
import torch
import training
from torch import Tensor
from tqdm import tqdm

import hvdkit.torch as hvd
from hvdkit.api.gradients.compression import codec_of
from hvdkit.compression import LossyCodec, TopK
from hvdkit.kernels import ONE
from hvdkit.transports.gpu.device_codecs import CODERS
from hvdkit.transports.gpu.device_compression import DeviceMemory, Exchange, reduce_encoded

COPY, TORCH_TOPK = "copy", "torch.topk, 1 %"
COLUMNS = 1024  # of the matrices into which powersgd shapes the gradient
CALLS = 10  # in a row
AHEAD_CYCLES = 4_000_000  # about 2 ms, in which the host launches all calls
PAYLOADS = {"int8": 1.0, "int4": 0.5, "onebit": 0.125, "topk": 0.08, "dgc": 0.008}  # approximate bytes per element


class Operation(NamedTuple):
    """A timed function of a gradient and the number of the call, and the bytes that it moves for each element."""

    run: Callable[[Tensor, int], object]
    bytes_moved: float


class Mirror:
    """A process group of one rank, whose collectives return their inputs."""

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
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="device of tensors")
    parser.add_argument("--elements", type=float, default=25e6, help="float32 numbers in a gradient")
    parser.add_argument("--rounds", type=int, default=7, help="rounds; each runs every operation several times")
    common.add_output_flag(parser)
    return common.parse(parser)


def operations(gradient: Tensor) -> dict[str, Operation]:
    """Return the operations by name. ``gradient`` has the size with which all operations are timed."""
    out, half = torch.empty_like(gradient), torch.empty_like(gradient, dtype=torch.float16)
    found = {
        COPY: Operation(lambda values, turn: out.copy_(values), 8),
        "fp16: encode": Operation(lambda values, turn: half.copy_(values), 6),
        "fp16: decode": Operation(lambda values, turn: out.copy_(half), 6),
        TORCH_TOPK: Operation(lambda values, turn: torch.topk(values.abs(), values.numel() // 100, sorted=False), 8),
    }
    for name in training.CODECS:
        codec = codec_of(training.codec(hvd, name))
        if isinstance(codec, LossyCodec) and codec.on_device:
            found.update(_of_codec(name, codec, gradient))
    return found


def _of_codec(name: str, codec: LossyCodec, gradient: Tensor) -> dict[str, Operation]:
    elements = gradient.numel()
    memory = DeviceMemory(elements, codec.keeps, [], gradient.device)
    rows = elements // COLUMNS
    matrices = [(0, rows, COLUMNS)] if rows else []
    way = "gather" if isinstance(codec, TopK) else codec.way(elements, 1)[0]

    def whole(values: Tensor, turn: int) -> None:
        reduce_encoded(Exchange(Mirror(), 0, 1, ONE, codec, way, turn, matrices, lambda work: None), values, memory)

    # The gradient and the memory that the codec keeps of it are read and written.
    found = {f"{name}: whole": Operation(whole, 16)}
    if type(codec) in CODERS:
        coder = CODERS[type(codec)](codec, 0, 0)
        row = gradient[: elements // coder.step * coder.step][None]
        payload, sent = coder.encode_rest(row, None, row.shape[1], 0)[0], PAYLOADS[name]
        found[f"{name}: encode"] = Operation(
            lambda values, turn: coder.encode_rest(row, None, row.shape[1], 0), 4 + sent
        )
        found[f"{name}: decode"] = Operation(lambda values, turn: coder.decode(payload, row.shape[1]), 4 + sent)
    return found


def timed(operation: Operation, gradient: Tensor, turn: int) -> float:
    """Return the milliseconds of a call; on a GPU the mean of CALLS calls in a row."""
    if gradient.device.type != "cuda":
        began = time.perf_counter()
        operation.run(gradient, turn)
        return 1e3 * (time.perf_counter() - began)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(AHEAD_CYCLES)
    begin.record()
    for call in range(CALLS):
        operation.run(gradient, turn * CALLS + call)
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / CALLS


def measure(args: argparse.Namespace) -> tuple[dict[str, Operation], dict[str, list[float]]]:
    device, elements = torch.device(args.device), int(args.elements)
    generator = torch.Generator(device).manual_seed(0)
    source = torch.randn(elements, generator=generator, device=device) * 1e-3
    chosen, found = operations(source), {}
    order, shuffled = list(chosen), random.Random(0)
    for turn in tqdm(range(-2, args.rounds), unit="round"):  # the first two rounds allocate memory
        for name in shuffled.sample(order, len(order)):
            gradient = source.roll(turn * 4099)
            milliseconds = timed(chosen[name], gradient, turn + 2)
            if turn >= 0:
                found.setdefault(name, []).append(milliseconds)
    return chosen, {name: found[name] for name in order}


def summarise(elements: int, chosen: dict[str, Operation], found: dict[str, list[float]]) -> list[dict[str, Any]]:
    spreads = {name: common.spread(times) for name, times in found.items()}
    copy = spreads[COPY]["median"]
    return [
        {
            "peer": name,
            "milliseconds": one,
            "copies": one["median"] / copy,
            "rate": chosen[name].bytes_moved * copy / (8 * one["median"]),
            "gigabytes_per_second": chosen[name].bytes_moved * elements / (1e6 * one["median"]),
        }
        for name, one in spreads.items()
    ]


def targets(summary: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the targets with their measured values and verdicts."""
    by_name = {one["peer"]: one for one in summary}

    def target(what: str, value: float, least: float) -> dict[str, Any]:
        return {"what": what, "value": round(float(value), 3), "must": least, "met": bool(value >= least)}

    names = ("fp16: encode", "fp16: decode", "int8: encode", "int8: decode")
    found = [target(f"{name}, of the copy's rate", by_name[name]["rate"], 0.8) for name in names]
    topk = by_name["topk: whole"]
    found.append(target("topk with residual: a copy's time over its own", 1 / topk["copies"], 0.4))
    ratio = by_name[TORCH_TOPK]["copies"] / topk["copies"]
    return [*found, target("topk with residual: times as fast as torch.topk", ratio, 10.0)]


def draw(summary: list[dict[str, Any]], device: str) -> Any:
    plt = common.pyplot()
    figure, axes = plt.subplots(figsize=(7, 6))
    axes.barh([one["peer"] for one in summary], [one["copies"] for one in summary], color="tab:blue")
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("time, in copies of the gradient on the device")
    axes.set_title(f"Codecs on {device}")
    return figure


def main() -> None:
    args = parse_arguments()
    chosen, found = measure(args)
    summary = summarise(int(args.elements), chosen, found)
    name = torch.cuda.get_device_name() if args.device.startswith("cuda") else args.device
    rows = [
        [one["peer"], f"{one['milliseconds']['median']:.3f}", f"{one['copies']:.1f}", f"{one['rate']:.2f}"]
        for one in summary
    ]
    print(f"\n{args.elements:.3g} float32 numbers on {name}")
    print(common.table(["", "ms", "copies", "of the copy's rate"], rows))
    verdicts = targets(summary)
    for one in verdicts:
        print(f"{one['what']}: {one['value']} (must be at least {one['must']}): {'met' if one['met'] else 'MISSED'}")
    payload = {"device": name, "summary": {"targets": verdicts, "operations": summary}, "rounds": found}
    common.save("device_compression", args, payload, draw(summary, name))


if __name__ == "__main__":
    main()
