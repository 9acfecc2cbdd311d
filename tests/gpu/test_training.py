"""Training on a GPU: each rank's share of a batch gives the weights that one process gets from the joined batch."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import tempfile
from collections import defaultdict

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from hvdkit.engine.session import runtime
from tests.gpu import card
from tests.ranks import Skip

ROWS, WIDTH, CLASSES = 8, 64, 10
STEPS = 4
pytestmark = [*card.on_card(2), *card.on_card(4, thorough=True)]

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


def check_same_bits(hvd, model: nn.Module) -> None:
    everyones = hvd.allgather(weights(model).cpu().view(1, -1))
    assert all(torch.equal(values, everyones[0]) for values in everyones), "ranks ended with different weights"
    assert torch.isfinite(everyones).all()


def wrap(hvd, model: nn.Module, optimizer: torch.optim.Optimizer, **arguments):
    return hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), **arguments)


def sgd(parameters, lr: float = 0.5, **options) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, **options)


def adamw(parameters, **options) -> torch.optim.Optimizer:
    """An optimizer that divides by the root of squares: where a gradient is nearly nothing, its rounding decides."""
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3, **options)


def take_step(
    model: nn.Module, optimizer, part, set_to_none: bool = True, autocast=contextlib.nullcontext
) -> torch.Tensor:
    optimizer.zero_grad(set_to_none=set_to_none)
    with autocast():
        value = loss(model, *part)
    value.backward()
    optimizer.step()
    return value.detach()


def compare(
    hvd,
    make_optimizer=sgd,
    make=network,
    tolerance: float = 2e-5,
    *,
    optimizers=None,
    steps: int = STEPS,
    joined=batch,
    step=take_step,
    around=contextlib.nullcontext,
    stand_in=lambda model: model,
    looks_at_way: bool = False,
    **arguments,
) -> tuple[nn.Module, nn.Module]:
    """Train a model on all ranks and in one process; both end with the same weights but for rounding.

    ``optimizers(model, alone)``: optimizers of both, in place of ``make_optimizer``'s; ``joined(step, ranks)``: the
    joined batch; ``step(model, optimizer, part)``: a step; ``around()``: a context for all ranks' steps; ``stand_in``:
    makes of all ranks' model what is called in its place; ``looks_at_way``: look at the way of the gradients.
    """
    model = make()
    alone, start = copy.deepcopy(model), weights(model).clone()
    if optimizers is None:
        plain = make_optimizer(alone.parameters())
        hvd.unsynchronized(plain)
        optimizer = wrap(hvd, model, make_optimizer(model.parameters()), **arguments)
    else:
        optimizer, plain = optimizers(model, alone)
    trained = stand_in(model)
    for number in range(steps):
        data = joined(number, hvd.size())
        with around():
            step(trained, optimizer, own_part(hvd, data))
        step(alone, plain, data)
    if looks_at_way:
        card.check_way(list(runtime.engine().lanes.values())[-1])
    check_same_bits(hvd, model)
    difference = (weights(model) - weights(alone)).abs().max().item()
    assert difference <= tolerance, f"weights differ by {difference} from those of one process"
    moved = (weights(alone) - start).abs().max().item()
    assert moved > 8 * tolerance, f"nothing was trained: {moved}"
    return model, alone


def test_sgd(hvd):
    compare(hvd, functools.partial(sgd, momentum=0.9), looks_at_way=True)


def test_adamw_fused(hvd):
    compare(hvd, functools.partial(adamw, fused=True), tolerance=1e-4, looks_at_way=True)


def test_adamw_foreach(hvd):
    compare(hvd, functools.partial(adamw, foreach=True), tolerance=1e-4, looks_at_way=True)


def test_fp16_on_the_wire(hvd):
    compare(hvd, compression=hvd.Compression.fp16, tolerance=2e-3, looks_at_way=True)


def test_channels_last(hvd):
    def make():
        return images().to(memory_format=torch.channels_last)

    compare(hvd, make=make, joined=lambda step, ranks: batch(step, ranks, 3, 12, 12), looks_at_way=True)


def test_gradients_are_kept_from_step_to_step(hvd):
    compare(hvd, step=functools.partial(take_step, set_to_none=False))


def synchronized(optimizer) -> contextlib.AbstractContextManager:
    """Let a distributed optimizer get its gradients; return a context in which its step asks for none."""
    if not hasattr(optimizer, "synchronize"):
        return contextlib.nullcontext()
    optimizer.synchronize()
    return optimizer.skip_synchronize()


def test_a_scaler_and_fp16(hvd):
    scalers = defaultdict(lambda: torch.amp.GradScaler(card.DEVICE.type, init_scale=2.0**10))

    def step(model, optimizer, part):
        optimizer.zero_grad()
        with torch.autocast(card.DEVICE.type, torch.float16 if card.IS_GPU else torch.bfloat16):
            value = loss(model, *part)
        scaler = scalers[optimizer]
        scaler.scale(value).backward()
        stepping = synchronized(optimizer)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        with stepping:
            scaler.step(optimizer)
        scaler.update()

    compare(hvd, step=step, tolerance=2e-3)


def test_bf16_autocast(hvd):
    autocast = functools.partial(torch.autocast, card.DEVICE.type, torch.bfloat16)
    compare(hvd, step=functools.partial(take_step, autocast=autocast), tolerance=5e-3)


def test_accumulation(hvd):
    numbers = defaultdict(itertools.count)

    def step(model, optimizer, _):
        optimizer.zero_grad()
        for _ in range(2):
            data = batch(next(numbers[optimizer]), hvd.size())
            (loss(model, *(own_part(hvd, data) if hasattr(optimizer, "synchronize") else data)) / 2).backward()
        optimizer.step()

    compare(hvd, step=step, backward_passes_per_step=2)


def test_clipping(hvd):
    norms = []

    def step(model, optimizer, part):
        optimizer.zero_grad()
        loss(model, *part).backward()
        with synchronized(optimizer):
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.3))
            optimizer.step()

    compare(hvd, step=step)
    torch.testing.assert_close(norms[::2], norms[1::2], rtol=1e-4, atol=1e-5)


class Several:
    def __init__(self, optimizers) -> None:
        self.optimizers = list(optimizers)

    def zero_grad(self, **options) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(**options)

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


def test_several_optimizers(hvd):
    def of_parts(net):
        return zip("ab", (net[:2], net[2:]), (sgd(net[:2].parameters()), adamw(net[2:].parameters())), strict=True)

    def optimizers(model, alone):
        wrapped = [
            hvd.DistributedOptimizer(optimizer, part.named_parameters(prefix=name))
            for name, part, optimizer in of_parts(model)
        ]
        return Several(wrapped), Several(hvd.unsynchronized(optimizer) for _, _, optimizer in of_parts(alone))

    compare(hvd, optimizers=optimizers, tolerance=1e-4)


class Sparse(nn.Module):
    """Words whose embeddings have sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(500, 32, sparse=True)
        self.head = nn.Linear(32, CLASSES)
        self.to(card.DEVICE)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(words).mean(1))


