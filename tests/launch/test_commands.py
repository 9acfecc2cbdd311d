"""The command lines and environments that the launcher makes, without starting anything."""

from __future__ import annotations

import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

from hvdkit.config import from_environment
from hvdkit.launch import UsageError, gloo, mpi, worker
from hvdkit.launch.hosts import Host, assign_slots
from hvdkit.launch.job import LaunchJob, for_other_hosts, job_environment
from hvdkit.launch.options import Options, parse
from hvdkit.launch.output import Output
from hvdkit.launch.ssh import Ssh, is_local

SLOTS = assign_slots([Host("a", 2), Host("b", 2)], 3)


def job(placements=SLOTS, remote=(), environment=None, interfaces=(), ssh=None) -> LaunchJob:
    options = Options(["python", "a b.py"], len(placements), [], interfaces=list(interfaces))
    return LaunchJob(options, placements, set(remote), environment or {}, ssh or Ssh(), Output(len(placements)))


def mpirun_argv(mpi_args=(), without_tcp=False, **changes) -> list[str]:
    environment = {"HVDKIT_JOB": "1", "PATH": "/bin", "BASH_FUNC_x%%": "() {", "SSH_TTY": "x"}
    return mpi.mpirun_argv(job(environment=environment, **changes), "/bin/mpirun", list(mpi_args), without_tcp)


def after(argv: list[str], flag: str) -> str:
    return argv[argv.index(flag) + 1]


def test_mpirun_gets_hosts_room_for_more_ranks_than_cores_and_the_variables_by_name():
    argv = mpirun_argv()
    assert after(argv, "-H") == "a:2,b:1"
    assert after(argv, "-np") == "3"
    assert "OVERSUBSCRIBE" in after(argv, "--map-by")
    assert [argv[index + 1] for index, word in enumerate(argv) if word == "-x"] == ["HVDKIT_JOB", "PATH"]
    assert argv[-4:] == [worker.__file__, "10", "python", "a b.py"]


