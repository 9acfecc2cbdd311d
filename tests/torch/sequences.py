"""What users do with gradients, in any order: on N ranks, and in one process alone on the joined batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.forking import in_child
from tests.torch.optimizer_support import Passing, distributed_sgd, sgd
from tests.transports.shared import in_thread

WIDTH, CHANNELS = 160, 16  # matrices of 25,600 elements are large enough for the arena, in float32 too
ROWS = 3  # of each rank's batch
LOSS_SCALE = 1024.0


@dataclass(frozen=True)
class Step:
    """A step of a user: names of ZEROS, BEFORE, WAYS and AFTER."""

    zero: str
    before: tuple[str, ...]
    way: str
    after: tuple[str, ...]


@dataclass(frozen=True)
class Program:
    """A training: what is trained, and its steps."""

    tied: bool
    checkpointed: bool
    scaled: bool
    models: int
    passes: int
    reduced: str
    steps: tuple[Step, ...]
    compiled: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """GradScaler is for float32."""
        return torch.float32 if self.scaled else torch.float64

    @property
    def tolerance(self) -> float:
        """The largest difference, as a part of the largest value."""
        return 1e-4 if self.scaled else 1e-10


# Arguments of DistributedOptimizer.
REDUCED: dict[str, dict[str, Any]] = {
    "planned": {},
    "planned, in groups": {"groups": 2},
    "by name": {"compression": Passing},
    "by name, in groups": {"compression": Passing, "groups": 2},
}


class Net(nn.Module):
    """A convolution, a dense layer that a tied model has twice, and a head: large matrices and small biases."""

    def __init__(self, program: Program, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.tied, self.checkpointed = program.tied, program.checkpointed
        self.conv = nn.Conv2d(CHANNELS, WIDTH, 3, padding=1)
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)
        if program.tied:
            self.head.weight = self.dense.weight
        self.to(program.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.conv(x).mean((2, 3)))
        x = checkpoint(self._middle, x, use_reentrant=False) if self.checkpointed else self._middle(x)
        return self.head(x)

    def _middle(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.dense(x))


class Side:
    """The models of a program, and what is done with them: on a rank, or alone on the batches of ``ranks``."""

    def __init__(self, program: Program, ranks: list[int], hvd: Any = None) -> None:
        self.program, self.ranks, self.hvd = program, ranks, hvd
        self.nets = [Net(program, seed) for seed in range(program.models)]
        self.calls: list[Callable[..., torch.Tensor]] = list(self.nets)
        if program.compiled:
            self.calls = [torch.compile(net, backend="aot_eager") for net in self.nets]
        self.optimizers: list[Any] = [sgd(net) for net in self.nets]
        if hvd is not None:
            options = {"backward_passes_per_step": program.passes, **REDUCED[program.reduced]}
            self.optimizers = [distributed_sgd(hvd, net, **options) for net in self.nets]
        self.scaler = torch.amp.GradScaler("cpu", init_scale=LOSS_SCALE, enabled=program.scaled)
        self.kept: list[list[torch.Tensor | None]] = []
        self.hooks: list[Any] = []

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Of all models, each once."""
        return [parameter for net in self.nets for parameter in net.parameters()]

    @property
    def gradients(self) -> list[torch.Tensor | None]:
        """The very tensors, in the order of ``parameters``."""
        return [parameter.grad for parameter in self.parameters]

    def batch(self, step: int, turn: int) -> torch.Tensor:
        seeds = [1000 * step + 100 * turn + rank for rank in self.ranks]
        shape = (ROWS, CHANNELS, 4, 4)
        parts = [torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        return torch.cat(parts).to(self.program.dtype)

    def loss(self, step: int, turn: int, power: int = 2) -> torch.Tensor:
        """A mean over the batch, so that the joined batch's gradient is the mean of the ranks' gradients."""
        inputs = self.batch(step, turn)
        losses = [((call(inputs) - inputs.mean((1, 2, 3))[:, None]).abs() ** power).mean() for call in self.calls]
        return self.scaler.scale(torch.stack(losses).sum())

    def complete(self) -> None:
        """The gradients are those of the step."""
        for optimizer in self.optimizers:
            if self.hvd is not None:
                optimizer.synchronize()
            if self.program.scaled:
                self.scaler.unscale_(optimizer)

    def update(self) -> None:
        for optimizer in self.optimizers:
            if self.hvd is None:
                self.scaler.step(optimizer)
            else:
                with optimizer.skip_synchronize():
                    self.scaler.step(optimizer)
        self.scaler.update()

    def zero(self, set_to_none: bool) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)


