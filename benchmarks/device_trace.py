"""The GPU's work in a training step, as PyTorch's profiler saw it: launches, and communication beside computation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import common

STEPS = 2
COMMUNICATION = ("nccl", "Memcpy HtoD", "Memcpy DtoH")
# Calls that give the GPU something to do.
LAUNCHES = (
    "cudaLaunchKernel",
    "cudaLaunchKernelExC",
    "cuLaunchKernel",
    "cuLaunchKernelEx",
    "cudaMemcpyAsync",
    "cudaMemsetAsync",
)
Span = tuple[float, float]


def traces(
    device: str, step: Callable[[str], object], names: Sequence[str], wait: Callable[[], object]
) -> dict[str, dict[str, Any]]:
    """Return by contestant the launches of a step, the part of communication beside kernels, and spans by stream."""
    if device != "cuda":
        return {}
    from torch.profiler import ProfilerActivity, profile

    found = {}
    for name in names:
        step(name)
        wait()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
            for _ in range(STEPS):
                step(name)
            wait()
        found[name] = digest(profiled.profiler.kineto_results.events())
    return found


def digest(events: Sequence[Any]) -> dict[str, Any]:
    """Return figures of Kineto's events in STEPS steps. Spans are in milliseconds since the first span began."""
    launches, spans = 0, []
    for event in events:
        if str(event.device_type()).endswith("CPU"):
            launches += event.name() in LAUNCHES
        elif not event.is_user_annotation():  # annotations also span the time between kernels
            begin = event.start_ns() / 1e6
            spans.append((event.device_resource_id(), event.name(), begin, begin + event.duration_ns() / 1e6))
    first = min((begin for _, _, begin, _ in spans), default=0.0)
    talks = [(begin, end) for _, name, begin, end in spans if is_communication(name)]
    computes = [(begin, end) for _, name, begin, end in spans if not is_communication(name)]
    total = sum(end - begin for begin, end in merged(talks))
    return {
        "launches": launches // STEPS,
        "overlap": beside(talks, computes) / total if total else None,
        "communication_milliseconds": total / STEPS,
        "spans": [
            [stream, is_communication(name), round(begin - first, 4), round(end - first, 4)]
            for stream, name, begin, end in spans
        ],
    }


def is_communication(name: str) -> bool:
    """True if a kernel or copy belongs to an exchange between ranks."""
    return any(word in name for word in COMMUNICATION)


def merged(spans: Sequence[Span]) -> list[Span]:
    """Return the spans in order, with overlapping spans merged."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def beside(spans: Sequence[Span], others: Sequence[Span]) -> float:
    """Return the time in which at least one of ``spans`` and one of ``others`` run."""
    ours, theirs, total, index = merged(spans), merged(others), 0.0, 0
    for begin, end in ours:
        while index < len(theirs) and theirs[index][1] <= begin:
            index += 1
        at = index
        while at < len(theirs) and theirs[at][0] < end:
            total += min(end, theirs[at][1]) - max(begin, theirs[at][0])
            at += 1
    return total


def draw(report: dict[str, Any], name: str) -> Any:
    """Draw the streams of each model's steps over time: kernels, and on top of them exchanges between ranks."""
    plt = common.pyplot()
    traced = {model: one["traces"][name]["spans"] for model, one in report.items() if name in one["traces"]}
    figure, all_axes = plt.subplots(max(1, len(traced)), squeeze=False, figsize=(10, 2.2 * max(1, len(traced))))
    for axes, (model, spans) in zip(all_axes[:, 0], traced.items(), strict=False):
        streams = sorted({stream for stream, *_ in spans})
        for row, stream in enumerate(streams):
            for talks, colour in ((False, "tab:blue"), (True, "tab:orange")):
                bars = [(begin, end - begin) for at, kind, begin, end in spans if at == stream and kind == talks]
                axes.broken_barh(bars, (row - 0.4, 0.8), color=colour)
        axes.set_yticks(range(len(streams)), [f"stream {stream}" for stream in streams])
        axes.set_title(f"{model}: {STEPS} steps; orange: between ranks")
        axes.set_xlabel("ms")
    return figure
