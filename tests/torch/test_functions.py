"""Bringing ranks to the root's objects, parameters and optimizer state, whatever each rank had before."""

from __future__ import annotations

import collections

import torch
from torch import nn

from tests.on_ranks import on_ranks
from tests.told import told
from tests.torch.data import MOVABLE, equal, values

pytestmark = on_ranks(2, 3)

ROOTS = ("first", "last")


def _root(hvd, which: str) -> int:
    return 0 if which == "first" else hvd.size() - 1


def test_broadcast_object_gives_the_roots_object(hvd):
    rank = hvd.rank()
    for which in ROOTS:
        root = _root(hvd, which)
        mine = {"rank": rank, "nested": [rank, (rank, "text" * (rank + 1))], "tensor": torch.full((rank + 1,), rank)}
        got = hvd.broadcast_object(mine, root)
        assert got["rank"] == root
        assert got["nested"] == [root, (root, "text" * (root + 1))]
        assert equal(got["tensor"], torch.full((root + 1,), root))
        assert (got is mine) == (rank == root)
    # What the others pass does not matter, not even its type.
    assert hvd.broadcast_object({"a": 1} if rank == 0 else None) == {"a": 1}
    assert hvd.broadcast_object(lambda: rank, name="function")() == 0
    large = hvd.broadcast_object(bytes(3_000_000) if rank == 0 else None, name="large")
    assert len(large) == 3_000_000


def test_allgather_object_gives_all_objects_in_order(hvd):
    objects = hvd.allgather_object({"rank": hvd.rank(), "list": list(range(hvd.rank()))})
    assert objects == [{"rank": rank, "list": list(range(rank))} for rank in range(hvd.size())]
    assert hvd.allgather_object(None, name="nothing") == [None] * hvd.size()


class _NotPicklable:
    def __reduce__(self):
        raise TypeError("this cannot be pickled")


def test_objects_that_cannot_be_pickled_are_an_error_on_every_rank(hvd):
    bad = hvd.size() - 1
    here = hvd.rank() == bad
    kind, text = (TypeError, "cannot be pickled") if here else (hvd.HorovodInternalError, f"{bad}")
    with told(kind, text):
        hvd.broadcast_object(_NotPicklable(), bad)
    with told(kind, text):
        hvd.allgather_object(_NotPicklable() if here else 1)
    assert hvd.broadcast_object("good", 0) == "good"


def _model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(
        collections.OrderedDict(
            conv=nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last),
            norm=nn.BatchNorm2d(4),
            linear=nn.Linear(5, 2).double(),
            brain=nn.Linear(3, 3).bfloat16(),
        )
    )
    for parameter in model.linear.parameters():
        parameter.requires_grad = False
    model.norm.running_mean.normal_()
    model.norm.num_batches_tracked.fill_(seed)
    model.register_buffer("expanded", torch.full((1, 1), float(seed)).expand(3, 4))
    model.register_buffer("complex", torch.complex(torch.full((2,), float(seed)), torch.ones(2)))
    model.register_buffer("flag", torch.tensor(seed % 2 == 0))
    model.register_buffer("eighth", torch.full((3,), float(seed)).to(torch.float8_e4m3fn))
    model.register_buffer("unsigned", torch.full((), seed, dtype=torch.uint16))
    return model


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).contiguous().view(torch.uint8)


def _same_state(model: nn.Module, expected: nn.Module) -> None:
    for (name, got), (_, wanted) in zip(model.state_dict().items(), expected.state_dict().items(), strict=True):
        assert got.dtype == wanted.dtype, name
        assert got.stride() == wanted.stride(), name
        assert torch.equal(_bytes(got), _bytes(wanted)), name


def test_broadcast_parameters_takes_every_form_and_type(hvd):
    for which in ROOTS:
        root = _root(hvd, which)
        expected = _model(100 + root)
        model = _model(100 + hvd.rank())
        hvd.broadcast_parameters(model.state_dict(), root_rank=root)
        _same_state(model, expected)
    forms = {
        "named iterator": lambda model: model.named_parameters(),
        "named list": lambda model: list(model.named_parameters()),
        "dict": lambda model: dict(model.named_parameters()),
        "iterator": lambda model: model.parameters(),
        "list": lambda model: list(model.parameters()),
    }
    for form, parameters in forms.items():
        model, expected = _model(100 + hvd.rank()), _model(100)
        requires_grad = [parameter.requires_grad for parameter in model.parameters()]
        hvd.broadcast_parameters(parameters(model), root_rank=0)
        for got, wanted in zip(model.parameters(), expected.parameters(), strict=True):
            assert equal(got, wanted), form
        assert [parameter.requires_grad for parameter in model.parameters()] == requires_grad


