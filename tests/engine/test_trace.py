"""``hvdkit timeline``: the ranks that came late, by a trace whose late rank is known."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hvdkit import command
from hvdkit.engine.telemetry.telemetry import Arrival
from hvdkit.engine.telemetry.timeline import TRAINING, Timeline
from hvdkit.engine.telemetry.trace import late_waits, read_trace, report_waits
from tests.launch.launching import run_to_end


def write_trace(path: Path, tensors: int = 100) -> None:
    """Write a trace: rank 1 is late by 2 s for many tensors at a time, and rank 2 by 100 ms in each of 5 steps."""
    timeline = Timeline(path, rank=0)
    began = timeline._began

    def wait(row: str, last: Arrival, end: float) -> None:
        timeline.span(row, last.activity, began + end - last.after_the_first, began + end, **last.fields)

    for number in range(tensors):
        wait(f"broadcast {number}", Arrival(1, 2.0, 2.1), 2.5 + number * 1e-4)
    for step in range(5):
        start = 3.0 + step
        timeline.span(f"{TRAINING}steps of SGD", f"STEP {step + 1}", began + start, began + start + 1.0)
        wait("SGD/bucket0", Arrival(2, 0.1, 0.2), start + 0.5)
        wait("SGD/bucket1", Arrival(2, 0.1, 0.2), start + 0.55)
        wait("allreduce 'loss'", Arrival(0, 0.0004, 0.0005), start + 0.9)
    timeline.begin("allreduce 'late'", "NEGOTIATE_ALLREDUCE")
    timeline.close()


@pytest.fixture
def path(tmp_path):
    write_trace(tmp_path / "trace.json")
    return tmp_path / "trace.json"


def test_waits_for_a_rank_at_the_same_time_count_once(path):
    waits = late_waits(read_trace(path))
    assert [(wait.rank, wait.in_step) for wait in waits] == [(1, False), *[(2, True)] * 5]
    assert [round(wait.end - wait.begin) for wait in waits] == [2010, *[150] * 5]


REPORT = """\
late               in steps                  outside of steps
            times   longest     total     times   longest     total
rank 1          0         -         -         1    2.01 s    2.01 s
rank 2          5    150 ms    750 ms         0         -         -

In 5 steps (5 s) the other ranks waited 750 ms for a late rank (15%), the longest time for rank 2 (750 ms).
Not finished when the recording ended: NEGOTIATE_ALLREDUCE of allreduce 'late'
"""


def test_the_report_names_late_ranks_in_steps_and_outside_of_them(path, capsys):
    assert command.main(["timeline", str(path)]) == 0
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == REPORT.splitlines()


def test_a_trace_without_waits_or_steps_is_told_in_a_sentence(path):
    trace = read_trace(path)
    assert report_waits(trace._replace(unfinished=[]), []) == "No rank was late in 5 steps (5 s)."
    bare = report_waits(trace._replace(activities=[], unfinished=[]), [])
    assert bare == "No steps are recorded: no optimizer of hvdkit made a step, or the recording ended before that."


@pytest.mark.parametrize("text", ["", "{}", '{"traceEvents": []}', "[1]", '[{"ph": "E", "tid": 1, "ts": 0}]'])
def test_other_files_are_refused_with_a_hint(tmp_path, text, capsys):
    file = tmp_path / "other.json"
    file.write_text(text)
    assert command.main(["timeline", str(file)]) == 1
    told = capsys.readouterr().err
    assert told.startswith(f"hvdkit timeline: {file} is not a timeline of hvdkit (")
    assert "\nHINT: record one with hvdkitrun --timeline-filename" in told
    assert command.main(["timeline", str(tmp_path / "none")]) == 1
    assert "No such file" in capsys.readouterr().err


def test_the_plot_names_late_ranks_and_has_a_legend(path, tmp_path):
    pytest.importorskip("matplotlib")
    assert command.main(["timeline", str(path), "--plot", str(tmp_path / "trace.svg")]) == 0
    drawn = (tmp_path / "trace.svg").read_text()
    for text in ("rank 1", "rank 2", "waits for a late rank", "SGD/bucket0", "STEP 2"):
        assert f"<!-- {text} -->" in drawn, text


def test_a_trace_without_activities_cannot_be_drawn(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    Timeline(tmp_path / "empty.json", rank=0).close()
    assert command.main(["timeline", str(tmp_path / "empty.json"), "--plot", str(tmp_path / "x.png")]) == 1
    assert capsys.readouterr().err == "hvdkit timeline: nothing to draw: the timeline has no finished activity\n"


def test_steps_that_follow_each_other_are_one_time_of_training(tmp_path):
    write_trace(tmp_path / "long.json")
    trace = read_trace(tmp_path / "long.json")
    between = trace.steps[0].end
    wait = trace.activities[0]._replace(end=between + 0.0005, args={"last_rank": 3, "ms_after_the_one_before": 50.0})
    assert [wait.in_step for wait in late_waits(trace._replace(activities=[*trace.steps, wait]))] == [True]


def test_without_matplotlib_the_plot_says_what_to_install(path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert command.main(["timeline", str(path), "--plot", "x.png"]) == 1
    assert "HINT: pip install matplotlib" in capsys.readouterr().err


READS = """
import sys
from hvdkit.command import main
main(sys.argv[1:])
print(sorted({"torch", "tensorflow", "matplotlib"} & sys.modules.keys()))
"""


def test_no_framework_is_imported_to_read_a_trace(path):
    done = run_to_end([sys.executable, "-c", READS, "timeline", str(path)])
    assert done.stdout.splitlines()[-1] == "[]"
