"""Communication hooks of DistributedDataParallel: on real ranks, on ranks that get lost, and what needs no ranks."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn

import hvdkit.torch as hvd
from hvdkit.engine.session.session import Session
from hvdkit.errors import HorovodInternalError
from hvdkit.torch import DDPHook
from hvdkit.torch.data_parallel.bucket import HookBucket
from tests.ranks import TORCH, start_ranks
from tests.threads import on_threads
from tests.told import told
from tests.torch.ddp_hook_loop import TIMEOUT_SECONDS

# What noticing may take on a machine that is busy with other tests.
PATIENCE_SECONDS = 240


def loop(mode: str, ranks: int, pids: list[int] | None = None) -> list[subprocess.Popen[str]]:
    """Ranks that are under way; ``pids`` is given theirs."""
    processes = start_ranks([sys.executable, "-m", "tests.torch.ddp_hook_loop", mode], ranks, "torch", preload=TORCH)
    try:
        for process in processes:
            assert process.stdout is not None
            while not (line := process.stdout.readline()).startswith("under way as "):
                assert line, "a rank ended before it was under way"
            if pids is not None:
                pids.append(int(line.rpartition(" ")[2]))
    except BaseException:
        end(processes)
        raise
    return processes


def end(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        process.kill()
        process.communicate()


def ended(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """The exit statuses and what was printed; all ranks end by themselves."""
    last = threading.Timer(PATIENCE_SECONDS, lambda: [process.kill() for process in processes])
    last.start()
    try:
        # Not communicate(), which misses what readline() has read ahead.
        outputs = [process.stdout.read() for process in processes if process.stdout is not None]
        return [(process.wait(), output) for process, output in zip(processes, outputs, strict=True)]
    finally:
        last.cancel()
        end([process for process in processes if process.poll() is None])


def test_ranks_that_end_without_a_word_end_well() -> None:
    assert [status for status, _ in ended(loop("ends", 2))] == [0, 0]


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_killed_rank_is_an_error_on_all_others(ranks: int) -> None:
    processes = loop("endless", ranks)
    processes[1].kill()
    for rank, (status, output) in enumerate(ended(processes)):
        if rank != 1:
            assert status == 1, output
            assert re.search(
                r"ddp_hook on rank \d with codec topk\(.* is lost: (its|the) connection to rank \d", output
            )


def test_a_stopped_rank_is_an_error_within_the_time_limit() -> None:
    pids: list[int] = []
    processes = loop("endless", 3, pids)
    os.kill(pids[2], signal.SIGSTOP)
    try:
        outputs = ""
        for status, output in ended(processes[:2]):
            assert status == 1, output
            outputs += output
        limit = rf"{TIMEOUT_SECONDS} s \(the hook's timeout\)"  # whichever is noticed first
        silent = rf"rank 2 \(.*\) gave .* no sign of life for {limit}"
        idle = rf"waited {TIMEOUT_SECONDS} s in operation .* for ranks \[(1, |0, )?2\]"
        assert re.search(f"{silent}|{idle}", outputs), outputs
    finally:
        processes[2].kill()
        processes[2].communicate()


def test_a_rank_that_raises_in_a_backward_pass_ends_and_so_do_the_others() -> None:
    (first, printed), (second, others) = ended(loop("raises", 2))
    assert (first, second) == (1, 1), printed + others
    assert "ZeroDivisionError: on purpose" in printed
    assert "has left the job: its process or its ddp_hook has ended" in others


@pytest.mark.parametrize("wrong", [3, "int8", None, nn.Linear, {"*": hvd.Compression.int8}, hvd.Compression])
def test_what_is_no_codec_is_refused(wrong: Any) -> None:
    with told(TypeError, "ddp_hook: compression must be one of hvd.Compression"):
        hvd.ddp_hook(wrong)


def test_wrong_arguments_are_refused() -> None:
    with told(TypeError, "timeout must be a datetime.timedelta or None, got 3"):
        hvd.ddp_hook(hvd.Compression.int8, timeout=3)  # type: ignore[arg-type]
    with told(ValueError, "timeout must be above zero"):
        hvd.ddp_hook(hvd.Compression.int8, timeout=timedelta(0))
    fact = "ddp_hook: process_group must be a process group with this rank, or None, got -100"
    with told(TypeError, fact, "HINT: give the process group of the DistributedDataParallel."):
        hvd.ddp_hook(hvd.Compression.int8, process_group=-100)
    with told(ValueError, "init_process_group"):
        hvd.ddp_hook(hvd.Compression.int8).state_dict()
    fact = "ddp_hook: register: expected a DistributedDataParallel, got Linear"
    with told(TypeError, fact, "HINT: for a plain module, use hvd.DistributedOptimizer(..., compression=...)."):
        hvd.ddp_hook(hvd.Compression.int8).register(nn.Linear(2, 2))  # type: ignore[arg-type]


def state(**changes: Any) -> dict[str, Any]:
    """A state_dict in which nothing is kept of a parameter of 2 x 3 elements."""
    return {"codec": "int8", "rank": 0, "size": 2, "turn": 1, "shapes": [[2, 3]], "kept": [], **changes}


NO_STATE = "ddp_hook.load_state_dict: expected a state_dict or a list of one for each rank, got"
NOT_ALIKE = "ddp_hook.load_state_dict: the state_dicts are not of the same step of the same job: number 1 has another"
ALIKE_HINT = "HINT: load the states that all ranks saved after the same step."


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        (3, TypeError, f"{NO_STATE} int"),
        ("state", TypeError, f"{NO_STATE} str"),
        ([], ValueError, "got none"),
        ({"step": 1}, TypeError, "expected the state_dict of a ddp_hook, got ['step'] as number 0"),
        ([state(), 3], TypeError, "got int as number 1"),
        ([state(), state(turn=2)], ValueError, f"{NOT_ALIKE} turn than number 0\n{ALIKE_HINT}"),
        ([state(), state(size=3)], ValueError, f"{NOT_ALIKE} size than number 0\n{ALIKE_HINT}"),
        ([state(), state(shapes=[])], ValueError, f"{NOT_ALIKE} list of parameters than number 0\n{ALIKE_HINT}"),
        ([state(), state(codec="int4")], ValueError, f"{NOT_ALIKE} codec than number 0\n{ALIKE_HINT}"),
        (
            [state(), state(rank=1), state()],
            ValueError,
            "number 2 is another state_dict of rank 0\nHINT: load one state_dict of each rank.",
        ),
    ],
)
def test_states_that_cannot_be_loaded_are_refused(wrong: Any, error: type[Exception], text: str) -> None:
    with told(error, "ddp_hook.load_state_dict: ", text):
        hvd.ddp_hook(hvd.Compression.int8).load_state_dict(wrong)


class PretendBucket:
    """A bucket of one parameter, with as much of DDP's as is looked at."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self._parameters, self._buffer = [nn.Parameter(buffer.clone(), requires_grad=False)], buffer

    def index(self) -> int:
        return 0

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def parameters(self) -> list[torch.Tensor]:
        return self._parameters

    def is_last(self) -> bool:
        return True


