"""A few training steps of two ranks on one GPU, for a checker to look at: ``python -m tests.gpu.one_step``.

This process is rank 0 and starts rank 1, which nobody looks at. The way is TESTS_WAY.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

from tests.ranks import free_port

SECONDS = 120
STEPS = 2  # after the first, which compiles kernels


def step() -> None:
    import torch

    import hvdkit.torch as hvd
    from hvdkit.engine.session import runtime
    from tests.gpu import card

    hvd.init()
    model = torch.nn.Sequential(torch.nn.Linear(64, 300), torch.nn.ReLU(), torch.nn.Linear(300, 8)).to(card.DEVICE)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model.named_parameters(),
        compression=hvd.Compression.int8(compress="everywhere"),
    )
    started = time.monotonic()
    for step in range(1 + STEPS):
        if step == 1:
            started = time.monotonic()
        optimizer.zero_grad()
        model(torch.randn(16, 64, device=card.DEVICE)).square().mean().backward()
        optimizer.step()
    lane = next(iter(runtime.engine().lanes.values()))
    card.check_way(lane)
    norm, milliseconds = model[0].weight.norm().item(), 1e3 * (time.monotonic() - started) / STEPS
    print(f"rank {hvd.rank()}: {milliseconds:.1f} ms a step, the norm of the first weight is {norm:.4f}")
    hvd.shutdown()


def main() -> int:
    from tests.gpu import ranks

    if "RANK" in os.environ:
        ranks.set_up()
        step()
        return 0
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "LOCAL_WORLD_SIZE": "2"}
    common["HVDKIT_TRANSPORT"] = "torch"
    common["HVDKIT_START_TIMEOUT_SECONDS"] = str(SECONDS)  # a checker makes a rank slow
    other = subprocess.Popen(
        [sys.executable, "-m", "tests.gpu.one_step"], env={**os.environ, **common, "RANK": "1", "LOCAL_RANK": "1"}
    )
    try:
        os.environ.update(common, RANK="0", LOCAL_RANK="0")
        ranks.set_up()
        step()
        return other.wait(SECONDS)
    finally:
        other.kill()


if __name__ == "__main__":
    sys.exit(main())
