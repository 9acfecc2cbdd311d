"""Ranks on other hosts, with an ssh that runs the command here, without this process's environment."""

from __future__ import annotations

import json
import signal

import pytest

from tests.launch.launching import PATIENCE_SECONDS, call, check_gone, marked, marker, running, wait_until

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
    ssh = tmp_path / "ssh"
    ssh.write_text(SSH)
    ssh.chmod(0o755)
    return f"{tmp_path}:/usr/bin:/bin"


def test_ranks_on_other_hosts_get_their_place_the_callers_variables_and_folder(path):
    code = "import json, os; print(json.dumps({**os.environ, 'folder': os.getcwd()}))"
    odd = "a 'b' \"c\" $HOME `id`\n;d"
    result = call(HOSTS, code, ODD=odd, PATH=path)
    assert result.status == 0, result.stderr
    ranks = {}
    for line in result.stdout.splitlines():
        environment = json.loads(line.split(": ", 1)[1])
        ranks[int(environment["HVDKIT_RANK"])] = environment
    assert [ranks[rank]["HVDKIT_LOCAL_RANK"] for rank in range(3)] == ["0", "0", "1"]
    assert [ranks[rank]["HVDKIT_CROSS_RANK"] for rank in range(3)] == ["0", "1", "0"]
    assert [ranks[rank]["ODD"] for rank in range(3)] == [odd] * 3
    assert len({ranks[rank]["folder"] for rank in range(3)}) == 1
    assert ranks[2]["HOME"] == "/there"  # the other host's own
    assert len({(ranks[rank]["HVDKIT_RENDEZVOUS_ADDR"], ranks[rank]["HVDKIT_RENDEZVOUS_PORT"]) for rank in ranks}) == 1


@pytest.mark.parametrize(
    ("ending", "status", "words"),
    [
        ("sys.exit(6)", 6, "rank 2 on far.invalid exited with code 6"),
        ("os.kill(os.getpid(), 9)", 137, "rank 2 on far.invalid was killed by signal SIGKILL (9)"),
    ],
)
def test_a_rank_that_fails_on_another_host_ends_all(path, ending, status, words):
    mark = marker()
    code = f"import os, sys, time\nif os.environ['HVDKIT_RANK'] == '2': {ending}\ntime.sleep(600)"
    result = call(HOSTS, code, mark, PATH=path)
    assert result.status == status
    assert words in result.last_words
    check_gone(mark)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["stopped", "killed"])
def test_a_launcher_that_ends_leaves_no_rank_on_another_host(path, number):
    mark = marker()
    with running(HOSTS, "import time; time.sleep(600)", mark, PATH=path) as launcher:
        wait_until(lambda: len(marked(mark)) >= 3, "all ranks run")
        launcher.send_signal(number)
        launcher.wait(PATIENCE_SECONDS)
        wait_until(lambda: marked(mark) == [], "all ranks end")


def test_the_environment_does_not_show_in_a_command_line(path):
    result = call([*HOSTS, "--verbose"], "pass", PRIVATE="do-not-show", PATH=path)
    assert result.status == 0
    assert "do-not-show" not in result.stdout + result.stderr


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


def test_a_rank_that_fails_under_mpirun_on_another_host_is_named_with_it(path):
    mark = marker()
    code = "import os, sys, time\nif os.environ['OMPI_COMM_WORLD_RANK'] == '2': sys.exit(6)\ntime.sleep(600)"
    result = call(["--mpi", "-np", "3", "-H", "localhost:1,far.invalid:2"], code, mark, PATH=path)
    assert result.status == 6
    assert "rank 2 on far.invalid exited with code 6" in result.last_words
    check_gone(mark)
