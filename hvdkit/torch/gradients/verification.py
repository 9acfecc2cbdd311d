"""The parameters of an optimizer, hashed where they are, and compared with those of the other ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch._compile import _disable_dynamo
from torch.nn.parameter import is_lazy

from hvdkit import kernels
from hvdkit.api.gradients.verification import Verification, rounding_limit
from hvdkit.api.machine import machine
from hvdkit.collectives.group import Array
from hvdkit.engine.telemetry.verifying import Statement, exchange_by_name, sketch
from hvdkit.torch.gradients.names import parameters_of

BROADCAST = "hvd.broadcast_parameters(model.state_dict(), 0) and hvd.broadcast_optimizer_state(optimizer, 0)"

# Of a tensor of a device so many elements are hashed at a time: what is computed of them takes 16 bytes each.
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
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.as_strided((flat.numel(),), (1,))  # of less than two elements the stride may be any number


def device_hash(tensor: torch.Tensor) -> torch.Tensor:
    """64 bits for a tensor's values, of dimension 0, on its device: the host is not waited for.

    The sum modulo 2**64 of the elements' bits as integers, each times an odd number that depends on its offset, so that
    one that changed is always seen; chunks are folded by Horner's rule. Another number than that of kernels.checksum.
    """
    flat = _flat(tensor)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    words = flat.view(_WORDS[flat.element_size()])
    offsets = torch.arange(min(CHUNK, words.numel()), dtype=torch.int64, device=tensor.device)
    weights = (offsets * _ODD) ^ (offsets << 21) | 1
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for begin in range(0, words.numel(), CHUNK):
        part = words[begin : begin + CHUNK].to(torch.int64)
        total = total * _BETWEEN_CHUNKS + (part * weights[: part.numel()]).sum()
    return total


def hashes_of(tensors: Sequence[torch.Tensor]) -> Array:
    """A hash of each tensor's values in their logical order, uint64. Of each device one small copy is waited for."""
    hashes = np.zeros(len(tensors), dtype=np.uint64)
    elsewhere: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    for index, tensor in enumerate(tensors):
        if tensor.is_cpu:
            hashes[index] = kernels.checksum(_flat(tensor).view(torch.uint8).numpy())
        else:
            elsewhere.setdefault(tensor.device, []).append((index, device_hash(tensor)))
    for found in elsewhere.values():
        indices, values = zip(*found, strict=True)
        hashes[list(indices)] = torch.stack(values).cpu().numpy().view(np.uint64)
    return hashes


def sketch_of(tensor: torch.Tensor) -> Array:
    """The sketch of a tensor's values, of which one part at a time is copied from a device."""
    flat = _flat(tensor)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    return sketch(flat.numel(), lambda begin, end: flat[begin:end].to("cpu", torch.float64).numpy())


def _precision(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 0.0


def machine_of(tensors: Sequence[torch.Tensor]) -> str:
    """What decides how this rank's updates are rounded."""
    devices = sorted({_device_name(tensor.device) for tensor in tensors if not tensor.is_cpu})
    capability = torch.backends.cpu.get_cpu_capability()
    return machine(capability, f"{torch.get_num_threads()} threads", f"torch {torch.__version__}", *devices)


@functools.cache
def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


class OptimizerVerification(Verification):
    """Of an optimizer. Parameters are hashed right after its update, also where they are compared a step later."""

    def __init__(self, process_set: Any, broadcast: str = BROADCAST) -> None:
        super().__init__(broadcast)
        self._process_set = process_set
        self._sparse: Collection[int] = ()  # ids
        self._joins = self._count = 0  # of updates that Adasum combined, since the last join
        self._title = ""

    def attach_to(self, engine: Any, planned: Any, sparse: Collection[int]) -> None:
        """Routes were agreed on: ``planned`` are the gradients with a lane, ``sparse`` the ids of the sparse ones."""
        self._sparse = sparse
        if planned is not None:
            self.attach(planned.lane, engine)

    @_disable_dynamo
    def updated(self, groups: Sequence[dict[str, Any]], name_of: NameOf) -> None:
        """The optimizer, which has these groups of parameters, made its update.

        Raises ParametersDifferError on all ranks if they differ, and all ranks are here.
        """
        if self.wants(self.step):
            self.state(*self._statement(groups, name_of, self.wants_sparse(self.step)))
            self.compare_at_once(self._process_set.process_set_id)

    @_disable_dynamo
    def combined(self, engine: Any, label: str, groups: Sequence[dict[str, Any]], name_of: NameOf) -> None:
        """The same where all ranks have combined their updates by name, and are here.

        Ranks that had joined have not counted what they left out, so all begin anew after a join.
        """
        if engine is not self._engine:
            self._engine, self._every, self._joins = engine, engine.settings.verify, -1
            self._has_compared = False
            self._title = label
        if engine.joining.over != self._joins:
            self._joins, self._count = engine.joining.over, 0
        self._count += 1
        if self.wants(self._count):
            self._names, self._limits, stated = self._statement(groups, name_of, self.wants_sparse(self._count))
            stated = replace(stated, is_first=not self._has_compared)
            heard = exchange_by_name(engine.named, self._title, self._process_set.process_set_id, stated)
            self._judge(heard, self._title, self._count, range(engine.topology.size))

    def _statement(
        self, groups: Sequence[dict[str, Any]], name_of: NameOf, sparse_too: bool
    ) -> tuple[list[str], list[float], Statement]:
        parameters = [
            parameter
            for parameter in parameters_of(groups)
            if can_be_hashed(parameter) and (sparse_too or id(parameter) not in self._sparse)
        ]
        sketches = np.array([sketch_of(one) for one in parameters]) if self.wants_sketches else None
        limits = [rounding_limit(_precision(one.dtype)) for one in parameters]
        statement = Statement(machine_of(parameters), hashes_of(parameters), sketches=sketches)
        return [name_of(one) for one in parameters], limits, statement
