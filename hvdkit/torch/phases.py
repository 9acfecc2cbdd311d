"""Forward and backward passes in the timeline: hooks on all modules, and on what they return, while one is recorded."""

from __future__ import annotations

import threading
import warnings
from time import perf_counter
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import unserializable_hook

from hvdkit.engine.telemetry.telemetry import Telemetry
from hvdkit.engine.telemetry.timeline import COMPUTATION

_engine: Any = torch.autograd.Variable._execution_engine


class Phases:
    """Marks the passes of the thread that steps, from now until ``end()``.

    A forward pass is that of a module which no other one calls, a backward pass that from such a module's output.
    """

    def __init__(self, telemetry: Telemetry) -> None:
        self.telemetry = telemetry
        self._depth, self._began = 0, 0.0  # of the forward pass
        self._thread = threading.get_ident()
        # The hooks on all modules may be called an extra time.
        warnings.filterwarnings("ignore", message=r"Using `torch\.compile\(module\)` when there are global hooks")
        self._backward: dict[int, float] = {}  # when passes began, by autograd's number of each
        self._handles = [register_module_forward_pre_hook(self._before_forward)]
        self._handles.append(register_module_forward_hook(self._after_forward, always_call=True))

    def step(self) -> None:
        """Note that this thread steps, and so is in no forward pass, whatever ended the last one."""
        self._thread, self._depth = threading.get_ident(), 0

    def end(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def _before_forward(self, module: torch.nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling() or threading.get_ident() != self._thread:
            return
        if self._depth == 0:
            self._began = perf_counter()
            if torch._C._current_graph_task_id() == -1:
                self._backward.clear()  # of passes that an exception ended
        self._depth += 1

    def _after_forward(self, module: torch.nn.Module, _: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or threading.get_ident() != self._thread or self._depth == 0:
            return  # at 0 the recording began within it
        self._depth -= 1
        timeline = self.telemetry.timeline
        if self._depth or timeline is None:
            return
        trains = torch.is_grad_enabled()
        activity = "FORWARD" if trains else "FORWARD_WITHOUT_GRADIENTS"
        timeline.span(COMPUTATION, activity, self._began, perf_counter(), module=type(module).__name__)
        is_traced = torch._C._get_tracing_state() is not None
        if not trains or is_traced or torch._C._functorch.peek_interpreter_stack() is not None:
            return
        for leaf in tree_leaves(output):
            is_computed = isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None
            if is_computed and self._in_backward not in (leaf._backward_hooks or {}).values():  # it may be an input
                leaf.register_hook(self._in_backward)

    @unserializable_hook  # type: ignore[untyped-decorator]  # nobody needs to be told that it is not saved with the tensor
    def _in_backward(self, _: torch.Tensor) -> None:
        task = torch._C._current_graph_task_id()
        if self.telemetry.timeline is None or task in self._backward:
            return
        self._backward[task] = perf_counter()

        def after_backward() -> None:
            if (began := self._backward.pop(task, None)) is not None and (timeline := self.telemetry.timeline):
                timeline.span(COMPUTATION, "BACKWARD", began, perf_counter())

        _engine.queue_callback(after_backward)


recording: Phases | None = None


def follow(telemetry: Telemetry) -> None:
    """Mark passes while a timeline is recorded, and stop with it. Each step calls this from the first recording on."""
    global recording
    records = telemetry.timeline is not None
    if recording is not None and not (records and recording.telemetry is telemetry):
        recording.end()
        recording = None
    if records:
        recording = recording or Phases(telemetry)
        recording.step()
