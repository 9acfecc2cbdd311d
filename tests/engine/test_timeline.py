"""The trace on the disk is valid JSON after every flush, and a disk that fails costs a warning, never the training."""

import errno
import json
import logging
import os
import sys
import threading
import time
from pathlib import Path

import pytest

from hvdkit.engine.telemetry import timeline as module
from hvdkit.engine.telemetry.telemetry import Arrival, last_of
from hvdkit.engine.telemetry.timeline import Timeline
from tests.launch.launching import run_to_end


@pytest.fixture
def path(tmp_path):
    return tmp_path / "trace.json"


def events(path, phases="BEXi"):
    return [event for event in json.loads(Path(path).read_text()) if event["ph"] in phases]


def metadata(path, name, field):
    """By row: what events of this name say of it."""
    return {event["tid"]: event["args"][field] for event in events(path, "M") if event["name"] == name}


def test_the_file_is_valid_json_from_the_start_and_after_every_flush(path):
    timeline = Timeline(path, rank=3)
    assert events(path) == []
    for step in range(5):
        timeline.begin("bucket 0", "ALLREDUCE", step=step)
        timeline.end("bucket 0")
        timeline.flush()
        assert len(events(path)) == 2 * (step + 1)
    timeline.close()
    assert len(events(path)) == 10


def test_rows_have_names_in_their_order_and_a_process_stands_for_the_rank(path):
    timeline = Timeline(path, rank=3)
    for row in ("weight", "training: steps", 'bias "é"\n'):
        timeline.begin(row, "QUEUE")
    timeline.close()
    names, places = metadata(path, "thread_name", "name"), metadata(path, "thread_sort_index", "sort_index")
    assert [names[event["tid"]] for event in events(path)] == ["weight", "training: steps", 'bias "é"\n']
    assert [names[tid] for tid in sorted(places, key=places.get)] == ["training: steps", "weight", 'bias "é"\n']
    about_process = {e["name"]: e["args"] for e in events(path, "M") if e["name"].startswith("process")}
    assert about_process == {"process_name": {"name": "rank 3"}, "process_sort_index": {"sort_index": 3}}
    assert {event["pid"] for event in events(path, "MBEXi")} == {3}


def test_times_are_microseconds_since_the_recording_began_and_what_was_before_is_cut_off(path):
    before = time.perf_counter()
    timeline = Timeline(path, rank=0)
    timeline.begin("a", "WAIT")
    timeline.end("a")
    after = time.perf_counter()
    timeline.span("a", "SEND", after, after + 0.5, bytes=10)
    timeline.span("a", "SEND", before - 1, before - 0.5)
    timeline.span("a", "SEND", before - 1, after + 2)
    timeline.close()
    begin, end, span, past, half = events(path)
    assert 0 <= begin["ts"] <= end["ts"] <= span["ts"] <= (after - before) * 1e6
    assert (span["ph"], span["dur"], span["args"]) == ("X", 0.5e6, {"bytes": 10})
    assert (past["ts"], past["dur"], half["ts"]) == (0, 0, 0)
    assert 2e6 <= half["dur"] <= (after - before + 2) * 1e6


@pytest.mark.parametrize("mark_cycles", [True, False])
def test_any_argument_is_written_as_json_and_cycles_are_marked_on_request(path, mark_cycles):
    timeline = Timeline(path, rank=0, mark_cycles=mark_cycles)
    timeline.mark_cycle()
    timeline.instant("mark", ratio=float("nan"), path=Path("x"))
    timeline.instant("mark", path=Path("x"))
    timeline.close()
    assert [event["name"] for event in events(path)] == [*["CYCLE_START"] * mark_cycles, "mark", "mark"]
    assert [event["args"]["path"] for event in events(path)[mark_cycles:]] == [repr(Path("x")), "x"]


