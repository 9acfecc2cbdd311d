"""Every kind of parallelism trains on four ranks as one process does, and rank 0 alone says so."""

from __future__ import annotations

import re

import pytest

from tests.examples.running import assert_only_one_rank_prints, lines, run_example
from tests.ranks import ROOT

TOLERANCE, OTHER_PROCESSOR = 1e-5, 2e-3
PAGE = (ROOT / "docs" / "parallelism.md").read_text()


def first_and_last(output: str) -> list[list[float]]:
    """Return the first and the last loss of each training that is reported."""
    found = re.findall(r"loss ([\d.]+), after \d+ steps ([\d.]+)", output)
    return [[float(loss) for loss in losses] for losses in found]


def check_losses(name: str, output: str, comparisons: int = 1) -> None:
    """Check that losses fell, were those of one process, and are the losses that the page of parallelism shows."""
    trained = first_and_last(output)
    differences = re.findall(r"largest difference of losses: (\S+)", output)
    assert len(trained) == len(differences) == comparisons, output
    assert all(last < first - 0.3 for first, last in trained), output
    assert all(float(difference) < TOLERANCE for difference in differences), output
    shown = re.search(rf"python examples/{name}\n```\n\n```text\n(.*?)\n```", PAGE, re.DOTALL)
    assert shown, f"the page does not say how to run {name} and what it prints"
    for losses, losses_shown in zip(trained, first_and_last(shown[1]), strict=True):
        assert losses == pytest.approx(losses_shown, rel=OTHER_PROCESSOR)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["ddp", "fsdp", "tensor_parallel", "pipeline"])
def test_four_ranks_have_the_losses_of_one_process(name: str) -> None:
    output = run_example(f"pytorch_{name}.py", size=4)[0]
    check_losses(f"pytorch_{name}.py", output)
    assert_only_one_rank_prints(output)


def test_two_kinds_at_once_have_the_losses_of_one_process() -> None:
    output = run_example("pytorch_hybrid.py", size=4)[0]
    check_losses("pytorch_hybrid.py", output, comparisons=2)
    assert len(lines(output)) == 4, output


@pytest.mark.thorough
def test_a_pipeline_s_idle_time_is_reported_beside_the_formula_s() -> None:
    output = run_example("pytorch_pipeline.py", "--bubble", "--milliseconds", 5, size=4)[0]
    # On a busy machine the stage alone may take longer than the pipeline: the measured share is negative then.
    reports = re.findall(r"(\d+) micro-batches: idle for -?[\d.]+% of a step, by the formula ([\d.]+)%", output)
    assert reports == [("4", "42.9"), ("8", "27.3"), ("16", "15.8")], output


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["tensorflow"])
def test_layers_on_ranks_and_their_slices_have_the_losses_of_one_process(backend, environment) -> None:
    output, _ = run_example("tensorflow2_layers_parallel.py", size=4, **environment)
    check_losses("tensorflow2_layers_parallel.py", output, comparisons=3)
    assert len(lines(output)) == 6, output
