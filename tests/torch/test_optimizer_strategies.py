"""The ways that gradients can take: compressed, predivided, grouped, sparse, over a process set."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.on_ranks import on_ranks
from tests.ranks import Skip
from tests.torch.optimizer_support import (
    assert_identical,
    assert_same_gradients,
    batch,
    expect,
    joined_batch,
    loss_of,
    make_net,
)
from tests.torch.test_optimizer import distributed_sgd

pytestmark = [
    on_ranks(2, 3, HOROVOD_DYNAMIC_PROCESS_SETS="1"),
    on_ranks((3, "torch"), name="two nodes", per_node=2, HOROVOD_DYNAMIC_PROCESS_SETS="1"),
]


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


def test_fp16_compression_stays_near(hvd: Any) -> None:
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


def test_custom_compressor_is_used(hvd: Any) -> None:
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


def test_custom_compressor_with_groups(hvd: Any) -> None:
    net, alone = make_net(), make_net()
    optimizer = distributed_sgd(hvd, net, compression=HalvingCompressor, groups=[list(net.hidden.parameters())])
    loss_of(alone, joined_batch(hvd.size())).backward()
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(net, batch(hvd.rank())).backward()
        optimizer.synchronize()
        assert_same_gradients(net, alone, 4e-3)


def test_predivide_factor_leaves_the_average(hvd: Any) -> None:
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


def test_groups_leave_the_gradients(hvd: Any) -> None:
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


def test_num_groups_is_the_deprecated_name_of_groups(hvd: Any) -> None:
    alone = make_net()
    loss_of(alone, joined_batch(hvd.size())).backward()
    net = make_net()
    with pytest.warns(DeprecationWarning, match="`num_groups` has been replaced by `groups`") as caught:
        optimizer = distributed_sgd(hvd, net, num_groups=3)
    assert caught[0].filename.endswith("test_optimizer.py")  # where DistributedOptimizer was called
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(net, batch(hvd.rank())).backward()
        optimizer.synchronize()
        assert_same_gradients(net, alone)
    planned = optimizer._synchronizer._agreement.planned
    groups = sorted(sorted(group) for group in planned.lane.plan.groups)
    assert groups == [[0, 1, 2], [3, 4, 5], [6, 7]]  # of eight parameters
    assert distributed_sgd(hvd, make_net())._synchronizer.settings.groups is None


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


def test_sparse_gradients(hvd: Any) -> None:
    for as_dense in (False, True):
        model = Bag()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), sparse_as_dense=as_dense)
        sparse_gradients(hvd, optimizer, model, [True] * hvd.size())


def test_sparse_gradients_on_one_rank_only(hvd: Any) -> None:
    for as_dense in (False, True):
        model = Bag()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), sparse_as_dense=as_dense)
        sparse_gradients(hvd, optimizer, model, [rank == hvd.size() - 1 for rank in range(hvd.size())])


def test_sparse_gradient_seen_late_is_reduced(hvd: Any) -> None:
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


def test_process_set_reduces_among_its_ranks(hvd: Any) -> None:
    if hvd.size() < 3:
        raise Skip("needs three ranks")
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


def test_different_parameters_are_an_error_on_every_rank(hvd: Any) -> None:
    model = nn.Linear(3, 2 if hvd.rank() else 5)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    model(torch.ones(1, 3)).sum().backward()
    with expect(hvd.HorovodInternalError, "weight"):
        optimizer.step()
