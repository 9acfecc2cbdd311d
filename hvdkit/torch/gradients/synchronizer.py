"""From backward() to step(): one optimizer's gradients, and whether they are reduced."""

from __future__ import annotations

import weakref
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.nn.parameter import is_lazy

from hvdkit.arena import ARENA, SMALLEST_BYTES
from hvdkit.engine.life import runtime
from hvdkit.errors import ForkedChildError, HorovodInternalError, NotInitializedError
from hvdkit.torch.gradients import compression_state
from hvdkit.torch.gradients.half_summed import HALF_SUMMED, STEP_FAILED, is_half_summed, some_are_half_summed
from hvdkit.torch.gradients.hooks import GradientHooks
from hvdkit.torch.gradients.layout import can_be_planned, gradient_dtype, slot_of
from hvdkit.torch.gradients.planned import PlannedGradients
from hvdkit.torch.gradients.routes import Routes
from hvdkit.torch.gradients.settings import Settings
from hvdkit.torch.gradients.verification import OptimizerVerification
from hvdkit.torch.gradients.watch import Watched, changed_of, raise_if_changed, watch
from hvdkit.torch.optimizers.names import default_names, parameters_of
from hvdkit.torch.phases import follow

INTERRUPTED = (
    "The gradients of this step were being reduced when hvd.shutdown() ended the job; they may be half summed.\n"
    "HINT: after hvd.init(), call optimizer.zero_grad() and run the forward and backward pass again."
)
SUPERSEDED = (
    "The parameters of this DistributedOptimizer were given to another DistributedOptimizer later.\n"
    "HINT: wrap each optimizer once, and no parameter in two of them."
)


def is_current(engine: Any) -> bool:
    """True while ``engine`` is this process's engine."""
    return engine is not None and runtime.current() is engine


