"""What stands outside of hvdkit, each in one file, on real ranks: an operation, a codec, a framework, a transport and a
launcher."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.extending.line_up import launch
from tests.on_ranks import RankedCases
from tests.preloaded import preloaded
from tests.ranks import CASES, TORCH, rank_environment, run_ranks

REGISTERED = "tests.extending.registered"
CARRIED = RankedCases("tests.transports.test_transports", runner=REGISTERED, HVDKIT_NODE_MEMORY="0")
FAILING_CODEC = [sys.executable, "-m", "tests.extending.failing_codec"]
# Without the node's memory, what is sent depends on the algorithm, and that on how busy the machine was at init.
DEPENDS = {"test_communication_statistics_count_bytes"}


@pytest.mark.parametrize("case", [name for name in CARRIED.names if name not in DEPENDS])
def test_a_transport_of_ones_own(case: str) -> None:
    CARRIED.check(case, 3, "unix")


@pytest.mark.parametrize(
    ("does", "kind", "said"),
    [
        ("encode", "HorovodInternalError -", r"\S.* failed on rank 1 \(\S+\): RuntimeError: no room for signs"),
        (
            "decode",
            r"PayloadError \d",
            r"\S.* failed on rank 1 \(\S+\): the compressed payload of rank \d is damaged: signs of another kind\. / "
            r"HINT: run the same version of hvdkit on all ranks; if you do, check the memory and the network of "
            r"rank \d\.",
        ),
    ],
)
def test_where_a_codec_fails_others_are_told_so_and_not_that_its_rank_is_lost(
    does: str, kind: str, said: str, transport: str, tmp_path: Path
) -> None:
    status, output = run_ranks([*FAILING_CODEC, does, str(tmp_path)], 3, transport, preload=TORCH)
    assert status == 3, output
    again = rf"hvdkit cannot communicate any more: {said} / HINT: call hvd\.shutdown\(\) and hvd\.init\(\) .*"
    for rank in range(3):
        first, then, *rest = re.findall(rf"^RANK {rank} .*$", output, re.M)
        assert not rest, output
        assert re.fullmatch(f"RANK {rank} {kind if rank == 1 else 'PeerFailedError 1'}: {said}", first), output
        kind_then = "HorovodInternalError -" if rank == 1 else "PeerFailedError 1"
        assert re.fullmatch(f"RANK {rank} {kind_then}: {again}", then), output


@pytest.mark.parametrize("shared", ["0", "1"])
def test_a_launcher_of_ones_own(shared: str) -> None:
    environment = rank_environment(HVDKIT_TRANSPORT="unix", HVDKIT_NODE_MEMORY=shared)
    command = preloaded([sys.executable, "-m", REGISTERED], CASES, environment)
    started = launch(command, 2, environment)
    told = [one.communicate(timeout=60)[0] for one in started]
    assert [one.returncode for one in started] == [0, 0], told
    assert told == [f"line-up {rank} of 2: unix [0, 1]\n" for rank in range(2)]
