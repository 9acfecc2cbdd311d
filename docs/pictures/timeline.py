"""Draws timeline.png: steps of three ranks, in one of which rank 2 is late. ``python docs/pictures/timeline.py``"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RANKS, STEPS, LATE_STEP, LATE_SECONDS = 3, 8, 6, 0.2
COLOURS = {"FORWARD": "#4878a8", "BACKWARD": "#6aa3d5", "WAIT": "#e08a3c", "ALLREDUCE": "#5a9e5a"}


def train() -> None:
    """What each rank does."""
    import torch

    import hvdkit.torch as hvd

    hvd.init()
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8)))
    sgd = torch.optim.SGD(model.parameters(), lr=0.001)
    optimizer = hvd.DistributedOptimizer(sgd, named_parameters=model.named_parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(torch.randn(32, 1024)).square().mean()
        if hvd.rank() == 2 and step == LATE_STEP:
            time.sleep(LATE_SECONDS)
        loss.backward()
        optimizer.step()
        hvd.allreduce(loss.detach(), name="loss")


def activities(trace: list[dict[str, Any]]) -> list[tuple[str, str, float, float]]:
    """Rows, names, and when each begins and ends, in milliseconds."""
    rows = {event["tid"]: event["args"]["name"] for event in trace if event.get("name") == "thread_name"}
    found, begun = [], dict[int, list[Any]]()
    for event in trace:
        if event["ph"] == "B":
            begun.setdefault(event["tid"], []).append(event)
        elif event["ph"] in "EX":
            start = event if event["ph"] == "X" else begun[event["tid"]].pop()
            end = event["ts"] + event.get("dur", 0)
            found.append((rows[event["tid"]], start["name"], start["ts"] / 1e3, end / 1e3))
    return found


def draw(found: list[tuple[str, str, float, float]], picture: Path) -> None:
    """As chrome://tracing shows it, with a legible name in each bar that has the room."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps = {name: (begin, end) for _, name, begin, end in found if name.startswith("STEP ")}
    left, right = steps[f"STEP {LATE_STEP - 1}"][0], steps[f"STEP {STEPS}"][1]
    shown = [one for one in found if left <= one[2] and one[3] <= right + 1 and "NEGOTIATE" not in one[1]]
    rows = sorted({row for row, *_ in shown}, key=lambda row: (not row.startswith("training"), row))
    figure, axes = pyplot.subplots(figsize=(9.5, 0.6 * len(rows) + 0.8), layout="constrained")
    for row, name, begin, end in shown:
        kind = next((kind for kind in COLOURS if name.startswith(kind)), "")
        height = rows.index(row)
        axes.barh(height, end - begin, left=begin - left, color=COLOURS.get(kind, "#b8b8b8"), edgecolor="white")
        if end - begin > 0.0105 * len(name) * (right - left):
            axes.text((begin + end) / 2 - left, height, name, ha="center", va="center", fontsize=8)
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture, dpi=110)


def main() -> None:
    """Train, and draw what rank 0 recorded."""
    if "HOROVOD_TIMELINE" in os.environ:
        train()
        return
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        command = [sys.executable, "-m", "hvdkit.launch", "-np", str(RANKS), "--timeline-filename", str(trace)]
        subprocess.run([*command, sys.executable, __file__], check=True)  # noqa: S603
        draw(activities(json.loads(trace.read_text())), Path(__file__).with_suffix(".png"))


if __name__ == "__main__":
    main()
