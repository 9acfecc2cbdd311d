"""A failed job in a few lines: whom it names, what it folds, and where all of it is."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdkit.environments.failure_record import BEGINS, MARK, Record, is_of_a_library, of_exception, parse
from hvdkit.launch.failures import LONGEST_LINE, Failures, first_to_fail, shortened, spans
from hvdkit.launch.output import Output
from tests.launch.launching import run_to_end
from tests.launch.test_output import cut
from tests.ranks import rank_environment


def own(text: str = "ValueError: mine") -> Record:
    return Record(text, '  File "w.py", line 3, in <module>\n    step()\n')


def of(rank: int) -> Record:
    return Record(f"hvdkit.errors.PeerLostError: rank {rank} has left the job", after=rank)


@pytest.mark.parametrize(
    ("records", "ended", "by_signal", "first"),
    [
        ({1: own()}, 1, False, 1),
        ({1: own(), 0: of(1)}, 0, False, 1),  # which ends while rank 1 says goodbye
        ({0: of(1), 1: own()}, 0, False, 1),
        ({0: of(1)}, 0, False, 1),  # which left in good order, and too early
        ({0: own()}, 1, True, 1),  # which was killed, and rank 0 got another error
        ({0: of(1), 2: of(1)}, 1, False, 1),  # which ended without a word
        ({0: of(-1)}, 0, False, 0),  # who is to blame is not known
        ({}, 2, False, 2),
        ({2: own(), 0: own()}, 0, False, 2),  # both of the same
        ({0: of(2), 2: of(1)}, 0, False, 1),
    ],
)
def test_who_failed_first(records: dict[int, Record], ended: int, by_signal: bool, first: int):
    assert first_to_fail(records, ended, by_signal) == first


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("rank 1 (h) gave rank 0 (h) no sign of life for 3 s", "gave no sign of life, which ended the job"),
        ("rank 1 (h) is alive, but it gave rank 0 (h) no answer for 9 s", "gave no answer, which ended the job"),
        ("'x' waits for rank 1, which has left the job", "left the job before the others, which ended it"),
    ],
)
def test_a_rank_that_was_stopped_did_not_leave(error: str, words: str):
    failures = Failures()
    failures.take(0, Record(f"hvdkit.errors.PeerLostError: {error}", after=1), "")
    assert failures.absence(1) == words


def test_the_files_of_the_newest_failed_jobs_stay(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for number in range(8):
        (tmp_path / f"hvdkit-{number}-failure.txt").touch()
        os.utime(tmp_path / f"hvdkit-{number}-failure.txt", (number, number))
    (tmp_path / "hvdkit-other.txt").touch()
    failures = Failures()
    failures.take(0, own(), "")
    failures.show_rest(0, None)
    left = {path.name for path in tmp_path.iterdir()}
    assert {"hvdkit-other.txt", *(f"hvdkit-{number}-failure.txt" for number in (4, 5, 6, 7))} < left
    assert len(left) == 6


def test_a_rank_that_fails_while_the_launcher_ends_it_is_not_the_first():
    failures = Failures()
    failures.take(0, own(), "")
    between = time.monotonic()
    failures.take(2, own(), "")
    assert failures.first(ended=1, by_signal=False, at=math.inf) == 0
    assert failures.first(ended=2, by_signal=False, at=failures.times[0]) == 2
    assert failures.first(ended=1, by_signal=False, at=failures.times[0]) == 1
    assert failures.first(ended=1, by_signal=False, at=between) == 0
    failures.take(3, of(4), "")
    assert failures.first(ended=3, by_signal=False, at=failures.times[0]) == 4


def kept_tracebacks(line: str) -> str:
    """Return, and remove, what was kept where this line says."""
    kept = re.match(
        r"hvdkitrun: all tracebacks are in (.*) \(the newest 5 such files are kept\); --verbose prints them", line
    )
    assert kept is not None
    text = Path(kept[1]).read_text()
    Path(kept[1]).unlink()
    return text


def shown(capfd: pytest.CaptureFixture[str], records: dict[int, Record], verbose: bool = False) -> list[str]:
    failures = Failures(verbose)
    for rank, record in records.items():
        assert failures.take(rank, record, f"Traceback of {rank}\n")
        assert not failures.take(rank, of(7), "of another process of it")
    first = first_to_fail(records, next(iter(records)), by_signal=False)
    failures.show_rest(first, None)
    lines = capfd.readouterr().err.splitlines()
    if not verbose:
        text = kept_tracebacks(lines.pop())
        assert text == "".join(f"rank {rank}:\nTraceback of {rank}\n" for rank in sorted(records))
    return lines


def test_the_first_to_tell_is_shown_and_the_others_have_a_line_or_less(capfd: pytest.CaptureFixture[str]):
    mine = own("a.b.ValueError: mine\nHINT: do it")
    block = ['  File "w.py", line 3, in <module>', "    step()", "a.b.ValueError: mine", "HINT: do it"]
    left = "PeerLostError: rank 2 has left the job"
    assert shown(capfd, {2: mine, 0: of(2), 1: of(2), 3: mine}) == [
        "hvdkitrun: rank 2 failed:", *block, f"hvdkitrun: ranks 0-1: {left}", "hvdkitrun: rank 3: the same"
    ]  # fmt: skip
    assert shown(capfd, {0: of(2), 2: mine, 1: of(2)}) == [
        f"hvdkitrun: rank 0: {left}", "hvdkitrun: rank 2 failed:", *block, "hvdkitrun: rank 1: the same"
    ]  # fmt: skip
    assert shown(capfd, {0: of(2)}) == [
        f"hvdkitrun: rank 0: {left}", "hvdkitrun: rank 0 waited for rank 2:"
    ]  # fmt: skip
    assert shown(capfd, {0: of(-1)}) == [
        "hvdkitrun: rank 0: PeerLostError: rank -1 has left the job", "hvdkitrun: rank 0 waited for another rank:"
    ]  # fmt: skip
    assert shown(capfd, {1: mine, 0: of(2)}, verbose=True) == [
        "hvdkitrun: rank 1 failed:", "Traceback of 1", "hvdkitrun: rank 0 failed:", "Traceback of 0"
    ]  # fmt: skip


def test_ranks_and_long_lines_are_shortened_and_say_so():
    assert spans([0, 2, 3, 4, 63]) == "0, 2-4, 63"
    for error, short in (
        ("a.b.KeyError: 3\nHINT: x", "KeyError: 3"),
        ("it called sys.exit(3)", "it called sys.exit(3)"),
        ("a.KeyError", "KeyError"),
    ):
        assert shortened(error) == short
    assert shortened("E: " + "x" * 2 * LONGEST_LINE).endswith("x ... (cut off here)")


def test_a_record_holds_the_users_own_lines():
    script = "import json\ndef main():\n    json.loads('no')\nmain()\n"
    try:
        exec(compile(script, "w.py", "exec"), {})  # noqa: S102 (a script of its own name)
    except ValueError as error:
        record = of_exception(type(error), error, error.__traceback__.tb_next, after=3)
    assert record.frames == (
        '  File "w.py", line 4, in <module>\n  File "w.py", line 3, in main\n  ... 3 lines in libraries\n'
    )
    assert record.error == "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)"
    assert parse(record.line().encode()) == record
    assert record.after == 3
    assert parse(f"{MARK}{{}}\n".encode()) is None
    assert parse(f"{MARK}not whole".encode()) is None
    assert is_of_a_library(textwrap.__file__)
    assert is_of_a_library("/home/me/.local/lib/python3.11/site-packages/torch/nn.py")
    assert not is_of_a_library("/home/me/train.py")


def test_what_an_exception_came_of_is_told():
    try:
        try:
            raise KeyError("x")
        except KeyError as error:
            raise ValueError("no x") from error
    except ValueError as error:
        record = of_exception(type(error), error, error.__traceback__)
    assert record.error == "ValueError: no x\nCaused by KeyError: 'x'"


FAILS = """
import os, sys, hvdkit.torch as hvd, torch
hvd.init()
def train():
    if hvd.rank() == 1:
        {fails}
    hvd.allreduce(torch.ones(3), name="x")
