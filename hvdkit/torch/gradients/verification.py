"""Verification of an optimizer's parameters, which are hashed where they are."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import torch
from torch._compile import _disable_dynamo
from torch.nn.parameter import is_lazy

from hvdkit import kernels
from hvdkit.api.gradients.verification import ALL, CHUNK, NOTHING, Statement, Verification, sketch
from hvdkit.api.machine import machine
from hvdkit.collectives.group import Array
from hvdkit.engine.telemetry.verifying import is_due
from hvdkit.torch.gradients.names import parameters_of

BROADCAST = "hvd.broadcast_parameters(model.state_dict(), 0) and hvd.broadcast_optimizer_state(optimizer, 0)"

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
    offset, so that a change of one element is always seen; chunks are folded by Horner's rule. It takes 16 bytes of
    temporary memory for each element of a chunk.
    """
    flat = _flat(tensor)
    words = flat.view(_WORDS[flat.element_size()])
    offsets = torch.arange(min(CHUNK, words.numel()), dtype=torch.int64, device=tensor.device)
    weights = (offsets * _ODD) ^ (offsets << 21) | 1
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for chunk in torch.split(words, CHUNK):
        total = total * _BETWEEN_CHUNKS + (chunk.to(torch.int64) * weights[: chunk.numel()]).sum()
    return total


def hashes_of(tensors: Sequence[torch.Tensor]) -> Array:
    """Return a hash of each tensor's values, uint64. Those of a device are copied to the host together."""
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
    return sketch(chunk.to("cpu", torch.float64).numpy() for chunk in torch.split(_flat(tensor), CHUNK))


def _machine_of(tensors: Sequence[torch.Tensor]) -> str:
    devices = {tensor.device for tensor in tensors if not tensor.is_cpu}
    names = {torch.cuda.get_device_name(each) if each.type == "cuda" else each.type for each in devices}
    capability = torch.backends.cpu.get_cpu_capability()
    return machine(capability, f"{torch.get_num_threads()} threads", f"torch {torch.__version__}", *sorted(names))


class OptimizerVerification(Verification):
    """The verification of an optimizer's parameters, which are hashed right after its update."""

    sparse: Collection[int] = ()  # the ids of parameters with sparse gradients

    @_disable_dynamo
    def updated(self, groups: Sequence[dict[str, Any]], name_of: NameOf) -> None:
        """Hash the parameters of these groups after the optimizer's update, if they are to be compared."""
        if (level := self.level()) != NOTHING:
            left_out = () if level == ALL else self.sparse
            self.state(self._statement_of([p for p in parameters_of(groups) if id(p) not in left_out], name_of))

    @_disable_dynamo
    def combined(self, engine: Any, label: str, groups: Sequence[dict[str, Any]], name_of: NameOf) -> None:
        """Do what ``updated`` does after all ranks have combined their updates by name. Collective.

        Ranks that had joined have not counted the updates that they left out, so all count anew after a join.
        """
        step = engine.named.count(f"updates of {label}", process_set_id=0) + 1
        if is_due(step, engine.settings.verify):
            self.compare(engine, label, 0, step, self._statement_of(parameters_of(groups), name_of))

    def _statement_of(self, parameters: Sequence[torch.Tensor], name_of: NameOf) -> Statement:
        tensors = list(filter(can_be_hashed, parameters))
        eps = [
            torch.finfo(each.dtype).eps if each.is_floating_point() or each.is_complex() else 0.0 for each in tensors
        ]
        sketches = list(map(_sketch_of, tensors)) if self.wants_sketches else None
        return Statement(_machine_of(tensors), list(map(name_of, tensors)), eps, hashes_of(tensors), sketches)
