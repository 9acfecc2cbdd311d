"""torchrun starts ranks anew when one dies; the store of its agent keeps what the dead ones wrote."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.launching import outputs_of
from tests.preloaded import preloaded
from tests.ranks import PIPES, TORCH, free_port, rank_environment

TORCHRUN = Path(sys.executable).with_name("torchrun")
pytestmark = pytest.mark.skipif(not TORCHRUN.exists(), reason="torchrun is not beside this Python")


def test_ranks_of_two_agents_meet_again_though_only_one_of_them_has_failed(tmp_path):
    moments = ("after a sum", "before init", "after a sum")
    flags = ["--max-restarts", str(len(moments)), "--nproc-per-node", "1", "--nnodes", "2"]
    flags += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "job"]
    processes = []
    for agent in "ab":
        environment = rank_environment(AGENT=agent, HVDKIT_START_TIMEOUT_SECONDS="20")
        rank = [sys.executable, "-m", "tests.faults.restarted", str(tmp_path), "a0", ",".join(moments)]
        command = [str(TORCHRUN), *flags, "--no-python", *preloaded(rank, TORCH, environment)]
        processes.append(subprocess.Popen(command, env=environment, **PIPES))
    outputs = [out for out, _ in outputs_of(processes, 150)]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    assert [output.count("ENDED WELL") for output in outputs] == [1, 1], outputs
    assert f"of a0 ENDED WELL in start {len(moments)} of its own" in outputs[0], outputs
