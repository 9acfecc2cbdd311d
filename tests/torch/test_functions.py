"""Bringing ranks to the root's objects, parameters and optimizer state, whatever each rank had before."""

from __future__ import annotations

import torch
from torch import nn

from tests.on_ranks import on_ranks
from tests.told import told
from tests.torch.data import MOVABLE, equal, same, values
from tests.torch.optimizer_support import assert_identical
from tests.torch.ownership_support import assert_same_bits

pytestmark = on_ranks(2, 3)


def test_objects_of_the_root_and_of_all_ranks(hvd):
    rank, size = hvd.rank(), hvd.size()
    for root in (0, size - 1):
        own = {"rank": rank, "nested": [rank, (rank, "text" * (rank + 1))], "tensor": torch.full((rank + 1,), rank)}
        received = hvd.broadcast_object(own, root)
        assert received["nested"] == [root, (root, "text" * (root + 1))]
        assert equal(received["tensor"], torch.full((root + 1,), root))
        assert (received is own) == (rank == root)
    # What the others pass does not matter, not even its type.
    assert hvd.broadcast_object({"a": 1} if rank == 0 else None) == {"a": 1}
    assert hvd.broadcast_object(lambda: rank, name="function")() == 0
    assert len(hvd.broadcast_object(bytes(3_000_000) if rank == 0 else None, name="large")) == 3_000_000
    objects = hvd.allgather_object({"rank": rank, "list": list(range(rank))})
    assert objects == [{"rank": other, "list": list(range(other))} for other in range(size)]
    assert hvd.allgather_object(None, name="nothing") == [None] * size


class NotPicklable:
    def __reduce__(self):
        raise TypeError("this cannot be pickled")


def test_objects_that_cannot_be_pickled_are_an_error_on_every_rank(hvd):
    bad = hvd.size() - 1
    here = hvd.rank() == bad
    kind, text = (TypeError, "cannot be pickled") if here else (hvd.HorovodInternalError, f"{bad}")
    with told(kind, text):
        hvd.broadcast_object(NotPicklable(), bad)
    with told(kind, text):
        hvd.allgather_object(NotPicklable() if here else 1)
    assert hvd.broadcast_object("good", 0) == "good"


def make_model(seed: int) -> nn.Module:
    """Return a model of parameters and buffers of many types and places in memory."""
    torch.manual_seed(seed)
    model = nn.ModuleDict(
        {
            "conv": nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last),
            "norm": nn.BatchNorm2d(4),
            "linear": nn.Linear(5, 2).double().requires_grad_(False),
            "brain": nn.Linear(3, 3).bfloat16(),
        }
    )
    model["norm"].running_mean.normal_()
    model["norm"].num_batches_tracked.fill_(seed)
    for name, buffer in {
        "expanded": torch.full((1, 1), float(seed)).expand(3, 4),
        "complex": torch.complex(torch.full((2,), float(seed)), torch.ones(2)),
        "flag": torch.tensor(seed % 2 == 0),
        "eighth": torch.full((3,), float(seed)).to(torch.float8_e4m3fn),
        "unsigned": torch.full((), seed, dtype=torch.uint16),
    }.items():
        model.register_buffer(name, buffer)
    return model


def in_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).contiguous().view(torch.uint8)


def test_broadcast_parameters_takes_every_form_and_type(hvd):
    for root in (0, hvd.size() - 1):
        model, expected = make_model(100 + hvd.rank()), make_model(100 + root)
        hvd.broadcast_parameters(model.state_dict(), root_rank=root)
        for (name, tensor), wanted in zip(model.state_dict().items(), expected.state_dict().values(), strict=True):
            assert (tensor.dtype, tensor.stride()) == (wanted.dtype, wanted.stride()), name
            assert torch.equal(in_bytes(tensor), in_bytes(wanted)), name
    for form in (
        lambda model: model.named_parameters(),
        lambda model: list(model.named_parameters()),
        lambda model: dict(model.named_parameters()),
        lambda model: model.parameters(),
        lambda model: list(model.parameters()),
    ):
        model, expected = make_model(100 + hvd.rank()), make_model(100)
        hvd.broadcast_parameters(form(model), root_rank=0)
        for parameter, wanted in zip(model.parameters(), expected.parameters(), strict=True):
            assert equal(parameter, wanted)
            assert parameter.requires_grad == wanted.requires_grad


def test_broadcast_parameters_of_every_type_and_place_in_memory(hvd):
    def tensors(rank: int) -> dict[str, torch.Tensor]:
        made = {}
        for dtype in MOVABLE:
            made[f"{dtype}.plain"] = values(rank, (3, 4), dtype)
            made[f"{dtype}.view"] = values(rank, (6, 8), dtype).t()[::2]
            made[f"{dtype}.scalar"] = values(rank, (), dtype)
            made[f"{dtype}.empty"] = torch.empty(0, 2, dtype=dtype)
        return made

    own, expected = tensors(hvd.rank()), tensors(0)
    hvd.broadcast_parameters(own, 0)
    assert all(equal(own[name], expected[name]) for name in own)


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


def optimizer_kinds():
    """Every optimizer of this PyTorch that has a state to broadcast, with what makes it keep all of it."""
    options = {"SGD": {"momentum": 0.9}, "RMSprop": {"momentum": 0.9, "centered": True}, "Adam": {"amsgrad": True}}
    for name, kind in sorted(vars(torch.optim).items()):
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and name not in ("Optimizer", "LBFGS"):
            yield kind, options.get(name, {})


