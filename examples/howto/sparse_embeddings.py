"""An embedding whose gradient is sparse: its rows are gathered, or summed as a dense tensor."""

import torch
import torch.nn.functional as F
from torch import nn

import hvdkit.torch as hvd

WORDS, LENGTH, SENTENCES = 5000, 8, 512

hvd.init()
# Sentences of random words; the label is 0 or 1: the sum of the words' numbers in thousands, modulo 2.
sentences = torch.randint(WORDS, (SENTENCES, LENGTH), generator=torch.Generator().manual_seed(1))
labels = (sentences.sum(dim=1) // 1000) % 2
mine = slice(hvd.rank(), SENTENCES, hvd.size())
sentences, labels = sentences[mine], labels[mine]


def train(sparse_as_dense: bool) -> float:
    """Train the model, and return the loss."""
    torch.manual_seed(hvd.rank())  # different weights on each rank, until rank 0's are broadcast
    model = nn.Sequential(nn.EmbeddingBag(WORDS, 16, mode="mean", sparse=True), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=10.0)  # takes sparse gradients; so does SparseAdam, not Adam
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), sparse_as_dense=sparse_as_dense
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for _ in range(40):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(sentences), labels)
        loss.backward()
        optimizer.step()
    assert model[0].weight.grad.is_sparse  # either way, so that SparseAdam works with both
    return hvd.allreduce(loss.detach(), name="loss").item()


gathered = train(sparse_as_dense=False)  # every rank gets all rows that the words of any rank touched
summed = train(sparse_as_dense=True)  # all rows are summed, zeros and all
if hvd.rank() == 0:
    print(f"rows gathered: loss {gathered:.6f}, summed as dense: loss {summed:.6f}, on {hvd.size()} rank(s)")
