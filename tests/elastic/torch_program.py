"""A training under hvd.elastic.run, whose result is a pure function of the ranks that took part in each step.

    python torch_program.py STEPS STEPS_PER_COMMIT SIZE RANK:STEP ...

It ends after STEPS steps, once a generation of SIZE ranks has trained. The rank RANK kills itself before STEP,
the first time.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time

import torch

import hvdkit.torch as hvd


def new_training() -> tuple[torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 1)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=10, gamma=0.9)


def loss_of(model: torch.nn.Module, step: int, rank: int) -> torch.Tensor:
    return model(torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + rank))).square().mean()


def replay(sizes: list[int]) -> torch.nn.Module:
    """Train in one process what so many ranks trained in each step."""
    model, optimizer, scheduler = new_training()
    for step, size in enumerate(sizes):
        optimizer.zero_grad()
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        for rank in reversed(range(size)):  # rank 0 last: its buffers are those that new ranks receive
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
            (loss_of(model, step, rank) / size).backward()
        optimizer.step()
        scheduler.step()
    return model


def main(last: int, steps_per_commit: int, full_size: int, kills: dict[int, int]) -> None:
    torch.set_num_threads(1)
    hvd.init()
    model, inner, scheduler = new_training()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(hvd.rank())  # rank 0 gives the others its own
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters())
    state = hvd.elastic.TorchState(model, optimizer, scheduler=scheduler, step=0, sizes=[], is_full=False)
    resets: list[tuple[int, int]] = []
    state.register_reset_callbacks([lambda: resets.append((hvd.rank(), hvd.size()))])

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        while state.step < last or not state.is_full:
            if kills.get(hvd.rank()) == state.step and hvd.size() == full_size:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            loss_of(model, state.step, hvd.rank()).backward()
            optimizer.step()
            scheduler.step()
            state.sizes.append(hvd.size())
            state.step += 1
            state.is_full = hvd.size() == full_size and state.step > max(kills.values(), default=0) + 5
            if state.step % steps_per_commit == 0:
                state.commit()
            time.sleep(0.01)

    train(state)
    values = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    digest = hashlib.sha256(values.numpy().tobytes()).hexdigest()
    expected = torch.cat([parameter.detach().flatten() for parameter in replay(state.sizes).parameters()])
    print(json.dumps({
        "digest": digest, "steps": state.step, "sizes": state.sizes, "resets": resets,
        "lr": inner.param_groups[0]["lr"], "difference": (values - expected).abs().max().item(), "rank": hvd.rank(),
    }), flush=True)  # fmt: skip


if __name__ == "__main__":
    pairs = [text.split(":") for text in sys.argv[4:]]
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), {int(rank): int(step) for rank, step in pairs})
