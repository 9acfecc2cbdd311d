"""The ways that gradients can take: compressed, predivided, grouped, sparse, Adasum, over a process set."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from tests.torch.optimizer_cases import distributed_sgd
from tests.torch.optimizer_support import (
    assert_close,
    assert_identical,
    assert_same_gradients,
    batch,
    expect,
    joined_batch,
    loss_of,
    make_net,
    train_step,
)


class HalvingCompressor:
    """A user's own compression class: sends half of every value as float16, and counts."""

    compressed = 0

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        HalvingCompressor.compressed += 1
        return (tensor / 2).to(torch.float16), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor.to(ctx) * 2


class Bag(nn.Module):
    """A sparse embedding in front of a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(20, 4, sparse=True)
        self.out = nn.Linear(4, 1)

    def forward(self, indices: torch.Tensor, sparse: bool = True) -> torch.Tensor:
        features = self.embedding(indices) if sparse else torch.ones(len(indices), 4)
        return self.out(features).mean()


def case_fp16_compression_stays_near(hvd: Any) -> None:
    net, alone = make_net(), make_net()
    optimizer = distributed_sgd(hvd, net, compression=hvd.Compression.fp16)
    for step in range(3):
        optimizer.zero_grad()
        alone.zero_grad()
        loss_of(net, batch(hvd.rank(), step)).backward()
        loss_of(alone, joined_batch(hvd.size(), step)).backward()
        optimizer.synchronize()
        assert_same_gradients(net, alone, 2e-3)
        assert net.out.weight.grad.dtype == torch.float32
        with optimizer.skip_synchronize():
            optimizer.step()
        alone.load_state_dict(net.state_dict())
    assert_identical(hvd, net)


def case_custom_compressor_is_used(hvd: Any) -> None:
    net, alone = make_net(), make_net()
    HalvingCompressor.compressed = 0
    optimizer = distributed_sgd(hvd, net, compression=HalvingCompressor)
    for step in range(3):
        optimizer.zero_grad()
        alone.zero_grad()
        loss_of(net, batch(hvd.rank(), step)).backward()
        loss_of(alone, joined_batch(hvd.size(), step)).backward()
        optimizer.synchronize()
        assert_same_gradients(net, alone, 4e-3)
        with optimizer.skip_synchronize():
            optimizer.step()
        alone.load_state_dict(net.state_dict())
    assert HalvingCompressor.compressed == (24 if hvd.size() > 1 else 0)
    assert_identical(hvd, net)


def case_custom_compressor_with_groups(hvd: Any) -> None:
    net, alone = make_net(), make_net()
    optimizer = distributed_sgd(hvd, net, compression=HalvingCompressor, groups=[list(net.hidden.parameters())])
    loss_of(alone, joined_batch(hvd.size())).backward()
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(net, batch(hvd.rank())).backward()
        optimizer.synchronize()
        assert_same_gradients(net, alone, 4e-3)


def case_predivide_factor_leaves_the_average(hvd: Any) -> None:
    alone = make_net()
    loss_of(alone, joined_batch(hvd.size())).backward()
    for factor in (0.5, 4.0):
        net = make_net()
        optimizer = distributed_sgd(hvd, net, gradient_predivide_factor=factor)
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(net, batch(hvd.rank())).backward()
            optimizer.synchronize()
            assert_same_gradients(net, alone)


def case_groups_leave_the_gradients(hvd: Any) -> None:
    alone = make_net()
    loss_of(alone, joined_batch(hvd.size())).backward()

    def groupings(net: nn.Module) -> list[Any]:
        return [1, 3, 100, [list(net.out.parameters()), [net.conv.weight, net.hidden.bias]]]

    for which in range(4):
        net = make_net()
        optimizer = distributed_sgd(hvd, net, groups=groupings(net)[which])
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(net, batch(hvd.rank())).backward()
            optimizer.synchronize()
            assert_same_gradients(net, alone)


def sparse_gradients(hvd: Any, optimizer: Any, model: Bag, uses: list[bool]) -> None:
    """Two steps in which only ranks with ``uses`` touch the embedding; compared with one process's gradients."""
    alone = Bag()
    alone.load_state_dict(model.state_dict())
    for step in range(3):
        indices = [torch.tensor([rank, (rank + step) % 20, 5]) for rank in range(hvd.size())]
        optimizer.zero_grad()
        model(indices[hvd.rank()], uses[hvd.rank()]).backward()
        optimizer.synchronize()
        alone.zero_grad()
        for rank in range(hvd.size()):
            (alone(indices[rank], uses[rank]) / hvd.size()).backward()
        assert_same_gradients(model, alone)
        assert model.embedding.weight.grad.is_sparse, "optimizers such as SparseAdam take sparse gradients only"
        with optimizer.skip_synchronize():
            optimizer.step()
        alone.load_state_dict(model.state_dict())
    assert_identical(hvd, model)


