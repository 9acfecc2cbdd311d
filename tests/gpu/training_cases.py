"""Training on a GPU: each rank's share of a batch gives the weights that one process gets from the joined batch."""

from __future__ import annotations

import contextlib
import copy

import torch
from torch import nn
from torch.nn import functional

from hvdkit.engine.session import runtime
from tests.gpu import card

ROWS, WIDTH, CLASSES = 8, 64, 10
STEPS = 4

torch.backends.cuda.matmul.allow_tf32 = False
torch.backends.cudnn.allow_tf32 = False


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, 300), nn.Tanh(), nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, CLASSES)]
    return nn.Sequential(*layers).to(card.DEVICE)


def images() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, CLASSES)).to(card.DEVICE)


def batch(step: int, ranks: int, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The joined batch of a step: inputs, and classes. Rank r has the rows from r * ROWS on."""
    shape = shape or (WIDTH,)
    inputs = card.random(ranks * ROWS, *shape, seed=step)
    classes = torch.randint(CLASSES, (ranks * ROWS,), generator=torch.Generator().manual_seed(step))
    return inputs, classes.to(card.DEVICE)


def own_part(hvd, tensors: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    return [tensor[hvd.rank() * ROWS : (hvd.rank() + 1) * ROWS] for tensor in tensors]


def loss(model: nn.Module, inputs: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(inputs), classes)


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().float().reshape(-1) for parameter in model.parameters()])


def check(hvd, model: nn.Module, alone: nn.Module, tolerance: float = 2e-5) -> None:
    """All ranks have the same bits, and what one process has but for rounding."""
    everyones = hvd.allgather(weights(model).cpu().view(1, -1))
    assert all(torch.equal(values, everyones[0]) for values in everyones), "ranks ended with different weights"
    assert torch.isfinite(everyones).all()
    difference = (weights(model) - weights(alone)).abs().max().item()
    assert difference <= tolerance, f"weights differ by {difference} from those of one process"
    moved = (weights(alone) - weights(_starts[id(alone)])).abs().max().item()
    assert moved > 8 * tolerance, f"nothing was trained: {moved}"


_starts: dict[int, nn.Module] = {}  # by id: what a model for one process was at first


def pair(make=network) -> tuple[nn.Module, nn.Module]:
    """A model to be trained on all ranks, and the same for one process."""
    model = make()
    alone = copy.deepcopy(model)
    _starts[id(alone)] = copy.deepcopy(model)
    return model, alone


def wrap(hvd, model: nn.Module, optimizer: torch.optim.Optimizer, **arguments):
    return hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), **arguments)


def both(hvd, model: nn.Module, alone: nn.Module, make=None, **arguments):
    """An optimizer for all ranks' model, and one for that of one process; SGD unless ``make`` makes others."""
    make = make or sgd
    plain = make(alone.parameters())
    hvd.unsynchronized(plain)
    return wrap(hvd, model, make(model.parameters()), **arguments), plain


def check_way() -> None:
    """Look at the way of the gradients of the last optimizer."""
    card.check_way(list(runtime.engine().lanes.values())[-1])


def compare(
    hvd,
    model: nn.Module,
    alone: nn.Module,
    optimizers,
    tolerance: float = 2e-5,
    steps: int = STEPS,
    joined=batch,
    around=contextlib.nullcontext,
    trained: nn.Module | None = None,
) -> None:
    """Train both models, each by its optimizer, and check that they end alike.

    ``joined(step, ranks)``: the joined batch; ``around()``: a context for the steps of all ranks' model; ``trained``:
    what stands for that model in a forward pass.
    """
    optimizer, plain = optimizers
    for step in range(steps):
        data = joined(step, hvd.size())
        with around():
            take_step(trained or model, optimizer, own_part(hvd, data))
        take_step(alone, plain, data)
    check(hvd, model, alone, tolerance)


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, part) -> None:
    optimizer.zero_grad()
    loss(model, *part).backward()
    optimizer.step()


def sgd(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5)


def case_sgd(hvd):
    model, alone = pair()
    optimizers = both(hvd, model, alone, lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.9))
    compare(hvd, model, alone, optimizers)
    check_way()


def case_adamw_fused(hvd):
    # Adam divides by the root of squares: where a gradient is nearly nothing, its rounding decides.
    model, alone = pair()
    adamw = both(hvd, model, alone, lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3, fused=True))
    compare(hvd, model, alone, adamw, tolerance=1e-4)


def case_fp16_on_the_wire(hvd):
    model, alone = pair()
    optimizers = both(hvd, model, alone, compression=hvd.Compression.fp16)
    compare(hvd, model, alone, optimizers, tolerance=2e-3)
    check_way()


def case_channels_last(hvd):
    model, alone = pair(lambda: images().to(memory_format=torch.channels_last))
    optimizers = both(hvd, model, alone)
    compare(hvd, model, alone, optimizers, joined=lambda step, ranks: batch(step, ranks, 3, 12, 12))


