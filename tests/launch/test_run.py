"""Ranks run with the environment, the output and the files that were asked for."""

from __future__ import annotations

import json
import sys

import pytest

from hvdkit.config import from_environment
from tests.launch.launching import call, call_bare

SHOW_ENVIRONMENT = "import json, os; print(json.dumps(dict(os.environ)))"
SHOW_BOTH = "import os, sys; print('to out'); print('to err', file=sys.stderr)"


def environments(stdout: str) -> dict[int, dict[str, str]]:
    """Each rank's environment from its prefixed line."""
    found = {}
    for line in stdout.splitlines():
        prefix, text = line.split("]<stdout>: ", 1)
        found[int(prefix.removeprefix("["))] = json.loads(text)
    return found


def test_more_ranks_than_cores_get_their_places(controller):
    from hvdkit.environments import detect

    result = call([controller, "-np", "5"], SHOW_ENVIRONMENT, WORLD_SIZE="9", RANK="8", HOROVOD_RANK="7")
    assert result.status == 0, result.stderr
    found = environments(result.stdout)
    worlds = {rank: detect(environment) for rank, environment in found.items()}
    assert {rank: (world.rank, world.size) for rank, world in worlds.items()} == {r: (r, 5) for r in range(5)}
    assert {rank: (world.local_rank, world.local_size) for rank, world in worlds.items()} == {
        r: (r, 5) for r in range(5)
    }
    assert len({world.job for world in worlds.values()}) == 1
    if controller == "--mpi":
        assert all(world.mpi for world in worlds.values())
    else:
        assert [worlds[rank].rendezvous.kind for rank in range(5)] == ["fd", "tcp", "tcp", "tcp", "tcp"]
        assert len({(world.rendezvous.host, world.rendezvous.port) for world in worlds.values()}) == 1


def test_settings_and_the_callers_variables_reach_every_rank(controller):
    flags = ["--fusion-threshold-mb", "2", "--cycle-time-ms", "2.5", "--cache-capacity", "7", "--no-stall-check"]
    flags += ["--start-timeout", "45"]
    odd = "a;b,c\n\"d\" 'e' $HOME \\ ü"
    result = call(
        [controller, "-np", "2", *flags], SHOW_ENVIRONMENT, ODD=odd, EMPTY="", HVDKIT_START_TIMEOUT_SECONDS="9"
    )
    for environment in environments(result.stdout).values():
        assert environment["HOROVOD_FUSION_THRESHOLD"] == str(2 * 1024 * 1024)
        assert environment["HOROVOD_CYCLE_TIME"] == "2.5"
        assert environment["HOROVOD_CACHE_CAPACITY"] == "7"
        assert environment["HOROVOD_STALL_CHECK_DISABLE"] == "1"
        assert from_environment(environment).start_timeout_seconds == 45
        assert (environment["ODD"], environment["EMPTY"]) == (odd, "")
        assert environment["HVDKIT_TRANSPORT"] == ("mpi" if controller == "--mpi" else "torch")


def test_rank_0_inherits_the_socket_at_which_the_ranks_meet():
    code = """
import os, socket
address = os.environ["HVDKIT_RENDEZVOUS_ADDR"], int(os.environ["HVDKIT_RENDEZVOUS_PORT"])
if os.environ["HVDKIT_RANK"] == "0":
    with socket.socket(fileno=int(os.environ["HVDKIT_RENDEZVOUS_FD"])) as listener:
        assert listener.getsockname() == address
        listener.accept()[0].sendall(b"hello")
else:
    assert "HVDKIT_RENDEZVOUS_FD" not in os.environ
    print(socket.create_connection(address).recv(5).decode())
"""
    result = call(["--gloo", "-np", "2"], code)
    assert (result.status, result.stdout) == (0, "[1]<stdout>: hello\n"), result.stderr


def test_ranks_that_read_find_the_end_of_their_input(controller):
    result = call([controller, "-np", "2"], "import sys; print(repr(sys.stdin.read()))")
    assert result.status == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == ["[0]<stdout>: ''", "[1]<stdout>: ''"]


