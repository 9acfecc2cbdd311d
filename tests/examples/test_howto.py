"""Every how-to script prints on two ranks what one process prints, as its page says; and the mistakes show."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from tests.examples.running import lines, run_example, start_example
from tests.ranks import ROOT

SCRIPTS = ROOT / "examples" / "howto"
PAGES = ROOT / "docs" / "howto"
NUMBER = re.compile(r"(?<![\w*.])-?\d+(?:\.\d+)?")
# Sums of other numbers of float32 values are rounded otherwise; so are those of another processor.
TOLERANCE, OTHER_PROCESSOR = 1e-5, 2e-3
# Gradients of half a batch are rounded to bfloat16, of which a step takes the mean.
BFLOAT16_TOLERANCE = 2e-3

# What prints the same on one process as on two ranks, as far as it is rounded alike.
ALIKE = {
    "checkpoints.py": TOLERANCE,
    "early_stopping.py": TOLERANCE,
    "evaluation.py": TOLERANCE,
    "gradient_accumulation.py": TOLERANCE,
    "gradient_clipping.py": TOLERANCE,
    "mixed_precision.py": BFLOAT16_TOLERANCE,
    "objects.py": TOLERANCE,
    "several_optimizers.py": TOLERANCE,
    "sparse_embeddings.py": TOLERANCE,
    "sync_batch_norm.py": TOLERANCE,
}
KERAS_ALIKE = ("keras_callbacks.py", "keras_early_stopping.py", "tensorflow_data.py")
# What make test runs of the former; what the others show is tested in each framework's own room, too.
ESSENTIAL = ("checkpoints.py", "evaluation.py", "gradient_clipping.py", "sync_batch_norm.py")
# What has tests of its own below.
OTHERS = ("keras_learning_rate.py", "learning_rate.py", "notebook.py", "process_sets.py", "uneven_data.py")


def report(name: str | Path, size: int = 2, **environment: str) -> str:
    """What a script prints, on rank 0 alone, with the number of ranks, which it is asked to tell, left out."""
    output, _ = run_example(Path("howto") / name, size=size, **environment)
    told = "\n".join(lines(output))
    assert f"[{size - 1}]<stdout>" not in output.replace("[0]<stdout>", ""), output
    assert f" on {size} rank(s)" in told, output
    return told.replace(f" on {size} rank(s)", " on N rank(s)")


def shown(name: str) -> str:
    """What the page of a script says that it prints."""
    pages = [page.read_text() for page in PAGES.glob("*.md") if f'--8<-- "examples/howto/{name}"' in page.read_text()]
    assert len(pages) == 1, f"{name} is in {len(pages)} pages"
    block = re.search(rf"python examples/howto/{name}\n```\n\n```text\n(.*?)\n```", pages[0], re.DOTALL)
    assert block, f"the page of {name} does not say how to run it and what it prints"
    return "\n".join(lines(block.group(1))).replace(" on 2 rank(s)", " on N rank(s)")


def same(left: str, right: str, tolerance: float) -> bool:
    """Whether two reports have the same words, and the same numbers but for this relative difference."""
    numbers = [[float(number) for number in NUMBER.findall(text)] for text in (left, right)]
    return NUMBER.sub("#", left) == NUMBER.sub("#", right) and numbers[0] == pytest.approx(numbers[1], rel=tolerance)


def assert_same(left: str, right: str, tolerance: float) -> None:
    assert same(left, right, tolerance), f"{left}\n\n{right}"


def test_every_script_has_a_page_and_a_test() -> None:
    scripts = {path.name for path in SCRIPTS.glob("*.py")}
    assert scripts == {*ALIKE, *KERAS_ALIKE, *OTHERS}
    for name in scripts:
        assert shown(name)


def test_the_index_lists_every_page_and_pages_include_scripts_that_exist() -> None:
    pages = {page.name for page in PAGES.glob("*.md")} - {"index.md"}
    assert set(re.findall(r"\]\((\w+\.md)\)", (PAGES / "index.md").read_text())) == pages
    for page in pages:
        included = re.findall(r'^--8<-- "(.+)"$', (PAGES / page).read_text(), re.MULTILINE)
        assert included, page
        assert all((ROOT / path).is_file() for path in included), page


@pytest.mark.parametrize(
    "name", [name if name in ESSENTIAL else pytest.param(name, marks=pytest.mark.thorough) for name in ALIKE]
)
def test_two_ranks_print_what_one_process_prints(name: str) -> None:
    two = report(name)
    assert_same(two, report(name, size=1), ALIKE[name])
    assert_same(two, shown(name), OTHER_PROCESSOR)


def test_a_resumed_training_ends_as_one_without_a_break() -> None:
    at_once, first, resumed = shown("checkpoints.py").splitlines()
    assert first.startswith("epochs 0 to 10")
    assert at_once.removeprefix("epochs 0 to 20: ") == resumed.removeprefix("epochs 10 to 20: ")


@pytest.mark.thorough
@pytest.mark.parametrize("name", KERAS_ALIKE)
def test_two_ranks_print_what_one_process_prints_in_keras(name: str, without_torch: dict[str, str]) -> None:
    two = report(name, **without_torch)
    assert_same(two, report(name, size=1, **without_torch), TOLERANCE)
    assert_same(two, shown(name), OTHER_PROCESSOR)


@pytest.mark.thorough
@pytest.mark.parametrize("name", [name for name in KERAS_ALIKE if name.startswith("keras_")])
def test_two_ranks_print_what_one_process_prints_in_keras_on_pytorch(name: str) -> None:
    two = report(name, KERAS_BACKEND="torch")
    assert_same(two, report(name, size=1, KERAS_BACKEND="torch"), TOLERANCE)


@pytest.mark.thorough
def test_the_learning_rate_grows_from_one_process_s_to_that_of_all_ranks() -> None:
    two = report("learning_rate.py")
    assert "rates 0.050, 0.075, 0.100, 0.100, 0.100, 0.100;" in two
    assert_same(two, shown("learning_rate.py"), 1e-2)
    assert "rates 0.050, 0.050, 0.050, 0.050, 0.050, 0.050;" in report("learning_rate.py", size=1)


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
def test_the_learning_rate_grows_in_keras(backend: str, without_torch: dict[str, str]) -> None:
    environment = without_torch if backend == "tensorflow" else {"KERAS_BACKEND": backend}
    two = report("keras_learning_rate.py", **environment)
    # At the end of each epoch.
    assert two.startswith("rates 0.075, 0.100, 0.100, 0.100, 0.100, 0.100;")
    assert NUMBER.sub("#", two) == NUMBER.sub("#", shown("keras_learning_rate.py"))
    assert float(two.split("loss ")[1].split(",")[0]) < 0.5
    one = report("keras_learning_rate.py", size=1, **environment)
    assert one.startswith("rates 0.050, 0.050, 0.050, 0.050, 0.050, 0.050;")


@pytest.mark.thorough
def test_a_notebook_trains_on_one_rank_again_and_again_and_then_on_two() -> None:
    output, _ = run_example("howto/notebook.py", size=1)
    first, again, two = lines(output)
    assert first == again
    assert first.endswith(" on 1 rank(s)")
    assert two.endswith(" on 2 rank(s)")
    assert_same(first.replace("1 rank(s)", "2 rank(s)"), two, TOLERANCE)
    told = "\n".join([first, again, two]).replace(" on 2 rank(s)", " on N rank(s)")
    assert_same(told, shown("notebook.py"), OTHER_PROCESSOR)


@pytest.mark.thorough
def test_teams_of_two_ranks_train_as_teams_of_one() -> None:
    teams = {}
    for size in (2, 4):
        output, _ = run_example("howto/process_sets.py", size=size)
        teams[size] = "\n".join(lines(output))
        assert teams[size].count(f"on {size // 2} of {size} ranks") == 2, output
    assert_same(teams[4], shown("process_sets.py"), OTHER_PROCESSOR)
    assert_same(teams[4].replace("on 2 of 4 ranks", "on 1 of 2 ranks"), teams[2], TOLERANCE)


def test_a_rank_that_has_joined_gives_zeros() -> None:
    told = report("uneven_data.py")
    loss, images, *steps = (float(number) for number in NUMBER.findall(told))
    assert (images, steps) == (1797, [8, 7])
    assert loss == pytest.approx(loss_of_two_ranks_that_join(), rel=TOLERANCE)
    assert_same(told, shown("uneven_data.py"), OTHER_PROCESSOR)


def loss_of_two_ranks_that_join() -> float:
    """What examples/howto/uneven_data.py computes on two ranks, in one process without hvdkit."""
    pixels, digits = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(digits)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(5):
        total = 0.0
        for first in range(0, 1797, 256):  # a batch of each rank, the last time of rank 0 alone
            optimizer.zero_grad()
            for start in range(first, min(first + 256, 1797), 128):
                loss = nn.functional.cross_entropy(model(images[start : start + 128]), labels[start : start + 128])
                (loss / 2).backward()
                total += loss.item() * len(labels[start : start + 128])
            optimizer.step()
    return total / 1797


@dataclass(frozen=True)
class Mistake:
    """A how-to script with what its page warns about: lines to replace, by which, and what comes of it."""

    name: str
    what: str
    replaced: dict[str, str]
    error: str | None = None  # what is printed; None: other figures


AVERAGE = "hvd.callbacks.MetricAverageCallback(),"
STEP = "    with optimizer.skip_synchronize():\n        optimizer.step()"
MISTAKES = [
    Mistake(
        "gradient_clipping.py",
        "clipped before gradients are reduced",
        {"    optimizer.synchronize()\n": "", STEP: "    optimizer.step()"},
        "were changed after loss.backward() but before optimizer.step() or optimizer.synchronize()",
    ),
    Mistake(
        "gradient_clipping.py",
        "reduced once more, in a sum",
        {STEP: "    optimizer.step()", "model.named_parameters())": "model.named_parameters(), op=hvd.Sum)"},
    ),
    Mistake(
        "mixed_precision.py",
        "unscaled before gradients are reduced",
        {"    optimizer.synchronize()": "    pass"},
        "GradScaler.unscale_() was called after loss.backward() but before optimizer.synchronize()",
    ),
    Mistake("gradient_accumulation.py", "passes are not divided", {") / PASSES": ")"}),
    Mistake(
        "gradient_accumulation.py",
        "more passes than were announced",
        {"backward_passes_per_step=PASSES": "backward_passes_per_step=PASSES - 1"},
        "backward_passes_per_step",
    ),
    Mistake(
        "gradient_accumulation.py",
        "cleared between the passes",
        {"        loss.backward()": "        optimizer.zero_grad()\n        loss.backward()"},
        "optimizer.zero_grad() was called after loss.backward() but before optimizer.step()",
    ),
    Mistake(
        "several_optimizers.py",
        "the discriminator is not frozen",
        {"    discriminator.requires_grad_(False)\n": ""},
        "This is prohibited as it can cause a race condition",
    ),
    Mistake("evaluation.py", "the mean of means", {"hvd.allreduce(sums,": "hvd.allreduce(sums / sums[2],"}),
    Mistake(
        "checkpoints.py",
        "the momentum is rank 0's alone",
        {"    hvd.broadcast_optimizer_state(optimizer, root_rank=0)\n": ""},
        "ParametersDifferError",
    ),
    Mistake(
        "checkpoints.py",
        "the epoch is rank 0's alone",
        {"    done = hvd.broadcast_object(done, root_rank=0)\n": ""},
        "each waits for the other",
    ),
    Mistake(
        "uneven_data.py",
        "who joined goes on with what it had",
        {"    hvd.broadcast_parameters(model.state_dict(), root_rank=last)\n": ""},
        "ParametersDifferError",
    ),
    Mistake("uneven_data.py", "nobody joins", {"hvd.join()": "0"}, "each waits for the other"),
    Mistake(
        "uneven_data.py",
        "a rank that has joined has no statistics",
        {"nn.Linear(64, 32), nn.ReLU()": "nn.Linear(64, 32), hvd.SyncBatchNorm(32), nn.ReLU()"},
        "It is of SyncBatchNorm, which averages over all ranks' batches, and who has joined has none.",
    ),
    Mistake(
        "process_sets.py",
        "ranks add sets in another order",
        {"for first in range(2)]": "for first in (hvd.rank() % 2, 1 - hvd.rank() % 2)]"},
        "HINT: make process sets of the same ranks, in the same order, on every rank.",
    ),
    Mistake("sparse_embeddings.py", "Adam", {"torch.optim.SGD(": "torch.optim.Adam("}, "sparse gradients"),
    Mistake("sync_batch_norm.py", "not converted", {"hvd.SyncBatchNorm.convert_sync_batchnorm(model)": "model"}),
    Mistake(
        "early_stopping.py",
        "each rank looks at its own loss",
        {'hvd.allreduce(sums, op=hvd.Sum, name="validation").tolist()': "sums.tolist()"},
        "each waits for the other",
    ),
    Mistake(
        "objects.py",
        "rank 0 alone asks for what the others have",
        {"[mine[place] for place in wrong]})": "[mine[place] for place in wrong]}) if hvd.rank() == 0 else []"},
        "All ranks must make the same calls",
    ),
    Mistake(
        "keras_callbacks.py",
        "the learning rate follows each rank's own loss",
        {f"    {AVERAGE}\n": "", "min_delta=0.02),\n": f"min_delta=0.02),\n    {AVERAGE}\n"},
        "ranks have different learning rates at the end of epoch",
    ),
    Mistake(
        "keras_early_stopping.py",
        "each rank stops by its own loss",
        {f"        {AVERAGE}\n": "", "restore_best_weights=True),\n": f"restore_best_weights=True),\n{AVERAGE}\n"},
        "each waits for the other",
    ),
    Mistake(
        "tensorflow_data.py", "ranks shuffle by other seeds", {"set_random_seed(0)": "set_random_seed(hvd.rank())"}
    ),
]


@pytest.mark.thorough
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: f"{mistake.name}-{mistake.what.replace(' ', '-')}")
def test_what_a_page_warns_about_shows(mistake: Mistake, tmp_path: Path, without_torch: dict[str, str]) -> None:
    text = (SCRIPTS / mistake.name).read_text()
    for right, wrong in mistake.replaced.items():
        assert right in text
        text = text.replace(right, wrong)
    script = tmp_path / mistake.name
    script.write_text(text)
    done = start_example(script, **(without_torch if mistake.name in KERAS_ALIKE else {}))
    if mistake.error is not None:
        assert done.returncode != 0, done.stdout
        assert mistake.error in done.stderr, done.stderr
        return
    assert done.returncode == 0, done.stderr
    told = "\n".join(lines(done.stdout)).replace(" on 2 rank(s)", " on N rank(s)")
    assert NUMBER.sub("#", told) == NUMBER.sub("#", shown(mistake.name)), told
    assert not same(told, shown(mistake.name), OTHER_PROCESSOR), told
