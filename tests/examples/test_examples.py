"""Every example does what its docstring says, on real ranks, with small settings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.examples.running import assert_only_one_rank_prints, lines, run_example
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


def test_digits_reach_97_percent_on_two_ranks(trained_digits: tuple[Path, str, str]) -> None:
    _, output, _ = trained_digits
    assert digits_accuracy(output) >= 97


def test_digits_speak_on_rank_0_only(trained_digits: tuple[Path, str, str]) -> None:
    _, output, progress = trained_digits
    assert len(lines(output)) == 1, output
    # Each bar is drawn once at its start.
    assert progress.count(" 0/460 ") == 1, progress


def test_digits_leave_one_whole_checkpoint(trained_digits: tuple[Path, str, str]) -> None:
    folder, _, _ = trained_digits
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


@pytest.mark.thorough
def test_digits_reach_97_percent_alone(tmp_path: Path) -> None:
    output, _ = run_example("pytorch_digits.py", "--checkpoint-dir", tmp_path, size=1)
    assert digits_accuracy(output) >= 97


@pytest.mark.parametrize("compression", ["none", pytest.param("fp16", marks=pytest.mark.thorough)])
def test_text_reports_speed_loss_and_bytes(compression: str) -> None:
    flags = ["--steps", 3, "--report-every", 1, "--layers", 1, "--width", 64, "--context", 32, "--batch-size", 2]
    output, _ = run_example("pytorch_text.py", *flags, "--max-bytes", 500_000, "--compression", compression)
    reports = re.findall(r"step (\d): loss ([\d.]+), ([\d,]+) tokens/s, ([\d.]+) MB sent per rank", output)
    assert [report[0] for report in reports] == ["1", "2", "3"], output
    for _, loss, speed, megabytes in reports:
        assert 4 < float(loss) < 7  # ln 256 = 5.5 for a guess
        assert int(speed.replace(",", "")) > 0
        assert float(megabytes) > 0
    assert "validation loss" in output
    assert_only_one_rank_prints(output)


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
@pytest.mark.parametrize("flag", [None, "--fp16-allreduce", "--use-adasum"])
def test_synthetic_benchmark_reports_as_horovods(flag: str | None) -> None:
    flags = ["--model", "resnet18", "--batch-size", 2, "--image-size", 32, "--no-cuda", "--threads", 1]
    flags += ["--num-warmup-batches", 1, "--num-batches-per-iter", 1, "--num-iters", 2, *([flag] if flag else [])]
    output, _ = run_example("pytorch_synthetic_benchmark.py", *flags)
    assert re.search(r"Model: resnet18\n", output), output
    assert re.search(r"Iter #1: [\d.]+ img/sec per CPU", output), output
    assert re.search(r"Img/sec per CPU: [\d.]+ \+-[\d.]+", output), output
    assert re.search(r"Total img/sec on 2 CPU\(s\): [\d.]+ \+-[\d.]+", output), output
    assert output.count("Total img/sec") == 1, output


@pytest.mark.thorough
def test_tensorflow_digits_reach_97_percent_and_resume_without_pytorch(
    tmp_path: Path, without_torch: dict[str, str]
) -> None:
    name, flags = "tensorflow2_digits.py", ["--checkpoint-dir", tmp_path]
    output, progress = run_example(name, *flags, "--epochs", 8, **without_torch)
    assert digits_accuracy(output) >= 97
    assert len(lines(output)) == 1, output
    assert progress.count(" 0/184 ") == 1, progress
    assert sorted(path.name.partition(".")[0] for path in tmp_path.iterdir()) == ["checkpoint", "digits-8", "digits-8"]

    output, _ = run_example(name, *flags, "--resume", "--epochs", 8, **without_torch)
    assert f"resumed from {tmp_path / 'digits-8'} after epoch 8" in output
    assert "nothing left to train: 8 epochs are done" in output
    assert digits_accuracy(output) >= 97
    assert_only_one_rank_prints(output)


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
def test_keras_digits_reach_97_percent_and_resume(backend: str, tmp_path: Path, without_torch: dict[str, str]) -> None:
    environment = without_torch if backend == "tensorflow" else {"KERAS_BACKEND": backend}
    name, flags = "keras_digits.py", ["--checkpoint-dir", tmp_path]
    output, _ = run_example(name, *flags, "--epochs", 10, **environment)
    assert digits_accuracy(output) >= 97
    assert_only_one_rank_prints(output)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"digits-{epoch:03d}.keras" for epoch in range(1, 11)]

    output, _ = run_example(name, *flags, "--resume", "--epochs", 11, **environment)
    assert f"resumed from {tmp_path / 'digits-010.keras'} after epoch 10" in output
    assert "nothing left to train" not in output
    assert digits_accuracy(output) >= 97
    assert_only_one_rank_prints(output)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("backend", "compression"),
    [("tensorflow", "none"), ("torch", "fp16")],
)
def test_keras_text_reports_speed_loss_and_bytes(backend: str, compression: str, without_torch: dict[str, str]) -> None:
    environment = without_torch if backend == "tensorflow" else {"KERAS_BACKEND": backend}
    flags = ["--steps", 3, "--report-every", 2, "--layers", 1, "--width", 64, "--context", 32, "--batch-size", 2]
    flags += ["--max-bytes", 500_000, "--compression", compression]
    output, _ = run_example("keras_text.py", *flags, **environment)
    reports = re.findall(r"step (\d): loss ([\d.]+), ([\d,]+) tokens/s, ([\d.]+) MB sent per rank", output)
    assert [report[0] for report in reports] == ["2", "3"], output
    for _, loss, speed, megabytes in reports:
        assert 4 < float(loss) < 7  # ln 256 = 5.5 for a guess
        assert int(speed.replace(",", "")) > 0
        assert float(megabytes) > 0
    assert "validation loss" in output
    assert_only_one_rank_prints(output)


@pytest.mark.thorough
def test_tensorflow_synthetic_benchmark_reports_as_horovods(without_torch: dict[str, str]) -> None:
    flags = ["--model", "MobileNet", "--batch-size", 2, "--image-size", 32, "--no-cuda", "--threads", 1]
    flags += ["--num-warmup-batches", 1, "--num-batches-per-iter", 1, "--num-iters", 2, "--fp16-allreduce"]
    output, _ = run_example("tensorflow2_synthetic_benchmark.py", *flags, **without_torch)
    assert re.search(r"Model: MobileNet\n", output), output
    assert re.search(r"Iter #1: [\d.]+ img/sec per CPU", output), output
    assert re.search(r"Img/sec per CPU: [\d.]+ \+-[\d.]+", output), output
    assert re.search(r"Total img/sec on 2 CPU\(s\): [\d.]+ \+-[\d.]+", output), output
    assert output.count("Total img/sec") == 1, output


@pytest.mark.thorough
@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "examples").glob("*.py")))
def test_examples_explain_their_options(name: str) -> None:
    output, _ = run_example(name, "--help", size=1)
    assert "options:" in output
    assert "(default:" in output
