"""Pure functions that compare when contestants of a training reach a loss, next to DDP, and judge the targets."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import common
import numpy as np
import training
from jobs import Peer

DDP, OWN_DENSE = training.DDP, "hvdkit none"
# The contestants that send all gradients in fp32, with AdamW first, then with SGD.
DENSE_DDP = (DDP, f"{DDP} SGD")
DENSE = (*DENSE_DDP, OWN_DENSE, f"{OWN_DENSE} SGD")
# The references for the times of all contestants.
FP32, FP16_HOOK, BEST_HOOK = "DDP fp32", "DDP's fp16 hook", "DDP's best hook"
COMPARED = (FP32, FP16_HOOK, BEST_HOOK)
HOOKS = (f"{DDP} fp16", f"{DDP} bf16", f"{DDP} PowerSGD")
GOALS = ("dense", "common")
# The targets: how many times sooner than DDP and its hooks, by the rate in Gb/s; the largest loss above dense, in %.
SOONER = {1.0: {FP32: 2.0, FP16_HOOK: 1.4, BEST_HOOK: 1.4}, 0.2: {FP32: 6.0, FP16_HOOK: 3.0, BEST_HOOK: 3.0}}
FARTHEST = {
    **dict.fromkeys(("int8", "fp16", "bf16"), 0.5),
    **dict.fromkeys(("topk", "topk warm-up", "topk warm-up SGD", "dgc", "powersgd"), 2.0),
}


def final(run: dict[str, Any]) -> float:
    """Return the last loss of a run; NaN if it diverged."""
    return math.nan if run["diverged"] else run["curve"]["loss"][-1]


def seconds_to(run: dict[str, Any], loss: float | None) -> float | None:
    """Return the seconds until a run first has the loss, interpolated between evaluations. None if it never has it."""
    curve = [pair for pair in zip(run["curve"]["seconds"], run["curve"]["loss"], strict=True) if pair[1] is not None]
    if loss is None or run["diverged"]:
        return None
    for (before, higher), (after, lower) in itertools.pairwise(curve):
        if lower <= loss < higher:
            return float(after - (after - before) * (loss - lower) / (higher - lower))
    return None


def groups(peers: Sequence[Peer]) -> list[list[str]]:
    """Return the peers' names in a group for AdamW and one for SGD: only losses of one optimizer can be compared."""
    found = [[peer.name for peer in peers if ("sgd" in peer.flags) == sgd] for sgd in (False, True)]
    return [names for names in found if names]


def first(names: Sequence[str], wanted: Sequence[str]) -> str | None:
    """Return the first of the wanted names that is among ``names``, or None."""
    return next((name for name in wanted if name in names), None)


def goals(one: dict[str, Any], names: Sequence[str], tolerance: float) -> dict[str, float | None]:
    """Return the losses that the contestants of a group are to reach in a round."""
    dense, finals = first(names, DENSE), [final(one[name]) for name in names if not one[name]["diverged"]]
    aim = None if dense is None or one[dense]["diverged"] else final(one[dense]) * (1 + tolerance / 100)
    return {"dense": aim, "common": max(finals, default=None)}


def arrivals(one: dict[str, Any], names: Sequence[str], loss: float | None) -> dict[str, float]:
    """Return the seconds to a loss, of the contestants that reach it in a round and of the references in COMPARED."""
    found = {name: seconds for name in names if (seconds := seconds_to(one[name], loss)) is not None}
    hooks = [found[hook] for hook in HOOKS if hook in found]
    compared = {FP32: first(list(found), DENSE_DDP), FP16_HOOK: first(list(found), HOOKS[:1])}
    best = {BEST_HOOK: min(hooks)} if hooks else {}
    return found | {name: found[peer] for name, peer in compared.items() if peer} | best


def summarise(names: Sequence[str], rounds: Sequence[dict[str, Any]], tolerance: float) -> list[dict[str, Any]]:
    """Return an entry per contestant of a group: its loss, seconds to each goal, and the references' over these."""
    dense = first(names, DENSE)
    losses = [goals(one, names, tolerance) for one in rounds]
    reached = {
        goal: [arrivals(one, names, loss[goal]) for one, loss in zip(rounds, losses, strict=True)] for goal in GOALS
    }
    summary = []
    for name in names:
        runs = [one[name] for one in rounds]
        far = [100 * (final(one[name]) / final(one[dense]) - 1) for one in rounds] if dense else []
        seconds = {goal: [one[name] for one in reached[goal] if name in one] for goal in GOALS}
        summary.append(
            {
                "peer": name,
                "diverged": any(run["diverged"] for run in runs),
                "loss": _median([final(run) for run in runs]),
                "percent_from_dense": _median(far),
                "milliseconds": common.spread(value for run in runs for value in run["milliseconds"]),
                "wire_bytes": _median([float(np.mean(run["wire_bytes"])) for run in runs]),
                # None for a goal that is not reached in all rounds.
                "seconds_to": {
                    goal: _median(some) if len(some) == len(runs) else None for goal, some in seconds.items()
                },
                "times_sooner_than": {
                    goal: {other: common.paired_ratio(reached[goal], other, name) for other in COMPARED}
                    for goal in GOALS
                },
            }
        )
    return summary


def _median(values: Sequence[float]) -> float | None:
    return float(np.median(values)) if values and all(map(math.isfinite, values)) else None


def verdicts(gigabits: float, summary: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the targets with their measured values and verdicts: None if a target was not measured."""
    found = []
    for (other, aim), goal in itertools.product(SOONER.get(gigabits, {}).items(), GOALS):
        ratios = {
            one["peer"]: ratio["median"]
            for one in summary
            if one["peer"].startswith("hvdkit ") and (ratio := one["times_sooner_than"][goal][other]) is not None
        }
        best = max(ratios, key=lambda name: ratios[name], default=None)
        what = f"{gigabits:g} Gb/s: {goal} loss {aim:g} times sooner than {other}"
        value = ratios[best] if best else None
        said = f"{best}, {value:.2f} times" if best else "no contestant to compare"
        found.append({"target": what, "value": value, "said": said, "met": None if value is None else value >= aim})
    for name, most in FARTHEST.items():
        for one in summary:
            if one["peer"] == f"hvdkit {name}":
                far = one["percent_from_dense"]
                said = "diverged" if one["diverged"] else "no dense one" if far is None else f"{far:+.2f}%"
                what = f"{gigabits:g} Gb/s: {one['peer']} ends within {most:g}% of dense"
                met = not one["diverged"] and (None if far is None else far <= most)
                found.append({"target": what, "value": far, "said": said, "met": met})
    return found
