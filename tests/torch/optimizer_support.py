"""A small model, batches that are split over the ranks, and what one process alone would compute."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.ranks import Skip, free_port

ROWS = 4  # of each rank's batch
Data = tuple[torch.Tensor, torch.Tensor]


class Net(nn.Module):
    """Linear and convolution, with a parameter that no forward pass uses unless asked."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3, padding=1)
        self.hidden = nn.Linear(48, 8)
        self.out = nn.Linear(8, 2)
        self.spare = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor, use_spare: bool = False) -> torch.Tensor:
        features = torch.tanh(self.hidden(torch.tanh(self.conv(x)).flatten(1)))
        return self.out(features) + self.spare(features) if use_spare else self.out(features)


def make_net(seed: int = 1) -> Net:
    """Return the same weights on every rank."""
    torch.manual_seed(seed)
    return Net()


def make_double(seed: int = 1) -> nn.Module:
    """Return the net in float64, in which the size of a batch rounds no product of matrices differently."""
    return make_net(seed).double()


def batch(rank: int, step: int = 0) -> Data:
    """Return a rank's inputs and targets in a step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(ROWS, 1, 4, 4, generator=generator), torch.randn(ROWS, 2, generator=generator)


def loss_of(net: nn.Module, data: Data, **options: Any) -> torch.Tensor:
    """Return the mean over all elements, so that the joined batch's gradient is the mean of the ranks' gradients."""
    dtype = next(net.parameters()).dtype
    return nn.functional.mse_loss(net(data[0].to(dtype), **options), data[1].to(dtype))


def loss_on(net: nn.Module, ranks: Iterable[int], step: int = 0, **options: Any) -> torch.Tensor:
    inputs, targets = zip(*(batch(rank, step) for rank in ranks), strict=True)
    return loss_of(net, (torch.cat(inputs), torch.cat(targets)), **options)


def sgd(net: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    """Return a plain optimizer with a state."""
    return torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)


def distributed_sgd(hvd: Any, net: nn.Module, lr: float = 0.05, **options: Any) -> Any:
    """Return a DistributedOptimizer with named parameters."""
    return hvd.DistributedOptimizer(sgd(net, lr), named_parameters=net.named_parameters(), **options)


def wrapped_net(hvd: Any, seed: int = 1, **options: Any) -> tuple[Net, Any]:
    net = make_net(seed)
    return net, distributed_sgd(hvd, net, **options)


def train_step(optimizer: Any, net: nn.Module, data: Data, **options: Any) -> None:
    """Train on one batch: zero_grad(), backward(), step()."""
    optimizer.zero_grad()
    loss_of(net, data, **options).backward()
    optimizer.step()


def train(hvd: Any, optimizer: Any, net: nn.Module, steps: int = 3) -> None:
    """Train on this rank's batches of some steps."""
    for step in range(steps):
        train_step(optimizer, net, batch(hvd.rank(), step))


def update(optimizer: Any) -> None:
    """Step after synchronize()."""
    with optimizer.skip_synchronize():
        optimizer.step()


def gradients(net: nn.Module) -> list[torch.Tensor]:
    """Return the gradients of all parameters, the tensors themselves. Each parameter must have one."""
    tensors = [parameter.grad for parameter in net.parameters()]
    assert all(gradient is not None for gradient in tensors)
    return tensors  # type: ignore[return-value]


