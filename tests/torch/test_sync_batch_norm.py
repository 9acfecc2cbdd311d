"""SyncBatchNorm over all ranks' batches against BatchNorm on one process that has them all."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, set_checkpoint_early_stop

from tests.on_ranks import on_ranks
from tests.told import told

pytestmark = on_ranks(2, 3)

SHAPES = [(4,), (4, 5), (4, 3, 2), (4, 2, 3, 2)]  # channels first, then the places


def _batches(size: int, shape: tuple[int, ...], dtype: torch.dtype, uneven: bool) -> list[torch.Tensor]:
    """A batch for each rank, the same on all ranks; far from zero, so that a careless variance would cancel."""
    generator = torch.Generator().manual_seed(len(shape))
    sizes = [3 + rank if uneven else 4 for rank in range(size)]
    offset = 100.0 if dtype == torch.float64 else 5.0
    return [(torch.randn(n, *shape, generator=generator, dtype=torch.float64) + offset).to(dtype) for n in sizes]


def _reference(norm: nn.Module, dimensions: int) -> nn.Module:
    kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[dimensions]
    arguments = (norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
    reference = kind(*arguments, dtype=torch.float64)
    reference.load_state_dict(norm.state_dict())
    return reference


def _close(got: torch.Tensor, expected: torch.Tensor) -> bool:
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}[got.dtype]
    return torch.allclose(got.double(), expected.double(), rtol=tolerance, atol=tolerance)


def _compare(hvd, norm: nn.Module, batches: list[torch.Tensor], steps: int = 2) -> None:
    """Train both for some steps; compare outputs, gradients, running statistics, and the result of evaluation."""
    rank = hvd.rank()
    rows = [len(batch) for batch in batches]
    reference = _reference(norm, batches[0].dim())
    for step in range(steps):
        mine = (batches[rank] * (step + 1)).requires_grad_()
        joined = torch.cat([batch.detach().double() * (step + 1) for batch in batches]).requires_grad_()
        weights = torch.randn(joined.shape, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        output, expected = norm(mine), reference(joined)
        assert output.dtype == mine.dtype
        assert output.shape == mine.shape
        assert _close(output, expected.split(rows)[rank])
        output.backward(weights.split(rows)[rank].to(output.dtype))
        expected.backward(weights)
        assert mine.grad.dtype == mine.dtype
        assert _close(mine.grad, joined.grad.split(rows)[rank])
    for (name, buffer), wanted in zip(norm.named_buffers(), reference.buffers(), strict=True):
        if name == "num_batches_tracked":
            assert int(buffer) == steps
        else:
            assert _close(buffer, wanted), name
    for parameter, wanted in zip(norm.parameters(), reference.parameters(), strict=True):
        # Each rank has the gradient of its own batch; their sum is that of the joined batch.
        assert parameter.grad.dtype == parameter.dtype
        assert _close(hvd.allreduce(parameter.grad, op=hvd.Sum), wanted.grad)
    if norm.track_running_stats:
        norm.eval()
        reference.eval()
        assert _close(norm(batches[rank]), reference(batches[rank].double()))


def test_every_dimension_and_type_with_even_and_uneven_batches(hvd):
    for shape, dtype, uneven in itertools.product(SHAPES, (torch.float32, torch.float64), (False, True)):
        norm = hvd.SyncBatchNorm(shape[0], dtype=dtype)
        if norm.affine:
            nn.init.uniform_(norm.weight, 0.5, 1.5, generator=torch.Generator().manual_seed(1))
            nn.init.uniform_(norm.bias, generator=torch.Generator().manual_seed(2))
        _compare(hvd, norm, _batches(hvd.size(), shape, dtype, uneven))


def test_without_affine_without_momentum_without_running_statistics(hvd):
    for options in ({"affine": False}, {"momentum": None}, {"track_running_stats": False}, {"momentum": 0.0}):
        norm = hvd.SyncBatchNorm(4, dtype=torch.float64, **options)
        _compare(hvd, norm, _batches(hvd.size(), (4, 3), torch.float64, uneven=True), steps=3)


def test_half_types_with_parameters_of_either_precision(hvd):
    for dtype, parameter_dtype in itertools.product((torch.bfloat16, torch.float16), (None, torch.float32)):
        norm = hvd.SyncBatchNorm(4, dtype=parameter_dtype or dtype)
        batch = _batches(hvd.size(), (4, 3), dtype, uneven=False)[hvd.rank()].requires_grad_()
        output = norm(batch)
        assert output.dtype == dtype
        output.sum().backward()
        assert batch.grad.dtype == dtype
        assert norm.weight.grad.dtype == (parameter_dtype or dtype)
        joined = torch.cat(_batches(hvd.size(), (4, 3), dtype, uneven=False)).double()
        expected = nn.functional.batch_norm(joined, None, None, training=True).split(4)[hvd.rank()]
        assert _close(output.detach(), expected)


def test_a_rank_with_an_empty_batch(hvd):
    norm = hvd.SyncBatchNorm(3, dtype=torch.float64)
    full = torch.randn(6, 3, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    batch = (full if hvd.rank() == 0 else full[:0]).clone().requires_grad_()
    output = norm(batch)
    (output**3).sum().backward()
    reference, whole = nn.BatchNorm1d(3, dtype=torch.float64), full.clone().requires_grad_()
    expected = reference(whole)
    (expected**3).sum().backward()
    assert output.shape == batch.shape
    if hvd.rank() == 0:
        assert _close(output, expected)
        assert _close(batch.grad, whole.grad)
    assert _close(norm.running_mean, reference.running_mean)
    assert _close(norm.running_var, reference.running_var)


def test_input_that_is_not_contiguous_and_needs_no_gradient(hvd):
    norm = hvd.SyncBatchNorm(4, dtype=torch.float64)
    batches = _batches(hvd.size(), (4, 3, 2), torch.float64, uneven=False)
    expected = nn.BatchNorm2d(4, dtype=torch.float64)(torch.cat(batches)).split(4)[hvd.rank()]
    output = norm(batches[hvd.rank()].to(memory_format=torch.channels_last))
    assert _close(output, expected)
    output.sum().backward()
    assert norm.bias.grad is not None


def test_evaluation_does_not_communicate(hvd):
    norm = hvd.SyncBatchNorm(4).eval()
    if hvd.rank() == 0:
        assert norm(torch.ones(2, 4)).shape == (2, 4)


def test_wrong_inputs_are_refused_on_every_rank(hvd):
    norm = hvd.SyncBatchNorm(4)
    for batch, text in (
        (torch.ones(4), "at least 2D"),
        (torch.ones(2, 5), "4 channels"),
        (torch.ones(1 if hvd.rank() == 0 else 0, 4), "more than 1 value per channel"),
    ):
        with told(ValueError, text):
            norm(batch)
    fact = "convert_sync_batchnorm: LazyBatchNorm1d must be initialized, got a layer that has seen no input"
    with told(ValueError, fact, "HINT: run the model once before you convert it."):
        hvd.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.LazyBatchNorm1d()))


def test_convert_replaces_every_batch_norm_and_keeps_its_tensors(hvd):
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, momentum=0.3), nn.Sequential(nn.BatchNorm2d(4)))
    model[2][0].eval()
    old = [model[1], model[2][0]]
    keys = list(model.state_dict())
    converted = hvd.SyncBatchNorm.convert_sync_batchnorm(model)
    assert converted is model
    assert list(converted.state_dict()) == keys
    for new, was in zip([model[1], model[2][0]], old, strict=True):
        assert type(new) is hvd.SyncBatchNorm
        assert new.weight is was.weight
        assert new.running_mean is was.running_mean
        assert new.num_batches_tracked is was.num_batches_tracked
        assert new.training == was.training
    assert model[1].momentum == 0.3
    assert hvd.SyncBatchNorm.convert_sync_batchnorm(model[1]) is model[1]
    alone = hvd.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(3, affine=False, track_running_stats=False))
    assert type(alone) is hvd.SyncBatchNorm
    assert alone.weight is None
    assert alone.running_mean is None
    assert type(hvd.SyncBatchNorm.convert_sync_batchnorm(nn.SyncBatchNorm(3))) is hvd.SyncBatchNorm
    model(torch.randn(2, 3, 4, 4)).sum().backward()
    copy.deepcopy(model)(torch.randn(2, 3, 4, 4))


Way = Callable[[nn.Sequential, torch.Tensor], torch.Tensor]


def _check_trained(hvd, build: Callable[..., nn.Sequential], run: Way, steps: int = 3, within: float = 1e-12) -> None:
    """Train ``build(SyncBatchNorm)`` on this rank's rows and ``build(BatchNorm1d)`` on all, in float64; compare states.

    In the middle each is evaluated once.
    """
    models = []
    for norm in (hvd.SyncBatchNorm, nn.BatchNorm1d):
        torch.manual_seed(1)
        model = build(norm).double()
        is_ours = norm is hvd.SyncBatchNorm
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer) if is_ours else hvd.unsynchronized(optimizer)
        for step in range(steps):
            rows = torch.randn(4 * hvd.size(), 3, 5, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            mine = (rows[4 * hvd.rank() :][:4] if is_ours else rows).clone().requires_grad_()
            optimizer.zero_grad()
            (run(model, mine).tanh() ** 3).mean().backward()
            optimizer.step()
            if step == 1:
                run(model.eval(), mine)
                model.train()
        models.append(model)
    for (name, ours), expected in zip(models[0].state_dict().items(), models[1].state_dict().values(), strict=True):
        assert torch.allclose(ours.double(), expected.double(), rtol=within, atol=within), name


def _stack(norm: Callable[..., nn.Module], ends_in_norm: bool = True, frozen: bool = False, **options) -> nn.Sequential:
    model = nn.Sequential(nn.Conv1d(3, 4, 1), norm(4, **options), nn.Tanh(), nn.Conv1d(4, 3, 1), norm(3, **options))
    if not ends_in_norm:
        model.append(nn.Tanh())
    if frozen:
        model[:2].requires_grad_(False)
    return model


def _nested(model: nn.Sequential, x: torch.Tensor, use_reentrant: bool) -> torch.Tensor:
    inner = functools.partial(checkpoint, model[:2], use_reentrant=use_reentrant)
    return checkpoint(lambda x: model[2:](inner(x)), x, use_reentrant=use_reentrant)


def _to_its_end(model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    with set_checkpoint_early_stop(False):
        return checkpoint(model, x, use_reentrant=False)


def test_training_in_float64_is_that_of_one_process(hvd):
    _check_trained(hvd, _stack, lambda model, x: model(x), steps=20)


def test_inside_a_checkpoint_statistics_are_those_of_batch_norm_inside_it(hvd):
    ways: list[Way] = [_to_its_end]
    for use_reentrant in (False, True):
        ways.append(functools.partial(checkpoint, use_reentrant=use_reentrant))
        ways.append(functools.partial(_nested, use_reentrant=use_reentrant))
        ways.append(lambda model, x, how=use_reentrant: checkpoint_sequential(model, 2, x, use_reentrant=how))
    options = [{}, {"momentum": None}, {"track_running_stats": False}, {"affine": False}, {"frozen": True}]
    for number, (run, kind) in enumerate(itertools.product(ways, options)):
        _check_trained(hvd, functools.partial(_stack, ends_in_norm=number % 2 == 0, **kind), run)


def test_a_compiled_model_inside_a_checkpoint(hvd):
    compiled = functools.cache(functools.partial(torch.compile, backend="aot_eager"))
    _check_trained(hvd, _stack, lambda model, x: checkpoint(compiled(model), x, use_reentrant=False))
