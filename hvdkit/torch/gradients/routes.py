"""The way of each gradient of an optimizer: in a plan, or by a named operation; agreed on once by all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from hvdkit.api.checks import check_registered
from hvdkit.api.gradients.planning import form_groups
from hvdkit.api.gradients.settings import GradientSettings
from hvdkit.engine.ops.requests import Call
from hvdkit.engine.steps.registration import HOST
from hvdkit.errors import HorovodInternalError
from hvdkit.torch.gradients.layout import Kinds, can_be_planned, gradient_dtypes, slot_of
from hvdkit.torch.gradients.named import NamedGradients
from hvdkit.torch.gradients.planned import PlannedGradients
from hvdkit.torch.gradients.settings import Settings
from hvdkit.torch.gradients.watch import Watched

NOTHING_TO_ENCODE = (
    "Compression.{name} encodes nothing here, since all ranks are on one node, and so gradients get no momentum from "
    "it.\n"
    'HINT: pass compress="everywhere" to it, or leave it out and give the optimizer its momentum.'
)

NameOf = Callable[[torch.Tensor], str]


def agree_on_kinds(
    engine: Any, parameters: Sequence[torch.Tensor], title: str, process_set_id: int, sparse_only: bool
) -> tuple[Kinds, bool]:
    """Learn from the ranks that have gradients now which are sparse, and the dtypes that PyTorch leaves open.

    Returns these, and whether this was put off since a rank has joined.
    ``sparse_only``: the optimizer takes no dense gradients, so that those that no rank has yet are sparse too.
    """
    rows = [
        (i, gradient.sparse_dim() if gradient.is_sparse else 0, str(gradient.dtype).removeprefix("torch."))
        for i, parameter in enumerate(parameters)
        if (gradient := parameter.grad) is not None
        and (gradient.is_sparse or getattr(parameter, "grad_dtype", parameter.dtype) is None)
    ]
    dtypes = dict(zip(map(id, parameters), gradient_dtypes(parameters), strict=True))
    sparse_dims = dict.fromkeys(map(id, parameters), 1) if sparse_only else {}
    open_dtypes: dict[int, torch.dtype] = {}
    is_complete, everyones = engine.named.gather_details(rows, Call(f"{title}.kinds", process_set_id, wake=False))
    for told in everyones:
        for i, sparse_dim, name in told:
            if i >= len(parameters):
                continue  # the ranks' models differ, as the plan will say
            key, dtype = id(parameters[i]), getattr(torch, name)
            if sparse_dim:
                sparse_dims[key] = sparse_dim
            open_dtypes[key] = torch.promote_types(open_dtypes.get(key, dtype), dtype)
    return Kinds({**dtypes, **open_dtypes}, sparse_dims), not is_complete


class Routes:
    """Who reduces which gradient. To construct it is collective; ranks whose parameters differ raise there.

    While another rank has joined there is no plan: gradients go by name, and all ranks agree anew in the next step.
    """

    def __init__(
        self,
        engine: Any,
        parameters: dict[int, torch.Tensor],
        name_of: NameOf,
        settings: Settings,
        sparse_only: bool = False,
    ) -> None:
        members = list(parameters.values())
        self.ids = list(parameters)  # of the parameters that ranks agree on, in order
        self._dtypes = gradient_dtypes(members)
        self._groups, self._epoch = engine.groups, engine.groups.plan_epoch
        process_set_id = check_registered(settings.title, settings.process_set)
        assert settings.pairing is not None, "an optimizer is kept"
        self.title = settings.pairing.next_title(engine, process_set_id)
        self.kinds, is_put_off = agree_on_kinds(engine, members, self.title, process_set_id, sparse_only)
        self.sparse_dims = sparse_dims = self.kinds.sparse_dims

        def is_planned(parameter: torch.Tensor) -> bool:
            is_sparse = id(parameter) in sparse_dims and not settings.sparse_as_dense
            can_be = can_be_planned(parameter, self.kinds.dtypes[id(parameter)])
            return not settings.policy.whole_tensors and can_be and not is_sparse

        planned = [] if is_put_off else [parameter for parameter in members if is_planned(parameter)]
        self.planned = self._register(engine, planned, name_of, settings) if planned else None
        self._is_put_off = is_put_off or (bool(planned) and self.planned is None)
        named = members if self._is_put_off else [member for member in members if not is_planned(member)]
        self.named = self._by_name(named, name_of, settings)

    @property
    def is_outdated(self) -> bool:
        """Whether all ranks agree anew in the next step, because a rank had joined."""
        return self._is_put_off or self._epoch != self._groups.plan_epoch

    def changed(self, parameters: dict[int, torch.Tensor]) -> list[int]:
        """Return the ids of those of these parameters whose gradients have another dtype than ranks agreed on."""
        agreed = dict(zip(self.ids, self._dtypes, strict=True))
        dtypes = zip(parameters, gradient_dtypes(parameters.values()), strict=True)
        return [key for key, dtype in dtypes if agreed.get(key, dtype) is not dtype]

    def leave_out(self, ids: Collection[int]) -> None:
        """Reduce nothing of these parameters in this step, the last one on these routes, on all ranks alike."""
        if self.planned is not None:
            self.planned.leave_out(ids)
        self.named.leave_out(ids)

    def fit(self, parameters: dict[int, torch.Tensor]) -> bool:
        """Whether these are the parameters that ranks agreed on, with gradients of the same dtypes."""
        return self.ids == list(parameters) and self._dtypes == gradient_dtypes(parameters.values())

    def _by_name(
        self, parameters: list[torch.Tensor], name_of: NameOf, settings: GradientSettings, prefix: str = ""
    ) -> NamedGradients:
        names = {id(parameter): f"{self.title}.{prefix}{name_of(parameter)}" for parameter in parameters}
        dense = [parameter for parameter in parameters if id(parameter) not in self.sparse_dims]
        groups = [] if prefix else form_groups(dense, settings.groups)
        return NamedGradients(parameters, names, settings, self.kinds, groups)

    def _register(
        self, engine: Any, parameters: list[torch.Tensor], name_of: NameOf, settings: GradientSettings
    ) -> PlannedGradients | None:
        index = {id(parameter): i for i, parameter in enumerate(parameters)}
        prescale, postscale = settings.scales
        # Parameters on several devices share one lane in host memory: a lane has one communicator, on one device.
        devices = {parameter.device for parameter in parameters}
        codecs, numbers = settings.policy.choose([(name_of(parameter), parameter) for parameter in parameters])
        lane = engine.register_plan(
            self.title,
            [
                slot_of(name_of(parameter), parameter, self.kinds.dtypes[id(parameter)], number)
                for parameter, number in zip(parameters, numbers, strict=True)
            ],
            op=settings.op,
            prescale=prescale,
            postscale=postscale,
            codecs=codecs,
            process_set_id=settings.process_set.process_set_id,
            device=HOST if len(devices) > 1 else str(devices.pop()),
            overlaps_forward=settings.overlap_forward,
            groups=[[index[id(member)] for member in group] for group in form_groups(parameters, settings.groups)],
        )
        if lane is None:
            return None
        idle = {codec.name for codec in codecs if codec.has_momentum and not lane.reducer.residuals.keeps_anything}
        for name in sorted(idle) if lane.group.rank == 0 else ():
            warnings.warn(NOTHING_TO_ENCODE.format(name=name), stacklevel=2)
        complaint = settings.policy.complaint([name_of(parameter) for parameter in parameters])
        if complaint is not None and lane.group.rank == 0:
            warnings.warn(f"{self.title}: {complaint}", stacklevel=2)
        device = parameters[0].device if lane.on_device else torch.device("cpu")
        return PlannedGradients(lane, parameters, self.kinds, device)

    def hand_over(
        self,
        parameter: torch.Tensor,
        since: float | None = None,
        watched: Watched | None = None,
        may_grow: bool = False,
    ) -> None:
        """A gradient is complete, ``since`` (perf_counter) if not just now; ``watched``: as it was then.

        ``may_grow``: this backward pass may add to it once more, so that it is reduced when the step is completed.
        Parameters that were no part of the agreement are left for the next one.
        """
        i = self.planned.index.get(id(parameter)) if self.planned is not None else None
        if i is not None and self.planned is not None:
            self.planned.hand_over(i, since, watched, may_grow)
        elif id(parameter) in self.named.index:
            self.named.hand_over(parameter, may_grow)

    @property
    def in_flight(self) -> bool:
        """Whether the lane has gradients of a step that is not over."""
        return self.planned is not None and self.planned.lane.in_flight

    @property
    def error(self) -> HorovodInternalError | None:
        """Why the lane is of no use any more, if it failed."""
        return self.planned.lane.error if self.planned is not None else None

    def finish(self, name_of: NameOf) -> None:
        """Complete the step. Collective: every rank does it once a step, whatever it has computed."""
        if self.planned is not None:
            self.planned.check_unchanged(name_of)
            self.planned.finish()
        self.named.finish()

    def begin_finish(self, name_of: NameOf) -> None:
        """The same, but for the wait for what a lane reduces: see PlannedGradients."""
        assert self.planned is not None
        self.planned.check_unchanged(name_of)
        self.planned.begin_finish()
        self.named.finish()

    def finish_newcomers(self, parameters: Sequence[torch.Tensor], name_of: NameOf, settings: GradientSettings) -> None:
        """Reduce gradients that were computed before these routes were agreed on, one by one."""
        self._by_name(list(parameters), name_of, settings, "newcomer.").finish()

    def abandon(self) -> None:
        """Forget what was handed over in this step."""
        try:
            if self.planned is not None:
                self.planned.abandon()
        finally:
            self.named.abandon()

    def give_up(self, is_current: bool) -> bool:
        """Forget the step and wait for nobody. Returns whether the lane is of no use any more: it fails on all ranks.

        ``is_current``: whether the lane's engine is this process's.
        """
        self.named.forget()
        if self.planned is None:
            return False
        if self.in_flight and is_current:
            self.planned.lane.give_up()
        self.planned.move_out()
        if self.error is None and is_current:
            return False
        self.planned.close()
        return True

    def move_out(self) -> bool:
        """After a failure: what it left of gradients is marked, and the lane given back. Whether any was marked."""
        if self.planned is None:
            return False
        is_marked = self.planned.move_out()
        self.planned.close()
        return is_marked

    def close(self) -> None:
        """Give the lane back."""
        if self.planned is not None:
            self.planned.close()
