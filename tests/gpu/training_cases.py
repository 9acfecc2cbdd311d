"""Training on a GPU: each rank's share of a batch gives the weights that one process gets from the joined batch."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from hvdkit.engine.session import runtime
from tests.gpu import card
from tests.ranks import Skip

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


def both(
    hvd, model: nn.Module, alone: nn.Module, make=lambda parameters: torch.optim.SGD(parameters, lr=0.5), **arguments
):
    """An optimizer for all ranks' model, and one for that of one process."""
    plain = make(alone.parameters())
    hvd.unsynchronized(plain)
    return wrap(hvd, model, make(model.parameters()), **arguments), plain


def check_way() -> None:
    """Look at the way of the gradients of the last optimizer."""
    card.check_way(list(runtime.engine().lanes.values())[-1])


def train(hvd, make_optimizer, make=network, shape: tuple[int, ...] = (), tolerance: float = 2e-5, **arguments):
    model, alone = pair(make)
    optimizer, plain = both(hvd, model, alone, make_optimizer, **arguments)
    for step in range(STEPS):
        joined = batch(step, hvd.size(), *shape)
        optimizer.zero_grad()
        loss(model, *own_part(hvd, joined)).backward()
        optimizer.step()
        plain.zero_grad()
        loss(alone, *joined).backward()
        plain.step()
    check_way()
    check(hvd, model, alone, tolerance)


def case_sgd(hvd):
    train(hvd, lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.9))


def case_adamw_fused(hvd):
    # Adam divides by the root of squares: where a gradient is nearly nothing, its rounding decides.
    train(hvd, lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3, fused=True), tolerance=1e-4)


def case_adamw_foreach(hvd):
    train(hvd, lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3, foreach=True), tolerance=1e-4)


def case_fp16_on_the_wire(hvd):
    train(hvd, lambda parameters: torch.optim.SGD(parameters, lr=0.5), compression=hvd.Compression.fp16, tolerance=2e-3)


def case_channels_last(hvd):
    def make() -> nn.Module:
        return images().to(memory_format=torch.channels_last)

    train(hvd, lambda parameters: torch.optim.SGD(parameters, lr=0.5), make, (3, 12, 12))


def case_gradients_are_kept_from_step_to_step(hvd):
    model, alone = pair()
    optimizer, plain = both(hvd, model, alone)
    for step in range(STEPS):
        joined = batch(step, hvd.size())
        optimizer.zero_grad(set_to_none=False)
        loss(model, *own_part(hvd, joined)).backward()
        optimizer.step()
        plain.zero_grad(set_to_none=False)
        loss(alone, *joined).backward()
        plain.step()
    check(hvd, model, alone)


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


def case_bf16_autocast(hvd):
    model, alone = pair()
    optimizer, plain = both(hvd, model, alone)
    for step in range(STEPS):
        joined = batch(step, hvd.size())
        for trained, stepped, part in ((model, optimizer, own_part(hvd, joined)), (alone, plain, joined)):
            stepped.zero_grad()
            with torch.autocast(card.DEVICE.type, torch.bfloat16):
                value = loss(trained, *part)
            value.backward()
            stepped.step()
    check(hvd, model, alone, tolerance=5e-3)


def case_accumulation(hvd):
    model, alone = pair()
    optimizer, plain = both(hvd, model, alone, backward_passes_per_step=2)
    for step in range(STEPS):
        optimizer.zero_grad()
        plain.zero_grad()
        for part in range(2):
            joined = batch(2 * step + part, hvd.size())
            (loss(model, *own_part(hvd, joined)) / 2).backward()
            (loss(alone, *joined) / 2).backward()
        optimizer.step()
        plain.step()
    check(hvd, model, alone)


def case_clipping(hvd):
    model, alone = pair()
    optimizer, plain = both(hvd, model, alone)
    for step in range(STEPS):
        joined = batch(step, hvd.size())
        optimizer.zero_grad()
        loss(model, *own_part(hvd, joined)).backward()
        optimizer.synchronize()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        with optimizer.skip_synchronize():
            optimizer.step()
        plain.zero_grad()
        loss(alone, *joined).backward()
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(alone.parameters(), 0.3), rtol=1e-4, atol=1e-5)
        plain.step()
    check(hvd, model, alone)


