"""Hosts that join an elastic job by ``hvdkitrun --join``: they come, go, and are lost; strangers do not come in."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from hvdkit.launch.elastic.agent import BEAT, OUTPUT, Frame
from hvdkit.launch.elastic.sealed import SealedChannel, prove
from hvdkit.transports.security.credentials import NotAuthenticError
from tests.launch.launching import PATIENCE_SECONDS, call_bare
from tests.launch.test_elastic import RunningJob, elastic_job
from tests.ranks import PIPES, rank_environment
from tests.waiting import until

LISTEN = "--min-np 1 --network-interfaces lo --listen 127.0.0.1:0 --secret-file"
MAIN = "import sys, hvdkit.launch.main; sys.exit(hvdkit.launch.main.main(sys.argv[1:]))"


def join_flags(job: RunningJob) -> list[str]:
    """Return the flags with which the launcher says that hosts join."""
    begin = "hvdkitrun: hosts join with: hvdkitrun "
    until(lambda: job.messages and job.messages[0].startswith(begin), PATIENCE_SECONDS, lambda: f"{job.messages}")
    return job.messages[0].removeprefix(begin).split()


@contextlib.contextmanager
def joined(job: RunningJob, name: str, *flags: str, code: str = MAIN, **extra: str) -> Iterator[subprocess.Popen[str]]:
    """Have a host join, which is this one under another name."""
    command = [sys.executable, "-c", code, *join_flags(job), "--hostname", name, *flags]
    process = subprocess.Popen(
        command, env=rank_environment(**extra), start_new_session=True, **{**PIPES, "stderr": subprocess.PIPE}
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def end_of(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Wait for the end of ``hvdkitrun --join``. Return its status and what it said after it had connected."""
    _, messages = process.communicate(timeout=PATIENCE_SECONDS)
    lines = [line for line in messages.splitlines() if "joins the job of hvdkitrun" not in line]
    return process.returncode, "\n".join(lines)


def test_a_job_grows_by_a_host_that_joins_and_has_its_end(tmp_path):
    secret = tmp_path / "secret"
    with elastic_job(f"-np 1 -H localhost:1 {LISTEN} {secret}") as job:
        first = job.wait_for(1, 1)
        assert stat.S_IMODE(secret.stat().st_mode) == 0o600
        with joined(job, "far", "--slots", "2") as far:
            second = job.wait_for(2, 3)
            assert [fact["slot"] for fact in second] == [0, 0, 1]
            assert second[0]["pid"] == first[0]["pid"]
            hosts = {fact["process"]: fact["environment"]["HOROVOD_HOSTNAME"] for fact in job.facts if "offer" in fact}
            assert hosts == {0: "localhost", 1: "far", 2: "far"}
            job.finish()
            assert end_of(far) == (0, "hvdkitrun: the job has ended with success")
        words = ["host far has joined with 2 slots", "the job goes on with 3 ranks"]
        assert job.messages[1:] == [f"hvdkitrun: {text}" for text in words]


def test_a_job_of_joined_hosts_alone_loses_one_that_is_killed_and_takes_it_back(tmp_path):
    with elastic_job(f"-np 2 {LISTEN} {tmp_path / 'secret'}") as job, joined(job, "a") as a:
        with joined(job, "b") as b:
            first = job.wait_for(1, 2)
            b.kill()
            second = job.wait_for(2, 1)
            lost = next(fact for fact in first if fact["pid"] != second[0]["pid"])
            until(lambda: not psutil.pid_exists(lost["pid"]), 10, lambda: "the end of its process")
            fact = "host b is lost: its connection broke; the job goes on with 1 rank"
            until(lambda: f"hvdkitrun: {fact}" in job.messages, 10, lambda: f"{fact}: {job.messages}")
        with joined(job, "b") as b:
            job.wait_for(3, 2)
            job.finish()
            assert [end_of(each)[0] for each in (a, b)] == [0, 0]


