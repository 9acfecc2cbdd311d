"""Draws step.png, the chart of the start pages, from benchmarks/results/step.json: ``python docs/pictures/step.py``"""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
PEERS = {
    "alone": ("compute alone", "#9a9a9a"),
    "hvdkit mpi": ("hvdkit on MPI", "#3b6ea8"),
    "DDP": ("DistributedDataParallel", "#e0a458"),
    "Horovod mpi": ("Horovod on MPI", "#c8643c"),
}
MODELS = {"transformer": "Transformer, 20.7 M parameters", "convolution": "ResNet-50, 25.6 M parameters"}


def main() -> None:
    """Draw a bar for each peer and model, with names that are legible on a telephone."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    models = json.loads((ROOT / "benchmarks" / "results" / "step.json").read_text())["models"]
    figure, rows = pyplot.subplots(len(MODELS), 1, figsize=(6.4, 4.6), layout="constrained")
    for axes, (model, title) in zip(rows, MODELS.items(), strict=True):
        times = {each["peer"]: each["milliseconds"]["median"] for each in models[model]["summary"]}
        measured = {peer: shown for peer, shown in PEERS.items() if peer in times}
        bars = axes.barh(
            [name for name, _ in measured.values()],
            [times[peer] for peer in measured],
            color=[colour for _, colour in measured.values()],
        )
        axes.bar_label(bars, fmt="%.0f", padding=4, fontsize=13)
        axes.tick_params(labelsize=13)
        axes.set_xticks([])
        axes.set_title(title, loc="left", fontsize=14)
        axes.invert_yaxis()
        axes.spines[["top", "right", "bottom"]].set_visible(False)
        axes.margins(x=0.12)
    rows[-1].set_xlabel("ms a training step; less is better", fontsize=13)
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=120)


if __name__ == "__main__":
    main()