# -- how gradients come about -----------------------------------------------------------------------------------------


def _by_hand(side: Side, step: int, turn: int) -> None:
    trained = [parameter for parameter in side.parameters if parameter.requires_grad]
    for parameter, gradient in zip(trained, torch.autograd.grad(side.loss(step, turn), trained), strict=True):
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def _in_a_thread(side: Side, step: int, turn: int) -> None:
    in_thread(lambda: side.loss(step, turn).backward()).result()


def _with_a_penalty(side: Side, step: int, turn: int) -> None:
    """Double backward: the gradient of a loss that has a gradient in it."""
    inputs = side.batch(step, turn).requires_grad_()
    total = torch.stack([net(inputs).square().sum() for net in side.nets]).sum()
    (slopes,) = torch.autograd.grad(total, inputs, create_graph=True)
    side.scaler.scale(slopes.square().mean()).backward()


def _retained(side: Side, step: int) -> None:
    """Two backward passes through one graph: of two steps, or of one that has two."""
    loss = side.loss(step, 0)
    loss.backward(retain_graph=True)
    if side.program.scaled:
        return  # GradScaler unscales once before an update
    if side.program.passes == 1:
        side.complete()
        side.zero(set_to_none=True)
    loss.backward()


WAYS: dict[str, Callable[[Side, int, int], None]] = {
    "backward": lambda side, step, turn: side.loss(step, turn).backward(),
    "autograd.grad": _by_hand,
    "in a thread": _in_a_thread,
    "double backward": _with_a_penalty,
}
RETAINED = "retained graph"


def _compute(side: Side, step: int, way: str) -> None:
    if way == RETAINED:
        _retained(side, step)
        return
    for turn in range(side.program.passes):
        WAYS[way](side, step, turn)


# -- what is done before, and with what came out ----------------------------------------------------------------------


def _hook(side: Side) -> None:
    """Register the user's own hooks, once."""
    if not side.hooks:
        side.hooks = [net.dense.weight.register_hook(lambda gradient: 2 * gradient) for net in side.nets]


def _for_nets(change: Callable[[Net], Any]) -> Callable[[Side], None]:
    return lambda side: list(map(change, side.nets))  # type: ignore[return-value]


def _for_gradients(change: Callable[[torch.Tensor], Any]) -> Callable[[Side, int], None]:
    return lambda side, step: [change(one) for one in side.gradients if one is not None]  # type: ignore[return-value]


BEFORE: dict[str, Callable[[Side], None]] = {
    "freeze": _for_nets(lambda net: net.conv.weight.requires_grad_(False)),
    "thaw": _for_nets(lambda net: net.conv.weight.requires_grad_(True)),
    "share_memory of the model": _for_nets(lambda net: net.share_memory()),
    "channels_last": _for_nets(lambda net: net.to(memory_format=torch.channels_last)),
    "hook": _hook,
}


def _add(side: Side, step: int) -> None:
    for gradient, kept in zip(side.gradients, side.kept[-1] if side.kept else [], strict=False):
        if gradient is not None and kept is not None:
            gradient.add_(kept, alpha=0.5)


def _replace(side: Side, step: int) -> None:
    for parameter in side.parameters:
        if parameter.grad is not None:
            parameter.grad = parameter.grad * 1.5


def _fork(side: Side, step: int) -> None:
    """Fork a child that clears the gradients of its copy of the models, and computes others."""

    def work() -> None:
        side.zero(set_to_none=False)
        for parameter in side.parameters:
            if parameter.requires_grad:
                # No products of matrices: MKL waits for ever for threads that ended before a fork.
                parameter.square().sum().backward()
                assert side.hooks or torch.equal(parameter.grad, 2 * parameter)

    private = [gradient is not None and not gradient.is_shared() for gradient in side.gradients]
    if all(private):  # what was moved to shared memory by hand is the child's too, as it is meant
        in_child(work)


def _copy(side: Side, step: int) -> None:
    """Train a copy of the models on, alone; its gradients are kept to be compared."""
    for net in side.nets:
        copied = copy.deepcopy(net)
        for parameter in copied.parameters():
            assert parameter.grad is None or all(parameter.grad is not other for other in side.gradients)
            parameter.grad = None
        inputs = torch.randn(ROWS, CHANNELS, 4, 4, generator=torch.Generator().manual_seed(step))
        copied(inputs.to(side.program.dtype)).square().mean().backward()
        side.kept.append([parameter.grad for parameter in copied.parameters()])


