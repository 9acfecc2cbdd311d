"""hvdkitrun says which processes never joined the job, where that is known."""

from __future__ import annotations

import pytest

from hvdkit.launch.main import is_python
from tests.launch.launching import RANK, call, call_bare

NOBODY = "hvdkitrun: no process had called hvd.init() or init_process_group()"
JOINS = "import hvdkit.torch as hvd; hvd.init()\n"
JOINS_TORCH = "import torch.distributed as dist; dist.init_process_group('hvdkit')\n"
# Nothing that a rank writes comes to hvdkitrun, whose word must still be right.
REDIRECTED = "os.dup2(os.open(os.devnull, os.O_WRONLY), 2); os.dup2(2, 1)\n"


def test_a_training_that_fails_alone_is_told_and_which_rank_it_was_comes_last(controller):
    result = call([controller, "-np", "2"], f"{RANK}if rank == '1': sys.exit(3)\ntime.sleep(600)")
    assert NOBODY in result.stderr.splitlines()
    assert "rank 1 on " in result.last_words


@pytest.mark.essential(controller="--gloo")
def test_a_script_for_horovod_that_finds_none_is_told_what_to_do(controller, tmp_path):
    script = tmp_path / "train.py"
    for text, hint in (
        (
            "import horovod.torch as hvd\n",
            "HINT: the script imports horovod: import hvdkit instead, or start it with hvdkitrun --as-horovod\n",
        ),
        ("import horovods\n", ""),
    ):
        script.write_text(text)
        result = call_bare(controller, "-np", "2", "python3", str(script))
        assert f"{NOBODY}\n{hint}hvdkitrun: rank " in result.stderr


@pytest.mark.essential(controller="--mpi")
@pytest.mark.parametrize("code", [JOINS, RANK + REDIRECTED + JOINS, JOINS_TORCH], ids=["", "redirected", "torch"])
def test_a_job_that_joins_hears_nothing_of_it(controller, code):
    result = call([controller, "-np", "2"], code)
    assert (result.status, result.stderr) == (0, "")


@pytest.mark.essential(controller="--gloo")
def test_ranks_that_had_not_joined_a_failed_job_are_named(controller):
    soon = {"HVDKIT_START_TIMEOUT_SECONDS": "2"}
    result = call([controller, "-np", "3"], f"{RANK}if rank == '1': {JOINS}else: time.sleep(600)", **soon)
    assert "hvdkitrun: ranks 0, 2 had not called hvd.init() or init_process_group()" in result.stderr.splitlines()
    assert result.status == 1


def test_one_process_and_other_programs_may_stay_alone(controller):
    assert call([controller, "-np", "1"], "pass").stderr == ""
    for command in (["hostname"], ["sh", "-c", "python3 -c pass || true"]):
        assert call_bare(controller, "-np", "2", *command).stderr == ""


@pytest.mark.essential(controller="--mpi")
def test_what_is_said_of_init_does_not_reach_what_a_rank_starts(controller):
    child = "import os, sys; print(os.environ.get('HVDKIT_INIT_PIPE'))"
    result = call(
        [controller, "-np", "1"], f"import subprocess, sys\n{JOINS}subprocess.run([sys.executable, '-c', {child!r}])"
    )
    assert result.stdout.splitlines() == ["[0]<stdout>: None"]


@pytest.mark.parametrize("program", ["python", "/usr/bin/python3.12", "./train.py", "pypy3"])
@pytest.mark.parametrize("other", ["hostname", "sh", "pythonic-tool", "/opt/python/bin/horovod"])
def test_programs_of_python_are_known_by_their_names(program, other):
    assert is_python(program)
    assert not is_python(other)