@pytest.mark.parametrize(
    "buffer", [torch.ones(3, dtype=torch.float8_e4m3fn), torch.ones(3, dtype=torch.int32), torch.ones(3, device="meta")]
)
def test_gradients_that_cannot_be_averaged_are_refused(buffer: torch.Tensor) -> None:
    with told(ValueError, "ddp_hook: bucket 0 ([3]) is", str(buffer.dtype), "torch.bfloat16", "CPU or CUDA"):
        hvd.ddp_hook(hvd.Compression.none).reduce(PretendBucket(buffer))  # type: ignore[arg-type]


class ThreadGroup:
    """A group of ranks that are threads, in the place of a HookGroup."""

    def __init__(self, session: Session) -> None:
        self.engine, self.has_ended = session.engine, threading.Event()
        size = session.engine.topology.size
        self.ordered = self.engine.ordered_group(range(size), 1, "ddp_hook", TIMEOUT_SECONDS)

    def leave(self, reason: str) -> None:
        self.ordered.close()
        self.has_ended.set()


def hook_on(session: Session, codec: Any = hvd.Compression.int8) -> DDPHook:
    """A hook whose ranks are connected, as threads may be."""
    hook, topology = hvd.ddp_hook(codec), session.engine.topology
    hook._group, hook._rank = ThreadGroup(session), topology.rank
    return hook