def test_every_line_says_its_rank_and_stream(controller):
    result = call([controller, "-np", "2"], SHOW_BOTH)
    assert sorted(result.stdout.splitlines()) == ["[0]<stdout>: to out", "[1]<stdout>: to out"]
    alone = "hvdkitrun: no process called hvd.init(): each trained alone"
    assert sorted(result.stderr.splitlines()) == ["[0]<stderr>: to err", "[1]<stderr>: to err", alone]


def test_long_lines_and_bytes_that_are_no_text_come_through_whole(controller):
    code = "import os, sys; [sys.stdout.buffer.write(b'x' * 100_000 + b'\\xc3\\xa4\\n') for _ in range(3)]"
    result = call([controller, "-np", "2"], code)
    expected = "x" * 100_000 + "ä"
    assert sorted(result.stdout.splitlines()) == [f"[{rank}]<stdout>: {expected}" for rank in (0, 0, 0, 1, 1, 1)]


def test_a_progress_bar_stays_one_line_that_is_written_over(controller):
    code = """
import sys, time
for step in range(3):
    sys.stderr.write(f"\\rstep {step}"); sys.stderr.flush(); time.sleep(0.1)
sys.stderr.write("\\n")
"""
    result = call_bare(controller, "-np", "1", sys.executable, "-c", code)
    # text=True turns the carriage returns into line feeds
    assert result.stderr.splitlines() == [f"[0]<stderr>: step {step}" for step in range(3)]


def test_timestamps_stand_in_front(controller):
    result = call([controller, "-np", "1", "--prefix-output-with-timestamp"], "print('x')")
    assert result.stdout.endswith("[0]<stdout>: x\n")
    assert result.stdout.count(":") >= 3


def test_output_files_hold_what_each_rank_wrote(controller, tmp_path):
    code = """
import os, sys
rank = os.environ.get("HVDKIT_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
print("out", rank); print("err", rank, file=sys.stderr)
"""
    result = call([controller, "-np", "2", "--output-filename", str(tmp_path / "logs")], code)
    assert result.status == 0, result.stderr
    for rank in (0, 1):
        assert (tmp_path / "logs" / f"rank.{rank}" / "stdout").read_text() == f"out {rank}\n"
        assert (tmp_path / "logs" / f"rank.{rank}" / "stderr").read_text() == f"err {rank}\n"


def test_the_commands_own_flags_are_left_alone(controller):
    result = call_bare(
        controller, "-np", "1", sys.executable, "-c", "import sys; print(sys.argv[1:])", "-np", "9", "--verbose", "-H"
    )
    assert result.stdout == "[0]<stdout>: ['-np', '9', '--verbose', '-H']\n"


def test_verbose_shows_hosts_and_command_lines(controller):
    result = call([controller, "-np", "2", "-H", "localhost:3", "--verbose"])
    assert "2 ranks on localhost (this machine)" in result.stderr
    assert ("mpirun" if controller == "--mpi" else "rank 1 on localhost:") in result.stderr


def test_without_a_flag_one_of_the_two_is_chosen():
    result = call(["-np", "2"], "print('ran')")
    assert sorted(result.stdout.splitlines()) == ["[0]<stdout>: ran", "[1]<stdout>: ran"]


def test_mpi_starts_in_the_ranks():
    pytest.importorskip("mpi4py")
    code = "from mpi4py import MPI; print(MPI.COMM_WORLD.allreduce(1))"
    result = call(["--mpi", "-np", "3"], code)
    assert sorted(result.stdout.splitlines()) == [f"[{rank}]<stdout>: 3" for rank in range(3)], result.stderr


def test_check_build_shows_what_is_there():
    result = call_bare("--check-build")
    assert result.status == 0, result.stderr
    for row in ("[X] PyTorch", "] TensorFlow", "MPI", "[X] Gloo", "[ ] NCCL", "native", "numpy"):
        assert row in result.stdout


def test_a_reader_that_goes_away_ends_the_job(controller, tmp_path):
    import subprocess

    from tests.launch.launching import PATIENCE_SECONDS, argv, environment

    code = "while True: print('y')"
    with subprocess.Popen(
        argv([controller, "-np", "2"], code), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    ) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(PATIENCE_SECONDS) == 128 + 13
