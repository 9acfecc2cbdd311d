"""Residuals of lossy codecs in an elastic job: what a rank that leaves has not sent is owed by rank 0."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hvdkit.api.objects import allgather_object
from hvdkit.compression.state import OWED
from hvdkit.engine.ops.requests import Call, ReduceRequest
from hvdkit.engine.session import runtime
from hvdkit.engine.session.process_sets import global_process_set
from hvdkit.kernels.reduce_op import ReduceOp
from hvdkit.torch.gradients.compression_state import FORMAT, OptimizerCodecs
from hvdkit.torch.gradients.synchronizer import GradientSynchronizer

_NAME = "hvdkit.elastic.residuals"
Array = npt.NDArray[Any]


def codecs_of(optimizer: Any) -> OptimizerCodecs | None:
    """Return the codecs of a DistributedOptimizer of all ranks; None of another, or where nothing is encoded."""
    gradients: GradientSynchronizer | None = getattr(optimizer, "_synchronizer", None)
    if gradients is None or not gradients.settings.encodes:
        return None
    return gradients.codecs if gradients.settings.process_set is global_process_set else None


def share_residuals(codecs: Sequence[OptimizerCodecs]) -> None:
    """Have rank 0 of the next generation owe the residuals of all ranks of this one. Collective.

    A rank adds what it owes to its next gradients. The ranks that leave are not known here, so all give theirs away.
    """
    owed = [_owed(each.state()) for each in codecs]
    gathered = allgather_object([{name: array.size for name, array in each.items()} for each in owed], _NAME)
    for number, own in enumerate(owed):
        sizes = {name: size for each in gathered for name, size in each[number].items()}
        if not sizes:
            continue
        arrays = [own.get(name, np.zeros(size, np.float32)) for name, size in sorted(sizes.items())]
        call = Call(f"{_NAME}.{number}", wake=False)
        runtime.engine().named.allreduce(arrays, ReduceRequest(ReduceOp.SUM), call).wait()
        codecs[number].hold(_saved(dict(zip(sorted(sizes), arrays, strict=True)), codecs[number].state()))


def _owed(saved: Any) -> dict[str, Array]:
    """Return the part of the result that each gradient lacks by a saved state, or several, of this rank."""
    owed: dict[str, Array] = defaultdict(lambda: np.zeros(0, np.float32))
    for state in [saved] if isinstance(saved, dict) else saved or ():
        for name, kept in state["kept"].items():
            for kind, values in kept.items():
                if unit := state["units"][name].get(kind):
                    part = values.numpy() * np.float32(unit)
                    owed[name] = owed[name] + part if owed[name].size else part
    return dict(owed)


def _saved(owed: dict[str, Array], own: Any) -> dict[str, Any]:
    """Return a saved state in which rank 0 owes these parts of the result. ``own``: of this rank, for its turn."""
    turns = [state["turn"] for state in ([own] if isinstance(own, dict) else own or ())]
    return {
        "format": FORMAT,
        "rank": 0,
        "size": 1,
        "place": "",
        "shapes": {},
        "kept": {name: {OWED: torch.from_numpy(array)} for name, array in owed.items()},
        "units": {name: {OWED: 1.0} for name in owed},
        "turn": max(turns, default=0),
        "notes": [],
    }