def test_the_last_rank_is_told_after_the_one_before_it_and_after_the_first():
    last = last_of({0: 10.0, 1: 10.5, 2: 10.125})
    assert last == Arrival(1, 0.375, 0.5)
    assert last.activity == "WAIT_FOR_RANK_1"
    assert last.fields == {"last_rank": 1, "ms_after_the_one_before": 375.0, "ms_after_the_first": 500.0}
    assert last_of({2: 5.0, 1: 5.0, 0: 1.0}) == Arrival(1, 0.0, 4.0)  # the lower one of two that come at once
    assert last_of({}) is last_of({3: 1.0}) is None


def test_who_records_flushes_by_number_and_by_time(path, monkeypatch):
    monkeypatch.setattr(module, "FLUSH_SECONDS", 3600.0)
    timeline = Timeline(path, rank=0)
    for _ in range(module.FLUSH_EVENTS - 1):
        timeline.instant("x")
    assert events(path) == []
    timeline.instant("x")
    assert len(events(path)) == module.FLUSH_EVENTS
    monkeypatch.setattr(module, "FLUSH_SECONDS", 0.0)
    timeline.flush()
    timeline.instant("y")
    assert events(path)[-1]["name"] == "y"
    timeline.close()


def test_no_event_of_any_thread_is_lost(path, monkeypatch):
    monkeypatch.setattr(module, "FLUSH_EVENTS", 50)
    timeline = Timeline(path, rank=0)

    def record(row):
        for step in range(500):
            timeline.begin(row, "STEP", step=step)
            timeline.end(row)

    threads = [threading.Thread(target=record, args=(f"row {k}",)) for k in range(6)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        timeline.flush()
        events(path)
    for thread in threads:
        thread.join()
    timeline.close()
    for row in range(1, 7):
        own = [event for event in events(path) if event["tid"] == row]
        assert [event["ph"] for event in own] == ["B", "E"] * 500
        assert [event["args"]["step"] for event in own[::2]] == list(range(500))


BEGIN = """
import os, sys
from hvdkit.engine.telemetry.timeline import Timeline
timeline = Timeline(sys.argv[1], rank=0)
"""


def run_timeline(code, path):
    done = run_to_end([sys.executable, "-c", BEGIN + code, str(path)])
    return done.status, [event.get("name") for event in events(path)]


def test_a_killed_process_leaves_valid_json_up_to_the_last_flush(path):
    code = """
timeline.begin("a", "FLUSHED")
timeline.flush()
timeline.begin("a", "LOST")
os._exit(7)
"""
    assert run_timeline(code, path) == (7, ["FLUSHED"])


def test_what_is_left_is_written_at_exit_and_not_again_by_a_forked_child(path):
    code = """
timeline.begin("a", "PARENT")
child = os.fork()
if child == 0:
    timeline.begin("a", "CHILD")
    timeline.flush()
    sys.exit(0)
os.waitpid(child, 0)
timeline.end("a")
"""
    assert run_timeline(code, path) == (0, ["PARENT", None])


def assert_one_warning(caplog, *parts):
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert all(part in record.getMessage() for part in parts)


@pytest.mark.parametrize(
    ("target", "reason"),
    [("/nowhere/at/all/trace.json", "No such file or directory"), ("/dev/full", "No space left on device")],
)
def test_a_path_that_cannot_be_written_costs_one_warning(target, reason, caplog):
    timeline = Timeline(target, rank=0)
    assert not timeline.recording
    for _ in range(10):
        timeline.begin("a", "WAIT")
        timeline.end("a")
        timeline.flush()
    timeline.close()
    timeline.close()
    assert_one_warning(caplog, target, reason)


def test_a_disk_that_fills_up_half_way_through_a_write_leaves_valid_json(path, monkeypatch, caplog):
    timeline = Timeline(path, rank=0)
    timeline.instant("kept")
    timeline.flush()
    real, room = os.pwrite, [40]

    def almost_full(file, data, position):
        if data == b"\n]\n":
            return real(file, data, position)
        if not room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(file, data[: room.pop()], position)

    monkeypatch.setattr(os, "pwrite", almost_full)
    for _ in range(100):
        timeline.instant("lost")
        timeline.flush()
    assert not timeline.recording
    assert_one_warning(caplog, str(path), "No space left on device")
    assert [event["name"] for event in events(path)] == ["kept"]
    timeline.close()
