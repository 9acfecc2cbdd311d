"""Draws timeline.png: steps of three ranks, in one of which rank 2 is late. ``python docs/pictures/timeline.py``"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hvdkit.engine.telemetry.trace import late_waits, read_trace
from hvdkit.engine.telemetry.trace_plot import plot_trace

RANKS, STEPS, LATE_STEP, LATE_SECONDS = 3, 8, 6, 0.2


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


def main() -> None:
    """Train, and draw what rank 0 recorded."""
    if "HOROVOD_TIMELINE" in os.environ:
        train()
        return
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        command = [sys.executable, "-m", "hvdkit.launch", "-np", str(RANKS), "--timeline-filename", str(trace)]
        subprocess.run([*command, sys.executable, __file__], check=True)  # noqa: S603
        recorded = read_trace(trace)
        plot_trace(recorded, late_waits(recorded), Path(__file__).with_suffix(".png"))


if __name__ == "__main__":
    main()
