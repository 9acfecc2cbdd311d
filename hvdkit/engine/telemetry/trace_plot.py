"""The plot of a recorded timeline: when each rank was late, and what rank 0 did around the longest of these waits."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from hvdkit.engine.telemetry.trace import Activity, LateWait, Trace

# The first words of activities, in the order in which they are looked for, with their label in the legend.
_KINDS = {
    "WAIT_FOR_RANK": ("waits for a late rank", "#d1495b"),
    "WAIT_FOR_GRADIENTS": ("training waits for gradients", "#e9a15b"),
    "WAIT_FOR_TURN": ("waits for its turn", "#e8d5a8"),
    "NEGOTIATE": ("waits for requests of all ranks", "#cfd8a0"),
    "FORWARD": ("forward pass", "#4878a8"),
    "BACKWARD": ("backward pass", "#8fbbe0"),
    "STEP": ("step", "#c9ced6"),
    "MEMCPY": ("copies", "#b89bc8"),
    "COMPRESSION": ("compression", "#7f7f7f"),
    "": ("communication", "#5a9e5a"),
}
MOST_ROWS = 24  # of activities
STEPS_AROUND = 1  # before and after the step with the longest wait


def plot_trace(trace: Trace, waits: Sequence[LateWait], picture: str | os.PathLike[str]) -> None:
    """Draw a trace into a file whose name ends with the format (png, svg, pdf).

    Raises ImportError without matplotlib, ValueError for an unknown format or a trace without activities, OSError if
    the file cannot be written.
    """
    from matplotlib.figure import Figure

    if not trace.activities:
        raise ValueError("nothing to draw: the timeline has no finished activity")
    shown = _around_longest(trace, waits)
    left, right = min(each.begin for each in shown), max(each.end for each in shown)
    rows = _rows_of(shown)
    late = sorted({wait.rank for wait in waits})
    heights = [0.3 * max(1, len(late)) + 0.6, 0.3 * len(rows) + 0.6]
    figure = Figure(figsize=(11.0, sum(heights) + 1.0), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=heights)
    for height, rank in enumerate(late):
        bars = [(wait.begin / 1e3, (wait.end - wait.begin) / 1e3) for wait in waits if wait.rank == rank]
        above.broken_barh(bars, (height - 0.4, 0.8), facecolors=_KINDS["WAIT_FOR_RANK"][1], linewidth=0.8)
    above.axvspan(left / 1e3, right / 1e3, color="#4878a8", alpha=0.15)
    above.set_yticks(range(len(late)), [f"rank {rank}" for rank in late])
    above.set_xlim(0.0, max(each.end for each in trace.activities) / 1e3)
    above.set_ylim(max(1, len(late)) - 0.5, -0.5)
    above.set_title("Late ranks: others waited for them" if late else "No rank was late", loc="left", fontsize=10)
    above.set_xlabel("s; the shaded part is shown below")
    _draw_activities(below, shown, rows, left, right)
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture, dpi=110)


def _around_longest(trace: Trace, waits: Sequence[LateWait]) -> list[Activity]:
    """Return the activities in the steps around the longest wait in a step; in the last steps if there is none.

    Without steps these are the activities around the longest wait, or all.
    """
    steps = trace.steps
    longest = max(waits, key=lambda wait: (wait.in_step, wait.end - wait.begin), default=None)
    if steps:
        ends = [step.end for step in steps]
        at = len(steps) - 1
        if longest is not None and longest.in_step:
            at = next(index for index, end in enumerate(ends) if end >= longest.end)
        near = steps[max(0, at - STEPS_AROUND) : at + STEPS_AROUND + 1]
        left, right = min(step.begin for step in near), max(step.end for step in near)
    elif longest is not None:
        margin = longest.end - longest.begin
        left, right = longest.begin - margin, longest.end + margin
    else:
        return trace.activities
    return [each for each in trace.activities if each.end >= left and each.begin <= right]


def _rows_of(shown: Sequence[Activity]) -> list[str]:
    """Return the rows to draw: the training above, then those with most activity."""
    weight: dict[str, float] = {}
    for each in shown:
        weight[each.row] = weight.get(each.row, 0.0) + each.end - each.begin
    busiest = sorted(weight, key=lambda row: (not row.startswith("training"), -weight[row]))[:MOST_ROWS]
    return sorted(busiest, key=lambda row: (not row.startswith("training"), row))


def _draw_activities(axes: Any, shown: Sequence[Activity], rows: Sequence[str], left: float, right: float) -> None:
    from matplotlib.patches import Patch

    used: dict[str, str] = {}
    for each in sorted(shown, key=lambda each: each.begin - each.end):  # the longest below the others
        if each.row not in rows:
            continue
        label, colour = next(value for prefix, value in _KINDS.items() if each.name.startswith(prefix))
        used[label] = colour
        begin, end, height = max(each.begin, left) - left, min(each.end, right) - left, rows.index(each.row)
        axes.barh(height, end - begin, left=begin, color=colour, edgecolor="white", linewidth=0.4)
        if end - begin > 0.009 * len(each.name) * (right - left):
            axes.text((begin + end) / 2, height, each.name, ha="center", va="center", fontsize=7)
    axes.set_yticks(range(len(rows)), rows, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0.0, right - left)
    axes.set_xlabel(f"ms, from {left / 1e3:.3f} s of the recording on")
    axes.set_title("Rank 0 at that time", loc="left", fontsize=10)
    patches = [Patch(color=colour, label=label) for label, colour in _KINDS.values() if used.get(label) == colour]
    axes.legend(handles=patches, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8, frameon=False)