def test_broadcast_parameters_of_every_type_and_place_in_memory(hvd):
    tensors, expected = {}, {}
    for dtype in MOVABLE:
        tensors[f"{dtype}.plain"] = values(hvd.rank(), (3, 4), dtype)
        expected[f"{dtype}.plain"] = values(0, (3, 4), dtype)
        tensors[f"{dtype}.view"] = values(hvd.rank(), (6, 8), dtype).t()[::2]
        expected[f"{dtype}.view"] = values(0, (6, 8), dtype).t()[::2]
        tensors[f"{dtype}.scalar"] = values(hvd.rank(), (), dtype)
        expected[f"{dtype}.scalar"] = values(0, (), dtype)
        tensors[f"{dtype}.empty"] = expected[f"{dtype}.empty"] = torch.empty(0, 2, dtype=dtype)
    hvd.broadcast_parameters(tensors, 0)
    assert all(equal(tensors[name], expected[name]) for name in tensors)


def test_broadcast_parameters_skips_extra_state_and_refuses_other_objects(hvd):
    weight = torch.full((2,), float(hvd.rank()))
    hvd.broadcast_parameters({"weight": weight, "layer._extra_state": {"any": "thing"}, "bias": None}, 0)
    assert equal(weight, torch.zeros(2))
    optimizer = torch.optim.SGD([weight.clone().requires_grad_()], lr=0.1)
    for wrong, kind, text in (
        (optimizer.state_dict(), TypeError, "broadcast_optimizer_state"),
        (3, ValueError, "invalid params of type"),
        (weight, ValueError, "invalid params of type"),
        ([("name", 3)], TypeError, "'name'"),
        ([weight.to_sparse()], ValueError, "dense"),
    ):
        with told(kind, text):
            hvd.broadcast_parameters(wrong, 0)


# -- optimizers -------------------------------------------------------------------------------------------------------


def _optimizers():
    """Every optimizer of this PyTorch that has a state to broadcast, with what makes it keep all of it."""
    options = {"SGD": {"momentum": 0.9}, "RMSprop": {"momentum": 0.9, "centered": True}, "Adam": {"amsgrad": True}}
    for name, kind in sorted(vars(torch.optim).items()):
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and name not in ("Optimizer", "LBFGS"):
            yield kind, options.get(name, {})


def _trained(kind, options, steps: int, seed: int, lr: float):
    """A small model and its optimizer after some steps with gradients that depend on the seed."""
    torch.manual_seed(seed)
    sparse = kind is torch.optim.SparseAdam
    layers = [nn.Embedding(6, 12, sparse=sparse), nn.Linear(12, 9, bias=False)]
    parameters = [layer.weight for layer in layers]
    groups = [{"params": [parameters[0]], "lr": lr}, {"params": [parameters[1]], "lr": lr / 2}]
    optimizer = kind(groups, lr=lr, **options)
    for _ in range(steps):
        _give_gradients(parameters, sparse, seed)
        optimizer.step()
    return parameters, optimizer


def _give_gradients(parameters, sparse: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        gradient = torch.randn(parameter.shape, generator=generator)
        parameter.grad = gradient.to_sparse(1) if sparse else gradient


def _same(left, right) -> bool:
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(_same, left, right))
    return left == right


def _check_broadcast(hvd, kind, options, root_steps: int, other_steps: int, root: int) -> None:
    rank = hvd.rank()
    steps = root_steps if rank == root else other_steps
    lr = 0.01 * (rank + 1)
    parameters, optimizer = _trained(kind, options, steps, seed=rank, lr=lr)
    _, expected = _trained(kind, options, root_steps, seed=root, lr=0.01 * (root + 1))
    groups = list(optimizer.param_groups)
    before = [(parameter.detach().clone(), parameter.grad) for parameter in parameters]
    hvd.broadcast_optimizer_state(optimizer, root)
    assert _same(optimizer.state_dict(), expected.state_dict())
    for parameter, (value, gradient) in zip(parameters, before, strict=True):
        assert equal(parameter.detach(), value)
        assert parameter.grad is gradient
    assert all(now is then for now, then in zip(optimizer.param_groups, groups, strict=True))
    # From here on all ranks make the same steps.
    hvd.broadcast_parameters(parameters, root)
    _give_gradients(parameters, kind is torch.optim.SparseAdam, seed=99)
    optimizer.step()
    for tensor in parameters:
        assert all(_same(tensor.detach(), other) for other in hvd.allgather_object(tensor.detach()))


def test_every_optimizer_whatever_steps_ranks_have_made(hvd):
    last = hvd.size() - 1
    for root_steps, other_steps, root in ((0, 0, 0), (2, 0, 0), (0, 2, last), (3, 1, last)):
        for kind, options in _optimizers():
            _check_broadcast(hvd, kind, options, root_steps, other_steps, root)


