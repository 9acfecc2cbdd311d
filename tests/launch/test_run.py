"""Ranks run with the environment, the output and the files that were asked for."""

from __future__ import annotations

import json

from hvdkit.config import from_environment
from hvdkit.environments import detect
from tests.launch.launching import PATIENCE_SECONDS, call, running

SHOW_ENVIRONMENT = "import json, os; print(json.dumps(dict(os.environ)))"


def environments(stdout: str) -> dict[int, dict[str, str]]:
    """Each rank's environment from its prefixed line."""
    found = {}
    for line in stdout.splitlines():
        prefix, text = line.split("]<stdout>: ", 1)
        found[int(prefix.removeprefix("["))] = json.loads(text)
    return found


def test_more_ranks_than_cores_get_their_places(controller):
    result = call([controller, "-np", "5"], SHOW_ENVIRONMENT, WORLD_SIZE="9", RANK="8", HOROVOD_RANK="7")
    assert result.status == 0, result.stderr
    found = environments(result.stdout)
    worlds = {rank: detect(environment) for rank, environment in sorted(found.items())}
    places = [(world.rank, world.size, world.local_rank, world.local_size) for world in worlds.values()]
    assert places == [(rank, 5, rank, 5) for rank in range(5)]
    assert len({world.job for world in worlds.values()}) == 1
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR")
    for rank, environment in found.items():
        assert [environment[name] for name in names] == [str(rank), "5", str(rank), "5", "0", "127.0.0.1"]
    assert len({environment["MASTER_PORT"] for environment in found.values()}) == 1
    if controller == "--mpi":
        assert all(world.mpi for world in worlds.values())
    else:
        assert [worlds[rank].rendezvous.kind for rank in range(5)] == ["fd", "tcp", "tcp", "tcp", "tcp"]
        assert len({(world.rendezvous.host, world.rendezvous.port) for world in worlds.values()}) == 1


OF_TORCH = """
import torch, torch.distributed as dist
import hvdkit.torch as hvd
def total():
    dist.init_process_group("gloo")
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return int(tensor)
"""


def test_torch_distributed_and_hvdkit_find_their_places_in_one_job(controller):
    code = OF_TORCH + "hvd.init(); print(total(), int(hvd.allreduce(torch.ones(1), op=hvd.Sum)))"
    result = call([controller, "-np", "2"], code)
    assert result.status == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == ["[0]<stdout>: 2 2", "[1]<stdout>: 2 2"]


def test_torch_distributed_in_a_job_within_a_rank_meets_the_ranks_of_that_job(controller):
    inner = ["-m", "hvdkit.launch", controller, "-np", "3", "{sys.executable}", "-c", OF_TORCH + "print(total())"]
    words = ", ".join("sys.executable" if word == "{sys.executable}" else repr(word) for word in inner)
    code = f"import subprocess, sys\n{OF_TORCH}total(); sys.exit(subprocess.call([sys.executable, {words}]))"
    result = call([controller, "-np", "2"], code)
    assert result.status == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == [
        f"[{outer}]<stdout>: [{rank}]<stdout>: 3" for outer in range(2) for rank in range(3)
    ]


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


def test_ranks_that_read_find_the_end_of_their_input(controller):
    result = call([controller, "-np", "2"], "import sys; print(repr(sys.stdin.read()))")
    assert result.status == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == ["[0]<stdout>: ''", "[1]<stdout>: ''"]


def test_long_lines_and_bytes_that_are_no_text_come_through_whole(controller):
    code = "import os, sys; [sys.stdout.buffer.write(b'x' * 100_000 + b'\\xc3\\xa4\\n') for _ in range(3)]"
    result = call([controller, "-np", "2"], code)
    expected = "x" * 100_000 + "ä"
    assert sorted(result.stdout.splitlines()) == [f"[{rank}]<stdout>: {expected}" for rank in (0, 0, 0, 1, 1, 1)]


def test_timestamps_stand_in_front(controller):
    result = call([controller, "-np", "1", "--prefix-output-with-timestamp"], "print('x')")
    assert result.stdout.endswith("[0]<stdout>: x\n")
    assert result.stdout.count(":") >= 3


def test_every_line_says_its_rank_and_stream_and_output_files_hold_it_too(controller, tmp_path):
    code = "import os, sys; print('to out'); print('to err', file=sys.stderr)"
    result = call([controller, "-np", "2", "--output-filename", str(tmp_path / "logs")], code)
    assert sorted(result.stdout.splitlines()) == ["[0]<stdout>: to out", "[1]<stdout>: to out"]
    alone = "hvdkitrun: no process called hvd.init() or init_process_group(): each trained alone"
    assert sorted(result.stderr.splitlines()) == ["[0]<stderr>: to err", "[1]<stderr>: to err", alone]
    for path in (tmp_path / "logs" / "rank.0", tmp_path / "logs" / "rank.1"):
        assert ((path / "stdout").read_text(), (path / "stderr").read_text()) == ("to out\n", "to err\n")


def test_a_reader_that_goes_away_ends_the_job(controller):
    with running([controller, "-np", "2"], "while True: print('y')") as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(PATIENCE_SECONDS) == 128 + 13
        process.stdout = None
