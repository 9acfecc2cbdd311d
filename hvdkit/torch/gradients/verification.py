"""Verification of an optimizer's parameters, which are hashed where they are."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import torch
from torch._compile import _disable_dynamo
from torch.nn.parameter import is_lazy

from hvdkit import kernels
from hvdkit.api.gradients.verification import Verification
from hvdkit.api.machine import machine
from hvdkit.collectives.group import Array
from hvdkit.engine.telemetry.verifying import Statement, sketch
from hvdkit.torch.gradients.names import parameters_of

BROADCAST = "hvd.broadcast_parameters(model.state_dict(), 0) and hvd.broadcast_optimizer_state(optimizer, 0)"

# Elements of a device's tensor that are hashed at a time; each takes 16 bytes of temporary memory.
CHUNK = 1 << 20
# By the bytes of an element, the integers that its bits are read as.
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # 2**64 divided by the golden ratio, as an int64
_BETWEEN_CHUNKS = 0xC2B2AE3D27D4EB4F - (1 << 64)

NameOf = Callable[[torch.Tensor], str]


def can_be_hashed(parameter: torch.Tensor) -> bool:
    """True for a plain tensor with values: no part of one that is spread over ranks, no lazy, meta or sparse tensor."""
    if is_lazy(parameter) or parameter.layout is not torch.strided or parameter.is_meta:
        return False
    if parameter.is_quantized or parameter.is_nested or type(parameter.detach()) is not torch.Tensor:
        return False
    return parameter.numel() == 0 or parameter.untyped_storage().nbytes() > 0  # else its memory was given back


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the real numbers of a tensor in their logical order."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    return flat.as_strided((flat.numel(),), (1,))  # of less than two elements the stride may be any number


def device_hash(tensor: torch.Tensor) -> torch.Tensor:
    """Return 64 bits for a tensor's values, of dimension 0, on its device. The host does not wait.

    The hash is the sum modulo 2**64 of the elements' bits as integers, each times an odd number that depends on its
    offset, so that a change of one element is always seen; chunks are folded by Horner's rule.
    """
    flat = _flat(tensor)
    words = flat.view(_WORDS[flat.element_size()])
    offsets = torch.arange(min(CHUNK, words.numel()), dtype=torch.int64, device=tensor.device)
    weights = (offsets * _ODD) ^ (offsets << 21) | 1
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for begin in range(0, words.numel(), CHUNK):
        part = words[begin : begin + CHUNK].to(torch.int64)
        total = total * _BETWEEN_CHUNKS + (part * weights[: part.numel()]).sum()
    return total


def hashes_of(tensors: Sequence[torch.Tensor]) -> Array:
    """Return a hash of each tensor's values, uint64. One small copy of each device is waited for."""
    hashes = np.zeros(len(tensors), dtype=np.uint64)
    by_device: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        if tensor.is_cpu:
            hashes[index] = kernels.checksum(_flat(tensor).view(torch.uint8).numpy())
        else:
            by_device.setdefault(tensor.device, []).append(index)
    for indices in by_device.values():
        hashes[indices] = torch.stack([device_hash(tensors[index]) for index in indices]).cpu().numpy().view(np.uint64)
    return hashes


def _sketch_of(tensor: torch.Tensor) -> Array:
    flat = _flat(tensor)
    return sketch(flat.numel(), lambda begin, end: flat[begin:end].to("cpu", torch.float64).numpy())


def _machine_of(tensors: Sequence[torch.Tensor]) -> str:
    devices = {tensor.device for tensor in tensors if not tensor.is_cpu}
    names = {torch.cuda.get_device_name(each) if each.type == "cuda" else each.type for each in devices}
    capability = torch.backends.cpu.get_cpu_capability()
    return machine(capability, f"{torch.get_num_threads()} threads", f"torch {torch.__version__}", *sorted(names))


class OptimizerVerification(Verification):
    """The verification of an optimizer's parameters, which are hashed right after its update."""

    def __init__(self, process_set: Any, broadcast: str = BROADCAST) -> None:
        super().__init__(broadcast)
        self._process_set = process_set
        self._sparse: Collection[int] = ()  # ids
        self._joins = self._count = 0  # updates that Adasum combined, since the last join

    def attach_to(self, engine: Any, lane: Any, sparse: Collection[int]) -> None:
        """Compare parameters with the steps of ``lane``, if there is one. ``sparse``: ids of parameters."""
        self._sparse = sparse
        if lane is not None:
            self.attach(lane, engine)

    @_disable_dynamo
    def updated(self, groups: Sequence[dict[str, Any]], name_of: NameOf) -> None:
        """Hash the parameters of these groups after the optimizer's update, if they are to be compared."""
        if self.wants(self.step):
            self.state(self._statement_of(groups, name_of, self.step))

    @_disable_dynamo
    def combined(self, engine: Any, label: str, groups: Sequence[dict[str, Any]], name_of: NameOf) -> None:
        """Do what ``updated`` does after all ranks have combined their updates by name. Collective.

        Ranks that had joined have not counted the updates that they left out, so all count anew after a join.
        """
        if engine is not self._engine:
            self._engine, self._every, self._joins = engine, engine.settings.verify, -1
            self._has_compared = False
        if engine.joining.over != self._joins:
            self._joins, self._count = engine.joining.over, 0
        self._count += 1
        if self.wants(self._count):
            self._statement = self._statement_of(groups, name_of, self._count)
            self._compare(label, self._process_set.process_set_id, self._count)

    def _statement_of(self, groups: Sequence[dict[str, Any]], name_of: NameOf, step: int) -> Statement:
        sparse_too = self.wants(step, sparse=True)
        tensors = [
            parameter
            for parameter in parameters_of(groups)
            if can_be_hashed(parameter) and (sparse_too or id(parameter) not in self._sparse)
        ]
        sketches = np.array(list(map(_sketch_of, tensors))) if self.wants_sketches else None
        eps = [
            torch.finfo(each.dtype).eps if each.is_floating_point() or each.is_complex() else 0.0 for each in tensors
        ]
        names = list(map(name_of, tensors))
        return Statement(_machine_of(tensors), hashes_of(tensors), sketches, names=names, precisions=eps)