def test_a_joined_host_that_gets_sigterm_leaves_with_success(tmp_path):
    with elastic_job(f"-np 1 -H localhost:1 {LISTEN} {tmp_path / 'secret'}") as job:
        job.wait_for(1, 1)
        with joined(job, "far") as far:
            second = job.wait_for(2, 2)
            far.send_signal(signal.SIGTERM)
            assert end_of(far) == (0, "hvdkitrun: this host has left the job")
            assert not psutil.pid_exists(second[1]["pid"])
            job.wait_for(3, 1)
        job.finish()
        assert "hvdkitrun: host far has left the job" in job.messages
        assert not [line for line in job.messages if "exited" in line or "killed" in line or "lost" in line]


def test_a_joined_host_that_is_cut_off_is_lost_and_ends_its_processes(tmp_path):
    flags = f"-np 1 -H localhost:1 {LISTEN} {tmp_path / 'secret'}"
    with elastic_job(flags, HVDKIT_TIMEOUT_SECONDS="2") as job:
        job.wait_for(1, 1)
        with joined(job, "far") as far:
            second = job.wait_for(2, 2)
            far.send_signal(signal.SIGSTOP)
            job.wait_for(3, 1)
            fact = "host far is lost: it gave no sign of life; the job goes on with 1 rank"
            until(lambda: f"hvdkitrun: {fact}" in job.messages, 10, job.story)
            far.send_signal(signal.SIGCONT)
            status, words = end_of(far)
            where = join_flags(job)[1]
            assert words == f"hvdkitrun: the connection to hvdkitrun at {where} has ended, as have all processes here"
            assert status == 1
            assert not psutil.pid_exists(second[1]["pid"])
        job.finish()


@pytest.mark.parametrize(("number", "words"), [
    (signal.SIGTERM, "hvdkitrun ended the job after SIGTERM"),
    (signal.SIGKILL, " has ended, as have all processes here"),
])  # fmt: skip
def test_no_process_of_a_joined_host_outlives_the_launcher(tmp_path, number, words):
    with elastic_job(f"-np 1 {LISTEN} {tmp_path / 'secret'}") as job, joined(job, "far") as far:
        pid = job.wait_for(1, 1)[0]["pid"]
        waits = "hvdkitrun: waits for hosts to join; with -H localhost:1 a process runs on this host too"
        assert waits in job.messages
        job.process.send_signal(number)
        status, text = end_of(far)
        assert (status, text.endswith(words)) == (1, True)
        assert not psutil.pid_exists(pid)


def test_strangers_do_not_come_in_and_hold_up_nobody(tmp_path):
    wrong, other = tmp_path / "wrong", MAIN.replace("sys.exit", "hvdkit.__version__ = '0'; sys.exit")
    wrong.write_text("0123456789abcdef")
    wrong.chmod(0o600)
    with elastic_job(f"-np 1 {LISTEN} {tmp_path / 'secret'}") as job:
        where = join_flags(job)[1]
        host, port = where.split(":")
        with socket.create_connection((host, int(port))), joined(job, "a") as a:
            job.wait_for(1, 1)
            with joined(job, "b", "--secret-file", str(wrong)) as b:
                status, words = end_of(b)
                assert (status, "does not know the secret of --secret-file\nHINT: " in words) == (1, True)
            with joined(job, "a") as b:
                assert end_of(b) == (1, "hvdkitrun: this host cannot join: the job has a host a already")
            with joined(job, "b", code=other) as b:
                status, words = end_of(b)
                assert (status, "this host cannot join: it has hvdkit 0, but the job has " in words) == (1, True)
            job.finish()
            assert end_of(a)[0] == 0
        strangers = "hvdkitrun: a process on 127.0.0.1 connected, but did not prove that it knows the secret"
        assert job.messages.count(strangers) == 1


