"""torchrun starts ranks anew when one dies; the store of its agent keeps what the dead ones wrote."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.preloaded import preloaded
from tests.ranks import ROOT, TORCH, free_port, rank_environment

TORCHRUN = Path(sys.executable).with_name("torchrun")
JOB_SECONDS = 150
MOMENTS = ("before init", "after a sum", "before init", "after a sum")

pytestmark = pytest.mark.skipif(not TORCHRUN.exists(), reason="torchrun is not beside this Python")


def run_job(folder: Path, agents: int, per_agent: int, dying: str, moments: tuple[str, ...]) -> list[str]:
    """What the ranks of each agent printed, when all agents have ended well."""
    flags = ["--max-restarts", str(len(moments)), "--nproc-per-node", str(per_agent), "--nnodes", str(agents)]
    flags += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "job"]
    processes = []
    for agent in range(agents):
        environment = rank_environment(AGENT="ab"[agent], HVDKIT_START_TIMEOUT_SECONDS="20")
        rank = preloaded(
            [sys.executable, "-m", "tests.faults.restarted", str(folder), dying, ",".join(moments)], TORCH, environment
        )
        processes.append(
            subprocess.Popen(
                [str(TORCHRUN), *flags, "--no-python", *rank],
                env=environment,
                cwd=ROOT,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        )
    try:
        outputs = [process.communicate(timeout=JOB_SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate()
    assert [process.returncode for process in processes] == [0] * agents, "\n".join(outputs)
    return outputs


@pytest.mark.parametrize("dying", ["a0", pytest.param("a1", marks=pytest.mark.thorough)])
def test_ranks_of_one_agent_meet_again_after_each_restart(tmp_path, dying):
    (output,) = run_job(tmp_path, 1, 2, dying, MOMENTS)
    assert output.count("ENDED WELL") == 2, output
    assert f"of {dying} ENDED WELL in start {len(MOMENTS)} of its own" in output, output


def test_ranks_of_two_agents_meet_again_though_only_one_of_them_has_failed(tmp_path):
    moments = ("after a sum", "before init")
    outputs = run_job(tmp_path, 2, 1, "a0", moments)
    assert [output.count("ENDED WELL") for output in outputs] == [1, 1], outputs
    assert f"of a0 ENDED WELL in start {len(moments)} of its own" in outputs[0], outputs
