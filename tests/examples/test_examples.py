"""Every example does what its docstring says, on real ranks, with small settings."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.examples.running import assert_only_one_rank_prints, lines, run_example
from tests.launch.launching import call_bare
from tests.ranks import ROOT

DIGITS_ACCURACY = re.compile(r"test accuracy ([\d.]+)% \(360 images, (\d+) process")


def digits_accuracy(output: str) -> float:
    reports = DIGITS_ACCURACY.findall(output)
    assert len(reports) == 1, output
    return float(reports[0][0])


@pytest.fixture(scope="module")
def trained_digits(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """Digits trained on two ranks with the defaults: the folder of the checkpoint, stdout, stderr."""
    folder = tmp_path_factory.mktemp("digits")
    return folder, *run_example("pytorch_digits.py", "--checkpoint-dir", folder)


def test_digits_reach_97_percent_on_two_ranks_and_leave_one_checkpoint(trained_digits: tuple[Path, str, str]) -> None:
    folder, output, progress = trained_digits
    assert digits_accuracy(output) >= 97
    assert len(lines(output)) == 1, output  # rank 0 alone speaks
    assert progress.count(" 0/460 ") == 1, progress  # each bar is drawn once at its start
    assert [path.name for path in folder.iterdir()] == ["digits.pt"]


@pytest.mark.thorough
def test_digits_resume_and_train_on(trained_digits: tuple[Path, str, str]) -> None:
    folder, _, _ = trained_digits
    output, _ = run_example("pytorch_digits.py", "--checkpoint-dir", folder, "--resume", "--epochs", 21)
    assert f"resumed from {folder / 'digits.pt'} after epoch 20" in output
    assert "nothing left to train" not in output
    assert digits_accuracy(output) >= 97
    assert_only_one_rank_prints(output)

    output, _ = run_example("pytorch_digits.py", "--checkpoint-dir", folder, "--resume", "--epochs", 21, size=1)
    assert "nothing left to train: 21 epochs are done" in output
    assert digits_accuracy(output) >= 97


def test_digits_without_resume_start_afresh(tmp_path: Path) -> None:
    path = tmp_path / "digits.pt"
    path.write_bytes(b"not a checkpoint")
    output, _ = run_example("pytorch_digits.py", "--checkpoint-dir", tmp_path, "--epochs", 1, size=1)
    assert "resumed" not in output
    assert path.read_bytes() != b"not a checkpoint"


def check_text(output: str, steps: list[str]) -> None:
    """Check a report of training on text: speed, loss and bytes at these steps, from one rank alone."""
    reports = re.findall(r"step (\d): loss ([\d.]+), ([\d,]+) tokens/s, ([\d.]+) MB sent per rank", output)
    assert [report[0] for report in reports] == steps, output
    for _, loss, speed, megabytes in reports:
        assert 4 < float(loss) < 7  # ln 256 = 5.5 for a guess
        assert int(speed.replace(",", "")) > 0
        assert float(megabytes) > 0
    assert "validation loss" in output
    assert_only_one_rank_prints(output)


TEXT = ["--steps", 3, "--layers", 1, "--width", 64, "--context", 32, "--batch-size", 2, "--max-bytes", 500_000]


def test_text_reports_speed_loss_and_bytes() -> None:
    check_text(run_example("pytorch_text.py", *TEXT, "--report-every", 1)[0], ["1", "2", "3"])


@pytest.mark.thorough
@pytest.mark.parametrize(("backend", "compression"), [("tensorflow", "none"), ("torch", "fp16")])
def test_keras_text_reports_speed_loss_and_bytes(backend, compression, environment: dict[str, str]) -> None:
    flags = ["--report-every", 2, "--compression", compression]
    check_text(run_example("keras_text.py", *TEXT, *flags, **environment)[0], ["2", "3"])


@pytest.mark.thorough
def test_text_sends_half_the_bytes_with_fp16() -> None:
    flags = ["--steps", 2, "--report-every", 1, "--layers", 1, "--width", 256, "--context", 32, "--batch-size", 1]
    sent = {}
    for compression in ("none", "fp16"):
        # In memory that ranks share nothing is sent, and nothing is compressed.
        output, _ = run_example("pytorch_text.py", *flags, "--compression", compression, HVDKIT_NODE_MEMORY="0")
        sent[compression] = float(re.findall(r"([\d.]+) MB sent", output)[-1])
    assert sent["none"] > 1  # 4 bytes for each of 926 thousand parameters, however the algorithm sends them
    assert sent["fp16"] == pytest.approx(sent["none"] / 2, rel=0.1), sent


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("script", "backend", "model", "flag"),
    [
        ("pytorch_synthetic_benchmark.py", None, "resnet18", "--fp16-allreduce"),
        ("pytorch_synthetic_benchmark.py", None, "resnet18", "--use-adasum"),
        ("tensorflow2_synthetic_benchmark.py", "tensorflow", "MobileNet", "--fp16-allreduce"),
    ],
)
def test_synthetic_benchmarks_report_as_horovods(script: str, backend, model: str, flag: str, environment) -> None:
    flags = ["--model", model, "--batch-size", 2, "--image-size", 32, "--no-cuda", "--threads", 1, flag]
    flags += ["--num-warmup-batches", 1, "--num-batches-per-iter", 1, "--num-iters", 2]
    output, _ = run_example(script, *flags, **environment)
    for pattern in (
        rf"Model: {model}\n",
        r"Iter #1: [\d.]+ img/sec per CPU",
        r"Img/sec per CPU: [\d.]+ \+-[\d.]+",
        r"Total img/sec on 2 CPU\(s\): [\d.]+ \+-[\d.]+",
    ):
        assert re.search(pattern, output), output
    assert output.count("Total img/sec") == 1, output


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("script", "backend", "epochs", "checkpoint"),
    [
        ("tensorflow2_digits.py", "tensorflow", 8, "digits-8"),
        ("keras_digits.py", "tensorflow", 10, "digits-010.keras"),
        ("keras_digits.py", "torch", 10, "digits-010.keras"),
    ],
)
def test_tensorflow_and_keras_digits_reach_97_percent_and_resume(
    script: str, backend: str, epochs: int, checkpoint: str, tmp_path: Path, environment: dict[str, str]
) -> None:
    output, _ = run_example(script, "--checkpoint-dir", tmp_path, "--epochs", epochs, **environment)
    assert digits_accuracy(output) >= 97
    assert_only_one_rank_prints(output)
    for last in (epochs, epochs + 1):
        output, _ = run_example(script, "--checkpoint-dir", tmp_path, "--resume", "--epochs", last, **environment)
        assert f"resumed from {tmp_path / checkpoint} after epoch {epochs}" in output
        assert (f"nothing left to train: {epochs} epochs are done" in output) == (last == epochs)
        assert digits_accuracy(output) >= 97
        assert_only_one_rank_prints(output)


@pytest.mark.parametrize(
    ("script", "backend"),
    [
        ("pytorch_digits_elastic.py", ""),
        pytest.param("keras_digits_elastic.py", "torch", marks=pytest.mark.thorough),
        pytest.param("keras_digits_elastic.py", "tensorflow", marks=pytest.mark.thorough),
    ],
)
def test_elastic_digits_reach_96_percent_though_a_rank_is_killed(script: str, backend: str) -> None:
    flags = ["-np", "2", "--min-np", "1", sys.executable, str(ROOT / "examples" / script), "--kill-at-epoch", "3"]
    environment = {"KERAS_BACKEND": backend, "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    result = call_bare(*flags, seconds=120, **environment)
    assert result.status == 0, result.stderr
    assert "was killed by signal SIGKILL (9); the job goes on with 1 rank" in result.stderr
    [accuracy] = re.findall(r"test accuracy ([\d.]+)%", result.stdout)
    assert float(accuracy) >= 96


@pytest.mark.thorough
@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "examples").glob("*.py")))
def test_examples_explain_their_options(name: str) -> None:
    output, _ = run_example(name, "--help", size=1)
    assert "options:" in output
    assert "(default:" in output