def test_mpirun_runs_as_root_only_when_root_asks(monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert "--allow-run-as-root" in mpirun_argv()
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert "--allow-run-as-root" not in mpirun_argv()


def test_mpirun_gets_interfaces_ssh_port_and_the_callers_own_arguments():
    argv = mpirun_argv(interfaces=["eth0", "eth1"], ssh=Ssh(2222, "/key"), mpi_args=mpi.split_mpi_args("--mca x 'y z'"))
    assert after(argv, "btl_tcp_if_include") == "eth0,eth1"
    assert after(argv, "oob_tcp_if_include") == "eth0,eth1"
    assert after(argv, "plm_ssh_args") == "-p 2222 -i /key"
    assert after(argv, "x") == "y z"


def test_a_file_whose_name_mpirun_would_take_apart_is_refused():
    with pytest.raises(UsageError, match=r"a space in its name\nHINT: "):
        mpirun_argv(ssh=Ssh(None, "/my key -o ProxyCommand=x"))


def test_mpirun_does_without_tcp_where_all_ranks_are_here_and_memory_has_room(monkeypatch):
    free = {"bytes": 1 << 30}
    monkeypatch.setattr(mpi.shutil, "disk_usage", lambda path: SimpleNamespace(free=free["bytes"]))
    here = assign_slots([Host("localhost", 4)], 4)
    assert mpi.needs_no_tcp(job(here), [])
    assert not mpi.needs_no_tcp(job(here, {"localhost"}), [])  # elsewhere, nobody looked whether there is room
    assert not mpi.needs_no_tcp(job(), [])
    assert not mpi.needs_no_tcp(job(here, environment={"OMPI_MCA_btl": "tcp,self"}), [])
    assert not mpi.needs_no_tcp(job(here), ["--mca", "btl", "tcp,self"])
    free["bytes"] = 64 << 20  # what Docker gives, and 4 ranks would fill to the last byte
    assert not mpi.needs_no_tcp(job(here), [])
    assert after(mpirun_argv(without_tcp=True), "btl") == "^tcp"
    assert "btl" not in mpirun_argv()


def test_over_several_hosts_mpirun_has_the_time_to_hear_who_died():
    assert after(mpirun_argv(), "opal_abort_delay") == "1"
    assert mpirun_argv(mpi_args=["--mca", "opal_abort_delay", "5"]).count("opal_abort_delay") == 1
    assert "opal_abort_delay" not in mpirun_argv(placements=assign_slots([Host("a", 2)], 2))


def test_flags_become_horovods_variables():
    flags = (
        "-np 2 --fusion-threshold-mb 64 --cycle-time-ms 3.5 --cache-capacity 9 --timeline-filename t.json "
        "--timeline-mark-cycles --stall-check-warning-time-seconds 5 --stall-check-shutdown-time-seconds 6 "
        "--log-level DEBUG python train.py"
    )
    assert parse(flags.split()).settings == {
        "HOROVOD_FUSION_THRESHOLD": str(64 * 1024 * 1024),
        "HOROVOD_CYCLE_TIME": "3.5",
        "HOROVOD_CACHE_CAPACITY": "9",
        "HOROVOD_TIMELINE": "t.json",
        "HOROVOD_TIMELINE_MARK_CYCLES": "1",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "5",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "6",
        "HOROVOD_LOG_LEVEL": "DEBUG",
    }


def test_flags_not_given_set_nothing():
    assert parse(["-np", "2", "python"]).settings == {}


def test_interfaces_may_be_repeated_or_joined():
    flags = ["-np", "2", "--network-interface", "a", "--network-interfaces", "b,c", "python"]
    assert parse(flags).interfaces == ["a", "b", "c"]


def test_a_word_after_two_dashes_is_the_command():
    assert parse(["-np", "2", "--", "python", "-x"]).command == ["python", "-x"]


def test_the_start_timeout_has_horovods_variable(monkeypatch):
    monkeypatch.setenv("HOROVOD_START_TIMEOUT", "7")
    assert parse(["-np", "2", "python"]).start_timeout == 7
    assert parse(["-np", "2", "--start-timeout", "3", "python"]).start_timeout == 3
    monkeypatch.setenv("HOROVOD_START_TIMEOUT", "soon")
    with pytest.raises(UsageError, match="HOROVOD_START_TIMEOUT"):
        parse(["-np", "2", "python"])


def test_hvdkits_own_start_timeout_counts_for_the_launcher_too(monkeypatch):
    monkeypatch.setenv("HOROVOD_START_TIMEOUT", "")
    assert parse(["-np", "2", "python"]).start_timeout == 30
    monkeypatch.setenv("HOROVOD_START_TIMEOUT", "7")
    monkeypatch.setenv("HVDKIT_START_TIMEOUT_SECONDS", "8")
    assert parse(["-np", "2", "python"]).start_timeout == 8


@pytest.mark.parametrize(("text", "variable"), [("3", "3"), ("2.5", "2.5"), ("600", "600")])
def test_the_start_timeout_is_for_the_ranks_too(text, variable):
    assert parse(["-np", "2", "--start-timeout", text, "python"]).settings == {"HOROVOD_START_TIMEOUT": variable}


@pytest.mark.parametrize("text", ["0", "-1", "inf", "nan"])
def test_a_start_timeout_in_which_nothing_can_start_is_refused(text):
    with pytest.raises(UsageError, match="--start-timeout"):
        parse(["-np", "2", f"--start-timeout={text}", "python"])


def test_a_flag_wins_over_the_callers_variables_under_all_names_of_the_setting():
    caller = {"HVDKIT_CYCLE_TIME": "1", "HOROVOD_CYCLE_TIME": "2", "HVDKIT_CACHE_CAPACITY": "3"}
    environment = job_environment(caller, {"HOROVOD_CYCLE_TIME": "4"}, job="j")
    assert "HVDKIT_CYCLE_TIME" not in environment
    assert environment["HOROVOD_CYCLE_TIME"] == "4"
    assert environment["HVDKIT_CACHE_CAPACITY"] == "3"
    assert from_environment(environment).cycle_time_ms == 4


def test_the_place_that_another_launcher_gave_is_not_inherited():
    caller = {"RANK": "1", "HOROVOD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "PMIX_RANK": "0", "HVDKIT_SIZE": "3"}
    kept = {"HOROVOD_FUSION_THRESHOLD": "1", "HVDKIT_TIMEOUT_SECONDS": "9", "MY_RANK": "1"}
    environment = job_environment({**caller, **kept}, {"HOROVOD_FUSION_THRESHOLD": "2"}, job="j")
    assert not caller.keys() & environment.keys()
    assert environment == {
        "HOROVOD_FUSION_THRESHOLD": "2",
        "HVDKIT_TIMEOUT_SECONDS": "9",
        "MY_RANK": "1",
        "PYTHONUNBUFFERED": "1",
        "HVDKIT_JOB": "j",
        "HVDKIT_FAILURE_RECORDS": "1",
    }


def test_the_secret_of_another_job_is_not_inherited_but_the_users_own_is():
    assert "HVDKIT_SECRET_FILE" not in job_environment({"HVDKIT_SECRET_FILE": "/proc/7/fd/3"}, {}, job="j")
    named = {"HVDKIT_SECRET_FILE": "/s"}
    assert named.items() <= job_environment(named, {}, job="j").items()


@pytest.mark.parametrize(("environment", "made"), [({}, True), ({"HVDKIT_SECRET_FILE": "/s"}, False)])
def test_all_ranks_get_one_secret_by_standard_input_unless_the_user_has_one(environment, made):
    slots = assign_slots([Host("localhost", 2), Host("other", 2)], 4)
    with gloo.meeting_point(job(slots[:2])) as point:
        children = gloo.children(job(slots, {"other"}, environment), point)
    assert len({child.secret for child in children}) == 1
    for child in children:
        assert bool(child.secret) == made
        assert made == (child.secret.encode() in child.header(10.0) and len(child.secret) == 64)
        assert not made or child.secret not in str((child.argv, child.command, child.environment, child))


def test_what_belongs_to_this_machine_stays_here():
    environment = {"HOME": "/root", "SSH_AUTH_SOCK": "s", "PATH": "p", "PYTHONPATH": "q", "CUDA_VISIBLE_DEVICES": "0"}
    assert for_other_hosts(environment) == {"PATH": "p", "PYTHONPATH": "q"}


def test_ssh_quotes_every_word_and_asks_nothing():
    argv = Ssh(port=22, identity_file="/k").argv("h", ["echo", "a b", "$HOME; rm"])
    assert argv[0] == "ssh"
    assert "BatchMode=yes" in argv
    assert after(argv, "-p") == "22"
    assert after(argv, "-i") == "/k"
    assert argv[-2] == "h"
    assert shlex.split(argv[-1]) == ["echo", "a b", "$HOME; rm"]


def test_this_machine_is_known_by_all_its_names():
    assert is_local("localhost")
    assert is_local("127.0.0.1")
    assert not is_local("host.invalid")
    assert not is_local("192.0.2.1")  # reserved for documentation


def test_ranks_on_this_machine_alone_meet_on_its_loopback():
    slots = assign_slots([Host("localhost", 2)], 2)
    with gloo.meeting_point(job(slots)) as point:
        assert point.socket.getsockname() == (gloo.LOOPBACK, point.port)
        first = gloo.rank_environment(job(slots), slots[0], point)
        second = gloo.rank_environment(job(slots), slots[1], point)
    assert "HVDKIT_RENDEZVOUS_FD" in first
    assert "HVDKIT_RENDEZVOUS_FD" not in second
    named = job(slots, interfaces=["e0", "e1"], environment={"GLOO_SOCKET_IFNAME": "e2"})
    assert gloo.rank_environment(named, slots[1], point)["GLOO_SOCKET_IFNAME"] == "e0,e1"
    callers = job(slots, environment={"GLOO_SOCKET_IFNAME": "e2"})
    assert gloo.rank_environment(callers, slots[1], point)["GLOO_SOCKET_IFNAME"] == "e2"


def test_ranks_meet_where_rank_0_runs():
    with gloo.meeting_point(job(remote={"a", "b"})) as point:
        assert (point.address, point.socket) == ("a", None)


def test_an_interface_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(UsageError, match="no-such"):
        gloo.own_address("other", ["no-such"], 22)


def test_the_worker_needs_nothing_but_the_standard_library():
    source = Path(worker.__file__).read_text()
    assert "import hvdkit" not in source
    assert "from hvdkit" not in source
