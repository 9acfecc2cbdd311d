"""Deep gradient compression: top-k of a momentum that each rank keeps by itself.

Lin et al., 2018, "Deep gradient compression: reducing the communication bandwidth for distributed training".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from hvdkit import kernels
from hvdkit.compression.codec import Array, Bytes
from hvdkit.compression.lossy import check_number
from hvdkit.compression.sparse import TopK, pairs_in
from hvdkit.compression.state import RESIDUAL, CodecState

VELOCITY = "velocity"


@dataclass(frozen=True)
class DGC(TopK):
    """The ``ratio`` of the largest values of the sum of each rank's own momentum that was not sent yet.

    Momentum correction: the velocity u = momentum * u + gradient is accumulated, not the gradient; momentum factor
    masking: the velocity of values that are sent becomes 0. So the optimizer itself must have no momentum, and small
    tensors are encoded as well. ``seed``, ``warmup_epochs``, ``steps_per_epoch``, ``feedback`` (which must be True),
    ``compress`` and errors are those of Compression.topk.

    Args:
        ratio: the part of the values that is sent, above 0 and at most 1.
        momentum: of the velocity, at least 0 and less than 1.
        clip: local clipping, none if None. The values that a rank encodes at a time (its piece of a bucket, between
            nodes its share of the node's sum) are scaled down to a norm of ``clip / sqrt(ranks)``, if it is larger.

    Examples:
        >>> codec = hvd.Compression.dgc(ratio=0.001, momentum=0.9)
        >>> optimizer = hvd.DistributedOptimizer(optimizer, compression=codec)
    """

    ratio: float = 0.001
    momentum: float = 0.9
    clip: float | None = None
    seed: int = field(default=0, kw_only=True)  # in TopK it is the second parameter, which here is momentum

    name: ClassVar[str] = "dgc"
    all_tensors: ClassVar[bool] = True
    needs_state: ClassVar[bool] = True
    has_momentum: ClassVar[bool] = True
    has_device_twin: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.feedback:
            raise ValueError("Compression.dgc: feedback must be True, since dgc sends accumulated gradients")
        if not 0.0 <= check_number(self.name, "momentum", self.momentum) < 1.0:
            raise ValueError(f"Compression.dgc: momentum must be at least 0 and less than 1, got {self.momentum}")
        if self.clip is not None and not check_number(self.name, "clip", self.clip) > 0.0:
            raise ValueError(f"Compression.dgc: clip must be above 0, or None, got {self.clip}")

    @property
    def keeps(self) -> tuple[str, ...]:
        return (*super().keeps, VELOCITY)

    @property
    def owes(self) -> Mapping[str, float]:
        # A gradient comes again with each turn of the velocity, 1 / (1 - momentum) times in the end.
        return {RESIDUAL: 1.0 - self.momentum, VELOCITY: self.momentum}

    def prepare(self, values: Array, state: CodecState, ranks: int) -> None:
        """Add the gradient to the velocity and that to the residual; leave of the gradient what is not finite."""
        residual, velocity = state.residual, state.arrays.get(VELOCITY)
        if residual is None or velocity is None:  # of a rank that has closed its plan and gives zeros
            return
        if self.clip is not None:
            norm, most = float(np.linalg.norm(values.astype(np.float64))), self.clip / ranks**0.5
            if most < norm < np.inf:
                kernels.scale_into(values, values, most / norm)
        if kernels.momentum_into(velocity, residual, values, self.momentum):
            values[...] = 0.0
        else:
            values[np.isfinite(values)] = 0.0

    def encode_into(self, payload: Bytes, values: Array, state: CodecState) -> int:
        """Encode as top-k does; zero the velocity of values that are sent."""
        nbytes = super().encode_into(payload, values, state)
        if (velocity := state.arrays.get(VELOCITY)) is not None:
            pairs = pairs_in(payload[:nbytes], values.size)
            sent = np.isfinite(values) if pairs is None else pairs[0][np.isfinite(pairs[1])]
            velocity[sent] = 0.0
        return nbytes
