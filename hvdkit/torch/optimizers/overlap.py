"""Updates that go on while the next forward pass runs: each is waited for by the first use of what it updates.

The next forward pass needs the first layers first, and their gradients are complete last: where the network is slower
than the backward pass, most of them travel after it (ByteScheduler, Peng et al., SOSP 2019). ``step()`` leaves them to
the background; until its update is made, a parameter is of a class of which PyTorch asks before it computes anything
with it, on whatever thread, so that nobody sees a value from before the step.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import optimizer as torch_optimizer
from torch.utils._python_dispatch import _disable_current_modes

from hvdkit.errors import HorovodInternalError
from hvdkit.kernels.reduce_op import ReduceOp
from hvdkit.torch.gradients.layout import has_storage_alone
from hvdkit.torch.gradients.planned import PlannedGradients
from hvdkit.torch.gradients.synchronizer import GradientSynchronizer
from hvdkit.torch.optimizers.awaited import before_forward, is_waiting, release, wait_for
from hvdkit.torch.optimizers.names import parameters_of
from hvdkit.torch.optimizers.unwrapped import others_hooks

logger = logging.getLogger("hvdkit")

# Their step() computes each parameter's update from its own gradient and state alone.
BY_PARAMETER = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adafactor,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
)
NOT_BY_PARAMETER = (
    "DistributedOptimizer: argument overlap_forward: the update of {name} may need all gradients at once.\n"
    "HINT: use one of {known}, or leave overlap_forward out."
)
WITH_ADASUM = (
    "DistributedOptimizer: argument overlap_forward: Adasum combines updates, which must all be there first.\n"
    "HINT: leave overlap_forward out, or use op=hvd.Average."
)
ON_A_DEVICE = (
    "DistributedOptimizer: argument overlap_forward: a parameter is on {device}, and what is reduced there is ordered "
    "by its stream: step() does not wait for it anyway.\n"
    "HINT: leave overlap_forward out."
)
HALF_UPDATED = (
    "Some parameters were updated in this step, others were not: have all ranks go back to the same state before they "
    "go on."
)


def check_overlap(optimizer: torch.optim.Optimizer, op: ReduceOp) -> None:
    """Raise ValueError where updates cannot be made one by one."""
    owner = next(one for one in type(optimizer).__mro__ if "step" in vars(one))
    if owner not in BY_PARAMETER:
        known = ", ".join(one.__name__ for one in BY_PARAMETER)
        raise ValueError(NOT_BY_PARAMETER.format(name=type(optimizer).__name__, known=known))
    if op is ReduceOp.ADASUM:
        raise ValueError(WITH_ADASUM)
    for parameter in parameters_of(optimizer.param_groups):
        if parameter.device.type not in ("cpu", "meta"):
            raise ValueError(ON_A_DEVICE.format(device=parameter.device))


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether somebody asked to be called before or after each step, who would see some parameters only."""
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or torch_optimizer._global_optimizer_pre_hooks
        or others_hooks()
    )


@contextmanager
def _apart_from_the_forward_pass() -> Iterator[None]:
    """What the thread is in the midst of changes nothing of an update that is made there."""
    with ExitStack() as stack:
        stack.enter_context(torch._C.DisableTorchFunction())
        stack.enter_context(temporarily_clear_interpreter_stack())
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.autocast("cpu", enabled=False))
        stack.enter_context(torch.no_grad())
        yield


def _holders(parameter: torch.Tensor) -> int:
    """How many in C++ hold a parameter: with its gradient's node, which a graph may or may not hold."""
    edge = torch.autograd.graph.get_gradient_edge(parameter)
    count = int(parameter._use_count())  # type: ignore[attr-defined]
    del edge
    return count


_ONE_HOLDER = _holders(torch.nn.Parameter(torch.empty(1)))


def can_wait(parameter: torch.Tensor) -> bool:
    """Whether nobody reads a parameter but through its object.

    Others may share its memory, with this process or another one, and a scripted module holds the tensor itself.
    """
    return (
        type(parameter) is torch.nn.Parameter
        and parameter.is_cpu
        and parameter.requires_grad
        and not parameter.is_shared()  # type: ignore[no-untyped-call]
        and has_storage_alone(parameter)
        and _holders(parameter) == _ONE_HOLDER
    )


def _only(groups: list[dict[str, Any]], takes_part: Callable[[torch.Tensor], bool]) -> list[dict[str, Any]]:
    """The same groups with some of their parameters."""
    return [{**group, "params": list(filter(takes_part, group["params"]))} for group in groups]