def test_sparse_gradients(hvd):
    def joined(step, ranks):
        words = torch.randint(500, (ranks * ROWS, 5), generator=torch.Generator().manual_seed(step))
        return words.to(card.DEVICE), batch(step, ranks)[1]

    compare(hvd, make=Sparse, joined=joined)


class Partly(nn.Module):
    """A network with a layer that is frozen now and then, and one without use."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = network(), nn.Linear(WIDTH, WIDTH).to(card.DEVICE)
        self.calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.used[2].weight.requires_grad_(self.calls % 3 != 1)
        self.calls += 1
        return self.used(inputs)


def test_frozen_and_unused_parameters(hvd):
    model, alone = compare(hvd, make=Partly, steps=2 * STEPS)
    assert torch.equal(model.unused.weight, alone.unused.weight)


class WithExtra(nn.Module):
    """A network with a layer more for the first ``rows`` of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.network, self.last, self.rows = network(), nn.Linear(CLASSES, CLASSES).to(card.DEVICE), ROWS

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output = self.network(inputs)
        return torch.cat([self.last(output[: self.rows]), output[self.rows :]]) if self.rows else output


def test_unused_on_some_ranks_only(hvd):
    def of_rank_0(model):
        model.rows = ROWS if hvd.rank() == 0 else 0
        return model

    compare(hvd, make=WithExtra, stand_in=of_rank_0)


def test_a_compiled_model(hvd):
    card.only_on_a_gpu()
    compare(hvd, tolerance=1e-4, stand_in=torch.compile)