def test_received_state_is_written_into_the_tensors_that_were_there(hvd):
    parameters, optimizer = _trained(torch.optim.Adam, {}, 1, seed=hvd.rank(), lr=0.1)
    before = [optimizer.state[parameter]["exp_avg"] for parameter in parameters]
    hvd.broadcast_optimizer_state(optimizer, 0)
    after = [optimizer.state[parameter]["exp_avg"] for parameter in parameters]
    assert all(new is old for new, old in zip(after, before, strict=True))


def test_options_that_are_tensors_and_lists(hvd):
    lr = torch.tensor(0.1 * (hvd.rank() + 1))
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([parameter], lr=lr, betas=(0.5 + 0.1 * hvd.rank(), 0.9), foreach=False)
    optimizer.param_groups[0]["milestones"] = [hvd.rank(), [hvd.rank()]]
    hvd.broadcast_optimizer_state(optimizer, 0)
    group = optimizer.param_groups[0]
    assert group["lr"] is lr
    assert equal(lr, torch.tensor(0.1))
    assert group["betas"] == (0.5, 0.9)
    assert group["milestones"] == [0, [0]]


def test_nested_state_and_state_of_no_parameter(hvd):
    """As deep as some optimizers outside PyTorch have it."""
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=1.0)

    def state(seed: int) -> dict:
        return {
            "factors": [torch.full((9, 9), float(seed)), {"inverse": torch.full((70,), seed)}],
            "low": torch.full((10, 10), float(seed)).to(torch.float8_e5m2),
            "sparse": torch.full((3,), float(seed)).to_sparse(),
            "nothing": None,
            "kind": f"seed {seed}",
            "pair": (seed, torch.tensor(seed)),
        }

    if hvd.rank() == 0:
        optimizer.state[parameter] = state(5)
        optimizer.state["shared"] = {"count": 5, "tensor": torch.full((100,), 5.0)}
    hvd.broadcast_optimizer_state(optimizer, 0)
    received, expected = optimizer.state[parameter], state(5)
    assert received["low"].dtype == torch.float8_e5m2
    for dense in (received, expected):
        dense.update(low=dense["low"].float(), sparse=dense["sparse"].to_dense())
    assert _same(received, expected)
    assert _same(optimizer.state["shared"], {"count": 5, "tensor": torch.full((100,), 5.0)})


def test_frozen_parameters_have_no_state(hvd):
    frozen, free = nn.Parameter(torch.ones(100), requires_grad=False), nn.Parameter(torch.ones(100))
    optimizer = torch.optim.Adam([frozen, free])
    if hvd.rank() == 0:
        free.grad = torch.ones(100)
        optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, 0)
    assert frozen not in optimizer.state
    assert optimizer.state[free]["step"] == 1


def test_a_distributed_optimizer(hvd):
    torch.manual_seed(hvd.rank())
    model = nn.Linear(20, 5)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (hvd.rank() + 1))
    if hvd.rank() == 0:
        model(torch.ones(2, 20)).sum().backward()
        optimizer.step()
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    gradients = [parameter.grad for parameter in model.parameters()]
    hvd.broadcast_parameters(model.state_dict(), 0)
    hvd.broadcast_optimizer_state(optimizer, 0)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert all(optimizer.state[parameter]["step"] == 1 for parameter in model.parameters())
    assert all(p.grad is gradient for p, gradient in zip(model.parameters(), gradients, strict=True))
    optimizer.zero_grad()
    model(torch.full((2, 20), float(hvd.rank()))).sum().backward()
    optimizer.step()
    weights = hvd.allgather_object(model.weight.detach())
    assert all(_same(weight, weights[0]) for weight in weights)


def test_optimizers_that_cannot_be_broadcast_are_an_error_on_every_rank(hvd):
    last = hvd.rank() == hvd.size() - 1
    parameter, other = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(4))
    adam = torch.optim.Adam
    with told(ValueError, "LBFGS"):
        hvd.broadcast_optimizer_state(torch.optim.LBFGS([parameter]), 0)
    for optimizer, text in (
        (torch.optim.SGD([parameter], lr=0.1) if last else adam([parameter]), "optimizer is SGD, not Adam"),
        (adam([other if last else parameter]), "parameter 0 of group 0 has shape (4,), not (2, 3)"),
        (adam([parameter, *[other] * last]), "2 parameters in group 0, not 1"),
        (adam([{"params": [parameter]}, *[{"params": [other]}] * last]), "2 parameter groups, not 1"),
    ):
        with told(ValueError, f"rank {hvd.size() - 1}: {text}"):
            hvd.broadcast_optimizer_state(optimizer, 0)