train()
"""


def script(folder: Path, fails: str) -> Path:
    path = folder / "w.py"
    path.write_text(textwrap.dedent(FAILS.format(fails=fails)))
    return path


def run(controller: str, path: Path, *flags: str) -> tuple[int, list[str]]:
    result = run_to_end(launch(controller, *flags, sys.executable, str(path)), 100)
    return result.status, result.stderr.splitlines()


def launch(controller: str, *words: str) -> list[str]:
    return [sys.executable, "-m", "hvdkit.launch", controller, "-np", "3", *words]


def test_a_job_that_raises_is_told_in_ten_lines(controller: str, tmp_path: Path):
    path = script(tmp_path, "raise ValueError('no data\\nHINT: get some')")
    status, lines = run(controller, path)
    assert status == 1
    assert lines[:7] == [
        "hvdkitrun: rank 1 failed:",
        f'  File "{path}", line 8, in <module>',
        "    train()",
        f'  File "{path}", line 6, in train',
        "    raise ValueError('no data\\nHINT: get some')",
        "ValueError: no data",
        "HINT: get some",
    ]
    # A rank that is slow to notice may be ended before it has told of it, or while it does.
    others = [line for line in lines[7:-2] if not line.startswith("[")]
    for line in others:
        assert re.fullmatch("hvdkitrun: ranks? (0|2|0, 2): PeerLostError: .*rank 1.*", line), lines
    text = kept_tracebacks(lines[-2])
    assert "rank 1:\nTraceback (most recent call last):\n" in text
    assert "in allreduce" in text or not others
    assert re.fullmatch("hvdkitrun: rank 1 on .* (failed|exited) with code 1, which ended the job", lines[-1])
    assert len(others) <= 2


@pytest.mark.essential(controller="--gloo")
def test_a_rank_that_leaves_early_is_blamed_and_not_who_waits_for_it(controller: str, tmp_path: Path):
    status, lines = run(controller, script(tmp_path, "sys.exit(0)"), "--output-filename", str(tmp_path / "out"))
    assert status == 1
    assert re.match("hvdkitrun: rank [02]: PeerLostError: allreduce 'x' .*rank 1, which has left the job", lines[0])
    assert f'  File "{tmp_path}/w.py", line 7, in train' in lines, "where it was missed"
    assert re.fullmatch("hvdkitrun: rank [02] waited for rank 1:", next(line for line in lines if line.endswith(":")))
    assert any(line.startswith("HINT: see what rank 1 printed.") for line in lines)
    assert sum("PeerLostError" in line for line in lines) <= 2, "once for each rank"
    assert lines[-2] == f"hvdkitrun: all tracebacks are in {tmp_path}/out/failure.txt; --verbose prints them"
    assert re.fullmatch("hvdkitrun: rank 1 on .* left the job before the others, which ended it", lines[-1])
    assert "PeerLostError" in (tmp_path / "out" / "failure.txt").read_text()
    assert MARK not in (tmp_path / "out" / "rank.0" / "stderr").read_text()


MPIRUN_CRASHES = """
import psutil, signal, time
tells = sys.excepthook
def crash(*failure):
    tells(*failure)
    time.sleep(1)  # until mpirun has handed it on
    psutil.Process().parent().parent().send_signal(signal.SIGSEGV)  # the parent is the rank's worker
