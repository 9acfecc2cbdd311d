"""From backward() to step(): the gradients of one optimizer, reduced over all ranks."""

from __future__ import annotations

import weakref
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
from torch._compile import _disable_dynamo

from hvdkit.api.checks import size_of
from hvdkit.api.gradients.settings import GradientSettings
from hvdkit.arena import ARENA
from hvdkit.engine.session import runtime
from hvdkit.errors import ForkedChildError, HorovodInternalError, NotInitializedError
from hvdkit.torch import phases
from hvdkit.torch.gradients import compression_state, watch
from hvdkit.torch.gradients.agreement import Agreement, check_reduced_once
from hvdkit.torch.gradients.hooks import GradientHooks
from hvdkit.torch.gradients.layout import arena_sizes
from hvdkit.torch.gradients.names import default_names
from hvdkit.torch.gradients.planned import PlannedGradients
from hvdkit.torch.gradients.verification import BROADCAST, OptimizerVerification
from hvdkit.torch.gradients.watch import HALF_SUMMED_MARKS, STEP_FAILED, Watched

INTERRUPTED = (
    "The gradients of this step were being reduced when hvd.shutdown() ended the job; they may be half summed.\n"
    "HINT: after hvd.init(), call optimizer.zero_grad() and run the forward and backward pass again."
)
SUPERSEDED = (
    "The parameters of this DistributedOptimizer were given to another DistributedOptimizer later.\n"
    "HINT: wrap each optimizer once, and give no parameter to two of them."
)