def _surgery(side: Side, step: int) -> None:
    """Compute the gradients of a second loss while those of the first one are kept."""
    if side.program.scaled:
        return  # GradScaler unscales once before an update
    first = side.gradients
    side.zero(set_to_none=True)
    side.loss(step, 5, power=3).backward()
    side.complete()
    for parameter, earlier in zip(side.parameters, first, strict=True):
        if parameter.grad is not None and earlier is not None:
            parameter.grad = parameter.grad - 0.5 * earlier


AFTER: dict[str, Callable[[Side, int], None]] = {
    "keep": lambda side, step: side.kept.append(side.gradients),
    "add what was kept": _add,
    "clip": lambda side, step: nn.utils.clip_grad_norm_(side.parameters, 0.05),  # type: ignore[dict-item, return-value]
    "replace": _replace,
    ".data": _for_gradients(lambda gradient: gradient.data.mul_(0.5)),
    "set_": _for_gradients(lambda gradient: gradient.set_(gradient.clone())),
    "share_memory_": _for_gradients(lambda gradient: gradient.share_memory_()),
    "fork": _fork,
    "deepcopy": _copy,
    "second loss": _surgery,
}
ZEROS = {"to None": True, "to zeros": False, "not at all": None}

steps = st.builds(
    Step,
    zero=st.sampled_from(list(ZEROS)),
    before=st.lists(st.sampled_from(list(BEFORE)), max_size=2).map(tuple),
    way=st.sampled_from([*WAYS, RETAINED]),
    after=st.lists(st.sampled_from(list(AFTER)), max_size=4).map(tuple),
)


def programs(compiled: bool = False) -> st.SearchStrategy[Program]:
    return st.builds(
        Program,
        tied=st.booleans(),
        checkpointed=st.booleans(),
        scaled=st.booleans(),
        models=st.integers(1, 2),
        passes=st.integers(1, 2),
        reduced=st.sampled_from(list(REDUCED)),
        steps=st.lists(steps, min_size=2, max_size=5).map(tuple),
        compiled=st.just(compiled),
    )


# -- running them -----------------------------------------------------------------------------------------------------


def run(hvd: Any, program: Program) -> None:
    """Raises AssertionError, on all ranks alike, where a rank has something else than one process alone."""
    ours, alone = Side(program, [hvd.rank()], hvd), Side(program, list(range(hvd.size())))
    problems: list[str] = []
    for number, step in enumerate(program.steps):
        for side in (ours, alone):
            for name in step.before:
                BEFORE[name](side)
            set_to_none = ZEROS[step.zero]
            if set_to_none is not None:
                side.zero(set_to_none)
            _compute(side, number, step.way)
            taken = side.gradients
            side.complete()
            if any(now is not then for now, then in zip(side.gradients, taken, strict=True)):
                problems.append(f"step {number}: synchronize() put other tensors in the place of gradients")
            for name in step.after:
                AFTER[name](side, number)
            side.update()
        problems += [f"step {number}: {problem}" for problem in _differences(ours, alone)]
    everyones = hvd.allgather_object((problems, [parameter.tolist() for parameter in ours.parameters]))
    for rank, (theirs, weights) in enumerate(everyones):
        assert not theirs, f"rank {rank}, {program}:\n" + "\n".join(theirs[:6])
        assert weights == everyones[0][1], f"ranks 0 and {rank} hold different bits: {program}"


def _differences(side: Side, alone: Side) -> list[str]:
    weights = [[parameter.detach() for parameter in each.parameters] for each in (side, alone)]
    pairs: list[Any] = [("parameter", *weights), ("gradient", side.gradients, alone.gradients)]
    pairs += [(f"kept gradient, {n},", *each) for n, each in enumerate(zip(side.kept, alone.kept, strict=True))]
    problems = []
    for what, tensors, others in pairs:
        for number, (tensor, other) in enumerate(zip(tensors, others, strict=True)):
            if tensor is None or other is None:
                if tensor is not other:
                    problems.append(f"{what} {number} is {type(tensor).__name__}, not {type(other).__name__}")
                continue
            difference = (tensor - other).abs().max().item() / (other.abs().max().item() or 1.0)
            if not difference <= side.program.tolerance:
                shape = tuple(tensor.shape)
                problems.append(f"{what} {number} of shape {shape} is off by {difference:.3g} of its largest value")
    return problems