def test_a_compiled_model_with_graphs(hvd):
    card.only_on_a_gpu()
    compare(hvd, tolerance=1e-4, stand_in=functools.partial(torch.compile, mode="reduce-overhead"))


def test_a_backward_pass_in_a_stream_of_the_users_own(hvd):
    @contextlib.contextmanager
    def around():
        with card.own_stream():
            card.keep_busy()
            yield

    compare(hvd, around=around)


def test_graphed_callables_train_as_others_do(hvd):
    card.only_on_a_gpu()

    def optimizers(model, alone):
        card.settle()
        # The callable stands in the model's forward(), and is made before the model's optimizer.
        torch.cuda.make_graphed_callables(model, (torch.randn(ROWS, WIDTH, device=card.DEVICE),))
        return wrap(hvd, model, sgd(model.parameters())), hvd.unsynchronized(sgd(alone.parameters()))

    compare(hvd, optimizers=optimizers)


def test_a_step_that_is_captured_in_a_graph_is_refused_in_words(hvd):
    card.only_on_a_gpu()
    model = network()
    optimizer = wrap(hvd, model, sgd(model.parameters()))
    part = own_part(hvd, batch(0, hvd.size()))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # as PyTorch asks for before a capture
        for _ in range(3):
            take_step(model, optimizer, part)
    torch.cuda.current_stream().wait_stream(side)
    optimizer.zero_grad()
    card.settle()

    def capture():
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            loss(model, *part).backward()
            optimizer.step()

    with pytest.raises(ValueError, match="CUDA graph"):
        capture()


def test_codecs_train_on_the_device(hvd):
    on_device = (("int8", 0.6), ("int4", 0.8), ("onebit", 1.0), ("topk", 1.0), ("dgc", 1.0), ("powersgd", 0.9))
    codecs = {name: (getattr(hvd.Compression, name)(compress="everywhere"), ratio) for name, ratio in on_device}
    codecs["threshold"] = hvd.Compression.threshold(1e-4, compress="everywhere"), 1.0  # a codec of the host
    for name, (codec, ratio) in codecs.items():
        model = network()
        optimizer = wrap(hvd, model, sgd(model.parameters(), 0.1), compression=codec)
        losses = [take_step(model, optimizer, own_part(hvd, batch(0, hvd.size()))).item() for _ in range(12)]
        total = hvd.allreduce(torch.tensor([losses[0], losses[-1]]), name=f"losses.{name}").tolist()
        assert total[1] <= ratio * total[0], (name, losses)
        check_same_bits(hvd, model)
        lane = list(runtime.engine().lanes.values())[-1]
        if name == "threshold":
            assert lane.reducer.reason != "the device's collectives"
        else:
            assert hvd.compression_stats().by_parameter["2.weight"].bytes_after, name
            card.check_way(lane)
        del model, optimizer


def test_residuals_go_through_a_checkpoint(hvd):
    """Steps after loading have the bits of the same steps without saving."""
    codec = hvd.Compression.topk(0.05, compress="everywhere")
    ends = []
    for saves in (False, True):
        model = network()
        optimizer = wrap(hvd, model, sgd(model.parameters(), 0.1), compression=codec)
        for step in range(6):
            if saves and step == 3:
                state, kept = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
                del optimizer
                model = network()
                model.load_state_dict(state)
                optimizer = wrap(hvd, model, sgd(model.parameters(), 0.1), compression=codec)
                optimizer.load_state_dict(kept)
            take_step(model, optimizer, own_part(hvd, batch(step, hvd.size())))
        ends.append(weights(model))
        del model, optimizer
    assert torch.equal(*ends)


def test_the_hook_of_distributed_data_parallel(hvd):
    if hvd.size() > 2 or (card.WAY == "host" and not card.IS_GPU):
        raise Skip("two ranks suffice, and where the CPU stands in, one way: the hook's reduction is the host's anyway")

    def hooked(model):
        trained = nn.parallel.DistributedDataParallel(model)
        hvd.ddp_hook(hvd.Compression.none).register(trained)
        return trained

    folder = hvd.broadcast_object(tempfile.mkdtemp(), 0)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=hvd.rank(), world_size=hvd.size())
    try:
        compare(hvd, optimizers=lambda *nets: [sgd(net.parameters()) for net in nets], stand_in=hooked)
    finally:
        dist.destroy_process_group()