def give_gradients(parameters, sparse: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        gradient = torch.randn(parameter.shape, generator=generator)
        parameter.grad = gradient.to_sparse(1) if sparse else gradient


def trained(kind, options, steps: int, seed: int):
    """Return the parameters of a small model, and its optimizer after steps with gradients of the seed."""
    torch.manual_seed(seed)
    sparse, rate = kind is torch.optim.SparseAdam, 0.01 * (seed + 1)
    parameters = [nn.Embedding(6, 12, sparse=sparse).weight, nn.Linear(12, 9, bias=False).weight]
    optimizer = kind([{"params": [one], "lr": rate / n} for n, one in enumerate(parameters, 1)], lr=rate, **options)
    for _ in range(steps):
        give_gradients(parameters, sparse, seed)
        optimizer.step()
    return parameters, optimizer


def check_broadcast(hvd, kind, options, root_steps: int, other_steps: int, root: int) -> None:
    parameters, optimizer = trained(kind, options, root_steps if hvd.rank() == root else other_steps, hvd.rank())
    _, expected = trained(kind, options, root_steps, root)
    groups = list(optimizer.param_groups)
    before = [(parameter.detach().clone(), parameter.grad) for parameter in parameters]
    hvd.broadcast_optimizer_state(optimizer, root)
    assert same(optimizer.state_dict(), expected.state_dict())
    for parameter, (value, gradient) in zip(parameters, before, strict=True):
        assert equal(parameter.detach(), value)
        assert parameter.grad is gradient
    assert all(now is then for now, then in zip(optimizer.param_groups, groups, strict=True))
    # From here on all ranks make the same steps.
    hvd.broadcast_parameters(parameters, root)
    give_gradients(parameters, kind is torch.optim.SparseAdam, seed=99)
    optimizer.step()
    assert_same_bits(hvd, parameters)


def test_every_optimizer_whatever_steps_ranks_have_made(hvd):
    last = hvd.size() - 1
    for root_steps, other_steps, root in ((0, 0, 0), (2, 0, 0), (0, 2, last), (3, 1, last)):
        for kind, options in optimizer_kinds():
            check_broadcast(hvd, kind, options, root_steps, other_steps, root)


def test_received_state_is_written_into_the_tensors_that_were_there(hvd):
    parameters, optimizer = trained(torch.optim.Adam, {}, 1, seed=hvd.rank())
    before = [optimizer.state[parameter]["exp_avg"] for parameter in parameters]
    hvd.broadcast_optimizer_state(optimizer, 0)
    assert all(optimizer.state[one]["exp_avg"] is old for one, old in zip(parameters, before, strict=True))


def test_options_that_are_tensors_and_lists(hvd):
    lr = torch.tensor(0.1 * (hvd.rank() + 1))
    optimizer = torch.optim.Adam([torch.ones(3, requires_grad=True)], lr=lr, betas=(0.5 + 0.1 * hvd.rank(), 0.9))
    optimizer.param_groups[0]["milestones"] = [hvd.rank(), [hvd.rank()]]
    hvd.broadcast_optimizer_state(optimizer, 0)
    group = optimizer.param_groups[0]
    assert group["lr"] is lr
    assert equal(lr, torch.tensor(0.1))
    assert (group["betas"], group["milestones"]) == ((0.5, 0.9), [0, [0]])


def test_nested_state_and_state_of_no_parameter(hvd):
    """As deep as some optimizers outside PyTorch have it."""
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    shared = {"count": 5, "tensor": torch.full((100,), 5.0)}

    def state(dense: bool) -> dict:
        low, sparse = torch.full((10, 10), 5.0).to(torch.float8_e5m2), torch.full((3,), 5.0).to_sparse()
        return {
            "factors": [torch.full((9, 9), 5.0), {"inverse": torch.full((70,), 5)}],
            "low": low.float() if dense else low,
            "sparse": sparse.to_dense() if dense else sparse,
            "nothing": None,
            "kind": "a text",
            "pair": (5, torch.tensor(5)),
        }

    if hvd.rank() == 0:
        optimizer.state.update({parameter: state(False), "shared": shared})
    hvd.broadcast_optimizer_state(optimizer, 0)
    received = optimizer.state[parameter]
    assert received["low"].dtype == torch.float8_e5m2
    assert received["sparse"].is_sparse
    assert same({**received, "low": received["low"].float(), "sparse": received["sparse"].to_dense()}, state(True))
    assert same(optimizer.state["shared"], shared)


def test_a_distributed_optimizer_of_which_a_parameter_is_frozen(hvd):
    torch.manual_seed(hvd.rank())
    model, frozen = nn.Linear(20, 5), nn.Parameter(torch.ones(100), requires_grad=False)
    optimizer = torch.optim.Adam([*model.parameters(), frozen], lr=0.1 * (hvd.rank() + 1))
    if hvd.rank() == 0:
        model(torch.ones(2, 20)).sum().backward()
        optimizer.step()
    names = [*model.named_parameters(), ("frozen", frozen)]
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=names)
    gradients = [parameter.grad for parameter in model.parameters()]
    hvd.broadcast_parameters(model.state_dict(), 0)
    hvd.broadcast_optimizer_state(optimizer, 0)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert frozen not in optimizer.state
    assert all(optimizer.state[parameter]["step"] == 1 for parameter in model.parameters())
    assert all(p.grad is gradient for p, gradient in zip(model.parameters(), gradients, strict=True))
    optimizer.zero_grad()
    model(torch.full((2, 20), float(hvd.rank()))).sum().backward()
    optimizer.step()
    assert_identical(hvd, model)


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
        fact = "broadcast_optimizer_state: optimizers must be alike on all ranks, but these differ from that of rank 0:"
        with told(ValueError, f"{fact}\nrank {hvd.size() - 1}: {text}"):
            hvd.broadcast_optimizer_state(optimizer, 0)
