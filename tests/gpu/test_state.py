"""Broadcasts of models and of optimizers' states, batch normalisation, and memory that does not grow, on a GPU."""

from __future__ import annotations

import copy

import psutil
import torch
from torch import nn
from torch.nn import functional

from tests.gpu import card

STEPS = 500
SETTLES_BYTES = 8 << 20  # of the GPU: blocks that a stream has used are free after a query
MOST_GROWTH_BYTES = 48 << 20  # of the process in host memory: lists, logs and allocators settle
pytestmark = card.on_card(2)


def test_a_model_and_its_optimizer_are_broadcast(hvd):
    torch.manual_seed(hvd.rank())
    model = nn.Sequential(nn.Linear(40, 30), nn.BatchNorm1d(30), nn.Linear(30, 2)).to(card.DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (1 + hvd.rank()))
    for _ in range(1 + hvd.rank()):
        optimizer.zero_grad()
        model(torch.randn(8, 40, device=card.DEVICE)).square().mean().backward()
        optimizer.step()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert all(tensor.device.type == card.DEVICE.type for tensor in model.state_dict().values())
    state = optimizer.state_dict()
    assert state["param_groups"][0]["lr"] == 0.1
    moments = [entry[key] for entry in state["state"].values() for key in ("exp_avg", "exp_avg_sq")]
    assert all(tensor.device.type == card.DEVICE.type for tensor in moments)
    tensors = [*model.state_dict().values(), *moments]
    numbers = torch.cat([tensor.detach().double().cpu().reshape(-1) for tensor in tensors])
    everyones = hvd.allgather(numbers.view(1, -1))
    assert all(torch.equal(values, everyones[0]) for values in everyones)
    assert hvd.broadcast_object({"rank": hvd.rank(), "tensor": torch.ones(2, device=card.DEVICE)}, 0)["rank"] == 0


def test_batch_normalisation_over_all_ranks(hvd):
    own = slice(hvd.rank() * 6, (hvd.rank() + 1) * 6)
    plain = nn.BatchNorm2d(5).to(card.DEVICE)
    distributed = hvd.SyncBatchNorm(5).to(card.DEVICE)
    for step in range(3):
        joined = card.random(6 * hvd.size(), 5, 4, 4, seed=step).requires_grad_()
        part = joined.detach()[own].clone().requires_grad_()
        factors = card.random(6 * hvd.size(), 5, 4, 4, seed=100 + step)
        (plain(joined) * factors).sum().backward()
        (distributed(part) * factors[own]).sum().backward()
        torch.testing.assert_close(part.grad, joined.grad[own], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(distributed.running_mean, plain.running_mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(distributed.running_var, plain.running_var, rtol=1e-5, atol=1e-6)
    of_weight = hvd.allreduce(distributed.weight.grad, op=hvd.Sum)
    torch.testing.assert_close(of_weight, plain.weight.grad, rtol=1e-4, atol=1e-3)


def test_memory_does_not_grow(hvd):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(20))).to(card.DEVICE)
    before = copy.deepcopy(model.state_dict())
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3), model.named_parameters())
    inputs = card.random(16, 128, seed=hvd.rank())
    process, seen = psutil.Process(), []
    for step in range(STEPS):
        optimizer.zero_grad()
        functional.mse_loss(model(inputs), inputs).backward()
        optimizer.step()
        if step % 100 == 99:
            on_card = torch.cuda.memory_stats() if card.IS_GPU else {}
            sizes = [on_card.get(f"{kind}_bytes.all.current", 0) for kind in ("allocated", "reserved")]
            seen.append((*sizes, process.memory_info().rss))
    allocated, reserved, resident = zip(*seen, strict=True)
    assert allocated[-1] <= allocated[1], seen
    assert reserved[-1] <= reserved[1] + SETTLES_BYTES, seen
    assert resident[-1] - resident[1] <= MOST_GROWTH_BYTES, seen
    assert any(not torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
