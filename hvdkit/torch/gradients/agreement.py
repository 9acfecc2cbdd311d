"""The parameters whose gradients all ranks reduce together: agreed on once, then used in every step."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hvdkit.api.checks import check_registered
from hvdkit.api.gradients.planning import form_groups
from hvdkit.api.gradients.settings import GradientSettings
from hvdkit.engine.loop.driver import ROUND_SECONDS
from hvdkit.engine.ops.requests import Call
from hvdkit.engine.steps.registration import HOST
from hvdkit.errors import HorovodInternalError
from hvdkit.torch.gradients.layout import Kinds, can_be_planned, declared_dtypes, gradient_dtype, slot_of
from hvdkit.torch.gradients.named import NamedGradients
from hvdkit.torch.gradients.planned import PlannedGradients
from hvdkit.torch.gradients.watch import Watched

NOTHING_TO_ENCODE = (
    "Compression.{name} encodes nothing here, since all ranks are on one node, so gradients get no momentum from it.\n"
    'HINT: pass compress="everywhere" to the compression, or leave it out and give the optimizer the momentum.'
)

IN_DDP = (
    "DistributedOptimizer '{title}' on rank {rank}: its parameter '{name}' belongs to a DistributedDataParallel too, "
    "which also averages its gradient over the ranks.\n"
    "HINT: keep the DistributedDataParallel and use the optimizer without hvd.DistributedOptimizer, or train the bare "
    "model. Accelerate and the Trainer of transformers wrap models "
    "themselves; hvd.ddp_hook(codec) compresses gradients there."
)
SHARDED = (
    "DistributedOptimizer '{title}' on rank {rank}: its parameter '{name}' is a DTensor: each rank may have another "
    "part of it; fully_shard and parallelize_module reduce gradients themselves.\n"
    "HINT: use the optimizer without hvd.DistributedOptimizer; where nothing averages over the data dimension of a "
    "mesh, average the local parts: hvd.grouped_allreduce_([p.grad.to_local() for p in model.parameters()], "
    "process_set=...)."
)

NameOf = Callable[[torch.Tensor], str]


def agree_on_kinds(
    engine: Any, parameters: Sequence[torch.Tensor], title: str, process_set_id: int, sparse_only: bool
) -> tuple[Kinds, bool]:
    """Learn from the ranks that have gradients now which are sparse, and the dtypes that PyTorch leaves open.

    Return the kinds, and True if the agreement was put off because a rank has joined. ``sparse_only``: the optimizer
    takes no dense gradients, so gradients that no rank has yet are sparse too.
    """
    rows = [
        (i, gradient.sparse_dim() if gradient.is_sparse else 0, str(gradient.dtype).removeprefix("torch."))
        for i, parameter in enumerate(parameters)
        if (gradient := parameter.grad) is not None
        and (gradient.is_sparse or getattr(parameter, "grad_dtype", parameter.dtype) is None)
    ]
    dtypes = {id(parameter): gradient_dtype(parameter) for parameter in parameters}
    sparse_dims = dict.fromkeys(map(id, parameters), 1) if sparse_only else {}
    open_dtypes: dict[int, torch.dtype] = {}
    call = Call(f"{title}.kinds", process_set_id, wake=False)
    is_complete, rows_by_rank = engine.named.gather_details(rows, call, for_plan=True)
    for rows_of_rank in rows_by_rank:
        for i, sparse_dim, name in rows_of_rank:
            if i >= len(parameters):
                continue  # the ranks' models differ, which the registration of the plan reports
            key, dtype = id(parameters[i]), getattr(torch, name)
            if sparse_dim:
                sparse_dims[key] = sparse_dim
            open_dtypes[key] = torch.promote_types(open_dtypes.get(key, dtype), dtype)
    return Kinds({**dtypes, **open_dtypes}, sparse_dims), not is_complete


def check_reduced_once(parameters: Collection[torch.Tensor], name_of: NameOf, title: str, rank: int) -> None:
    """Raise ValueError if torch.distributed reduces the gradient of a parameter too."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return
    from torch.distributed.tensor import DTensor

    def check(text: str, members: Collection[int]) -> None:
        for parameter in parameters:
            if id(parameter) in members:
                raise ValueError(text.format(title=title, rank=rank, name=name_of(parameter)))

    check(SHARDED, {id(parameter) for parameter in parameters if isinstance(parameter, DTensor)})
    if _parameters_in_ddp().intersection(map(id, parameters)):
        gc.collect()  # a model that is no longer used reduces nothing
        check(IN_DDP, _parameters_in_ddp())


