"""Lightning's strategy "hvdkit" on two ranks trains as on one: with clipping, accumulation, metrics and checkpoints."""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import Any

import pytest

from tests.examples.running import lines, run_example
from tests.examples.test_libraries import environment_with
from tests.ranks import ROOT

pytestmark = pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed")


@pytest.fixture(scope="module")
def results() -> dict[int, list[Any]]:
    """The results of each rank, by the number of ranks."""
    jobs = {}
    for size in (1, 2):
        output, _ = run_example(ROOT / "tests/torch/lightning_job.py", size=size, **environment_with("lightning"))
        jobs[size] = [json.loads(line) for line in lines(output) if line.startswith("{")]
        jobs[size].sort(key=lambda result: result["1 at once"]["ranks"])
        assert len(jobs[size]) == size, output
    return jobs


def same(left: Any, right: Any, tolerance: float = 1e-5) -> None:
    for name in ("metrics", "weights", "rate", "norms"):
        assert left[name] == pytest.approx(right[name], rel=tolerance), name


@pytest.mark.parametrize("passes", [1, 4])
def test_clipped_and_accumulated_steps_and_metrics_are_those_of_one_process(results: Any, passes: int) -> None:
    (alone,) = results[1]
    for rank in results[2]:
        same(rank[f"{passes} at once"], alone[f"{passes} at once"])


@pytest.mark.parametrize("passes", [1, 4])
def test_a_training_goes_on_from_a_checkpoint_that_one_rank_has_written(results: Any, passes: int) -> None:
    for rank in (*results[1], *results[2]):
        whole, resumed = rank[f"{passes} at once"], rank[f"{passes} in two"]
        assert resumed["norms"] == pytest.approx(whole["norms"][len(resumed["norms"]) :], rel=1e-9)
        same({**resumed, "norms": []}, {**whole, "norms": []}, 1e-9)
        steps = 12 if passes == 1 else 4
        assert rank[f"{passes} files"] == [f"epoch=1-step={steps}.ckpt", "last.ckpt"]


def test_optimizers_that_are_stepped_by_hand_reduce_their_gradients(results: Any) -> None:
    for rank in results[2]:
        same(rank["by hand"], results[1][0]["by hand"])


def test_options_of_the_strategy_are_those_of_the_optimizer(results: Any) -> None:
    (alone,) = results[1]
    for rank in results[2]:
        assert rank["summed"]["norms"][0] == pytest.approx(2 * alone["summed"]["norms"][0])


def test_lightning_knows_the_ranks(results: Any) -> None:
    assert [rank["1 at once"]["ranks"] for rank in results[2]] == [[0, 0, 2, True], [1, 1, 2, False]]
    for rank in results[2]:
        assert rank["1 at once"]["gathered"] == [0, 1]
        assert rank["gradient of all_gather"] == 1.0
        assert rank["reduced"] == [1.0, 2.0, 2.0, 0.0]


def test_trainers_that_cannot_work_say_so(results: Any) -> None:
    assert results[1][0]["several devices"] == (
        'Trainer(strategy="hvdkit", devices=2): hvd.size() is 1.\n'
        "HINT: start the ranks with hvdkitrun -np 2 python script.py, or train on one device with devices=1."
    )
    for rank in (*results[1], *results[2]):
        assert "hvd.SyncBatchNorm" in rank["layers"]