def case_a_scaler_and_fp16(hvd):
    model, alone = pair()
    optimizer, plain = both(hvd, model, alone)
    scalers = [torch.amp.GradScaler(card.DEVICE.type, init_scale=2.0**10) for _ in range(2)]
    dtype = torch.float16 if card.IS_GPU else torch.bfloat16
    for step in range(STEPS):
        joined = batch(step, hvd.size())
        for trained, stepped, scaler, part in (
            (model, optimizer, scalers[0], own_part(hvd, joined)),
            (alone, plain, scalers[1], joined),
        ):
            stepped.zero_grad()
            with torch.autocast(card.DEVICE.type, dtype):
                value = loss(trained, *part)
            scaler.scale(value).backward()
            if stepped is optimizer:
                optimizer.synchronize()
            scaler.unscale_(stepped)
            nn.utils.clip_grad_norm_(trained.parameters(), 0.5)
            with optimizer.skip_synchronize() if stepped is optimizer else contextlib.nullcontext():
                scaler.step(stepped)
            scaler.update()
    check(hvd, model, alone, tolerance=2e-3)


class Sparse(nn.Module):
    """Words whose embeddings have sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(500, 32, sparse=True)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(words).mean(1))


def case_sparse_gradients(hvd):
    def words(step: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
        drawn = torch.randint(500, (ranks * ROWS, 5), generator=torch.Generator().manual_seed(step))
        return drawn.to(card.DEVICE), batch(step, ranks)[1]

    torch.manual_seed(0)
    model, alone = pair(lambda: Sparse().to(card.DEVICE))
    compare(hvd, model, alone, both(hvd, model, alone), joined=words)


class Partly(nn.Module):
    """A network with layers that take part now and then, on rank 0, or never."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = network(), nn.Linear(WIDTH, WIDTH).to(card.DEVICE)
        self.of_rank_0 = nn.Linear(CLASSES, CLASSES).to(card.DEVICE)
        self.rows_of_rank_0 = ROWS
        self.calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.used[2].weight.requires_grad_(self.calls % 3 != 1)
        self.calls += 1
        output = self.used(inputs)
        first, others = output[: self.rows_of_rank_0], output[self.rows_of_rank_0 :]
        return torch.cat([self.of_rank_0(first), others]) if len(first) else others


def case_frozen_and_unused_parameters(hvd):
    model, alone = pair(Partly)
    model.rows_of_rank_0 = ROWS if hvd.rank() == 0 else 0
    compare(hvd, model, alone, both(hvd, model, alone), steps=2 * STEPS)
    assert torch.equal(model.unused.weight, alone.unused.weight)


def case_a_compiled_model(hvd):
    card.only_on_a_gpu()
    for options in ({}, {"mode": "reduce-overhead"}):
        model, alone = pair()
        optimizers = both(hvd, model, alone)
        compare(hvd, model, alone, optimizers, tolerance=1e-4, trained=torch.compile(model, **options))


def case_a_backward_pass_in_a_stream_of_the_users_own(hvd):
    @contextlib.contextmanager
    def busy():
        with card.own_stream():
            card.keep_busy()
            yield

    model, alone = pair()
    compare(hvd, model, alone, both(hvd, model, alone), around=busy)


def case_graphed_callables_train_as_others_do(hvd):
    card.only_on_a_gpu()
    model, alone = pair()
    card.settle()
    graphed = torch.cuda.make_graphed_callables(model, (torch.randn(ROWS, WIDTH, device=card.DEVICE),))
    compare(hvd, model, alone, both(hvd, model, alone), trained=graphed)


def case_codecs_train_on_the_device(hvd):
    on_device = (("int8", 0.6), ("int4", 0.8), ("onebit", 1.0), ("topk", 1.0), ("dgc", 1.0), ("powersgd", 0.9))
    codecs = {name: (getattr(hvd.Compression, name)(compress="everywhere"), ratio) for name, ratio in on_device}
    codecs["threshold"] = hvd.Compression.threshold(1e-4, compress="everywhere"), 1.0  # a codec of the host
    for name, (codec, ratio) in codecs.items():
        model, _ = pair()
        optimizer = wrap(hvd, model, torch.optim.SGD(model.parameters(), lr=0.1), compression=codec)
        losses = []
        for _ in range(12):
            optimizer.zero_grad()
            value = loss(model, *own_part(hvd, batch(0, hvd.size())))
            value.backward()
            optimizer.step()
            losses.append(value.item())
        total = hvd.allreduce(torch.tensor([losses[0], losses[-1]]), name=f"losses.{name}").tolist()
        assert total[1] <= ratio * total[0], (name, losses)
        everyones = hvd.allgather(weights(model).cpu().view(1, -1))
        assert all(torch.equal(values, everyones[0]) for values in everyones), name
        if name != "threshold":
            assert hvd.compression_stats().by_parameter["2.weight"].bytes_after, name
            check_way()
        del model, optimizer


def case_residuals_go_through_a_checkpoint(hvd):
    """Steps after loading have the bits of the same steps without saving."""
    codec = hvd.Compression.topk(0.05, compress="everywhere")
    ends = []
    for saves in (False, True):
        model = network()
        optimizer = wrap(hvd, model, torch.optim.SGD(model.parameters(), lr=0.1), compression=codec)
        for step in range(6):
            if saves and step == 3:
                state, kept = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
                del optimizer
                model = network()
                model.load_state_dict(state)
                optimizer = wrap(hvd, model, torch.optim.SGD(model.parameters(), lr=0.1), compression=codec)
                optimizer.load_state_dict(kept)
            take_step(model, optimizer, own_part(hvd, batch(step, hvd.size())))
        ends.append(weights(model))
        del model, optimizer
    assert torch.equal(*ends)
