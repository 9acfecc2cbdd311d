"""Elastic jobs under hvdkitrun, with real processes that are killed, stopped, and join."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from hvdkit.launch.elastic.agent import BEAT
from hvdkit.launch.elastic.host import AgentHost, StartedAgent
from tests.launch.launching import PATIENCE_SECONDS, call, call_bare, write_program
from tests.ranks import PIPES, rank_environment
from tests.waiting import until

PROGRAM = str(Path(__file__).with_name("elastic_program.py"))

# Runs the command here, behind a process that carries the bytes and can be stopped, as a network that was cut.
SSH = f"""#!{sys.executable}
import os, subprocess, sys, threading
words = sys.argv[1:]
while words[0].startswith("-"):
    del words[:2]
process = subprocess.Popen(["sh", "-c", " ".join(words[1:])], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                           start_new_session=True)
def carry(source, sink):
    while data := os.read(source, 65536):
        os.write(sink, data)
    os.close(sink)
threading.Thread(target=carry, args=(0, process.stdin.fileno()), daemon=True).start()
carry(process.stdout.fileno(), 1)
sys.exit(process.wait())
"""


class RunningJob:
    """An elastic job that runs: what its processes told, and its messages."""

    def __init__(self, process: subprocess.Popen[str], last: Path) -> None:
        self.process, self._last = process, last
        self.facts: list[dict[str, Any]] = []
        self.messages: list[str] = []
        self._threads = [
            threading.Thread(target=self._read, args=(process.stdout, self._take), daemon=True),
            threading.Thread(target=self._read, args=(process.stderr, self.messages.append), daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def _read(self, stream: Any, take: Callable[[str], object]) -> None:
        for line in stream:
            take(line.rstrip("\n"))

    def _take(self, line: str) -> None:
        match = re.fullmatch(r"\[(\d+)\]<stdout>: (.*)", line)
        assert match is not None, line
        self.facts.append({**json.loads(match[2]), "process": int(match[1])})

    def generation(self, number: int) -> list[dict[str, Any]]:
        """Return what the members of a generation told when it began, in the order of ranks."""
        found = [fact for fact in self.facts if fact.get("generation") == number]
        return sorted(found, key=lambda fact: int(fact["rank"]))

    def wait_for(self, generation: int, size: int, seconds: float = PATIENCE_SECONDS) -> list[dict[str, Any]]:
        """Wait until a generation has begun on all its ranks."""
        until(lambda: len(self.generation(generation)) == size, seconds, lambda: f"{self.facts} {self.messages}")
        assert {fact["size"] for fact in self.generation(generation)} == {size}
        return self.generation(generation)

    def finish(self) -> None:
        """Have the job end with success: all its processes finish at the same step."""
        self._last.touch()
        assert self.end() == 0, self.messages
        assert len({fact["end"] for fact in self.facts if "end" in fact}) == 1

    def end(self, seconds: float = PATIENCE_SECONDS) -> int:
        """Wait for the end of the job. Return its exit status."""
        status = self.process.wait(seconds)
        for thread in self._threads:
            thread.join(seconds)
        return status

    def story(self) -> str:
        """Return the last messages, and what the processes told last."""
        return "\n".join([*self.messages[-12:], *map(str, self.facts[-12:])])

    def finished(self) -> list[int]:
        """Return the processes that finished, in the order of their ranks."""
        facts = sorted((fact for fact in self.facts if "end" in fact), key=lambda fact: int(fact["rank"]))
        return [fact["process"] for fact in facts]


@contextlib.contextmanager
def elastic_job(flags: str, fault: str = "", **extra: str) -> Iterator[RunningJob]:
    folder = Path(tempfile.mkdtemp())
    command = [
        sys.executable,
        "-m",
        "hvdkit.launch",
        *flags.split(),
        sys.executable,
        PROGRAM,
        str(folder / "end"),
        fault,
    ]
    extra = {"OMP_NUM_THREADS": "1", **extra}
    process = subprocess.Popen(
        command, env=rank_environment(**extra), start_new_session=True, **{**PIPES, "stderr": subprocess.PIPE}
    )
    job = RunningJob(process, folder / "end")
    try:
        yield job
    finally:
        process.kill()
        process.wait()
        pids = {fact["pid"] for fact in job.facts}
        until(lambda: not any(map(psutil.pid_exists, pids)), 10, lambda: f"the end of {pids}")
        shutil.rmtree(folder)


def test_a_job_begins_with_np_processes_and_grows_to_max_np():
    with elastic_job("-np 2 --min-np 1 --max-np 3") as job:
        first = job.wait_for(1, 2)
        second = job.wait_for(2, 3)
        assert [fact["pid"] for fact in second[:2]] == [fact["pid"] for fact in first]
        assert second[0]["steps"] == second[2]["steps"] > 0  # the new rank has the state, and no step is lost
        job.finish()
        assert job.finished() == [0, 1, 2]
        assert job.messages == ["hvdkitrun: the job goes on with 3 ranks"]
        offers = {fact["process"]: fact["offer"] for fact in job.facts if "offer" in fact}
        assert offers == {0: [0, 2, 0], 1: [1, 2, 1], 2: [2, 3, 2]}
        environment = next(fact["environment"] for fact in job.facts if fact["process"] == 1)
        assert environment == {
            "HOROVOD_ELASTIC": "1", "HOROVOD_HOSTNAME": "localhost", "HOROVOD_RANK": "1", "HOROVOD_SIZE": "2",
            "HOROVOD_LOCAL_RANK": "1",
        }  # fmt: skip


@pytest.mark.parametrize(("fault", "how"), [
    ("kill", "was killed by signal SIGKILL (9)"),
    ("raise", "exited with code 1 (ZeroDivisionError: division by zero)"),
    ("stop", "was killed by signal SIGKILL (9)"),
])  # fmt: skip
def test_a_lost_rank_is_replaced_on_its_slot_and_told_in_one_line(fault, how):
    flags = "-np 3 --min-np 2"
    with elastic_job(flags, f"generation 1 rank 1 step 5 {fault}", HVDKIT_TIMEOUT_SECONDS="2") as job:
        job.wait_for(1, 3)
        second = job.wait_for(2, 2)
        assert [fact["slot"] for fact in second] == [0, 2]  # a hole in the slots
        assert {fact["steps"] for fact in second} == {5}
        third = job.wait_for(3, 3)
        assert [fact["slot"] for fact in third] == [0, 1, 2]
        assert [fact["process"] for fact in third] == [0, 3, 2]
        job.finish()
        assert job.finished() == [0, 3, 2]
        lines = [line for line in job.messages if not line.startswith("[")]
        lines = [line for line in lines if " is killed: " not in line]  # of a rank that was stopped
        assert lines == [
            f"hvdkitrun: rank 1 on localhost {how}; the job goes on with 2 ranks",
            "hvdkitrun: the job goes on with 3 ranks",
        ]
        assert not [line for line in job.messages if "Traceback" in line]


@pytest.mark.parametrize("hosts", ["localhost:4", "localhost:2,127.0.0.1:2"])
@pytest.mark.parametrize("rank", [0, 2])
def test_ranks_give_up_at_once_to_connect_to_a_rank_that_ended_with_its_ticket(rank, hosts):
    with elastic_job(f"-np 4 --min-np 2 -H {hosts}", f"generation 1 rank {rank} ticket kill") as job:
        job.wait_for(2, 3, seconds=20)  # HVDKIT_TIMEOUT_SECONDS is 60
        job.wait_for(3, 4)
        job.finish()
        assert "was killed by signal SIGKILL (9); the job goes on with 3 ranks" in job.messages[0]


def test_a_rank_that_stops_with_its_ticket_is_missed_killed_and_replaced():
    flags, fault = "-np 3 --min-np 2", "generation 1 rank 1 ticket stop"
    with elastic_job(flags, fault, HVDKIT_TIMEOUT_SECONDS="2") as job:
        job.wait_for(2, 2, seconds=20)  # not only after --elastic-timeout
        assert any(line.endswith(" is killed: others wait for it") for line in job.messages)
        job.finish()


def test_the_third_failure_of_a_slot_closes_it_which_is_told():
    with elastic_job("-np 2 --min-np 1", "generation * rank 1 step * exit") as job:
        text = "slot 1 of host localhost is closed after 3 failures, and 1 slot remains"
        until(lambda: any(text in line for line in job.messages), PATIENCE_SECONDS, job.story)
        job.finish()


def test_a_step_that_always_fails_ends_the_job_with_its_error():
    with elastic_job("-np 2 --min-np 1", "generation * rank 0 step 5 raise") as job:
        assert job.end() == 1
        text = "\n".join(job.messages)
        assert "ZeroDivisionError" in text
        assert "elastic_program.py" in text  # where
        assert "hvdkitrun: the job ended: " in job.messages[-1]
        assert "Process name: " in text  # as Horovod says it
        assert len(job.generation(2)) <= 2


def test_processes_that_fail_before_they_are_ready_end_the_job_soon():
    result = call(["-np", "2", "--min-np", "1"], "import sys; sys.exit(3)")
    assert result.status == 3
    assert result.last_words == "hvdkitrun: the job ended: 3 processes failed before any of them was ready"


def test_a_program_that_never_asks_runs_to_its_end():
    result = call(["-np", "2", "--min-np", "1"], "print('ran', end='')")
    assert (result.status, sorted(result.stdout.splitlines())) == (0, ["[0]<stdout>: ran", "[1]<stdout>: ran"])


def discovery(folder: Path, hosts: str) -> tuple[str, Path]:
    """Return a script that prints hosts, and the file that has them."""
    found = folder / "hosts"
    found.write_text(hosts)
    return str(write_program(folder / "find.sh", f"#!/bin/sh\ncat {found}\n")), found


def replace_text(path: Path, text: str) -> None:
    """Replace a file at once, which a script may be reading."""
    new = path.with_suffix(".new")
    new.write_text(text)
    os.replace(new, path)


def test_hosts_come_and_go_and_localhost_and_127_0_0_1_are_two(tmp_path):
    script, found = discovery(tmp_path, "localhost:2\n")
    with elastic_job(f"-np 2 --min-np 1 --max-np 4 --host-discovery-script {script}") as job:
        job.wait_for(1, 2)
        replace_text(found, "localhost:2\n127.0.0.1:1\n")
        second = job.wait_for(2, 3)
        assert [fact["slot"] for fact in second] == [0, 1, 0]
        replace_text(found, "127.0.0.1:1\n")  # its rank stays, the others leave with success
        third = job.wait_for(3, 1)
        assert third[0]["process"] == second[2]["process"]
        replace_text(found, "localhost:1\n")  # all hosts are replaced: the new process joins before the old leaves
        fourth = job.wait_for(4, 2)
        assert min(fact["steps"] for fact in fourth) > third[0]["steps"] > 0
        fifth = job.wait_for(5, 1)
        assert fifth[0]["process"] not in [fact["process"] for fact in second]
        job.finish()
        assert job.finished() == [fifth[0]["process"]]
        assert all(line.startswith("hvdkitrun: the job goes on with ") for line in job.messages), job.messages


@pytest.mark.parametrize(("text", "fact"), [
    ("#!/bin/sh\nexit 4\n", "ended with code 4"),
    ("#!/bin/sh\necho a b c\n", "cannot read 'a b c' in the output of the discovery script"),
])  # fmt: skip
def test_the_last_answer_of_a_discovery_script_that_fails_holds(tmp_path, text, fact):
    script, _ = discovery(tmp_path, "localhost:2\n")
    with elastic_job(f"-np 2 --min-np 2 --host-discovery-script {script}") as job:
        job.wait_for(1, 2)
        new = write_program(tmp_path / "new", text)
        os.replace(new, script)
        until(lambda: job.messages, PATIENCE_SECONDS, lambda: "the message")
        job.finish()
        assert job.messages == [f"hvdkitrun: the discovery script {script}: {fact}; its last answer stays valid"]


def test_too_few_slots_end_the_job_after_the_timeout(tmp_path):
    script, _ = discovery(tmp_path, "localhost:1\n")
    flags = f"-np 3 --min-np 2 --elastic-timeout 6 --host-discovery-script {script}"
    with elastic_job(flags) as job:
        assert job.end() == 1
        assert job.messages[-1] == "hvdkitrun: the job ended: only 1 of at least 2 ranks for 6 s"


@pytest.fixture
def far(tmp_path):
    """A PATH on which ``ssh`` is the one above."""
    write_program(tmp_path / "ssh", SSH)
    return f"{tmp_path}:/usr/bin:/bin"


def test_a_host_that_is_cut_off_is_dead_before_it_counts_as_lost(far):
    flags = "-np 3 --min-np 1 -H localhost:2,far.invalid:1 --network-interfaces lo"
    with elastic_job(flags, PATH=far, HVDKIT_TIMEOUT_SECONDS="2") as job:
        first = job.wait_for(1, 3)
        ssh = next(child for child in psutil.Process(job.process.pid).children() if "far.invalid" in child.cmdline())
        ssh.send_signal(signal.SIGSTOP)
        until(lambda: not psutil.pid_exists(first[2]["pid"]), 8, lambda: "the end of the rank on that host")
        assert not job.messages  # the driver has not given up the host yet
        second = job.wait_for(2, 2)
        assert [fact["slot"] for fact in second] == [0, 1]
        assert job.messages[0] == (
            "hvdkitrun: host far.invalid is lost: it gave no sign of life; the job goes on with 2 ranks"
        )
        third = job.wait_for(3, 3)  # the host is tried again after a pause
        assert third[2]["process"] > 2
        job.finish()


def test_a_host_that_cannot_be_reached_does_not_end_the_job(tmp_path):
    write_program(tmp_path / "ssh", "#!/bin/sh\necho 'ssh: no route' >&2\nexit 255\n")
    flags = "-np 2 --min-np 1 --max-np 3 -H localhost:2,far.invalid:1 --network-interfaces lo"
    with elastic_job(flags, PATH=f"{tmp_path}:/usr/bin:/bin") as job:
        job.wait_for(1, 2)
        until(lambda: job.messages, PATIENCE_SECONDS, lambda: "the message")
        job.finish()
        assert job.finished() == [0, 1]
        assert set(job.messages) == {"hvdkitrun: host far.invalid is lost: ssh: no route"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=["int", "term", "kill"])
def test_no_process_outlives_the_launcher(number):
    with elastic_job("-np 2 --min-np 1") as job:
        pids = [fact["pid"] for fact in job.wait_for(1, 2)]
        job.process.send_signal(number)
        assert job.end() == (-9 if number == signal.SIGKILL else 128 + number)
        until(lambda: not any(map(psutil.pid_exists, pids)), 5, lambda: f"the end of {pids}")


def test_output_of_any_form_and_size_arrives_whole():
    code = (
        "import os, sys\nfor n in range(40): os.write(1, b'x' * 99999 + b'\\n')\n"
        "os.write(2, b'unfinished'); os.write(1, bytes(range(14, 64)))"
    )
    result = call(["-np", "2", "--min-np", "2"], code)
    assert result.status == 0, result.stderr
    for label in "01":
        lines = [line for line in result.stdout.split("\n") if line.startswith(f"[{label}]<stdout>: ")]
        assert [len(line) for line in lines[:40]] == [99999 + len("[0]<stdout>: ")] * 40
        assert f"[{label}]<stderr>: unfinished" in result.stderr.splitlines()


def test_output_files_of_later_processes_are_made_too(tmp_path):
    flags = f"-np 2 --min-np 1 --output-filename {tmp_path}"
    with elastic_job(flags, "generation 1 rank 1 step 5 exit") as job:
        job.wait_for(3, 2)
        job.finish()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank.0", "rank.1", "rank.2"]
    assert json.loads((tmp_path / "rank.1" / "stdout").read_text().splitlines()[0])["offer"] == [1, 2, 1]


@pytest.mark.parametrize(("flags", "message"), [
    (
        "--mpi -np 2 --min-np 1",
        "--mpi cannot be combined with --min-np\n"
        "HINT: leave --mpi out: elastic jobs use Gloo, since MPI ends a job if one of its processes fails\n",
    ),
    ("--max-np 4", "--max-np without a number of processes\nHINT: add -np N, the number to start with\n"),
    ("-np 2 --min-np 3", "--min-np 3 is more than -np 2\nHINT: raise -np, or lower --min-np to 2\n"),
    ("-np 4 --max-np 3", "-np 4 is more than --max-np 3\nHINT: lower -np, or raise --max-np to 4\n"),
    (
        "-np 4 --min-np 2 -H localhost:2",
        "-np 4 asks for more processes than there are slots (2)\n"
        "HINT: lower -np to 2, or raise the slots of the hosts (-H HOST:SLOTS)\n",
    ),
    (
        "-np 2 -H localhost:2 --host-discovery-script s",
        "both a list of hosts and --host-discovery-script\nHINT: let the script print the hosts\n",
    ),
    (
        "-np 2 --blacklist-cooldown-range 9 3",
        "--blacklist-cooldown-range: LOW is larger than HIGH\nHINT: give LOW first, as in 10 60\n",
    ),
])  # fmt: skip
def test_flags_that_contradict_each_other_are_refused(flags, message):
    result = call_bare(*flags.split(), "python", "train.py")
    assert result.status == 2
    assert message in result.stderr
    assert "\nHINT: " in result.stderr


def agents(job: RunningJob) -> list[psutil.Process]:
    """Return the agents of a job on this machine, in the order of their start."""
    found = psutil.Process(job.process.pid).children()
    return [process for process in found if any(word.endswith("agent.py") for word in process.cmdline())]


def test_a_host_that_gets_a_warning_leaves_and_its_ranks_end_with_success():
    with elastic_job("-np 2 --min-np 1 -H localhost:1,127.0.0.1:1") as job:
        first = job.wait_for(1, 2)
        agents(job)[1].send_signal(signal.SIGUSR1)
        second = job.wait_for(2, 1)
        assert second[0]["pid"] == first[0]["pid"]
        until(lambda: not psutil.pid_exists(first[1]["pid"]), 10, lambda: "the end of the other rank")
        job.finish()
        assert job.messages == ["hvdkitrun: the job goes on with 1 rank"]


@pytest.mark.parametrize("count", [6, pytest.param(30, marks=pytest.mark.thorough)])
def test_random_events_end_in_a_job_that_goes_on_without_a_lost_step(tmp_path, count):
    choose = random.Random(count)
    script, file = discovery(tmp_path, "localhost:2\n127.0.0.1:2\n")
    flags = f"-np 2 --min-np 1 --max-np 4 --blacklist-cooldown-range 0.1 0.1 --host-discovery-script {script}"
    with elastic_job(flags, HVDKIT_TIMEOUT_SECONDS="2") as job:
        newest = 0

        def members() -> list[dict[str, Any]]:
            number = max(fact["generation"] for fact in job.facts if "generation" in fact)
            facts = job.generation(number)
            return facts if facts and len(facts) == facts[0]["size"] else []

        def has_settled(size: int) -> bool:
            alive = [psutil.pid_exists(fact["pid"]) for fact in members()]
            return len(alive) >= size and all(alive)

        job.wait_for(1, 2)
        for _ in range(count):
            replace_text(file, "localhost:2\n127.0.0.1:2\n")
            until(lambda: has_settled(3), PATIENCE_SECONDS, job.story)
            now = members()
            assert now[0]["steps"] >= newest, (now, newest)  # no step is lost
            newest = now[0]["steps"]
            event = choose.choice(["kill", "stop", "agent", "host", "all but one"])
            time.sleep(choose.uniform(0, 1))
            if event == "host":
                replace_text(file, choose.choice(["localhost:2\n", "127.0.0.1:2\n", "127.0.0.1:1\nlocalhost:1\n"]))
                until(lambda: len(members()) == 2, PATIENCE_SECONDS, job.story)
            elif event == "agent":
                choose.choice(agents(job)).kill()
            else:
                number = signal.SIGSTOP if event == "stop" else signal.SIGKILL
                for fact in choose.sample(now, len(now) - 1 if event == "all but one" else 1):
                    with contextlib.suppress(ProcessLookupError):  # it may have left meanwhile
                        os.kill(fact["pid"], number)
            until(lambda now=now: members() != now, PATIENCE_SECONDS, job.story)
        job.finish()


def test_a_sign_of_life_that_comes_while_the_job_ends_is_no_error():
    link = StartedAgent([])
    host = AgentHost("localhost", link, time.monotonic(), 60.0, 60.0)
    select.select([host.channel.reading], [], [], 60.0)  # its first sign of life has come, and is not read yet
    host.end((0, ""))
    frames = host.receive(time.monotonic())
    assert [frame.kind for frame in frames][:1] == [BEAT]
    with contextlib.suppress(EOFError):  # the agent has ended
        while True:
            assert select.select([host.channel.reading], [], [], 60.0)[0]
            host.receive(time.monotonic())
    link.kill()


ADDS_A_SET = """
import torch, hvdkit.torch as hvd
hvd.init(process_sets="dynamic")
@hvd.elastic.run
def train(state):
    first = hvd.add_process_set([0])
    everyone = hvd.allreduce(torch.ones(1), op=hvd.Sum)
    print("SET", first.ranks, everyone.item())
train(hvd.elastic.TorchState(torch.nn.Linear(1, 1)))
"""


def test_process_sets_may_be_added_if_init_said_so():
    result = call(["-np", "2", "--min-np", "2"], ADDS_A_SET)
    assert sorted(result.stdout.splitlines()) == [f"[{rank}]<stdout>: SET [0] 2.0" for rank in (0, 1)], result.stderr
    assert result.status == 0


def test_a_part_of_the_ranks_is_refused():
    result = call(["-np", "2", "--min-np", "2"], "import hvdkit.torch as hvd; hvd.init(comm=[0, 1])")
    fact = "ValueError: init: comm: in an elastic job, hvdkitrun decides which processes take part.\n"
    hint = "HINT: leave comm out; for operations of some of the ranks, pass process_sets=[hvd.ProcessSet(ranks)]."
    assert f"[0]<stderr>: {fact}[0]<stderr>: {hint}\n" in "".join(
        line for line in result.stderr.splitlines(keepends=True) if line.startswith("[0]")
    )
    assert result.status == 1
