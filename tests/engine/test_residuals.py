"""What lossy codecs owe reaches the result, whatever becomes of the job, on the host and on devices."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hvdkit.compression import CASTS, Codec, Int8, OneBit, PowerSGD, RandomK, TopK
from hvdkit.engine.session.session import Session
from hvdkit.engine.steps.lane import Lane
from hvdkit.engine.steps.offers import Offer
from hvdkit.engine.steps.plan import Slot
from hvdkit.kernels import ReduceOp
from hvdkit.torch.gradients import compression_state
from tests.network import MemoryTransport
from tests.threads import hand_over, on_threads
from tests.transports.thread_group import DeviceThreadTransport

SHAPES = [(40, 30), (7,), (5, 120)]
CODECS: dict[str, Codec] = {
    "none": CASTS["none"],
    "int8": Int8(compress="everywhere"),
    "onebit": OneBit(compress="everywhere"),
    "topk": TopK(0.05, compress="everywhere"),
    "randomk": RandomK(0.1, compress="everywhere"),  # on the host alone
    "powersgd": PowerSGD(1, compress="everywhere"),
}


@dataclass(frozen=True)
class Job:
    """Some ranks that go on from what an earlier job saved, and freeze and unfreeze parameters meanwhile."""

    ranks: int
    codec: str
    op: ReduceOp
    prescale: float
    on_device: bool
    trainable: tuple[tuple[frozenset[int], int], ...]  # parameters, and for how many steps


jobs = st.builds(
    Job,
    ranks=st.integers(1, 3),
    codec=st.sampled_from(list(CODECS)),
    op=st.sampled_from([ReduceOp.SUM, ReduceOp.AVERAGE]),
    prescale=st.sampled_from([1.0, 0.25]),
    on_device=st.booleans(),
    trainable=st.lists(
        st.tuples(st.frozensets(st.sampled_from(range(len(SHAPES))), min_size=1), st.integers(0, 3)),
        min_size=1,
        max_size=3,
    ).map(tuple),
)


def gradient(step: int, parameter: int, rank: int, ranks: int) -> np.ndarray | None:
    """None on a rank that has none for this step; never on all of them."""
    draw = np.random.default_rng([step, parameter, rank])
    if rank != step % ranks and draw.random() < 0.3:
        return None
    return draw.standard_normal(int(np.prod(SHAPES[parameter]))).astype(np.float32)


def take_step(lane: Lane, step: int, parameters: list[int]) -> dict[int, np.ndarray]:
    """The results of this rank."""
    results: dict[int, Any] = {}
    for slot, parameter in enumerate(parameters):
        own = gradient(step, parameter, lane.group.rank, lane.group.size)
        if own is not None and lane.on_device:
            tensor = results[parameter] = torch.from_numpy(own)
            lane.ready(slot, Offer(0, lambda tensor=tensor: tensor))
        elif (result := hand_over(lane, slot, own)) is not None:
            results[parameter] = result
    lane.finish()
    return {parameter: torch.as_tensor(one, dtype=torch.float64).numpy() for parameter, one in results.items()}


class Account:
    """What came in, as part of the result, and what came out, of each parameter since it was frozen last."""

    def __init__(self) -> None:
        self.came = [np.zeros(int(np.prod(shape))) for shape in SHAPES]
        self.went = [np.zeros(int(np.prod(shape))) for shape in SHAPES]

    def frozen(self, parameter: int) -> None:
        self.came[parameter][...] = self.went[parameter][...] = 0.0

    def check(self, saved: list[dict[str, Any]]) -> None:
        owed = [np.zeros_like(one) for one in self.came]
        for one in saved:
            for name, arrays in one["kept"].items():
                for kind, array in arrays.items():
                    owed[int(name[1:])] += array.numpy() * one["units"][name][kind]
        for came, went, still in zip(self.came, self.went, owed, strict=True):
            np.testing.assert_allclose(went + still, came, rtol=1e-4, atol=2e-3)


def run_job(job: Job, begin: int, saved: list[dict[str, Any]], account: Account) -> list[dict[str, Any]]:
    """All ranks' states at its end. Its first step is number ``begin`` of all."""

    def run(session: Session) -> tuple[list[dict[int, np.ndarray]], Any]:
        results, earlier, step = [], None, begin
        for number, (trainable, steps) in enumerate(job.trainable):
            parameters = sorted(trainable)
            lane = session.engine.register_plan(
                f"net{number}",
                [Slot(f"p{one}", SHAPES[one], np.dtype(np.float32)) for one in parameters],
                op=job.op,
                prescale=job.prescale,
                codecs=[CODECS[job.codec]],
            )
            if earlier is None:
                compression_state.resume(lane, saved)
            else:
                old, before = earlier
                slots = ({one: slot for slot, one in enumerate(ones)} for ones in (before, parameters))
                compression_state.move(old, next(slots), lane, next(slots))
                old.close()
            assert lane.on_device == (job.on_device and job.codec != "randomk")
            results += [take_step(lane, step + one, parameters) for one in range(steps)]
            step += steps
            earlier = lane, parameters
        assert earlier is not None
        file = io.BytesIO()
        torch.save(compression_state.save(earlier[0]), file)
        file.seek(0)
        return results, torch.load(file, weights_only=True)

    transport = DeviceThreadTransport if job.on_device else MemoryTransport
    ended = [one for one in on_threads(job.ranks, run, transport=transport) if one is not None]
    step, part = begin, job.prescale / (job.ranks if job.op == ReduceOp.AVERAGE else 1)
    for trainable, steps in job.trainable:
        for parameter in set(range(len(SHAPES))) - trainable:
            account.frozen(parameter)
        for _ in range(steps):
            for parameter in trainable:
                everyones = [gradient(step, parameter, rank, job.ranks) for rank in range(job.ranks)]
                account.came[parameter] += part * sum(one for one in everyones if one is not None)
                seen = [results[step - begin][parameter] for results, _ in ended if parameter in results[step - begin]]
                assert all(np.array_equal(one, seen[0]) for one in seen)
                account.went[parameter] += seen[0]
            step += 1
    return [state for _, state in ended if state is not None]


ALL = frozenset(range(len(SHAPES)))


@given(st.lists(jobs, min_size=2, max_size=4))
@example(
    [
        Job(3, "topk", ReduceOp.AVERAGE, 0.25, False, ((ALL, 3), (frozenset({0, 2}), 2))),
        Job(2, "int8", ReduceOp.SUM, 1.0, True, ((ALL, 0), (ALL, 1))),
        Job(2, "none", ReduceOp.AVERAGE, 0.25, True, ((ALL, 3),)),
    ]
)
@settings(max_examples=25, deadline=None)
def test_results_and_what_is_owed_are_all_gradients(all_jobs):
    account, saved, step = Account(), list[dict[str, Any]](), 0
    for job in all_jobs:
        saved = run_job(job, step, saved, account)
        step += sum(steps for _, steps in job.trainable)
        account.check(saved)
    everything = Job(2, "none", ReduceOp.SUM, 1.0, all_jobs[-1].on_device, ((ALL, 3),))
    for parameter in ALL - all_jobs[-1].trainable[-1][0]:
        account.frozen(parameter)
    assert not run_job(everything, step, saved, account), "once all is paid, nothing is kept"
    account.check([])