class GradientSynchronizer:
    """The reduction of the gradients of ``optimizer``'s parameters, as they become complete or all together.

    Ranks agree on parameters when a step is completed: there all are at the same line of the program, also those
    without gradients. So the first step has no overlap.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, settings: GradientSettings) -> None:
        self.settings = settings
        self.verification = OptimizerVerification(BROADCAST)
        self.should_synchronize = True  # False within skip_synchronize()
        self.reduced_on_reading = False  # True if a GradScaler or a clipping function had the gradients synchronised
        self._is_synchronized = self._distributed = False
        self._optimizer = weakref.ref(optimizer)
        self._names = {id(parameter): name for name, parameter in settings.names}
        self.hooks: Any = self._new_hooks()
        self._engine: Any = None
        self._agreement: Agreement | None = None
        # After the first gradient of a step: True if its gradients wait for the next agreement.
        self._agrees_anew: bool | None = None
        # By id, complete before there was an agreement: the parameter, the time (perf_counter), the gradient then.
        self._waiting: dict[int, tuple[torch.Tensor, float, Watched | None]] = {}
        self._served: list[int] = []  # sizes of gradients, in bytes, that the arena serves for this optimizer
        self.codecs = compression_state.OptimizerCodecs()
        self._lane_error: HorovodInternalError | None = None  # of a lane that failed while a step was abandoned
        with suppress(NotInitializedError, ForkedChildError):  # unpickled before hvd.init(); the first step binds again
            self.bind()

    def _new_hooks(self) -> Any:
        return GradientHooks(self.settings.backward_passes_per_step, self._complete)

    def name_of(self, parameter: torch.Tensor) -> str:
        """Return the user's name of a parameter, else its place in the optimizer."""
        if id(parameter) in self._names:
            return self._names[id(parameter)]
        return next((name for name, member in default_names(self.groups()) if member is parameter), "a parameter")

    def groups(self) -> list[dict[str, Any]]:
        """Return the optimizer's groups of parameters."""
        return getattr(self._optimizer(), "param_groups", [])

    def trainable(self, complete: Collection[int] = ()) -> dict[int, torch.Tensor]:
        """Return parameters by id, with frozen parameters in ``complete``, whose gradients were complete before."""
        return {
            id(member): member
            for group in self.groups()
            for member in group["params"]
            if member.requires_grad or id(member) in complete
        }

    def bind(self) -> bool:
        """Prepare a step in the present job. Return True if there are other ranks to reduce with."""
        if self.hooks.superseded:
            raise ValueError(SUPERSEDED)
        engine = runtime.engine()
        if engine.telemetry.timeline is not None or phases.recording is not None:
            phases.follow(engine.telemetry)
        if engine is not self._engine:
            self._bind_to(engine)
        return self._distributed

    def _bind_to(self, engine: Any) -> None:
        """Use this engine: a new one after shutdown() and init(), perhaps with another number of ranks."""
        self._engine, self._lane_error = engine, None
        is_interrupted = self._planned is not None and self._planned.lane.in_flight
        self._drop_agreement()
        is_included = bool(self.settings.process_set.included())
        self._distributed = is_included and size_of(self.settings.process_set) > 1
        if self._distributed:
            self._attach(self.trainable())
        else:
            self._start_step()
            ARENA.remove_sizes(self._served)
            self._served = []
            if is_included:  # errors of several ranks are raised on one rank too
                self.hooks.attach_all(self.trainable())
            else:
                self.hooks.detach()
        if is_interrupted:
            self._start_step()
            raise HorovodInternalError(INTERRUPTED)

    def _attach(self, trainable: dict[int, torch.Tensor]) -> None:
        """Hook parameters, and have their gradients allocated where the node's other ranks can reach them."""
        check_reduced_once(trainable.values(), self.name_of, self.settings.title, self._engine.topology.rank)
        self.hooks.attach_all(trainable)
        sizes, arena = arena_sizes(trainable.values()), self._engine.settings.arena
        if sizes and ARENA.open(arena) >= 0:
            ARENA.serve_torch()
        if sizes and arena:
            ARENA.complain(self._engine.topology)
        served = ARENA.add_sizes(sizes)
        ARENA.remove_sizes(self._served)
        self._served = served

    @property
    def is_synchronized(self) -> bool:
        """True if gradients were synchronised, and neither used by step() nor computed anew since."""
        return self._is_synchronized and not self.hooks.touched

    def synchronize_for_reading(self) -> None:
        """Synchronise gradients in flight that PyTorch is about to read, so that step() does not reduce them again."""
        if self.should_synchronize and not self.is_synchronized:
            self.synchronize()
            self.reduced_on_reading = True

    @property
    def awaits_reduction(self) -> bool:
        """True unless a function of PyTorch that reads gradients had them synchronised."""
        return not (self.reduced_on_reading and self.is_synchronized)

    def forget_synchronized(self) -> None:
        """Note that the synchronised gradients were used or cleared."""
        self._is_synchronized = self.reduced_on_reading = False

    def set_passes(self, passes: int) -> None:
        """Expect ``passes`` backward passes a step from now on."""
        self.settings = replace(self.settings, backward_passes_per_step=passes)
        self.hooks.set_passes(passes)

    def _complete(self, parameter: torch.Tensor) -> None:
        """Take a complete gradient from a hook. The engine and the agreement are checked once a step."""
        agreement = self._agreement
        if self._agrees_anew is None:
            self._agrees_anew = agreement is None or runtime.current() is not self._engine or agreement.is_outdated()
        key = id(parameter)
        if agreement is None or self._agrees_anew:
            watched = None if parameter.grad is None else watch.watch(parameter.grad)
            self._waiting[key] = parameter, perf_counter(), watched
        elif agreement.planned is not None and key in agreement.planned.index:
            agreement.planned.hand_over(agreement.planned.index[key], may_grow=key in self.hooks.reentered)
        else:
            agreement.named.hand_over(parameter, may_grow=key in self.hooks.reentered)

    @_disable_dynamo  # a compiled step must not trace the wait for other ranks
    def synchronize(self, updates: bool = False) -> None:
        """Wait until all gradients are reduced. Collective: every rank does it once a step.

        ``updates``: the optimizer's update follows at once. Raises ParametersDifferError if ranks' parameters differed.
        """
        if self.settings.pairing is not None and self.settings.pairing.error is not None:
            raise ValueError(self.settings.pairing.error)
        is_distributed = self.bind()
        if HALF_SUMMED_MARKS:
            self.check_cleared()
        if is_distributed:
            self.verification.updates = updates
            with torch.no_grad():
                self._finish_step()
            self.verification.finished()
        elif self.settings.process_set.included():
            self._finish_alone()
        self._is_synchronized, self.reduced_on_reading = True, False

    def check_cleared(self) -> None:
        """Raise ValueError for a gradient that a failed step left half summed."""
        for parameter in self.trainable().values() if HALF_SUMMED_MARKS else ():
            if watch.is_half_summed(parameter.grad):
                self.abandon()  # gradients added to half sums are of no use either, and may be cleared
                raise ValueError(watch.HALF_SUMMED.format(name=self.name_of(parameter)))

    def _finish_step(self) -> None:
        trainable = self.trainable()
        try:
            if self._lane_error is not None:  # ranks that go back to a common state do so together
                error, self._lane_error = self._lane_error, None
                raise error
            if self._agreement is not None and self._agreement.is_outdated():
                self._drop_agreement()
            if self._agreement is None:
                self._agreement = agreement = self._agree(self.trainable(self._waiting))
                for parameter, since, watched in self._waiting.values():
                    agreement.hand_over(parameter, since, watched)
                agreement.finish(self.name_of)
            elif self._agreement.fits(trainable):
                self._agreement.finish(self.name_of)
            else:
                self._change_agreement(self._agreement, trainable)
        except HorovodInternalError as error:
            if self._drop_agreement() and STEP_FAILED not in str(error):
                error.args = (f"{error}\n{STEP_FAILED}", *error.args[1:])
            self._start_step()
            raise
        self.hooks.attach_again(trainable)
        self._start_step()

    def _finish_alone(self) -> None:
        """Complete a step of one rank: gradients changed in flight are an error as on several ranks."""
        if not self.settings.policy.whole_tensors:
            watch.check_unchanged(self._waiting.values(), self.name_of)
        self.hooks.attach_again(self.trainable())
        self._start_step()

    def _start_step(self) -> None:
        self._agrees_anew = None
        self._waiting.clear()
        self.hooks.reset()

    def abandon(self, has_raised: bool = False) -> None:
        """Forget a step that is half done. All ranks fail if another rank uses its results.

        ``has_raised``: an exception ended the step on this rank, which goes on at once. Otherwise wait until the others
        have abandoned the step or used it; if a rank has used it, the next step raises its error.
        """
        self._start_step()
        self.forget_synchronized()
        self.should_synchronize = True
        if self._agreement is None:
            return
        if is_current := runtime.current() is self._engine:
            self._lane_error = self._agreement.abandon(has_raised)
        planned = self._planned
        if not is_current or (planned is not None and planned.lane.error is not None):
            self._drop_agreement()
        elif planned is not None:
            planned.move_out()

    @property
    def _planned(self) -> PlannedGradients | None:
        return None if self._agreement is None else self._agreement.planned

    def _agree(self, trainable: dict[int, torch.Tensor]) -> Agreement:
        self._attach(trainable)
        sparse_only = isinstance(self._optimizer(), torch.optim.SparseAdam)
        agreement = Agreement(self._engine, trainable, self.name_of, self.settings, sparse_only)
        lane = None if agreement.planned is None else agreement.planned.lane
        self.verification.sparse = agreement.kinds.sparse_dims
        if lane is not None:
            self.verification.attach(lane, self._engine)
        self.codecs.enter(lane)
        return agreement

    def _change_agreement(self, old: Agreement, trainable: dict[int, torch.Tensor]) -> None:
        """Change the agreement after parameters were frozen, unfrozen, added or cast: this step ends on the old one."""
        changed = old.changed(trainable)
        old.finish(self.name_of, left_out=changed)
        self._agreement = new = self._agree(trainable)
        settled = set(old.ids).difference(changed)
        new.finish_newcomers([member for key, member in trainable.items() if key not in settled], self.name_of)
        if old.planned is not None:
            if new.planned is None:
                self.codecs.load(compression_state.save(old.planned.lane))
            else:
                compression_state.move(old.planned.lane, old.planned.index, new.planned.lane, new.planned.index)
            old.planned.close()

    def _drop_agreement(self) -> bool:
        """Give the lane back, so that the next step agrees anew. Return True if gradients were marked half summed."""
        self.codecs.leave()
        planned, self._agreement = self._planned, None
        is_marked = planned is not None and planned.move_out()
        if planned is not None:
            planned.close()
        return is_marked

    def __del__(self) -> None:
        with suppress(Exception):  # a half-built object, or the interpreter at its end
            self.hooks.detach()
            ARENA.remove_sizes(self._served)
            if self._planned is not None:
                self._planned.close()