def case_several_optimizers(hvd):
    model, alone = pair()

    def optimizers(net: nn.Module) -> list[torch.optim.Optimizer]:
        first = torch.optim.SGD(net[:2].parameters(), lr=0.5)
        return [first, torch.optim.AdamW(net[2:].parameters(), lr=1e-2, eps=1e-3)]

    wrapped = [
        hvd.DistributedOptimizer(optimizer, part.named_parameters(prefix=name))
        for optimizer, part, name in zip(optimizers(model), (model[:2], model[2:]), "ab", strict=True)
    ]
    plain = optimizers(alone)
    for optimizer in plain:
        hvd.unsynchronized(optimizer)
    for step in range(STEPS):
        joined = batch(step, hvd.size())
        for trained, all_of_it, part in ((model, wrapped, own_part(hvd, joined)), (alone, plain, joined)):
            for optimizer in all_of_it:
                optimizer.zero_grad()
            loss(trained, *part).backward()
            for optimizer in all_of_it:
                optimizer.step()
    check(hvd, model, alone, tolerance=1e-4)


class Sparse(nn.Module):
    """Words whose embeddings have sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(500, 32, sparse=True)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(words).mean(1))


def case_sparse_gradients(hvd):
    torch.manual_seed(0)
    model, alone = pair(lambda: Sparse().to(card.DEVICE))
    optimizer, plain = both(hvd, model, alone)
    for step in range(STEPS):
        words = torch.randint(500, (hvd.size() * ROWS, 5), generator=torch.Generator().manual_seed(step))
        _, classes = batch(step, hvd.size())
        joined = words.to(card.DEVICE), classes
        for trained, stepped, part in ((model, optimizer, own_part(hvd, joined)), (alone, plain, joined)):
            stepped.zero_grad()
            loss(trained, *part).backward()
            stepped.step()
    check(hvd, model, alone)


def case_frozen_and_unused_parameters(hvd):
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = network(), nn.Linear(WIDTH, WIDTH).to(card.DEVICE)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.used(inputs)

    model, alone = pair(Partly)
    optimizer, plain = both(hvd, model, alone)
    for step in range(2 * STEPS):
        joined = batch(step, hvd.size())
        for trained, stepped, part in ((model, optimizer, own_part(hvd, joined)), (alone, plain, joined)):
            trained.used[2].weight.requires_grad_(step % 3 != 1)
            stepped.zero_grad()
            loss(trained, *part).backward()
            stepped.step()
    assert torch.equal(model.unused.weight, alone.unused.weight)
    check(hvd, model, alone)


def case_unused_on_some_ranks_only(hvd):
    model, alone = pair()
    extra, extra_alone = (nn.Linear(CLASSES, CLASSES).to(card.DEVICE) for _ in range(2))
    extra_alone.load_state_dict(extra.state_dict())
    hvd.broadcast_parameters(extra.state_dict(), 0)
    hvd.broadcast_parameters(extra_alone.state_dict(), 0)
    both = nn.ModuleList([model, extra])
    optimizer = wrap(hvd, both, torch.optim.SGD(both.parameters(), lr=0.5))
    plain = torch.optim.SGD([*alone.parameters(), *extra_alone.parameters()], lr=0.5)
    hvd.unsynchronized(plain)
    for step in range(STEPS):
        joined = batch(step, hvd.size())
        optimizer.zero_grad()
        inputs, classes = own_part(hvd, joined)
        output = model(inputs)
        functional.cross_entropy(extra(output) if hvd.rank() == 0 else output, classes).backward()
        optimizer.step()
        plain.zero_grad()
        output = alone(joined[0])
        output = torch.cat([extra_alone(output[:ROWS]), output[ROWS:]])
        functional.cross_entropy(output, joined[1]).backward()
        plain.step()
    check(hvd, model, alone)
    torch.testing.assert_close(extra.weight, extra_alone.weight, rtol=1e-4, atol=1e-5)


def case_a_compiled_model(hvd):
    train_compiled(hvd)


def case_a_compiled_model_with_graphs(hvd):
    train_compiled(hvd, mode="reduce-overhead")


def train_compiled(hvd, **options):
    card.only_on_a_gpu()
    model, alone = pair()
    optimizer, plain = both(hvd, model, alone)
    compiled = torch.compile(model, **options)
    for step in range(STEPS):
        joined = batch(step, hvd.size())
        for trained, stepped, part in ((compiled, optimizer, own_part(hvd, joined)), (alone, plain, joined)):
            stepped.zero_grad()
            loss(trained, *part).backward()
            stepped.step()
    check(hvd, model, alone, tolerance=1e-4)


def case_a_backward_pass_in_a_stream_of_the_users_own(hvd):
    model, alone = pair()
    optimizer, plain = both(hvd, model, alone)
    for step in range(STEPS):
        joined = batch(step, hvd.size())
        with card.own_stream():
            optimizer.zero_grad()
            card.keep_busy()
            loss(model, *own_part(hvd, joined)).backward()
            optimizer.step()
        plain.zero_grad()
        loss(alone, *joined).backward()
        plain.step()
    check(hvd, model, alone)


def case_graphed_callables_train_as_others_do(hvd):
    card.only_on_a_gpu()
    model, alone = pair()
    card.settle()
    graphed = torch.cuda.make_graphed_callables(model, (torch.randn(ROWS, WIDTH, device=card.DEVICE),))
    optimizer, plain = both(hvd, model, alone)
    for step in range(STEPS):
        joined = batch(step, hvd.size())
        for trained, stepped, part in ((graphed, optimizer, own_part(hvd, joined)), (alone, plain, joined)):
            stepped.zero_grad()
            loss(trained, *part).backward()
            stepped.step()
    check(hvd, model, alone)


def case_a_step_that_is_captured_in_a_graph_is_refused_in_words(hvd):
    card.only_on_a_gpu()
    model, _ = pair()
    optimizer = wrap(hvd, model, torch.optim.SGD(model.parameters(), lr=0.5))
    part = own_part(hvd, batch(0, hvd.size()))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # as PyTorch asks for before a capture
        for _ in range(3):
            optimizer.zero_grad()
            loss(model, *part).backward()
            optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    optimizer.zero_grad()
    card.settle()

    def capture() -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            loss(model, *part).backward()
            optimizer.step()

    with pytest.raises(ValueError, match="CUDA graph"):
        capture()


def case_codecs_train_on_the_device(hvd):
    for name, ratio in (("int8", 0.6), ("int4", 0.8), ("onebit", 1.0), ("topk", 1.0), ("dgc", 1.0), ("powersgd", 0.9)):
        codec = getattr(hvd.Compression, name)(compress="everywhere")
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
        assert hvd.compression_stats().by_parameter["2.weight"].bytes_after, name
        check_way()
        del model, optimizer


def case_a_codec_of_the_host_trains_too(hvd):
    model, _ = pair()
    codec = hvd.Compression.threshold(1e-4, compress="everywhere")
    optimizer = wrap(hvd, model, torch.optim.SGD(model.parameters(), lr=0.1), compression=codec)
    before = weights(model).clone()
    for _ in range(3):
        optimizer.zero_grad()
        loss(model, *own_part(hvd, batch(0, hvd.size()))).backward()
        optimizer.step()
    assert (weights(model) - before).abs().max() > 0
    everyones = hvd.allgather(weights(model).cpu().view(1, -1))
    assert all(torch.equal(values, everyones[0]) for values in everyones)


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
            optimizer.zero_grad()
            loss(model, *own_part(hvd, batch(step, hvd.size()))).backward()
            optimizer.step()
        ends.append(weights(model))
        del model, optimizer
    assert torch.equal(*ends)


def case_the_hook_of_distributed_data_parallel(hvd):
    if hvd.size() > 2 or (card.WAY == "host" and not card.IS_GPU):
        raise Skip("two ranks suffice, and where the CPU stands in, one way: the hook's lanes are the host's anyway")
    import tempfile

    import torch.distributed as dist

    folder = hvd.broadcast_object(tempfile.mkdtemp(), 0)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=hvd.rank(), world_size=hvd.size())
    try:
        model, alone = pair()
        trained = nn.parallel.DistributedDataParallel(model)
        hook = hvd.ddp_hook(hvd.Compression.none)
        hook.register(trained)
        optimizer, plain = (torch.optim.SGD(net.parameters(), lr=0.5) for net in (model, alone))
        for step in range(STEPS):
            joined = batch(step, hvd.size())
            for net, stepped, part in ((trained, optimizer, own_part(hvd, joined)), (alone, plain, joined)):
                stepped.zero_grad()
                loss(net, *part).backward()
                stepped.step()
        check(hvd, model, alone)
        del trained, hook
    finally:
        dist.destroy_process_group()
