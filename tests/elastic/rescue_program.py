"""A training whose result depends on its number of ranks alone, however often it is interrupted and rescued.

    python rescue_program.py STEPS FATAL_STEP

Rank 1 kills itself before FATAL_STEP, unless the training begins with a rescued state.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time

import torch

import hvdkit.torch as hvd


def main(last: int, fatal: int) -> None:
    torch.set_num_threads(1)
    hvd.init()
    torch.manual_seed(hvd.rank())
    model = torch.nn.Linear(8, 1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), model.named_parameters()
    )

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        begin = state.step
        print(f"begins with step {begin}\n", end="", flush=True)
        while state.step < last:
            if (hvd.rank(), state.step, begin) == (1, fatal, 0):
                os.kill(os.getpid(), signal.SIGKILL)
            samples = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * state.step + hvd.rank()))
            optimizer.zero_grad()
            model(samples).square().mean().backward()
            optimizer.step()
            state.step += 1
            state.commit()
            if state.step == 10:
                print("is at step 10", flush=True)
            time.sleep(0.01)

    train(hvd.elastic.TorchState(model, optimizer, step=0))
    values = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    # As one piece: torchrun's ranks share the output.
    sys.stdout.write(f"digest {hashlib.sha256(values.numpy().tobytes()).hexdigest()}\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
