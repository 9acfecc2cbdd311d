"""Every how-to script prints on two ranks what one process prints, as its page says; and the mistakes show."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.running import TIMEOUT_SECONDS, lines, run_example
from tests.launch.launching import Result, run_to_end
from tests.ranks import ROOT

SCRIPTS = ROOT / "examples" / "howto"
PAGES = ROOT / "docs" / "howto"
NUMBER = re.compile(r"(?<![\w*.])-?\d+(?:\.\d+)?")
# Sums of other numbers of float32 values are rounded otherwise; so are those of another processor.
TOLERANCE, OTHER_PROCESSOR = 1e-5, 2e-3
# Gradients of half a batch are rounded to bfloat16, of which a step takes the mean.
BFLOAT16_TOLERANCE = 2e-3
# An image whose two best scores are nearly equal may be right in one process, and wrong on two ranks.
ACCURACY_TOLERANCE = 1e-3

# What prints the same on one process as on two ranks, as far as it is rounded alike.
ALIKE = {
    "checkpoints.py": TOLERANCE,
    "data_loader_workers.py": TOLERANCE,
    "early_stopping.py": TOLERANCE,
    "evaluation.py": TOLERANCE,
    "gradient_accumulation.py": TOLERANCE,
    "gradient_clipping.py": TOLERANCE,
    "logging_metrics.py": ACCURACY_TOLERANCE,
    "mixed_precision.py": BFLOAT16_TOLERANCE,
    "objects.py": TOLERANCE,
    "several_optimizers.py": TOLERANCE,
    "sparse_embeddings.py": TOLERANCE,
    "sync_batch_norm.py": TOLERANCE,
    "torch_compile.py": TOLERANCE,
}
KERAS_ALIKE = ("keras_callbacks.py", "keras_early_stopping.py", "tensorflow_data.py")
# What make test runs of the former; what the others show is tested in each framework's own room, too.
ESSENTIAL = ("checkpoints.py", "evaluation.py", "gradient_clipping.py", "sync_batch_norm.py")
# What needs other libraries, and is tested in test_libraries.py.
LIBRARIES = (
    "accelerate_group.py",
    "accelerate_optimizer.py",
    "lightning_group.py",
    "lightning_strategy.py",
    "trainer_group.py",
    "trainer_optimizer.py",
)
# What has tests of its own below.
OTHERS = (
    "keras_learning_rate.py",
    "learning_rate.py",
    "notebook.py",
    "process_sets.py",
    "slow_network.py",
    "test_training.py",
    "uneven_data.py",
)


def report(name: str | Path, size: int = 2, **environment: str) -> str:
    """What a script prints, on rank 0 alone, with the number of ranks, which it is asked to tell, left out."""
    output, _ = run_example(Path("howto") / name, size=size, **environment)
    told = "\n".join(lines(output))
    assert f"[{size - 1}]<stdout>" not in output.replace("[0]<stdout>", ""), output
    assert f" on {size} rank(s)" in told, output
    return told.replace(f" on {size} rank(s)", " on N rank(s)")


def shown(name: str) -> str:
    """What the page of a script says that it prints."""
    mark = f"<!-- code: examples/howto/{name} -->"
    pages = [page.read_text() for page in PAGES.glob("*.md") if mark in page.read_text()]
    assert len(pages) == 1, f"{name} is in {len(pages)} pages"
    command = rf"python (?:-m pytest [^\n]*)?examples/howto/{name}"
    block = re.search(rf"{command}\n```\n\n```text\n(.*?)\n```", pages[0], re.DOTALL)
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
    assert scripts == {*ALIKE, *KERAS_ALIKE, *LIBRARIES, *OTHERS}
    for name in scripts:
        assert shown(name)


def test_the_index_lists_every_page() -> None:
    pages = {page.name for page in PAGES.glob("*.md")} - {"index.md"}
    assert set(re.findall(r"\]\((\w+\.md)\)", (PAGES / "index.md").read_text())) == pages


@pytest.mark.parametrize(
    "name", [name if name in ESSENTIAL else pytest.param(name, marks=pytest.mark.thorough) for name in ALIKE]
)
def test_two_ranks_print_what_one_process_prints(name: str) -> None:
    if name == "torch_compile.py" and shutil.which("g++") is None:
        pytest.skip("needs a compiler")
    two = report(name)
    assert_same(two, report(name, size=1), ALIKE[name])
    assert_same(two, shown(name), OTHER_PROCESSOR)


def test_a_resumed_training_ends_as_one_without_a_break() -> None:
    at_once, first, resumed = shown("checkpoints.py").splitlines()
    assert first.startswith("epochs 0 to 10")
    assert at_once.removeprefix("epochs 0 to 20: ") == resumed.removeprefix("epochs 10 to 20: ")


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
@pytest.mark.parametrize("name", KERAS_ALIKE)
def test_two_ranks_print_what_one_process_prints_in_keras(name: str, backend: str, environment) -> None:
    if backend == "torch" and not name.startswith("keras_"):
        pytest.skip("of TensorFlow alone")
    two = report(name, **environment)
    assert_same(two, report(name, size=1, **environment), TOLERANCE)
    if backend == "tensorflow":
        assert_same(two, shown(name), OTHER_PROCESSOR)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("script", "backend", "rates"),
    [
        ("learning_rate.py", None, "0.050, 0.075, 0.100, 0.100, 0.100, 0.100;"),
        ("keras_learning_rate.py", "tensorflow", "0.075, 0.100, 0.100, 0.100, 0.100, 0.100;"),  # after each epoch
        ("keras_learning_rate.py", "torch", "0.075, 0.100, 0.100, 0.100, 0.100, 0.100;"),
    ],
)
def test_the_learning_rate_grows_from_one_process_s_to_that_of_all_ranks(script, backend, rates, environment) -> None:
    two = report(script, **environment)
    assert f"rates {rates}" in two
    assert NUMBER.sub("#", two) == NUMBER.sub("#", shown(script))
    assert float(two.split("loss ")[1].split(",")[0]) < 0.5
    assert "rates 0.050, 0.050, 0.050, 0.050, 0.050, 0.050;" in report(script, size=1, **environment)


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
    printed = report("uneven_data.py")
    _, images, *steps = (float(number) for number in NUMBER.findall(printed))
    assert (images, steps) == (1797, [8, 7])
    assert_same(printed, shown("uneven_data.py"), OTHER_PROCESSOR)


def run_pytest(path: Path) -> Result:
    """Run a file of tests on two ranks."""
    tests = [sys.executable, "-m", "pytest", "-q", "--tb=short", "--color=no", "-p", "no:cacheprovider", str(path)]
    return run_to_end([sys.executable, "-m", "hvdkit.launch", "-np", "2", *tests], TIMEOUT_SECONDS)


@pytest.mark.thorough
def test_tests_of_a_training_pass_on_all_ranks_and_fail_on_all_ranks(tmp_path: Path) -> None:
    passed = run_pytest(SCRIPTS / "test_training.py")
    assert passed.status == 0, passed.stdout
    told = shown("test_training.py")
    printed, expected = (sorted(NUMBER.sub("#", line) for line in lines(text)) for text in (passed.stdout, told))
    assert printed == expected
    script = (SCRIPTS / "test_training.py").read_text()
    share = "slice(hvd.rank(), len(images), hvd.size())"
    wrong = tmp_path / "test_wrong.py"
    wrong.write_text(script.replace(share, "slice(0, len(images) // hvd.size())"))
    assert wrong.read_text() != script
    failed = run_pytest(wrong)
    assert failed.status == 1
    assert failed.stdout.count("2 failed, 1 passed in") == 2, failed.stdout


def makes_namespaces() -> bool:
    """True if this user may make network namespaces and the tools are there."""
    if sys.platform != "linux" or os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc", "unshare"))):
        return False
    command = ["unshare", "--net", "ip", "link", "add", "one", "type", "veth", "peer", "name", "two"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def network_namespaces() -> set[str]:
    return set(subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout.splitlines())


@pytest.mark.thorough
@pytest.mark.skipif(not makes_namespaces(), reason="two hosts on one machine take root, ip and tc")
def test_a_script_trains_with_each_codec_over_a_slow_wire_and_no_host_is_left() -> None:
    before = network_namespaces()
    words = ["examples/howto/slow_network.sh", "200mbit", sys.executable, "examples/howto/slow_network.py"]
    done = run_to_end(["sh", *words], TIMEOUT_SECONDS)
    assert done.status == 0, done.stderr
    milliseconds = {name: float(number) for name, number in re.findall(r"(\w+): (\d+) ms a step", done.stdout)}
    assert milliseconds.keys() == {"none", "fp16", "int8"}
    assert all(time > 0 for time in milliseconds.values()), milliseconds
    told = done.stdout.strip().replace(" on 2 rank(s)", " on N rank(s)")
    assert NUMBER.sub("#", told) == NUMBER.sub("#", shown("slow_network.py"))
    assert not [name for name in network_namespaces() - before if name.startswith("slow-")]


def test_the_page_of_the_slow_network_shows_its_shell_script() -> None:
    assert f"```sh\n{(SCRIPTS / 'slow_network.sh').read_text()}```" in (PAGES / "slow_network.md").read_text()