sys.excepthook = crash
raise ValueError("no data")
"""


def test_where_mpirun_itself_crashes_the_rank_that_failed_is_named(tmp_path: Path):
    status, lines = run("--mpi", script(tmp_path, f"exec({MPIRUN_CRASHES!r}, globals())"))
    assert status == 1, lines
    assert {"hvdkitrun: rank 1 failed:", "ValueError: no data"} <= set(lines)
    assert "hvdkitrun: mpirun itself was killed by signal SIGSEGV (11)" in lines
    assert re.fullmatch(r"hvdkitrun: rank 1 on \S+ exited with code 1, which ended the job", lines[-1])


@pytest.mark.essential(controller="--mpi")
def test_an_exit_code_is_told_and_verbose_shows_all(controller: str, tmp_path: Path):
    status, lines = run(controller, script(tmp_path, "sys.exit(3)"), "--verbose")
    assert status == 3
    text = "\n".join(lines)
    outer, inner = (rf'  File "[^"]+w\.py", line \d+, in {name}\n    ' for name in ("<module>", "train"))
    places = rf"{outer}train\(\)\n{inner}sys\.exit\(3\)"
    assert re.search(rf"hvdkitrun: rank 1 failed:\n{places}\nit called sys\.exit\(3\)\n", text), text
    assert "all tracebacks are in" not in text
    assert "rank 1 on " in lines[-1]


@pytest.mark.essential(controller="--gloo")
def test_what_a_rank_prints_itself_stays_and_its_children_are_not_asked(controller: str, tmp_path: Path):
    child = "import os, sys; print('asked', os.environ.get('HVDKIT_FAILURE_RECORDS'), file=sys.stderr)"
    fails = f"import subprocess; subprocess.run([sys.executable, '-c', {child!r}])"
    status, lines = run(controller, script(tmp_path, f"{fails}; sys.stderr.write('half a line'); raise KeyError(3)"))
    assert status == 1
    assert "[1]<stderr>: asked None" in lines
    assert "[1]<stderr>: half a line" in lines
    assert "KeyError: 3" in lines


@pytest.mark.essential(controller="--mpi")
def test_a_failure_is_shown_at_once_and_all_of_it_kept_where_the_rank_does_not_end(controller: str, tmp_path: Path):
    stays = "import threading; threading.Thread(target=threading.Event().wait).start(); raise ValueError('here')"
    command = launch(controller, sys.executable, str(script(tmp_path, stays)))
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=rank_environment()) as job:
        assert job.stderr is not None
        lines = []
        while not lines or lines[-1] != "ValueError: here\n":
            lines.append(job.stderr.readline())
            assert lines[-1], lines
        job.send_signal(signal.SIGINT)
        rest = job.stderr.read().splitlines()
    assert job.returncode == 128 + signal.SIGINT
    assert "hvdkitrun: rank 1 failed:\n" in lines
    [text] = [kept_tracebacks(line) for line in rest if line.startswith("hvdkitrun: all tracebacks are in ")]
    assert "rank 1:\nTraceback (most recent call last):\n" in text
    assert rest[-1] == "hvdkitrun: ended all ranks after SIGINT"


@settings(deadline=None)
@given(st.lists(st.integers(0, 900)))
def test_a_traceback_is_kept_back_until_its_record_comes_and_shown_if_it_never_does(places: list[int]):
    begins, record = BEGINS.encode() + b"\n", own().line().encode()
    no_record = b"a\n" + MARK.encode() + b"no record\n"
    for data, shown, kept, whole in (
        (
            b"a\nb" + begins + b"Traceback\n x\n" + record + b"after\n",
            b"a\nb\nafter\n", "Traceback\n x\n", b"a\nbTraceback\n x\nafter\n",
        ),
        (b"a\n" + begins + b"Traceback\n x\n", b"a\nTraceback\n x\n", None, b"a\nTraceback\n x\n"),
        (begins + b"Traceback\n" + no_record, b"Traceback\n" + no_record, None, b"Traceback\na\n"),
        (record, b"", "", b""),
        (record + begins + b"Another\n" + record, b"Another\n", "", b"Another\n"),
    ):  # fmt: skip
        written: list[bytes] = []
        with tempfile.TemporaryDirectory() as folder:
            output = Output(1, Path(folder))
            output._show = lambda rank, stream, lines, written=written: written.extend(lines)
            for piece in cut(data, places):
                output.write(0, "stderr", piece)
            output.close()
            assert (Path(folder) / "rank.0" / "stderr").read_bytes() == whole
        assert b"".join(written) == shown
        assert output.failures.tracebacks.get(0) == kept
        assert output.failures.records == ({} if kept is None else {0: own()})
