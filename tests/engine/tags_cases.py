"""Lanes that are agreed on anew in each step, beside one that stays open, with few numbers for all of them."""

import torch

from hvdkit.engine.ranks import assignments

STEPS, PARAMETERS = 24, 30
FEW = 4  # lanes: two optimizers, of which one agrees anew before it lets go


def case_an_optimizer_that_agrees_anew_never_meets_one_that_is_open(hvd):
    """Both get their gradients from one backward pass; the ranks step them in one order, so both are in flight."""
    saved, assignments.LANES = assignments.LANES, FEW
    try:
        kept, changing = ([torch.nn.Parameter(torch.zeros(200)) for _ in range(PARAMETERS)] for _ in range(2))
        optimizers = [
            hvd.DistributedOptimizer(
                torch.optim.SGD(parameters, 0.0), [(str(i), one) for i, one in enumerate(parameters)], op=hvd.Sum
            )
            for parameters in (kept, changing)
        ]
        everyones = hvd.size() * (hvd.size() + 1) // 2
        for step in range(STEPS):
            changing[0].requires_grad_(step % 2 == 0)
            for optimizer in optimizers:
                optimizer.zero_grad()
            factors = [
                (parameter, place + (hvd.rank() + 1) * (step + 1) * (number + 1))
                for place, parameters in ((0, kept), (1000, changing))
                for number, parameter in enumerate(parameters)
                if parameter.requires_grad
            ]
            torch.stack([(parameter * factor).sum() for parameter, factor in factors]).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
            for place, parameters in ((0, kept), (1000, changing)):
                for number, parameter in enumerate(parameters):
                    if parameter.requires_grad:
                        expected = place * hvd.size() + everyones * (step + 1) * (number + 1)
                        assert parameter.grad.unique().tolist() == [expected], (step, place, number)
    finally:
        assignments.LANES = saved
