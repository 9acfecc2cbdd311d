"""The way of each gradient of an optimizer: in a plan, or by a named operation; agreed on once by all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvdkit.api.checks import check_registered
from hvdkit.api.gradients.planning import form_groups, next_title
from hvdkit.api.gradients.settings import GradientSettings
from hvdkit.engine.steps.registration import HOST
from hvdkit.errors import HorovodInternalError
from hvdkit.torch.gradients.layout import can_be_planned, slot_of
from hvdkit.torch.gradients.named import NamedGradients
from hvdkit.torch.gradients.planned import PlannedGradients
from hvdkit.torch.gradients.watch import Watched
from hvdkit.torch.ops.allgather import allgather_async
from hvdkit.torch.ops.sync import synchronize

NOTHING_TO_ENCODE = (
    "Compression.{name} encodes nothing here, since all ranks are on one node, and so gradients get no momentum from "
    "it.\n"
    'HINT: pass compress="everywhere" to it, or leave it out and give the optimizer its momentum.'
)

NameOf = Callable[[torch.Tensor], str]


def agree_on_sparse(parameters: Sequence[torch.Tensor], title: str, process_set: Any) -> dict[int, int]:
    """The number of sparse axes, by id, of each parameter whose gradient is sparse on some rank now."""
    rows = [
        (i, parameter.grad.sparse_dim())
        for i, parameter in enumerate(parameters)
        if parameter.grad is not None and parameter.grad.is_sparse
    ]
    mine = torch.tensor(rows, dtype=torch.int64).view(-1, 2)
    everyones = synchronize(allgather_async(mine, name=f"{title}.sparse", process_set=process_set))
    return {id(parameters[i]): sparse_dim for i, sparse_dim in everyones.tolist() if i < len(parameters)}


class Routes:
    """Who reduces which gradient. To construct it is collective; ranks whose parameters differ raise there."""

    def __init__(
        self, engine: Any, parameters: dict[int, torch.Tensor], name_of: NameOf, settings: GradientSettings
    ) -> None:
        self.ids = list(parameters)
        members = list(parameters.values())
        process_set = settings.process_set
        title = next_title(engine, check_registered(settings.title, process_set), settings.title)
        sparse_dims = agree_on_sparse(members, title, process_set)
        self.sparse_dims = sparse_dims
        by_name = settings.policy.whole_tensors

        def is_planned(parameter: torch.Tensor) -> bool:
            is_sparse = id(parameter) in sparse_dims and not settings.sparse_as_dense
            return not by_name and can_be_planned(parameter) and not is_sparse

        planned = [parameter for parameter in members if is_planned(parameter)]
        named = [parameter for parameter in members if not is_planned(parameter)]
        self.planned = self._register(engine, planned, name_of, settings, title) if planned else None
        dense = [parameter for parameter in named if id(parameter) not in sparse_dims]
        self.named = NamedGradients(
            named,
            {id(parameter): f"{title}.{name_of(parameter)}" for parameter in named},
            settings,
            sparse_dims,
            form_groups(dense, settings.groups),
        )

    def _register(
        self, engine: Any, parameters: list[torch.Tensor], name_of: NameOf, settings: GradientSettings, title: str
    ) -> PlannedGradients:
        index = {id(parameter): i for i, parameter in enumerate(parameters)}
        prescale, postscale = settings.scales
        # Parameters on several devices share one lane in host memory: a lane has one communicator, on one device.
        devices = {parameter.device for parameter in parameters}
        codecs, numbers = settings.policy.choose([(name_of(parameter), parameter) for parameter in parameters])
        lane = engine.register_plan(
            title,
            [
                slot_of(name_of(parameter), parameter, number)
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
        idle = {codec.name for codec in codecs if codec.has_momentum and not lane.reducer.residuals.keeps_anything}
        for name in sorted(idle) if lane.group.rank == 0 else ():
            warnings.warn(NOTHING_TO_ENCODE.format(name=name), stacklevel=2)
        complaint = settings.policy.complaint([name_of(parameter) for parameter in parameters])
        if complaint is not None and lane.group.rank == 0:
            warnings.warn(f"{title}: {complaint}", stacklevel=2)
        device = parameters[0].device if lane.on_device else torch.device("cpu")
        return PlannedGradients(lane, parameters, self.sparse_dims, device)

    def hand_over(self, parameter: torch.Tensor, since: float | None = None, watched: Watched | None = None) -> None:
        """A gradient is complete, ``since`` (perf_counter) if not just now; ``watched``: as it was then.

        Parameters that were no part of the agreement are left for the next one.
        """
        i = self.planned.index.get(id(parameter)) if self.planned is not None else None
        if i is not None and self.planned is not None:
            self.planned.hand_over(i, since, watched)
        elif id(parameter) in self.named.index:
            self.named.hand_over(parameter)

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
        names = {id(parameter): f"newcomer.{name_of(parameter)}" for parameter in parameters}
        NamedGradients(parameters, names, settings, self.sparse_dims).finish()

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
