"""A generator and a discriminator, each with a DistributedOptimizer of its own."""

import torch
import torch.nn.functional as F
from torch import nn

import hvdkit.torch as hvd

hvd.init()
torch.manual_seed(hvd.rank())  # different weights on each rank, until rank 0's are broadcast

generator = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
discriminator = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
optimizers = []
# Each optimizer gets the parameters of its own model, and only those names.
for model in (generator, discriminator):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.5, 0.99))
    optimizers.append(hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters()))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
generator_optimizer, discriminator_optimizer = optimizers

draws = torch.Generator().manual_seed(1)  # one seed: all ranks draw the whole batch, and each takes its share
mine = slice(hvd.rank(), 256, hvd.size())


def loss_of(points: torch.Tensor, label: float) -> torch.Tensor:
    """Return the discriminator's loss if ``label`` is the right label of all these points."""
    scores = discriminator(points)
    return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, label))


for _ in range(60):
    real = (torch.randn(256, 2, generator=draws) * 0.5 + 2)[mine]
    fake = generator(torch.randn(256, 4, generator=draws)[mine])

    discriminator_optimizer.zero_grad()
    discriminator_loss = loss_of(real, 1.0) + loss_of(fake.detach(), 0.0)
    discriminator_loss.backward()
    discriminator_optimizer.step()

    # The generator's loss goes through the discriminator. Freeze it for this pass: its gradients would be sent too,
    # and the next zero_grad() of the discriminator's optimizer would raise an error.
    discriminator.requires_grad_(False)
    generator_optimizer.zero_grad()
    generator_loss = loss_of(fake, 1.0)
    generator_loss.backward()
    generator_optimizer.step()
    discriminator.requires_grad_(True)

losses = torch.stack([generator_loss.detach(), discriminator_loss.detach()])
losses = hvd.allreduce(losses, name="losses")
if hvd.rank() == 0:
    print(f"generator {losses[0]:.6f}, discriminator {losses[1]:.6f}, on {hvd.size()} rank(s)")