def pretend(elements: int = 4096) -> PretendBucket:
    """A bucket with a parameter that is large enough to be encoded."""
    bucket = PretendBucket(torch.linspace(-1, 1, elements))
    bucket._parameters = [nn.Parameter(torch.zeros(64, elements // 64))]
    return bucket


def test_all_futures_end_where_the_device_fails_when_they_shall() -> None:
    class Broken(torch.futures.Future):  # type: ignore[type-arg]
        """Fails the first time, as where a kernel before it failed, or always."""

        def __init__(self, always: bool) -> None:
            super().__init__()
            self.always, self.fails = always, True

        def set_result(self, result: Any) -> None:
            if self.fails:
                self.fails = self.always
                raise RuntimeError("device-side assert triggered")
            super().set_result(result)

    def run(session: Session) -> None:
        hook = hook_on(session)
        late = HookBucket(torch.ones(3), [], Broken(always=False))
        late.finish()
        assert late.future.done()
        assert "device-side assert" in str(late.error)
        futures: list[Any] = [torch.futures.Future(), Broken(always=True), torch.futures.Future()]
        futures[0].set_result(torch.empty(0))  # as far as the step came
        handed = [HookBucket(torch.ones(3), [], future) for future in futures]
        for bucket in handed:
            hook._gradients.take(bucket)
        hook._fail(RuntimeError("an illegal memory access"))
        assert [future.done() for future in futures] == [True, False, True], "all that can end"
        assert all("an illegal memory access" in str(bucket.error) for bucket in handed)
        with told(RuntimeError, "an earlier step failed", "an illegal memory access"):
            hook.reduce(pretend()).wait()  # type: ignore[arg-type]

    on_threads(1, run)


def test_an_error_between_the_average_and_the_future_ends_it() -> None:
    def run(session: Session) -> None:
        hook = hook_on(session)

        def fail(bucket: Any) -> None:
            raise MemoryError("on purpose")

        hook._gradients._give_back = fail  # type: ignore[method-assign]
        with told(RuntimeError, "ddp_hook", "on purpose"):
            hook.reduce(pretend()).wait()  # type: ignore[arg-type]

    on_threads(1, run)


def test_after_a_failure_the_state_is_that_of_the_last_complete_step_or_an_error() -> None:
    def run(session: Session) -> tuple[dict[str, Any], Any]:
        hook, bucket = hook_on(session), pretend()
        for _ in range(2):
            hook.reduce(bucket).wait()  # type: ignore[arg-type]
        before = hook.state_dict()
        hook._gradients.in_flight = True  # some of the next step was handed over, and nothing of it has begun
        with pytest.raises(HorovodInternalError, match=r"ddp_hook: state_dict.*not completed") as caught:
            hook.state_dict()
        assert "optimizer" not in str(caught.value)
        hook._fail(hvd.HorovodInternalError("rank 1 is lost"))
        with told(RuntimeError, "rank 1 is lost"):
            hook.reduce(bucket).wait()  # type: ignore[arg-type]
        after = hook.state_dict()
        hook._gradients.reducer.residuals.is_in_use = True  # some of it was encoded
        with pytest.raises(HorovodInternalError, match=r"ddp_hook: state_dict.*rank 1 is lost") as caught:
            hook.state_dict()
        assert "optimizer" not in str(caught.value)
        return before, after

    for result in on_threads(2, run):
        assert result is not None
        before, after = result
        assert before["kept"]
        assert str(before) == str(after)