def case_sparse_gradients(hvd: Any) -> None:
    for as_dense in (False, True):
        model = Bag()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), sparse_as_dense=as_dense)
        sparse_gradients(hvd, optimizer, model, [True] * hvd.size())


def case_sparse_gradients_on_one_rank_only(hvd: Any) -> None:
    if hvd.size() == 1:
        return
    for as_dense in (False, True):
        model = Bag()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), sparse_as_dense=as_dense)
        sparse_gradients(hvd, optimizer, model, [rank == hvd.size() - 1 for rank in range(hvd.size())])


def case_sparse_gradient_seen_late_is_reduced(hvd: Any) -> None:
    if hvd.size() == 1:
        return
    model = Bag()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    indices = torch.tensor([hvd.rank()])
    model(indices, False).backward()
    optimizer.step()
    optimizer.zero_grad()
    model(indices).backward()
    optimizer.synchronize()
    gradient = model.embedding.weight.grad.to_dense()
    assert (gradient[: hvd.size()].abs().sum(1) > 0).all()
    assert (gradient[hvd.size() :] == 0).all()


def adasum(vectors: list[np.ndarray]) -> np.ndarray:
    """Adasum of 2^n vectors by its definition, neighbours first."""
    while len(vectors) > 1:
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [(1 - a @ b / (2 * (a @ a) or 1.0)) * a + (1 - a @ b / (2 * (b @ b) or 1.0)) * b for a, b in pairs]
    return vectors[0]


def case_adasum_combines_the_updates(hvd: Any) -> None:
    if hvd.size() not in (2, 4):
        return
    net = make_net()
    optimizer = distributed_sgd(hvd, net, op=hvd.Adasum)
    replicas = [make_net() for _ in range(hvd.size())]
    plain = [torch.optim.SGD(replica.parameters(), lr=0.05, momentum=0.9) for replica in replicas]
    for step in range(3):
        train_step(optimizer, net, batch(hvd.rank(), step))
        starts = [parameter.detach().clone() for parameter in replicas[0].parameters()]
        for rank, replica in enumerate(replicas):
            train_step(plain[rank], replica, batch(rank, step))
        for place, start in enumerate(starts):
            members = [list(replica.parameters())[place] for replica in replicas]
            deltas = [(member.detach() - start).flatten().double().numpy() for member in members]
            with torch.no_grad():
                for member in members:
                    member.copy_(start + torch.from_numpy(adasum(deltas)).float().view_as(start))
            assert_close(list(net.parameters())[place].detach(), members[0].detach(), 1e-5)
    assert_identical(hvd, net)
    with expect(AssertionError, "Skipping synchronization is not supported when using Adasum"):
        optimizer.skip_synchronize().__enter__()


def case_adasum_counts_passes(hvd: Any) -> None:
    if hvd.size() not in (2, 4):
        return
    net = make_net()
    optimizer = distributed_sgd(hvd, net, op=hvd.Adasum, backward_passes_per_step=2)
    for _ in range(2):
        loss_of(net, batch(hvd.rank())).backward()
        loss_of(net, batch(hvd.rank())).backward()
        with expect(AssertionError, "backward_passes_per_step"):
            loss_of(net, batch(hvd.rank())).backward()
        with expect(AssertionError, "optimizer.zero_grad()"):
            optimizer.zero_grad()
        optimizer.synchronize()
        optimizer.step()
        optimizer.zero_grad()
    assert_identical(hvd, net)


def case_process_set_reduces_among_its_ranks(hvd: Any) -> None:
    if hvd.size() < 3:
        return
    ranks = [0, 2]
    process_set = hvd.add_process_set(ranks)
    for compression in (hvd.Compression.none, HalvingCompressor):
        net, alone = make_net(), make_net()
        optimizer = distributed_sgd(hvd, net, process_set=process_set, compression=compression)
        for _ in range(2):
            optimizer.zero_grad()
            alone.zero_grad()
            loss_of(net, batch(hvd.rank()), use_spare=True).backward()
            for rank in ranks if hvd.rank() in ranks else [hvd.rank()]:
                (loss_of(alone, batch(rank), use_spare=True) / (2 if hvd.rank() in ranks else 1)).backward()
            optimizer.synchronize()
            assert_same_gradients(net, alone, 4e-3 if compression is HalvingCompressor else 1e-6)
    hvd.remove_process_set(process_set)


def case_different_parameters_are_an_error_on_every_rank(hvd: Any) -> None:
    if hvd.size() == 1:
        return
    model = nn.Linear(3, 2 if hvd.rank() else 5)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    model(torch.ones(1, 3)).sum().backward()
    with expect(hvd.HorovodInternalError, "weight"):
        optimizer.step()