class Comparison:
    """A model that all ranks train together, and the same one trained by one process on the batches of all ranks."""

    def __init__(
        self,
        hvd: Any,
        make: Callable[[], nn.Module] = make_net,
        plain: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
        loss: Callable[..., torch.Tensor] = loss_on,
        relative: float = 1e-5,
        **options: Any,
    ) -> None:
        """``loss(net, ranks, step)`` is the mean over the batches of ranks; ``relative`` the tolerance of checks."""
        self.hvd, self.loss, self.relative = hvd, loss, relative
        self.net, self.alone = make(), make()
        self.optimizer = hvd.DistributedOptimizer(plain(self.net), self.net.named_parameters(), **options)
        self.plain = hvd.unsynchronized(plain(self.alone))

    @property
    def sides(self) -> list[tuple[nn.Module, Any, list[int]]]:
        """Model, optimizer, and the ranks whose batches it is trained on."""
        everyone = list(range(self.hvd.size()))
        return [(self.net, self.optimizer, [self.hvd.rank()]), (self.alone, self.plain, everyone)]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of both; those of the process alone always become None."""
        self.optimizer.zero_grad(set_to_none=set_to_none)
        self.plain.zero_grad()

    def backward(self, step: int = 0, **options: Any) -> None:
        for net, _, ranks in self.sides:
            self.loss(net, ranks, step, **options).backward()

    def reduce(self, step: int = 0, set_to_none: bool = True, passes: int = 1, **options: Any) -> None:
        """Compute the gradients of a step in some passes, reduce and compare them."""
        self.zero_grad(set_to_none)
        for part in range(passes):
            self.backward(step * passes + part, **options)
        self.optimizer.synchronize()
        self.check_gradients()

    def update(self) -> None:
        """Step on gradients that are reduced already."""
        update(self.optimizer)
        self.plain.step()

    def step(self) -> None:
        self.optimizer.step()
        self.plain.step()

    def train(self, steps: int = 3, first: int = 0, **options: Any) -> None:
        """Train both for some steps, and compare them."""
        for step in range(first, first + steps):
            self.zero_grad()
            self.backward(step, **options)
            self.step()
        self.check()

    def check_gradients(self) -> None:
        assert_same_gradients(self.net, self.alone, self.relative)

    def check(self) -> None:
        """Compare the parameters with those of one process, and with the bits of all ranks."""
        assert_same_weights(self.net, self.alone, self.relative)
        assert_identical(self.hvd, self.net)


def assert_reduces(
    hvd: Any,
    optimizer: Any,
    net: nn.Module,
    steps: int = 2,
    relative: float = 1e-5,
    loss: Callable[..., torch.Tensor] = loss_on,
    updates: bool = True,
    **options: Any,
) -> None:
    """Check that gradients are those of one process on the joined batch, in this and the next steps."""
    for step in range(steps):
        alone = copy.deepcopy(net)
        optimizer.zero_grad()
        loss(net, [hvd.rank()], step, **options).backward()
        loss(alone, range(hvd.size()), step, **options).backward()
        optimizer.synchronize()
        assert_same_gradients(net, alone, relative)
        if updates:
            update(optimizer)
    assert_identical(hvd, net)


def assert_same_gradients(net: nn.Module, expected: nn.Module, relative: float = 1e-6) -> None:
    """Check the gradients, of which one that ``expected`` has not counts as zeros."""
    for (name, parameter), wanted in zip(net.named_parameters(), expected.parameters(), strict=True):
        if parameter.grad is not None or wanted.grad is not None:
            assert parameter.grad is not None, name
            gradient = torch.zeros_like(wanted) if wanted.grad is None else wanted.grad
            assert_close(parameter.grad.to_dense(), gradient.to_dense(), relative, f"the gradient of {name}")


def assert_same_weights(net: nn.Module, expected: nn.Module, relative: float = 1e-6) -> None:
    for (name, parameter), wanted in zip(net.named_parameters(), expected.parameters(), strict=True):
        assert_close(parameter.detach(), wanted.detach(), relative, name)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, relative: float = 1e-6, what: str = "it") -> None:
    """Check that the largest difference is at most ``relative`` of the largest value."""
    if expected.numel() == 0:
        return
    scale = expected.abs().max().item() or 1.0
    difference = (actual - expected).abs().max().item()
    assert difference <= relative * scale, f"{what} differs by {difference:.3g} where the largest value is {scale:.3g}"


def digest(net: nn.Module) -> str:
    summary = hashlib.sha256()
    for parameter in net.parameters():
        summary.update(parameter.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return summary.hexdigest()


def assert_identical(hvd: Any, net: nn.Module) -> None:
    """Check that all ranks hold the same bits."""
    digests = hvd.allgather_object(digest(net))
    assert len(set(digests)) == 1, digests


@contextlib.contextmanager
def no_warnings() -> Iterator[None]:
    """Make any warning in the block an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@contextlib.contextmanager
def process_group(hvd: Any, backend: str = "gloo") -> Iterator[None]:
    """Run the block beside a group of torch.distributed with all ranks."""
    if dist.is_initialized():
        raise Skip("needs a torch.distributed that is free")
    port = hvd.broadcast_object(free_port(), 0)
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=hvd.rank(), world_size=hvd.size())
    try:
        yield
    finally:
        dist.destroy_process_group()


class Passing:
    """A compression of the user's own that changes nothing, so that gradients are reduced by name."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, context: Any) -> torch.Tensor:
        return tensor