def _parameters_in_ddp() -> set[int]:
    """Return the ids of parameters whose gradients a DistributedDataParallel reduces. The model knows, they do not."""
    models: list[Any] = [each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel)]
    return {
        id(parameter)
        for model in models
        for name, parameter in model.module.named_parameters()
        if name not in model.parameters_to_ignore
    }


class Agreement:
    """The division of an optimizer's gradients into planned and named ones.

    Its construction is collective; ranks whose parameters differ raise HorovodInternalError there. While a rank has
    joined there is no plan: gradients go by name, and all ranks agree anew in the next step.
    """

    def __init__(
        self,
        engine: Any,
        parameters: dict[int, torch.Tensor],
        name_of: NameOf,
        settings: GradientSettings,
        sparse_only: bool,
    ) -> None:
        members = list(parameters.values())
        self.ids = list(parameters)
        self.engine = engine
        self._settings = settings
        self._dtypes = list(map(gradient_dtype, members))
        self._declared = list(map(declared_dtypes, members))
        self._epoch = engine.groups.plan_epoch
        process_set_id = check_registered(settings.title, settings.process_set)
        assert settings.pairing is not None, "an optimizer is kept"
        self._title = settings.pairing.next_title(engine, process_set_id)
        self.kinds, is_put_off = agree_on_kinds(engine, members, self._title, process_set_id, sparse_only)

        def is_planned(parameter: torch.Tensor) -> bool:
            is_sparse = id(parameter) in self.kinds.sparse_dims and not settings.sparse_as_dense
            can_be = can_be_planned(parameter, self.kinds.dtypes[id(parameter)])
            return not settings.policy.whole_tensors and can_be and not is_sparse

        planned = [] if is_put_off else [parameter for parameter in members if is_planned(parameter)]
        self.planned = self._register(planned, name_of) if planned else None
        self._is_put_off = is_put_off or (bool(planned) and self.planned is None)
        named = members if self._is_put_off else [member for member in members if not is_planned(member)]
        self.named = self._by_name(named, name_of)

    def is_outdated(self) -> bool:
        """True if all ranks agree anew in the next step: a rank had joined, or all ranks abandoned a step."""
        is_spent = self.planned is not None and self.planned.lane.abandonment.is_spent
        return bool(self._is_put_off or is_spent or self._epoch != self.engine.groups.plan_epoch)

    def fits(self, parameters: dict[int, torch.Tensor]) -> bool:
        """True if these are the parameters that ranks agreed on, with gradients of the same dtypes."""
        if self.ids != list(parameters):
            return False
        is_as_declared = self._declared == list(map(declared_dtypes, parameters.values()))
        return is_as_declared or self._dtypes == list(map(gradient_dtype, parameters.values()))

    def changed(self, parameters: dict[int, torch.Tensor]) -> list[int]:
        """Return the ids of parameters whose gradients have another dtype than ranks agreed on."""
        agreed = dict(zip(self.ids, self._dtypes, strict=True))
        dtypes = {key: gradient_dtype(parameter) for key, parameter in parameters.items()}
        return [key for key, dtype in dtypes.items() if agreed.get(key, dtype) is not dtype]

    def hand_over(self, parameter: torch.Tensor, since: float, watched: Watched | None) -> None:
        """Let a gradient be reduced that was complete before; see PlannedGradients.hand_over."""
        if self.planned is not None and id(parameter) in self.planned.index:
            self.planned.hand_over(self.planned.index[id(parameter)], since, watched)
        else:
            self.named.hand_over(parameter)

    def abandon(self, has_raised: bool) -> HorovodInternalError | None:
        """Abandon a step as ``GradientSynchronizer.abandon`` says. Return the error that the next step raises."""
        error = None
        if self.planned is not None:
            lane = self.planned.lane
            was_in_flight = lane.in_flight
            lane.abandonment.begin()
            if has_raised and was_in_flight and not lane.on_device:
                with self.engine.driver.halted(ROUND_SECONDS):  # not in the middle of a sum
                    lane.fail(HorovodInternalError("an exception ended a step on this rank"))
            else:
                error = lane.error
                try:
                    lane.abandonment.settle()
                except HorovodInternalError as failure:
                    error = failure
        self.named.abandon(waits=not has_raised)
        return None if has_raised else error

    def finish(self, name_of: NameOf, left_out: Collection[int] = ()) -> None:
        """Complete the step. Collective: every rank does it once a step, whatever it has computed.

        ``left_out``: ids of parameters that all ranks have cast, which are not reduced in this last step.
        """
        if self.planned is not None:
            self.planned.finish(name_of, left_out)
        if self.named.parameters:
            self.named.finish(left_out)

    def finish_newcomers(self, parameters: list[torch.Tensor], name_of: NameOf) -> None:
        """Reduce gradients that were computed before this agreement, each by itself."""
        self._by_name(parameters, name_of, "newcomer.").finish()

    def _by_name(self, parameters: list[torch.Tensor], name_of: NameOf, prefix: str = "") -> NamedGradients:
        names = {id(parameter): f"{self._title}.{prefix}{name_of(parameter)}" for parameter in parameters}
        dense = [parameter for parameter in parameters if id(parameter) not in self.kinds.sparse_dims]
        groups = [] if prefix else form_groups(dense, self._settings.groups)
        return NamedGradients(parameters, names, self._settings, self.kinds, groups)

    def _register(self, parameters: list[torch.Tensor], name_of: NameOf) -> PlannedGradients | None:
        settings = self._settings
        index = {id(parameter): i for i, parameter in enumerate(parameters)}
        prescale, postscale = settings.scales
        # Parameters on several devices share one lane in host memory: a lane has one communicator, on one device.
        devices = {parameter.device for parameter in parameters}
        names = list(map(name_of, parameters))
        codecs, numbers = settings.policy.choose(list(zip(names, parameters, strict=True)))
        slots = [
            slot_of(name, parameter, self.kinds.dtypes[id(parameter)], number)
            for name, parameter, number in zip(names, parameters, numbers, strict=True)
        ]
        lane = self.engine.register_plan(
            self._title,
            slots,
            op=settings.op,
            prescale=prescale,
            postscale=postscale,
            codecs=codecs,
            process_set_id=settings.process_set.process_set_id,
            device=HOST if len(devices) > 1 else str(devices.pop()),
            groups=[[index[id(member)] for member in group] for group in form_groups(parameters, settings.groups)],
        )
        if lane is None:
            return None
        idle = {codec.name for codec in codecs if codec.has_momentum and not lane.reducer.residuals.keeps_anything}
        for name in sorted(idle) if lane.group.rank == 0 else ():
            warnings.warn(NOTHING_TO_ENCODE.format(name=name), stacklevel=2)
        complaint = settings.policy.complaint(names)
        if complaint is not None and lane.group.rank == 0:
            warnings.warn(f"{self._title}: {complaint}", stacklevel=2)
        device = parameters[0].device if lane.on_device else torch.device("cpu")
        return PlannedGradients(lane, parameters, self.kinds, device)