class Updates:
    """Those of one step that are still to be made, bucket by bucket.

    ``held``: slots whose gradients others hold. ``optimizer``: one of the classes of ``distributed_class``.
    """

    def __init__(
        self,
        synchronizer: GradientSynchronizer,
        planned: PlannedGradients,
        held: Collection[int],
        optimizer: Any,
    ) -> None:
        self._synchronizer, self._planned, self._optimizer = synchronizer, planned, optimizer
        self._lock = threading.RLock()
        self._is_busy = False
        self._clears = False
        # A scheduler sets the next step's learning rate before this one's updates are made.
        self._groups = [
            {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in group.items()}
            for group in optimizer.param_groups
        ]
        for group in self._groups:
            group["params"] = list(group["params"])
        self._left: dict[int, list[int]] = {}  # slots by bucket
        self._bucket_of = planned.lane.arrangement.bucket_of
        self._lanes = planned.lane.lanes
        self._at_once: list[int] = []  # slots
        for slot, parameter in enumerate(planned.parameters):
            if slot not in held and can_wait(parameter):
                self._left.setdefault(self._bucket_of[slot], []).append(slot)
            else:
                self._at_once.append(slot)
        self._lanes.unended[planned.lane] = self
        self._hook = register_module_forward_pre_hook(before_forward)

    def begin(self) -> None:
        """Make at once what cannot wait, which may be all, and have the others wait for their first use."""
        waiting = self._waiting()
        rest = [parameter for parameter in parameters_of(self._groups) if id(parameter) not in waiting]
        with self._lock, self._busy():
            if self._at_once:
                self._planned.lane.wait(self._at_once)
                with torch.no_grad():
                    self._planned.give_back(self._at_once)
            if rest:
                self._make(rest)
            for slots in self._left.values():
                for slot in slots:
                    wait_for(self._planned.parameters[slot], self)
            if not self._left:
                self._end()

    def _waiting(self) -> set[int]:
        """The ids of parameters whose updates are left."""
        return {id(self._planned.parameters[slot]) for slots in self._left.values() for slot in slots}

    @property
    def is_over(self) -> bool:
        """Whether all have been made."""
        return not self._left

    def complete(self, parameter: torch.Tensor) -> None:
        """Make the update of this parameter, and of others that travelled with it."""
        with self._lock:
            if self._is_busy or not is_waiting(parameter):
                return
            self._complete(self._bucket_of[self._planned.index[id(parameter)]])

    def complete_all(self) -> None:
        """Make all updates that are left."""
        with self._lock:
            while self._left and not self._is_busy:
                self._complete(next(iter(self._left)))

    def clear_later(self, clear: Callable[[torch.optim.Optimizer], None]) -> None:
        """Gradients of what is left are cleared as soon as they are used; ``clear`` clears the others now."""
        with self._lock:
            self._clears = True
            waiting = self._waiting()
            groups = _only(self._optimizer.param_groups, lambda parameter: id(parameter) not in waiting)
            clear(self._optimizer.plain_with(groups))

    def _complete(self, bucket: int) -> None:
        slots = self._left[bucket]
        try:
            # Whoever interrupts this, as Ctrl-C, leaves all as it is; a signal's handler may need what is left itself.
            self._planned.lane.wait(slots)
        except HorovodInternalError as error:
            self._fail(error)
            raise
        if bucket not in self._left:
            return
        with self._busy(), _apart_from_the_forward_pass():
            parameters = [self._planned.parameters[slot] for slot in slots]
            self._planned.give_back(slots)
            self._make(parameters)
            if self._clears:
                for parameter in parameters:
                    parameter.grad = None
            self._release(bucket)
            if not self._left:
                self._end()

    @contextmanager
    def _busy(self) -> Iterator[None]:
        """Here this thread makes updates, and waits for none of them; what fails here fails the step."""
        self._is_busy = True
        try:
            yield
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            self._is_busy = False

    def _make(self, parameters: Iterable[torch.Tensor]) -> None:
        """Have the optimizer update these, with the settings that it had in the step."""
        chosen = {id(parameter) for parameter in parameters}
        plain = self._optimizer.plain_with(_only(self._groups, lambda parameter: id(parameter) in chosen))
        # Without the hooks that somebody may have registered since.
        getattr(type(plain).step, "__wrapped__", type(plain).step)(plain)

    def _release(self, bucket: int) -> None:
        for slot in self._left.pop(bucket):
            release(self._planned.parameters[slot])

    def _end(self) -> None:
        self._hook.remove()
        self._lanes.unended.pop(self._planned.lane, None)
        self._planned.end()
        self._synchronizer.ended()

    def give_up(self) -> None:
        """Make no more updates: parameters are as the step before left them."""
        for bucket in list(self._left):
            self._release(bucket)
        self._hook.remove()
        self._lanes.unended.pop(self._planned.lane, None)

    def _fail(self, error: BaseException) -> None:
        self.give_up()
        if isinstance(error, HorovodInternalError):
            error.args = (f"{error}\n{HALF_UPDATED}", *error.args[1:])
            self._synchronizer.failed(error)
        else:
            logger.error("%s: %r in an update. %s", self._planned.lane.name, error, HALF_UPDATED)
            self._planned.end()  # the others know nothing of that
