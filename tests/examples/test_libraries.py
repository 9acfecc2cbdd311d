"""Lightning, Accelerate and the Trainer of transformers train on two ranks as in one process."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.examples.running import TIMEOUT_SECONDS, lines, run_example
from tests.examples.test_howto import OTHER_PROCESSOR, SCRIPTS, TOLERANCE, assert_same, shown
from tests.launch.launching import run_to_end
from tests.ranks import ROOT

# The library of each script.
LIBRARIES = {
    "lightning_strategy.py": "lightning",
    "lightning_group.py": "lightning",
    "accelerate_group.py": "accelerate",
    "accelerate_optimizer.py": "accelerate",
    "trainer_group.py": "transformers",
    "trainer_optimizer.py": "transformers",
}


def environment_with(library: str) -> dict[str, str]:
    """Return the variables with which a process finds a library, wherever it is installed."""
    spec = find_spec(library)
    if spec is None or spec.origin is None:
        pytest.skip(f"{library} is not installed")
    return {"PYTHONPATH": f"{ROOT}:{Path(spec.origin).parents[1]}", "HF_HUB_OFFLINE": "1"}


def printed(script: Path | str, launcher: str, library: str) -> str:
    """Return what a script prints on two ranks."""
    environment = environment_with(library)
    if launcher == "hvdkitrun":
        output, _ = run_example(Path("howto") / script, **environment)
    else:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        done = run_to_end([*torchrun, str(SCRIPTS / script)], TIMEOUT_SECONDS, **environment)
        assert done.status == 0, f"{done.stdout}\n{done.stderr}"
        output = done.stdout
    return "\n".join(lines(output))


@pytest.mark.essential(launcher="hvdkitrun", name=("lightning_strategy.py", "accelerate_group.py"))
@pytest.mark.parametrize("launcher", ["hvdkitrun", "torchrun"])
@pytest.mark.parametrize("name", LIBRARIES)
def test_two_ranks_print_what_one_process_prints(name: str, launcher: str) -> None:
    library = LIBRARIES[name]
    two = printed(name, launcher, library).replace(" on 2 rank(s)", " on N rank(s)")
    assert " on N rank(s)" in two
    output, _ = run_example(Path("howto") / name, size=1, **environment_with(library))
    assert_same(two, "\n".join(lines(output)).replace(" on 1 rank(s)", " on N rank(s)"), TOLERANCE)
    assert_same(two, shown(name), OTHER_PROCESSOR)


@pytest.mark.thorough
def test_a_trainer_that_only_measures_the_norm_measures_that_of_all_ranks(tmp_path: Path) -> None:
    script = tmp_path / "measuring.py"
    text = (SCRIPTS / "trainer_optimizer.py").read_text()
    assert "max_steps=20," in text
    script.write_text(text.replace("max_steps=20,", "max_steps=20, max_grad_norm=0.0,"))
    two = printed(script, "torchrun", "transformers")
    output, _ = run_example(script, size=1, **environment_with("transformers"))
    assert_same(two, "\n".join(lines(output)).replace(" on 1 rank(s)", " on 2 rank(s)"), TOLERANCE)


@pytest.mark.thorough
def test_a_model_that_accelerate_puts_into_ddp_is_an_error_with_a_distributed_optimizer(tmp_path: Path) -> None:
    script = tmp_path / "twice.py"
    text = (SCRIPTS / "accelerate_optimizer.py").read_text()
    prepared = "optimizer, loader = accelerator.prepare(optimizer, loader)"
    assert prepared in text
    script.write_text(
        text.replace(prepared, "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)")
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = run_to_end([*torchrun, str(script)], TIMEOUT_SECONDS, **environment_with("accelerate"))
    assert done.status != 0
    assert "belongs to a DistributedDataParallel too" in done.stderr
