"""The buckets of DistributedDataParallel: what lies in them, and how one is averaged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hvdkit.api.compression_policy import Policy
from hvdkit.collectives.compressed import allreduce_encoded
from hvdkit.collectives.group import Array, Group, Steps
from hvdkit.collectives.scratch import SCRATCH
from hvdkit.compression import CASTS, Codec, Memory
from hvdkit.kernels import ReduceOp, Scale
from hvdkit.torch.ddp_group import agree
from hvdkit.torch.ddp_units import Member, Units

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
TAG = 0  # of every allreduce: they follow each other
NAMED = 3  # of a bucket's parameters, in errors
Run = tuple[int, int]


@dataclass(frozen=True)
class Gradient:
    """A parameter's run of its bucket."""

    member: Member
    begin: int
    encoded: bool  # by a lossy codec
    told: str  # its type and shape

    @property
    def run(self) -> Run:
        return self.begin, self.begin + self.member.elements


@dataclass(frozen=True)
class Bucket:
    """What DDP hands over, but for the numbers in it."""

    index: int
    gradients: tuple[Gradient, ...]
    told: str  # for errors

    @property
    def places(self) -> list[int]:
        return [gradient.member.place for gradient in self.gradients]


class Describer:
    """Knows the parameters of one model by their places, counted from the last, since DDP's buckets begin there."""

    def __init__(self, codec: Codec) -> None:
        self._policy = Policy(codec) if codec.encodes else None
        self._places: dict[Tensor, int] = {}
        self._names: dict[Tensor, str] = {}
        self._complete = False
        self._described: dict[int, tuple[list[int], torch.dtype, Bucket]] = {}

    @property
    def knows_any(self) -> bool:
        """Whether it has seen a model."""
        return bool(self._places)

    def name(self, module: nn.Module) -> None:
        """Know the parameters of ``module``, by name too."""
        self._names = {parameter: name for name, parameter in module.named_parameters()}
        for parameter in reversed([one for one in module.parameters() if one.requires_grad]):
            self._places[parameter] = len(self._places)
        self._complete = True

    def describe(self, bucket: Any) -> Bucket:
        """What lies in a bucket, the same object while that stays as it is.

        Raises ValueError for what cannot be averaged, and for a parameter of another model.
        """
        index, buffer, parameters = bucket.index(), bucket.buffer(), bucket.parameters()
        if buffer.dtype not in DTYPES or buffer.device.type not in ("cpu", "cuda"):
            told = f"{self._told(index, parameters)} is {buffer.dtype} on {buffer.device}"
            raise ValueError(f"ddp_hook: {told}; expected one of {', '.join(map(str, DTYPES))} on the CPU or CUDA")
        # Within a bucket too the parameters stand in the model's order at first.
        places = [self._place(parameter) for parameter in reversed(parameters)]
        if bucket.is_last():
            self._complete = True
        known = self._described.get(index)
        if known is not None and known[:2] == (places, buffer.dtype):
            return known[2]
        dtype = str(buffer.dtype).removeprefix("torch.")
        gradients, begin = [], 0
        for parameter in parameters:
            member = Member(self._place(parameter), *_matrix(parameter))
            told = f"{dtype}{list(parameter.shape)}"
            encoded = self._policy is not None and self._policy.codec("", parameter).encodes
            gradients.append(Gradient(member, begin, encoded, told))
            begin += member.elements
        assert begin == buffer.numel(), (begin, buffer.numel())
        described = Bucket(index, tuple(gradients), self._told(index, parameters))
        self._described[index] = places, buffer.dtype, described
        return described

    def _place(self, parameter: Tensor) -> int:
        if parameter not in self._places:
            if self._complete:
                raise ValueError("ddp_hook: this hook belongs to another model\nHINT: make one for each model.")
            self._places[parameter] = len(self._places)
        return self._places[parameter]

    def _told(self, index: int, parameters: Sequence[Tensor]) -> str:
        names = [f"'{self._names[one]}'" if one in self._names else f"{list(one.shape)}" for one in parameters]
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        return f"bucket {index} ({', '.join(names[:NAMED])}{more})"


def _matrix(parameter: Tensor) -> tuple[int, int]:
    """Rows and columns of a parameter as its gradient lies in a bucket: the outermost dimension there are the rows."""
    elements = parameter.numel() * (2 if parameter.is_complex() else 1)  # DDP views them as pairs of real numbers
    if not parameter.dim() or not elements:
        return 1, elements
    rows = max(zip(parameter.stride(), parameter.shape, strict=True), key=lambda dimension: dimension[0])[1]
    return rows, elements // rows


def reduce_bucket(
    group: Group, flat: Array, bucket: Bucket, codec: Codec, units: Units | None, agreed: bool
) -> Steps[None]:
    """Replace ``flat``, a bucket, by its average over all ranks, as far as ``codec`` carries it.

    ``units``: what is kept, None for a cast, which encodes all there is. Without ``agreed``, ranks first make sure that
    they have the same bucket: messages of other lengths would end the process. Raises MismatchError, ValueError for
    a state of other parameters, PayloadError and PeerLostError.
    """
    members = [gradient.member for gradient in bucket.gradients if gradient.encoded]
    together = [] if units is None else units.arrange(members)
    if not agreed:
        facts = {
            "gradients": [gradient.told for gradient in bucket.gradients],
            "order of parameters": bucket.places,
            "number of earlier steps": 0 if units is None else units.turn,
            "gradients that are encoded together": [list(unit.places) for unit in together],
        }
        yield from agree(group, facts)
    runs = {gradient.member.place: gradient.run for gradient in bucket.gradients}
    if units is None:
        yield from _average(group, flat, list(runs.values()), codec, None)
        return
    for unit in together:
        yield from _average(group, flat, [runs[place] for place in unit.places], codec, unit.memory)
    dense = [gradient.run for gradient in bucket.gradients if not gradient.encoded]
    if dense:
        yield from _average(group, flat, dense, CASTS["none"], None)


def _average(group: Group, flat: Array, runs: Sequence[Run], codec: Codec, memory: Memory | None) -> Steps[None]:
    """Average some runs of ``flat``, one after the other in this order, as one array."""
    scale = Scale(divisor=group.size)
    runs = _joined(runs)
    if len(runs) == 1:
        yield from allreduce_encoded(group, flat[slice(*runs[0])], ReduceOp.SUM, scale, codec, TAG, memory)
        return
    elements = sum(end - begin for begin, end in runs)
    scratch = SCRATCH.take(elements * flat.itemsize)
    values = scratch[: elements * flat.itemsize].view(flat.dtype)
    at = 0
    for begin, end in runs:
        values[at : at + end - begin] = flat[begin:end]
        at += end - begin
    yield from allreduce_encoded(group, values, ReduceOp.SUM, scale, codec, TAG, memory)
    at = 0
    for begin, end in runs:
        flat[begin:end] = values[at : at + end - begin]
        at += end - begin
    SCRATCH.give_back(scratch)


def _joined(runs: Sequence[Run]) -> list[Run]:
    """The same elements in as few runs as there can be."""
    joined: list[Run] = []
    for begin, end in runs:
        if joined and joined[-1][1] == begin:
            joined[-1] = joined[-1][0], end
        else:
            joined.append((begin, end))
    return joined
