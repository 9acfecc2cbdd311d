"""Ranks on other hosts, with an ssh that runs the command here, without this process's environment."""

from __future__ import annotations

import json
import signal

import pytest

from tests.launch.launching import PATIENCE_SECONDS, RANK, call, check_gone, marked, marker, running, write_program
from tests.waiting import until

# Takes the options off, wants the host's name, and starts the rest through a shell as sshd does.
SSH = """#!/bin/sh
while [ "$1" = -x ] || [ "$1" = -o ] || [ "$1" = -p ]; do [ "$1" = -x ] || shift; shift; done
case "$1" in *.invalid) ;; *) echo "not a host: $1" >&2; exit 255;; esac
shift
cd /
exec env -i PATH=/usr/bin:/bin HOME=/there sh -c "$*"
"""
HOSTS = ["--gloo", "-np", "3", "-H", "localhost:1,far.invalid:2", "--network-interfaces", "lo"]


@pytest.fixture
def path(tmp_path):
    """A PATH on which ``ssh`` is the one above."""
    write_program(tmp_path / "ssh", SSH)
    return f"{tmp_path}:/usr/bin:/bin"


def test_ranks_on_other_hosts_get_their_place_the_callers_variables_and_folder(path):
    code = "import json, os; print(json.dumps({**os.environ, 'folder': os.getcwd()}))"
    odd = "a 'b' \"c\" $HOME `id`\n;d"
    result = call(HOSTS, code, ODD=odd, PATH=path)
    assert result.status == 0, result.stderr
    environments = [json.loads(line.split(": ", 1)[1]) for line in result.stdout.splitlines()]
    environments.sort(key=lambda environment: int(environment["HVDKIT_RANK"]))
    assert [one["HVDKIT_LOCAL_RANK"] for one in environments] == ["0", "0", "1"]
    assert [one["ODD"] for one in environments] == [odd] * 3
    assert environments[2]["HOME"] == "/there"  # the other host's own
    for names in (["folder"], ["HVDKIT_RENDEZVOUS_ADDR", "HVDKIT_RENDEZVOUS_PORT"]):
        assert len({tuple(one[name] for name in names) for one in environments}) == 1


@pytest.mark.parametrize("flags", [HOSTS, ["--mpi", *HOSTS[1:5]]], ids=["gloo", "mpi"])
def test_a_rank_that_fails_on_another_host_ends_all_and_is_named_with_it(path, flags):
    mark = marker()
    result = call(flags, f"{RANK}if rank == '2': sys.exit(6)\ntime.sleep(600)", mark, PATH=path)
    assert result.status == 6
    assert "rank 2 on far.invalid exited with code 6" in result.last_words
    check_gone(mark)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["stopped", "killed"])
def test_a_launcher_that_ends_leaves_no_rank_on_another_host(path, number):
    mark = marker()
    with running(HOSTS, "import time; time.sleep(600)", mark, PATH=path) as launcher:
        until(lambda: len(marked(mark)) >= 3, what="all ranks run")
        launcher.send_signal(number)
        launcher.wait(PATIENCE_SECONDS)
        until(lambda: marked(mark) == [], what="all ranks end")


def test_an_address_that_cannot_be_found_is_told_with_what_to_do(path):
    result = call(["--gloo", "-np", "2", "-H", "localhost:1,far.invalid:1"], PATH=path)
    assert result.status == 1
    assert "far.invalid" in result.stderr
    assert "--network-interfaces" in result.stderr


def test_mpirun_starts_its_ranks_on_other_hosts_with_the_same_ssh(path):
    code = "import os; print(os.environ['OMPI_COMM_WORLD_RANK'], os.environ['ODD'], os.environ['HVDKIT_TRANSPORT'])"
    result = call(["--mpi", "-np", "3", "-H", "localhost:1,far.invalid:2", "-p", "22"], code, ODD="a 'b' $c", PATH=path)
    assert result.status == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == [f"[{rank}]<stdout>: {rank} a 'b' $c mpi" for rank in range(3)]