def test_a_launcher_that_is_not_there_is_told_after_the_start_timeout(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef")
    secret.chmod(0o600)
    result = call_bare("--join", "127.0.0.1:1", "--secret-file", str(secret), "--start-timeout", "0.6")
    assert result.status == 1
    assert result.stderr.startswith("hvdkitrun: cannot reach hvdkitrun at 127.0.0.1:1 within 0.6 s: ")
    hint = "check that hvdkitrun --listen runs there, behind no firewall; --start-timeout waits longer"
    assert result.stderr.endswith(f"\nHINT: {hint}\n")


TOO = "HINT: give {} too: hosts that join prove that they know the file's secret\n"


@pytest.mark.parametrize(("flags", "message"), [
    ("-np 2 --listen 0 python t.py", f"--listen without --secret-file\n{TOO.format('--secret-file')}"),
    ("-np 2 --secret-file s python t.py", f"--secret-file without --listen or --join\n{TOO.format('one of them')}"),
    (
        "-np 2 --listen x --secret-file s python t.py",
        "cannot read --listen x\nHINT: write it as in --listen host1:4000\n",
    ),
    ("--join 4000 --secret-file s", "cannot read --join 4000\nHINT: write it as in --join host1:4000\n"),
    ("--join h:1", "--join without --secret-file\nHINT: copy the file of hvdkitrun --listen to this host\n"),
    (
        "--join h:1 --secret-file s python t.py",
        "--join takes no command, -np or --listen\nHINT: give them to the hvdkitrun that listens\n",
    ),
    ("--join h:1 --secret-file open", "in --secret-file open can be read or changed by others"),
    ("--join h:1 --secret-file none", "in --secret-file none cannot be read"),
])  # fmt: skip
def test_flags_that_do_not_fit_are_refused(tmp_path, monkeypatch, flags, message):
    monkeypatch.chdir(tmp_path)
    Path("open").write_text("0123456789abcdef")
    os.chmod("open", 0o644)
    for name in ("open", "none"):
        flags = flags.replace(f"file {name}", f"file {tmp_path / name}")
        message = message.replace(f"file {name}", f"file {tmp_path / name}")
    result = call_bare(*flags.split())
    assert (result.status, "\nHINT: " in result.stderr) == (2, True)
    assert message in result.stderr


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return socket.create_connection(server.getsockname()), server.accept()[0]


def channels(secrets: tuple[bytes, bytes]) -> tuple[SealedChannel, SealedChannel, list[socket.socket]]:
    """Return the channels of a launcher and of a host with these secrets, and the sockets between them."""
    here, there = tcp_pair(), tcp_pair()
    found: list[SealedChannel] = []
    errors: list[Exception] = []

    def launcher() -> None:
        try:
            found.append(prove(here[0], secrets[0], True, 5))
        except Exception as error:
            errors.append(error)
            here[0].close()

    def carry(source: socket.socket, sink: socket.socket, count: int) -> None:
        while count and (data := source.recv(count)):
            sink.sendall(data)
            count -= len(data)
        if count:
            sink.shutdown(socket.SHUT_WR)

    threads = [
        threading.Thread(target=launcher),
        threading.Thread(target=carry, args=(there[1], here[1], 36 + 32)),
        threading.Thread(target=carry, args=(here[1], there[1], 64)),
    ]
    for thread in threads:
        thread.start()
    try:
        host = prove(there[0], secrets[1], False, 5)
    except NotAuthenticError:
        there[0].close()
        raise
    finally:
        for thread in threads:
            thread.join(10)
    return found[0], host, [here[1], there[1]]


@pytest.mark.parametrize("change", ["none", "flip", "repeat", "skip", "reflect"])
def test_a_frame_that_somebody_touched_is_refused(change):
    launcher, host, (near, far) = channels((b"s" * 16, b"s" * 16))
    host.send(OUTPUT, 3, b"first")
    first = far.recv(4096)
    host.send(BEAT, 0, b"second")
    second = far.recv(4096)
    changed = {
        "none": first + second, "flip": first[:-34] + bytes([first[-34] ^ 1]) + first[-33:], "repeat": first + first,
        "skip": second,
    }  # fmt: skip
    if change == "none":
        near.sendall(changed[change])
        assert frames(launcher, 2) == [Frame(OUTPUT, 3, b"first"), Frame(BEAT, 0, b"second")]
        return
    if change == "reflect":
        far.sendall(first)
    else:
        near.sendall(changed[change])
    with pytest.raises(EOFError):
        frames(host if change == "reflect" else launcher, 2)


def frames(channel: SealedChannel, count: int) -> list[Frame]:
    """Receive so many frames."""
    found: list[Frame] = []
    while len(found) < count:
        assert select.select([channel.reading], [], [], 10)[0]
        found += channel.receive()
    return found


def test_both_ends_find_that_the_other_does_not_know_the_secret():
    with pytest.raises(NotAuthenticError):
        channels((b"s" * 16, b"t" * 16))
