"""Updates that go on during the next forward pass: what they give, and who waits for them."""

from __future__ import annotations

import copy
import io
import os
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from hvdkit.engine.steps import lane
from hvdkit.engine.steps.arrangement import arrange
from hvdkit.torch.optimizers.awaited import is_waiting
from tests.torch.optimizer_support import assert_close, assert_identical, digest, expect

WIDTH, LAYERS = 48, 6
STEPS = 6


class Layered(nn.Module):
    """Layers that each need their own update, and one that no pass uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.spare = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def make_model() -> Layered:
    torch.manual_seed(3)
    return Layered()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def data(hvd: Any, step: int) -> torch.Tensor:
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(100 * step + hvd.rank()))


def backward(hvd: Any, model: nn.Module, step: int) -> None:
    model(data(hvd, step)).square().mean().backward()


def waiting(model: nn.Module) -> int:
    return sum(is_waiting(parameter) for parameter in model.parameters())


class Trained:
    """A model that was trained some steps, the last of which has updates that still wait."""

    def __init__(self, hvd: Any, overlap: bool = True, make: Callable[[nn.Module], Any] = sgd, **options: Any) -> None:
        self.hvd, self.model = hvd, make_model()
        self.plain = make(self.model)
        self.optimizer = hvd.DistributedOptimizer(
            self.plain, self.model.named_parameters(), overlap_forward=overlap, **options
        )
        self.steps = 0

    def step(self) -> None:
        self.optimizer.zero_grad()
        backward(self.hvd, self.model, self.steps)
        self.optimizer.step()
        self.steps += 1

    def run(self, steps: int = STEPS) -> Trained:
        for _ in range(steps):
            self.step()
        return self


def twins(hvd: Any, **options: Any) -> tuple[Trained, Trained]:
    """The same training with and without overlap; with it, all updates of the last step wait."""
    waits, overlaps = Trained(hvd, False, **options).run(), Trained(hvd, **options).run()
    assert waiting(waits.model) == 0
    assert waiting(overlaps.model) == len(list(overlaps.model.parameters()))
    return waits, overlaps


def same(hvd: Any, one: Trained, other: Trained) -> None:
    assert digest(one.model) == digest(other.model)
    assert waiting(other.model) == 0
    assert_identical(hvd, other.model)


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "SGD": sgd,
    "Adam": lambda model: torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01)),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True),
    "NAdam": lambda model: torch.optim.NAdam(model.parameters(), lr=0.01),
    "RAdam": lambda model: torch.optim.RAdam(model.parameters(), lr=0.01),
    "Adamax": lambda model: torch.optim.Adamax(model.parameters(), lr=0.01),
    "Adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.01),
    "Adadelta": lambda model: torch.optim.Adadelta(model.parameters()),
    "Adafactor": lambda model: torch.optim.Adafactor(model.parameters()),
    "RMSprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=0.01, centered=True),
    "Rprop": lambda model: torch.optim.Rprop(model.parameters()),
    "ASGD": lambda model: torch.optim.ASGD(model.parameters()),
    "foreach": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True),
    "fused": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, fused=True),
    "groups": lambda model: torch.optim.SGD(
        [{"params": model.layers.parameters(), "lr": 0.1}, {"params": model.spare.parameters(), "weight_decay": 0.1}],
        lr=0.01,
    ),
}


def case_all_optimizers_give_the_same_bits(hvd: Any) -> None:
    for name, make in OPTIMIZERS.items():
        waits, overlaps = twins(hvd, make=make)
        assert digest(waits.model) == digest(overlaps.model), name
        for one, other in zip(waits.model.parameters(), overlaps.model.parameters(), strict=True):
            mine, theirs = waits.optimizer.state[one], overlaps.optimizer.state[other]
            assert mine.keys() == theirs.keys(), name
            for key, value in mine.items():
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(theirs[key])), (name, key)


def case_a_scheduler_changes_the_next_step_only(hvd: Any) -> None:
    digests = []
    for overlap in (False, True):
        trained = Trained(hvd, overlap)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(trained.optimizer, 0.5)
        for _ in range(STEPS):
            trained.step()
            scheduler.step()
        digests.append(digest(trained.model))
    assert digests[0] == digests[1]


def case_each_layer_waits_for_its_own_update(hvd: Any) -> None:
    trained = Trained(hvd).run()
    left = []
    for layer in trained.model.layers:
        layer.register_forward_hook(lambda *_: left.append(waiting(trained.model)))
    trained.optimizer.zero_grad()
    trained.model(data(hvd, 0))
    assert left == sorted(left, reverse=True)
    assert len(set(left)) > 2, left
    assert left[-1] > 0  # the spare layer's, which no pass uses
    assert_identical(hvd, trained.model)


def layers(one: Trained) -> list[nn.Linear]:
    return [*one.model.layers, one.model.spare]


READERS: dict[str, Callable[[Trained], Any]] = {
    "state_dict": lambda one: one.model.state_dict(),
    "data": lambda one: [parameter.data for parameter in one.model.parameters()],
    "detach": lambda one: [parameter.detach() for parameter in one.model.parameters()],
    "numpy": lambda one: [torch.Tensor.numpy(parameter, force=True) for parameter in one.model.parameters()],
    "tolist": lambda one: [parameter.tolist() for parameter in one.model.parameters()],
    "item": lambda one: [parameter[0].sum().item() for parameter in one.model.parameters()],
    "printed": lambda one: [str(parameter) for parameter in one.model.parameters()],
    "formatted": lambda one: [f"{parameter}" for parameter in one.model.parameters()],
    "copied": lambda one: copy.deepcopy(one.model).state_dict(),
    "copied alone": lambda one: [copy.deepcopy(parameter) for parameter in one.model.parameters()],
    "pickled": lambda one: pickle.dumps(one.model),
    "saved": lambda one: torch.save(one.model, io.BytesIO()),
    "saved state": lambda one: torch.save(one.model.state_dict(), io.BytesIO()),
    "vector": lambda one: nn.utils.parameters_to_vector(one.model.parameters()),
    "list": lambda one: torch._foreach_norm(list(one.model.parameters())),
    "gradients": lambda one: [parameter.grad for parameter in one.model.parameters()],
    "gradients' norm": lambda one: nn.utils.get_total_norm(
        [parameter.grad for parameter in one.model.parameters() if parameter.grad is not None]
    ),
    "pointer": lambda one: [parameter.data_ptr() for parameter in one.model.parameters()],
    "equal": lambda one: [torch.equal(parameter, parameter) for parameter in one.model.parameters()],
    "averaged": lambda one: torch.optim.swa_utils.AveragedModel(one.model).update_parameters(one.model),
    "to": lambda one: one.model.to(torch.float32),
    "function": lambda one: [nn.functional.linear(data(one.hvd, 0), layer.weight, layer.bias) for layer in layers(one)],
    "in place": lambda one: [parameter.data.add_(0) for parameter in one.model.parameters()],
    "optimizer's state": lambda one: one.optimizer.state,
    "optimizer's state_dict": lambda one: one.optimizer.state_dict(),
    "pickled optimizer": lambda one: pickle.dumps(one.optimizer),
    "model.zero_grad": lambda one: one.model.zero_grad(),
    "zero_grad to zeros": lambda one: one.optimizer.zero_grad(set_to_none=False),
    "freezing": lambda one: one.model.requires_grad_(False).requires_grad_(True),
    "synchronize": lambda one: one.optimizer.synchronize(),
    "broadcast": lambda one: one.hvd.broadcast_parameters(one.model.state_dict(), 0),
}  # fmt: skip


def case_whoever_reads_sees_what_the_step_gives(hvd: Any) -> None:
    for name, read in READERS.items():
        waits, overlaps = twins(hvd)
        read(overlaps)
        assert waiting(overlaps.model) == 0, name
        assert digest(waits.model) == digest(overlaps.model), name
        waits.run(2), overlaps.run(2)
        assert digest(waits.model) == digest(overlaps.model), name


def case_what_is_read_is_what_the_step_gives(hvd: Any) -> None:
    waits, overlaps = twins(hvd)
    for ours, theirs in zip(waits.model.state_dict().values(), overlaps.model.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)
    waits, overlaps = twins(hvd)
    for ours, theirs in zip(waits.model.parameters(), copy.deepcopy(overlaps.model).parameters(), strict=True):
        assert type(theirs) is nn.Parameter
        assert torch.equal(ours, theirs)
    waits, overlaps = twins(hvd)
    for ours, theirs in zip(waits.model.parameters(), overlaps.model.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def case_facts_do_not_wait(hvd: Any) -> None:
    _, overlaps = twins(hvd)
    for parameter in overlaps.model.parameters():
        assert isinstance(parameter, nn.Parameter)
        assert parameter.requires_grad
        assert parameter.is_leaf
        assert parameter.dtype is torch.float32
        assert parameter.device == torch.device("cpu")
        assert WIDTH in parameter.shape
    assert waiting(overlaps.model) == len(list(overlaps.model.parameters()))


def case_another_thread_waits_too(hvd: Any) -> None:
    waits, overlaps = twins(hvd)
    seen: list[dict[str, torch.Tensor]] = []
    threads = [threading.Thread(target=lambda: seen.append(overlaps.model.state_dict())) for _ in range(4)]
    for thread in threads:
        thread.start()
    overlaps.model(data(hvd, 0))
    for thread in threads:
        thread.join()
    for state in seen:
        for name, value in waits.model.state_dict().items():
            assert torch.equal(value, state[name]), name
    same(hvd, waits, overlaps)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(x, weight)
        return 2 * x @ weight

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = context.saved_tensors
        return 2 * gradient @ weight.T, 2 * x.T @ gradient


def case_functions_and_transforms_of_parameters(hvd: Any) -> None:
    x = data(hvd, 0)

    def loss(weight: torch.Tensor) -> torch.Tensor:
        return (x @ weight).square().sum()

    def called(parameters: dict[str, torch.Tensor], model: nn.Module) -> torch.Tensor:
        return torch.func.functional_call(model, parameters, (x,)).square().sum()

    def weights(model: Layered) -> torch.Tensor:
        return model.layers[2].weight

    for compute in (
        lambda model: Doubled.apply(x, weights(model)),
        lambda model: torch.func.grad(loss)(weights(model)),
        lambda model: torch.func.vjp(loss, weights(model))[0],
        lambda model: torch.func.jvp(loss, (weights(model),), (torch.ones(WIDTH, WIDTH),))[1],
        lambda model: torch.func.jacrev(loss)(weights(model)),
        lambda model: torch.func.jacfwd(loss)(weights(model)),
        lambda model: torch.func.vmap(lambda row: row.sum())(weights(model)),
        lambda model: torch.func.vmap(lambda row: (row @ weights(model)).sum())(x),
        lambda model: torch.func.grad(lambda other: (other * weights(model)).sum())(torch.ones(WIDTH, WIDTH)),
        lambda model: torch.func.grad(called)(dict(model.named_parameters()), model)["layers.3.weight"],
        lambda model: torch.autograd.grad(model(x).sum(), list(model.layers.parameters()))[0],
        lambda model: torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False),
        lambda model: torch.utils.checkpoint.checkpoint(model, x.clone().requires_grad_(), use_reentrant=True),
    ):
        waits, overlaps = twins(hvd)
        ours, theirs = compute(waits.model), compute(overlaps.model)
        assert torch.equal(ours, theirs)
        same(hvd, waits, overlaps)


@contextmanager
def inference(dtype: torch.dtype | None = None) -> Iterator[None]:
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=dtype is not None):
        yield


def case_what_the_thread_is_in_changes_no_update(hvd: Any) -> None:
    for context in (inference, lambda: inference(torch.bfloat16), torch.no_grad):
        for make in (sgd, OPTIMIZERS["AdamW"]):
            digests = []
            for overlap in (False, True):
                trained = Trained(hvd, overlap, make=make)
                for step in range(STEPS):
                    trained.step()
                    with context():
                        trained.model(data(hvd, step))
                digests.append(digest(trained.model))
            assert digests[0] == digests[1]


def compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


CONVERSIONS: dict[str, Callable[[nn.Module], Any]] = {
    "scripted": torch.jit.script,
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "compiled in place": compiled_in_place,
    "a compiled function": lambda model: torch.compile(lambda x: model(x) * 2, backend="eager"),
}


def case_scripted_and_compiled_models(hvd: Any) -> None:
    for name, convert in CONVERSIONS.items():
        outputs = []
        for overlap in (False, True):
            trained = Trained(hvd, overlap)
            converted = convert(trained.model)
            for step in range(STEPS):
                trained.optimizer.zero_grad()
                with warnings.catch_warnings(record=True) as told:
                    converted(data(hvd, step)).square().mean().backward()
                assert not [one for one in told if "hook" in str(one.message)], name
                trained.optimizer.step()
            outputs.append(converted(data(hvd, 0)))
        # What TorchScript has fused is rounded otherwise from call to call.
        assert_close(outputs[1], outputs[0], relative=1e-6)
        assert name == "scripted" or torch.equal(*outputs), name


def case_memory_that_others_hold_is_updated_at_once(hvd: Any) -> None:
    values = []
    for overlap in (False, True):
        trained = Trained(hvd, overlap)
        held = [parameter.data for parameter in trained.model.layers[1].parameters()]
        trained.run()
        values.append([value.clone() for value in held])
        digest(trained.model)
    assert all(torch.equal(*pair) for pair in zip(*values, strict=True))


def case_gradients_that_somebody_holds(hvd: Any) -> None:
    def cleared(trained: Trained) -> None:
        torch._foreach_zero_(held)

    def read(trained: Trained) -> None:
        seen.append(torch.stack([gradient.norm() for gradient in held]))

    for use in (cleared, read):
        digests: list[str] = []
        seen: list[torch.Tensor] = []
        for overlap in (False, True):
            trained = Trained(hvd, overlap)
            for step in range(STEPS):
                backward(hvd, trained.model, step)
                held = [parameter.grad for parameter in trained.model.parameters() if parameter.grad is not None]
                trained.optimizer.step()
                use(trained)
                if use is read:
                    trained.optimizer.zero_grad()
            digests.append(digest(trained.model))
        assert digests[0] == digests[1]
        assert use is cleared or torch.equal(torch.stack(seen[:STEPS]), torch.stack(seen[STEPS:]))


def case_gradients_in_one_buffer(hvd: Any) -> None:
    digests = []
    for overlap in (False, True):
        trained = Trained(hvd, overlap)
        parameters = list(trained.model.layers.parameters())
        buffer = torch.zeros(sum(parameter.numel() for parameter in parameters))
        for parameter, part in zip(parameters, buffer.split([one.numel() for one in parameters]), strict=True):
            parameter.grad = part.view_as(parameter)
        for step in range(STEPS):
            backward(hvd, trained.model, step)
            trained.optimizer.step()
            buffer.zero_()
        digests.append(digest(trained.model))
    assert digests[0] == digests[1]


def case_a_graph_made_before_the_step(hvd: Any) -> None:
    for cleared in (True, False):
        digests = []
        for overlap in (False, True):
            torch.manual_seed(7)
            layer = nn.Linear(WIDTH, WIDTH)  # whose weight no graph saves
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(layer.parameters(), lr=0.1), layer.named_parameters(), overlap_forward=overlap
            )
            for step in range(STEPS):
                losses = [layer(data(hvd, 2 * step + number)).square().mean() for number in range(2)]
                for loss in losses:
                    loss.backward()
                    optimizer.step()
                    if cleared:
                        optimizer.zero_grad()
                optimizer.zero_grad()
            digests.append(digest(layer))
        assert digests[0] == digests[1]


def case_transformers_in_evaluation(hvd: Any) -> None:
    mask = torch.tensor([[False] * 4 + [True] * 2] * 3)
    outputs = []
    for overlap in (False, True):
        torch.manual_seed(7)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.0, batch_first=True)
        model = nn.TransformerEncoder(layer, 2)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), overlap_forward=overlap
        )
        x = torch.randn(3, 6, WIDTH, generator=torch.Generator().manual_seed(1))
        for _ in range(STEPS):
            model.train()
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            model.eval()
            with torch.no_grad():
                outputs.append(model(x, src_key_padding_mask=mask))
    assert torch.equal(torch.stack(outputs[:STEPS]), torch.stack(outputs[STEPS:]))


def case_scripted_modules_are_read_by_other_ways(hvd: Any) -> None:
    def saved(scripted: Any) -> list[torch.Tensor]:
        file = io.BytesIO()
        torch.jit.save(scripted, file)
        file.seek(0)
        return list(torch.jit.load(file).state_dict().values())

    def after(trained: Trained) -> list[torch.Tensor]:
        return saved(torch.jit.script(trained.model))

    before = Trained(hvd, False).run(), Trained(hvd)
    scripted = torch.jit.script(before[1].model)
    before[1].run()
    expected = list(before[0].model.state_dict().values())
    assert all(torch.equal(*pair) for pair in zip(expected, saved(scripted), strict=True))
    before[0].run(1), before[1].run(1)
    assert_close(scripted.forward(data(hvd, 0)), before[0].model(data(hvd, 0)), relative=1e-6)
    waits, overlaps = twins(hvd)
    assert all(torch.equal(*pair) for pair in zip(after(waits), after(overlaps), strict=True))


def case_the_wrapped_optimizer_tells_what_the_step_gives(hvd: Any) -> None:
    waits, overlaps = twins(hvd, make=OPTIMIZERS["AdamW"])
    ours, theirs = (one.plain.state_dict()["state"] for one in (waits, overlaps))
    for number, state in ours.items():
        assert all(torch.equal(value, theirs[number][key]) for key, value in state.items())


class ReadInExtension(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, weight: torch.Tensor) -> torch.Tensor:
        return torch.from_dlpack(torch._C._to_dlpack(weight.__class__.detach(weight))).clone()


def case_what_hands_parameters_to_extensions(hvd: Any) -> None:
    for read in (
        lambda model: ReadInExtension.apply(model.layers[3].weight),
        lambda model: torch.utils.dlpack.from_dlpack(
            torch.utils.dlpack.to_dlpack(model.layers[3].weight.requires_grad_())
        ),
    ):
        waits, overlaps = twins(hvd)
        waits.model.requires_grad_(False)
        with torch.no_grad():
            assert torch.equal(waits.model.layers[3].weight, read(overlaps.model).detach())


def case_an_interrupted_wait_changes_nothing(hvd: Any) -> None:
    waits, overlaps = twins(hvd)
    lane = overlaps.optimizer._synchronizer._routes.planned.lane
    wait = lane.wait

    def interrupted(slots: Any) -> None:
        lane.wait = wait
        raise KeyboardInterrupt

    lane.wait = interrupted
    left = waiting(overlaps.model)
    with pytest.raises(KeyboardInterrupt):
        overlaps.model(data(hvd, 0))
    assert waiting(overlaps.model) == left
    waits.run(2), overlaps.run(2)
    same(hvd, waits, overlaps)


def case_a_handler_that_reads_while_the_thread_waits(hvd: Any) -> None:
    waits, overlaps = twins(hvd)
    lanes = overlaps.optimizer._synchronizer._routes.planned.lane.lanes
    drive, digests = lanes.drive, []

    def handled(what: Any, finished: Callable[[], bool]) -> None:
        lanes.drive = drive
        digests.append(digest(overlaps.model))
        drive(what, finished)

    lanes.drive = handled
    overlaps.model(data(hvd, 0))
    assert digests == [digest(waits.model)]
    same(hvd, waits, overlaps)


def case_a_forked_child_sees_what_the_step_gives(hvd: Any) -> None:
    waits, overlaps = twins(hvd)
    expected = digest(waits.model)
    child = os.fork()
    if child == 0:
        os._exit(0 if digest(overlaps.model) == expected else 1)
    assert os.waitpid(child, 0)[1] == 0


def case_hooks_and_groups_of_the_next_step(hvd: Any) -> None:
    trained = Trained(hvd).run()
    calls: list[int] = []
    trained.optimizer.register_step_post_hook(lambda *_: calls.append(1))
    groups: list[Any] = []
    trained.model.layers[1].register_forward_hook(lambda *_: groups.append(trained.optimizer.param_groups))
    trained.model(data(hvd, 0))
    assert calls == []
    assert groups[0] is trained.optimizer.param_groups


def case_parameters_that_processes_share_are_updated_at_once(hvd: Any) -> None:
    trained = Trained(hvd)
    trained.model.layers[2].share_memory()
    trained.run()
    assert not any(is_waiting(parameter) for parameter in trained.model.layers[2].parameters())
    assert waiting(trained.model) == 12


def case_step_waits_where_all_gradients_are_needed(hvd: Any) -> None:
    digests = []
    for overlap in (False, True):
        trained = Trained(hvd, overlap).run()
        for step in range(3):
            trained.optimizer.zero_grad()
            backward(hvd, trained.model, step)
            trained.optimizer.synchronize()
            nn.utils.clip_grad_norm_(trained.model.parameters(), 0.01)
            with trained.optimizer.skip_synchronize():
                trained.optimizer.step()
            assert waiting(trained.model) == 0
        trained.run(2)

        def closure(trained: Trained = trained) -> torch.Tensor:
            trained.optimizer.zero_grad()
            loss = trained.model(data(hvd, 1)).square().mean()
            loss.backward()
            return loss

        trained.optimizer.step(closure)
        assert waiting(trained.model) == 0
        seen: list[int] = []
        hook = trained.optimizer.register_step_post_hook(
            lambda *_, trained=trained, seen=seen: seen.append(waiting(trained.model))
        )
        trained.run(2)
        assert seen == [0, 0]
        hook.remove()
        trained.run(2)
        assert waiting(trained.model) == (14 if overlap else 0)
        digests.append(digest(trained.model))
    assert digests[0] == digests[1]


def case_a_grad_scaler(hvd: Any) -> None:
    digests = []
    for overlap in (False, True):
        trained = Trained(hvd, overlap)
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        for step in range(STEPS):
            trained.optimizer.zero_grad()
            scaler.scale(trained.model(data(hvd, step)).square().mean()).backward()
            scaler.step(trained.optimizer)
            scaler.update()
        digests.append(digest(trained.model))
    assert digests[0] == digests[1]


def case_accumulated_passes_and_gradients_that_are_kept(hvd: Any) -> None:
    digests = []
    for overlap in (False, True):
        trained = Trained(hvd, overlap, backward_passes_per_step=2)
        for step in range(STEPS):
            if step % 3:
                trained.optimizer.zero_grad()
            backward(hvd, trained.model, 2 * step)
            backward(hvd, trained.model, 2 * step + 1)
            trained.optimizer.step()
        digests.append(digest(trained.model))
    assert digests[0] == digests[1]


def case_two_optimizers_and_a_model_that_is_let_go(hvd: Any) -> None:
    digests = []
    for overlap in (False, True):
        first, second = Trained(hvd, overlap), Trained(hvd, overlap, make=OPTIMIZERS["AdamW"])
        for step in range(STEPS):
            first.optimizer.zero_grad()
            second.optimizer.zero_grad()
            second.model(first.model(data(hvd, step))).square().mean().backward()
            first.optimizer.step()
            second.optimizer.step()
        digests.append((digest(first.model), digest(second.model)))
        Trained(hvd, overlap).run()
    assert digests[0] == digests[1]


def case_compression_with_feedback(hvd: Any) -> None:
    for codec in (hvd.Compression.fp16, hvd.Compression.int8(compress="everywhere")):
        waits, overlaps = twins(hvd, compression=codec)
        same(hvd, waits, overlaps)


def case_sparse_gradients_beside_dense_ones(hvd: Any) -> None:
    digests = []
    for overlap in (False, True):
        torch.manual_seed(5)
        model = nn.Sequential(nn.Embedding(50, WIDTH, sparse=True), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), overlap_forward=overlap
        )
        for step in range(STEPS):
            optimizer.zero_grad()
            model(torch.tensor([step, hvd.rank(), 7])).square().mean().backward()
            optimizer.step()
        assert waiting(model) == (4 if overlap else 0)
        digests.append(digest(model))
    assert digests[0] == digests[1]


def case_frozen_thawed_and_added_parameters(hvd: Any) -> None:
    digests = []
    for overlap in (False, True):
        trained = Trained(hvd, overlap).run(4)
        trained.model.layers[2].requires_grad_(False)
        trained.run(3)
        trained.model.layers[2].requires_grad_(True)
        trained.run(3)
        added = nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            added.weight.fill_(0.1), added.bias.fill_(0.2)
        trained.model.layers.append(added)
        trained.optimizer.add_param_group({"params": list(added.parameters())})
        trained.run(4)
        state = copy.deepcopy(trained.optimizer.state_dict())
        trained.run(2)
        trained.optimizer.load_state_dict(state)
        trained.run(2)
        digests.append(digest(trained.model))
    assert digests[0] == digests[1]


def case_ranks_that_join_with_updates_left(hvd: Any) -> None:
    digests = []
    for overlap in (False, True):
        trained = Trained(hvd, overlap).run(4 + hvd.rank())
        assert hvd.join() == hvd.size() - 1
        assert waiting(trained.model) == 0
        hvd.broadcast_parameters(trained.model.state_dict(), hvd.size() - 1)
        digests.append(digest(trained.model))
        trained.run(3)
    assert digests[0] == digests[1]


def case_updates_are_made_before_a_rank_leaves(hvd: Any) -> None:
    waits, overlaps = twins(hvd)
    hvd.shutdown()
    assert waiting(overlaps.model) == 0
    assert digest(waits.model) == digest(overlaps.model)
    hvd.init()
    waits.run(2), overlaps.run(2)
    assert digest(waits.model) == digest(overlaps.model)


def case_an_error_of_the_optimizer_leaves_ordinary_parameters(hvd: Any) -> None:
    trained = Trained(hvd).run()
    trained.step()
    updates = trained.optimizer._synchronizer.updates

    def broken(parameters: Any) -> None:
        raise RuntimeError("broken update")

    updates._make = broken
    with expect(RuntimeError, "broken update"):
        trained.model(data(hvd, 0))
    assert waiting(trained.model) == 0
    trained.run(2)


def case_what_cannot_be_left_to_the_background_is_refused(hvd: Any) -> None:
    model = make_model()

    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    for optimizer in (torch.optim.LBFGS(model.parameters()), Own(model.parameters(), lr=0.1)):
        with expect(ValueError, "overlap_forward", type(optimizer).__name__, "HINT"):
            hvd.DistributedOptimizer(optimizer, overlap_forward=True)
    with expect(ValueError, "overlap_forward", "Adasum", "HINT"):
        hvd.DistributedOptimizer(sgd(model), op=hvd.Adasum, overlap_forward=True)
    with pytest.raises(ValueError, match="overlap_forward"):
        hvd.DistributedOptimizer(sgd(model.to("meta")), op=hvd.Adasum, overlap_forward=True)


def case_rank_0_says_in_which_order_gradients_travel(hvd: Any) -> None:
    """Each rank computes it by itself; some may have been told to overlap, others not."""
    for overlaps in (True, False):
        told = []

        def recorded(*arguments: Any, told: list[bool] = told) -> Any:
            told.append(arguments[-1])
            return arrange(*arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lane, "arrange", recorded)
            trained = Trained(hvd, overlaps == (hvd.rank() == 0)).run(3)
        assert told == [False, overlaps], "before the first step and after it"
        same(hvd, Trained(hvd, False).run(3), trained)
