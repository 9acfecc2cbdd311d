"""Programs that hypothesis makes of what users do with gradients: see sequences.py.

All ranks make the same programs, and fail together, so they shrink them together too. SEQUENCES=300 tries so many, and
shrinks what fails.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config
from hypothesis import HealthCheck, Phase, given, settings

from tests.on_ranks import on_ranks
from tests.torch.sequences import Program, programs, run

pytestmark = [
    # Reduced beside the backward pass, and not after it, also where the ranks' threads have every core.
    on_ranks((2, "mpi"), HVDKIT_FUSION_THRESHOLD="65536"),
    # Reduced after the backward pass, on every machine.
    on_ranks((3, "torch"), name="in turn", OMP_NUM_THREADS=str(max(2, os.cpu_count() or 1))),
    on_ranks((2, "torch"), name="no arena", thorough=True, HVDKIT_ARENA="0"),
    on_ranks((2, "torch"), name="no memory", thorough=True, HVDKIT_NODE_MEMORY="0"),
    on_ranks((3, "torch"), name="two nodes", thorough=True, per_node=2),
]


def try_all(hvd: Any, compiled: bool, examples: int) -> None:
    """Every program that is made gives what one process gives; else the smallest that does not is told."""
    failed: dict[Program, BaseException] = {}

    def once(program: Program) -> None:
        """Hypothesis runs again what has failed, and would tell how ranks of which one failed alone miss each other."""
        if program in failed:
            raise failed[program]
        try:
            if compiled:
                torch._dynamo.reset()
            run(hvd, program)
        except BaseException as error:
            failed[program] = error
            raise

    torch.set_num_threads(1)  # OpenMP's threads do not come along into a child
    warnings.filterwarnings("ignore", message="grad and param do not obey the gradient layout contract")
    settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate, *[Phase.shrink] * ("SEQUENCES" in os.environ)],  # which may take minutes
        suppress_health_check=list(HealthCheck),
    )(given(program=programs(compiled))(once))()


def test_any_sequence_gives_what_one_process_gives_on_the_joined_batch(hvd: Any) -> None:
    try_all(hvd, compiled=False, examples=int(os.environ.get("SEQUENCES", "14")))


def test_any_sequence_of_a_compiled_model_gives_that_too(hvd: Any) -> None:
    torch._functorch.config.donated_buffer = False  # which may be given back once: graphs are retained here
    try_all(hvd, compiled=True, examples=3)