class GradientSynchronizer:
    """Reduces the gradients of ``optimizer``'s parameters as they become complete, or then all, and waits for them.

    The ranks agree on routes when a step is completed, never inside backward(): there all ranks are at the same line
    of the program, and a rank that computed nothing comes there too. So the first step's gradients travel when the step
    is completed; from the second on they travel during the backward pass, unless the ranks' threads have every core of
    their one host (``Lane.takes_turns``).
    """

    def __init__(self, optimizer: torch.optim.Optimizer, settings: Settings) -> None:
        self.settings = settings
        self.verification = OptimizerVerification(settings.process_set)
        self._optimizer = weakref.ref(optimizer)
        self._names = {id(parameter): name for name, parameter in settings.names}
        self.hooks: Any = self._new_hooks()
        self._engine: Any = None
        self._distributed = False
        self._routes: Routes | None = None
        # By id, complete before there were routes: when (perf_counter), and as it was then.
        self._early: dict[int, tuple[torch.Tensor, float, Watched | None]] = {}
        self._served: list[int] = []  # sizes of gradients, in bytes, that the arena serves for this optimizer
        self._kept: Any = None  # what was loaded, or kept by codecs before, for when there are routes
        self._unraised: HorovodInternalError | None = None  # of a lane that failed while a step was given up
        with suppress(NotInitializedError, ForkedChildError):  # unpickled before hvd.init(); the first step asks again
            self._bind()

    def _new_hooks(self) -> Any:
        return GradientHooks(self.settings.backward_passes_per_step, self._complete, self.name_of)

    @property
    def in_flight(self) -> bool:
        """True between a backward pass and the synchronisation of its gradients."""
        return bool(self.hooks.touched)

    def name_of(self, parameter: torch.Tensor) -> str:
        """The user's name of a parameter, else its place in the optimizer."""
        name = self._names.get(id(parameter))
        if name is None:
            indices = {id(member): index for index, member in default_names(self._groups())}
            name = indices.get(id(parameter), "a parameter")
        return name

    def _groups(self) -> list[dict[str, Any]]:
        optimizer = self._optimizer()
        return [] if optimizer is None else optimizer.param_groups

    def _trainable(self, complete: Collection[int] = ()) -> dict[int, torch.Tensor]:
        """Parameters by id; also those in ``complete``, whose gradients were complete before they were frozen."""
        return {
            id(parameter): parameter
            for parameter in parameters_of(self._groups())
            if parameter.requires_grad or id(parameter) in complete
        }

    def _bind(self) -> None:
        """Meet this process's engine: again after shutdown() and init(), when the number of ranks may be another."""
        engine = runtime.engine()
        follow(engine.telemetry)
        if engine is self._engine:
            return
        self._engine = engine
        self._unraised = None
        interrupted = self._routes is not None and self._routes.in_flight
        if self._routes is not None:
            self._save_kept(self._routes)
            self._routes.move_out()
            self._routes = None
        process_set = self.settings.process_set
        self._distributed = process_set.included() and process_set.size() > 1
        if self._distributed:
            self._attach(self._trainable())
            self._serve()
        else:
            self.hooks.detach()
            self._start_step()
            ARENA.remove_sizes(self._served)
            self._served = []
            if process_set.included():  # what is wrong on several ranks shall be found on one
                self._attach(self._trainable())
        if interrupted:
            self._start_step()
            raise HorovodInternalError(INTERRUPTED)

    def _attach(self, trainable: dict[int, torch.Tensor]) -> None:
        for parameter in trainable.values():
            self.hooks.attach(parameter)

    def _attach_again(self, trainable: dict[int, torch.Tensor]) -> None:
        """Hook parameters whose hook was not called in this step: torch.utils.swap_tensors takes it off."""
        seen = self.hooks.seen
        self._attach({key: one for key, one in trainable.items() if key not in seen})

    def _serve(self) -> None:
        """Have gradients of these parameters born where the node's other ranks can reach them."""
        parameters = self._trainable().values()
        sizes = [
            nbytes
            for parameter in parameters
            if parameter.is_cpu
            and not is_lazy(parameter)
            and (nbytes := parameter.numel() * gradient_dtype(parameter).itemsize) >= SMALLEST_BYTES
        ]
        if sizes and ARENA.open(self._engine.settings.arena) >= 0:
            ARENA.serve_torch()
        if sizes and self._engine.settings.arena:
            ARENA.complain(self._engine.topology)
        served = ARENA.add_sizes(sizes)
        ARENA.remove_sizes(self._served)
        self._served = served

    def _check_owner(self) -> None:
        if self.hooks.superseded:
            raise ValueError(SUPERSEDED)

    def set_passes(self, passes: int) -> None:
        """Expect ``passes`` backward passes a step from now on."""
        self.settings = replace(self.settings, backward_passes_per_step=passes)
        self.hooks.set_passes(passes)

    def _complete(self, parameter: torch.Tensor) -> None:
        if self._routes is None or self._routes.is_outdated or not is_current(self._engine):
            watched = None if parameter.grad is None else watch(parameter.grad)
            self._early[id(parameter)] = parameter, perf_counter(), watched
        else:
            self._routes.hand_over(parameter, may_grow=id(parameter) in self.hooks.reentered)

    @_disable_dynamo  # a compiled step must not trace what waits for other ranks
    def synchronize(self, updates: bool = False) -> None:
        """Wait until all gradients are reduced. Collective: every rank does it once a step.

        ``updates``: the optimizer's update follows at once. Raises ParametersDifferError, on all ranks, where these
        held other parameters after the last update.
        """
        self._check_owner()
        if self.settings.pairing is not None:
            self.settings.pairing.check()
        self._bind()
        self._check_cleared()
        if self._distributed:
            self.verification.updates = updates
            with torch.no_grad():
                self._finish_step()
            self.verification.finished()
        elif self.settings.process_set.included():
            self._finish_alone()

    @_disable_dynamo
    def begin_step(self, known_holders: int = 0) -> tuple[PlannedGradients, Collection[int]] | None:
        """The same as far as that is possible without a wait. Collective: an update follows.

        ``known_holders``: how many hold each gradient for as long as this call takes, and read it no more. Returns
        gradients to be given back, ended and then ``ended()``, and the slots of those that others hold; None where this
        is a step to be waited for.
        """
        self._check_owner()
        self._bind()
        self._check_cleared()
        routes = self._routes
        planned = None if routes is None or self._unraised is not None else routes.planned
        trainable = self._trainable()
        if routes is None or planned is None or routes.is_outdated or not routes.fit(trainable):
            return None
        is_compared = planned.lane.verifies or self.verification.wants(planned.lane.steps + 1)
        if is_compared or planned.lane.on_device or not planned.can_be_collected_apart():
            return None
        self.verification.updates = True
        held = planned.held(known_holders)
        try:
            with torch.no_grad():
                routes.begin_finish(self.name_of)
        except HorovodInternalError as error:
            self.failed(error)
            raise
        self._attach_again(trainable)
        self._start_step()
        return planned, held

    def ended(self) -> None:
        """All that ``begin_step`` began was collected, and is over."""
        self.verification.finished()

    def _check_cleared(self) -> None:
        for parameter in self._trainable().values() if some_are_half_summed() else ():
            if is_half_summed(parameter.grad):
                self.abandon()  # what was added to it is of no use either, and may be cleared
                raise ValueError(HALF_SUMMED.format(name=self.name_of(parameter)))

    def _finish_step(self) -> None:
        trainable = self._trainable()
        try:
            self._raise_unraised()
            if self._routes is not None and self._routes.is_outdated:
                self._save_kept(self._routes)
                self._routes.close()
                self._routes = None
            if self._routes is None:
                self._routes = self._agree(self._trainable(self._early))
                for parameter, since, watched in self._early.values():
                    self._routes.hand_over(parameter, since, watched)
                self._routes.finish(self.name_of)
            elif self._routes.fit(trainable):
                self._routes.finish(self.name_of)
            else:
                self._change_routes(self._routes, trainable)
        except HorovodInternalError as error:
            self.failed(error)
            raise
        self._attach_again(trainable)
        self._start_step()

    def _finish_alone(self) -> None:
        """On one rank nothing is reduced, but what would have been changed in flight is an error as on several."""
        if not self.settings.policy.whole_tensors:
            early = [
                (parameter, one)
                for parameter, _, one in self._early.values()
                if can_be_planned(parameter, gradient_dtype(parameter))
            ]
            raise_if_changed(changed_of(early), self.name_of)
        self._attach_again(self._trainable())
        self._start_step()

    def failed(self, error: HorovodInternalError) -> None:
        """A step failed: the next one begins anew."""
        if self._routes is not None:
            self._save_kept(self._routes)
            if self._routes.move_out() and STEP_FAILED not in str(error):
                error.args = (f"{error}\n{STEP_FAILED}", *error.args[1:])
        self._routes = None
        self._start_step()

    def _raise_unraised(self) -> None:
        """Every rank raises the failure of a lane once: ranks that go back to a common state do so together."""
        error, self._unraised = self._unraised, None
        if error is not None:
            raise error

    def _start_step(self) -> None:
        self._early.clear()
        self.hooks.reset()

    def _agree(self, trainable: dict[int, torch.Tensor]) -> Routes:
        self._attach(trainable)
        self._serve()
        sparse_only = isinstance(self._optimizer(), torch.optim.SparseAdam)
        routes = Routes(self._engine, trainable, self.name_of, self.settings, sparse_only)
        self.verification.attach_to(self._engine, routes.planned, routes.sparse_dims)
        if self._kept is not None and routes.planned is not None:
            saved, self._kept = self._kept, None
            compression_state.resume(routes.planned.lane, saved)
        return routes

    def _save_kept(self, routes: Routes) -> None:
        """Routes are given up between two steps: what codecs kept goes on with the next ones."""
        if routes.planned is not None and routes.planned.lane.error is None and not routes.in_flight:
            self._kept = self._kept_in(routes.planned)

    def _change_routes(self, old: Routes, trainable: dict[int, torch.Tensor]) -> None:
        """Parameters were frozen, unfrozen, added or cast: this step ends on the old routes, the next has new ones."""
        changed = old.changed(trainable)
        old.leave_out(changed)
        old.finish(self.name_of)
        self._routes = self._agree(trainable)
        settled = set(old.ids).difference(changed)
        newcomers = [parameter for key, parameter in trainable.items() if key not in settled]
        self._routes.finish_newcomers(newcomers, self.name_of, self.settings)
        if self._routes.planned is None:
            self._save_kept(old)
        elif old.planned is not None:
            compression_state.move(
                old.planned.lane, old.planned.index, self._routes.planned.lane, self._routes.planned.index
            )
        old.close()

    def kept_by_codecs(self) -> Any:
        """What this rank's codecs keep, or what was loaded and could not be used yet; None if nothing."""
        if self._routes is None or self._routes.planned is None:
            return self._kept
        return self._kept_in(self._routes.planned)

    def _kept_in(self, planned: PlannedGradients) -> Any:
        return compression_state.save(planned.lane)

    def check_compression_state(self, saved: Any) -> None:
        """Raises TypeError or ValueError for what codecs cannot go on from. Nothing is changed."""
        if saved is not None:
            compression_state.check(saved, self._shapes())

    def _shapes(self) -> compression_state.Shapes:
        return {
            self.name_of(parameter): slot_of("", parameter, gradient_dtype(parameter)).shape
            for parameter in parameters_of(self._groups())
            if not is_lazy(parameter) and can_be_planned(parameter, gradient_dtype(parameter))
        }

    def load_compression_state(self, saved: Any) -> None:
        """Let codecs go on from what this or other ranks kept, which was checked; from nothing if it is None."""
        self.reset_compression()
        if saved is None or self._routes is None or self._routes.planned is None:
            self._kept = saved
        else:
            compression_state.resume(self._routes.planned.lane, saved)

    def reset_compression(self) -> None:
        """Forget what codecs keep."""
        self._kept = None
        if self._routes is not None and self._routes.planned is not None:
            self._routes.planned.lane.reducer.reset()

    def abandon(self) -> None:
        """Forget a step that an exception left half done."""
        self._start_step()
        if self._routes is None:
            return
        if is_current(self._engine):
            try:
                self._routes.abandon()
                self._unraised = self._routes.error
            except HorovodInternalError as error:  # of the step that is forgotten; the next one raises it
                self._unraised = error
        if not is_current(self._engine) or self._routes.error is not None:
            self._routes.move_out()
            self._routes = None

    def __del__(self) -> None:
        with suppress(Exception):  # a half-built object, or the interpreter at its end
            self.hooks.detach()
            ARENA.remove_sizes(self._served)
            if self._routes is not None:
                self._routes.close()
