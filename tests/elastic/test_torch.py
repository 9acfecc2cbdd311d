"""hvd.elastic with PyTorch under hvdkitrun: what ranks hold after others were killed is what a replay gives."""

from __future__ import annotations

import json
import pickle
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import hvdkit.torch as hvd
from hvdkit.api.states import State
from hvdkit.api.transfer import _pickled
from hvdkit.engine.session import runtime
from hvdkit.torch.elastic import ElasticSampler, TorchState
from hvdkit.torch.elastic.handlers import StateHandler, get_handler_registry, set_handler_registry
from tests.launch.launching import call_bare
from tests.told import told

PROGRAM = str(Path(__file__).with_name("torch_program.py"))


def train(flags: str, *arguments: object) -> list[dict]:
    """Run a job to its end. Return what the ranks of its last generation told, in their order."""
    words = [*flags.split(), sys.executable, PROGRAM, *map(str, arguments)]
    result = call_bare(*words, seconds=120, OMP_NUM_THREADS="1")
    assert result.status == 0, result.stdout + result.stderr
    facts = [json.loads(line.partition(": ")[2]) for line in result.stdout.splitlines()]
    assert len({fact["digest"] for fact in facts}) == 1  # the same bits
    assert len({tuple(fact["sizes"]) for fact in facts}) == 1
    assert [fact["difference"] < 1e-5 for fact in facts] == [True] * len(facts), facts
    return sorted(facts, key=lambda fact: fact["rank"])


@pytest.mark.parametrize("steps_per_commit", [1, pytest.param(3, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("kills", [["1:20"], ["0:20"], ["0:20", "2:20"]], ids=["rank 1", "rank 0", "two ranks"])
def test_killed_ranks_are_replaced_and_the_result_is_that_of_a_replay(steps_per_commit, kills):
    facts = train("-np 3 --min-np 1", 60, steps_per_commit, 3, *kills)
    sizes = facts[0]["sizes"]
    restored = 20 - 20 % steps_per_commit
    assert sizes[:restored] == [3] * restored  # the steps after the last commit were taken back
    assert sizes[restored] == 3 - len(kills)
    assert sizes[-1] == 3
    assert facts[0]["steps"] == len(sizes)
    assert facts[0]["lr"] == pytest.approx(0.05 * 0.9 ** (len(sizes) // 10))


def test_a_job_that_grows_gives_its_state_to_the_new_rank_and_calls_the_callbacks():
    facts = train("-np 2 --min-np 1 --max-np 3", 30, 1, 3)
    sizes = facts[0]["sizes"]
    assert (sizes[0], sizes[-1], len(facts)) == (2, 3, 3)
    assert sizes == sorted(sizes)  # no step was repeated or lost
    assert [fact["resets"] for fact in facts] == [[[0, 3]], [[1, 3]], []]  # the new rank has the place it was offered


def test_outside_of_an_elastic_job_the_function_is_called_once():
    facts = train("-np 2 --gloo", 10, 1, 2)
    assert facts[0]["sizes"] == [2] * 10
    assert [fact["resets"] for fact in facts] == [[], []]


def at_place(monkeypatch: pytest.MonkeyPatch, rank: int, size: int) -> None:
    monkeypatch.setattr(runtime, "topology", lambda: SimpleNamespace(rank=rank, size=size))


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_sampler_repeats_and_loses_no_full_batch_when_ranks_change(monkeypatch, shuffle):
    choose, batch = random.Random(1), 4
    for _ in range(20):
        length = choose.randrange(1, 200)
        at_place(monkeypatch, 0, choose.randrange(1, 5))
        samplers = [ElasticSampler(range(length), shuffle=shuffle, seed=3)]
        samplers[0].set_epoch(7)
        state, seen = samplers[0].state_dict(), []
        while True:
            size = choose.randrange(1, 5)
            samplers = []
            for rank in range(size):
                at_place(monkeypatch, rank, size)
                sampler = ElasticSampler(range(length), shuffle=shuffle, seed=3)
                sampler.load_state_dict(state)
                samplers.append(sampler)
            assert len({len(sampler) for sampler in samplers}) == 1
            orders = [list(sampler) for sampler in samplers]
            assert [len(order) for order in orders] == [len(samplers[0])] * size
            batches = len(orders[0]) // batch
            if batches == 0:
                break
            done = choose.randrange(1, batches + 1)
            for number in range(done):
                for order in orders:
                    seen += order[number * batch : (number + 1) * batch]
                for sampler in samplers:
                    sampler.record_batch(number, batch)
            state = samplers[0].state_dict()
        rest = {index for order in orders for index in order}
        repeated = len(seen) - len(set(seen))
        assert set(seen) | rest == set(range(length))
        assert repeated <= size - 1 or length < size  # only what fills up the last share
        assert samplers[0].processed_indices == set(seen)


def test_a_sampler_shuffles_each_epoch_anew_and_all_ranks_alike(monkeypatch):
    at_place(monkeypatch, 0, 1)
    first, second = ElasticSampler(range(50)), ElasticSampler(range(50))
    assert list(first) == list(second) != list(range(50))
    second.set_epoch(1)
    assert list(first) != list(second)
    assert sorted(second) == list(range(50))


class VersionedLayer(torch.nn.Linear):
    """A layer that loads a state_dict of its own version alone, as torchvision's MNASNet does."""

    _version = 2

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest):
        if local_metadata.get("version") != 2:
            raise ValueError(local_metadata)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


def test_a_layer_that_asks_for_the_version_of_its_state_is_restored(monkeypatch):
    at_place(monkeypatch, 0, 1)
    layer = VersionedLayer(2, 3)
    state, held = TorchState(layer), layer.weight.detach().clone()
    with torch.no_grad():
        layer.weight.zero_()
    state.restore()
    assert torch.equal(layer.weight, held)


def test_a_state_goes_back_to_its_last_save_whatever_changed(monkeypatch):
    at_place(monkeypatch, 0, 1)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    scaler, sampler = torch.amp.GradScaler("cpu", init_scale=8.0), ElasticSampler(range(10))

    def step():
        model(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()
        state.losses.append(1.0)
        sampler.record_batch(0, 1)
        scaler.update(scaler.get_scale() * 2)

    state = TorchState(model, optimizer, scaler=scaler, sampler=sampler, losses=[], best=None)
    scaler.scale(torch.ones(1))  # makes its state
    state.save()
    for saves in (1, 2):  # the second time into the memory of the first
        step()
        state.save()
        held = json.dumps(facts := [model.state_dict(), optimizer.state_dict()], default=lambda each: each.tolist())
        losses, scale, place = list(state.losses), scaler.get_scale(), sampler.state_dict()
        for _ in range(2):
            step()
            state.best = "changed"
            assert json.dumps([model.state_dict(), optimizer.state_dict()], default=lambda each: each.tolist()) != held
            state.restore()
            facts = [model.state_dict(), optimizer.state_dict()]
            assert json.dumps(facts, default=lambda each: each.tolist()) == held
            assert (state.losses, state.best, scaler.get_scale(), sampler.state_dict()) == (losses, None, scale, place)
        assert len(state.losses) == saves


class Training:
    """A model with buffers, two optimizers and an average of the parameters, in a state."""

    def __init__(self) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout())
        self.other, self.average = torch.nn.Linear(4, 1), torch.nn.Linear(3, 4)
        self.optimizers = [torch.optim.AdamW(self.model.parameters()), torch.optim.SGD(self.other.parameters(), 0.1)]
        first, second = self.optimizers
        self.state = TorchState(self.model, first, other=self.other, second=second, average=self.average, batch=0)
        self.objects = [self.model, self.other, self.average, *self.optimizers]

    def compute(self) -> None:
        self.other(self.model(torch.randn(5, 3))).square().sum().backward()

    def step(self) -> None:
        self.compute()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            self.average.weight.lerp_(self.model[0].weight, 0.5)
        self.state.batch += 1

    def facts(self) -> str:
        facts = [each.state_dict() for each in self.objects]
        return json.dumps([facts, self.state.batch, torch.rand(1)], default=lambda each: each.tolist())

    def kept_bytes(self) -> int:
        """Return the bytes of the copies that the state has."""
        trees, total = [handler._snapshot.kept for handler in self.state._handlers.values()], 0
        while trees:
            tree = trees.pop()
            trees += tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else []
            total += tree.nbytes if isinstance(tree, torch.Tensor) else 0
        return total


@pytest.fixture
def training(monkeypatch):
    at_place(monkeypatch, 0, 1)
    torch.manual_seed(0)
    return Training()


@pytest.mark.parametrize("steps_per_commit", [1, 2])
def test_a_failed_step_leaves_nothing_behind(training, steps_per_commit):
    for _ in range(5):
        for _ in range(steps_per_commit):
            training.step()
        training.state.commit()
    buffers_and_average = 4 * (4 + 4) + 8 + 4 * (12 + 4)
    assert (training.kept_bytes() == buffers_and_average) == (steps_per_commit == 1)
    held = training.facts()
    for _ in range(2):
        training.state._go_back()  # whence the random numbers of the facts are those of the commit again
        for _ in range(steps_per_commit - 1):
            training.step()
        training.compute()  # which fails before the optimizers step
        training.optimizers[0].param_groups[0]["lr"] = 7.0
        training.state.batch = 100
        training.state._go_back()
        assert training.facts() == held
        assert all(parameter.grad is None for parameter in training.model.parameters())
    assert training.state._version == (5, 0)


def test_a_step_of_one_optimizer_that_was_applied_is_kept_where_there_is_no_copy(training):
    for _ in range(3):
        training.step()
        training.state.commit()
    second = training.other.weight.clone()
    training.compute()
    training.optimizers[0].step()
    first = training.model[0].weight.clone()
    training.state.batch = 100
    training.state._go_back()
    assert torch.equal(training.model[0].weight, first)
    assert torch.equal(training.other.weight, second)
    assert training.state.batch == 3
    assert training.state._version == (3, 1)
    training.step()
    training.state.commit()
    assert training.state._version == (4, 0)


def test_an_interrupt_between_two_commits_does_not_look_as_a_commit_in_each_step(training):
    for _ in range(6):
        training.step()
        training.state._interrupt()
        training.step()
        training.state.commit()
    assert training.kept_bytes() > 400


def test_optimizers_that_change_parameters_before_their_step_is_over_are_copied(monkeypatch):
    at_place(monkeypatch, 0, 1)
    layer = torch.nn.Linear(3, 4)
    optimizer = torch.optim.LBFGS(layer.parameters())
    state = TorchState(layer, optimizer)
    for _ in range(4):
        optimizer.step(lambda: layer(torch.ones(1, 3)).square().sum())
        state.commit()
    held = layer.weight.clone()
    with torch.no_grad():
        layer.weight.add_(1)
    state._go_back()
    assert torch.equal(layer.weight, held)
    with told(
        ValueError,
        "TorchState: an ElasticSampler with exact=True goes on with the steps of the state's optimizer, but the state "
        "has no optimizer whose steps can be counted.",
        "HINT: pass an optimizer, other than LBFGS and without op=hvd.Adasum; or pass exact=False.",
    ):
        TorchState(layer, optimizer, sampler=ElasticSampler(range(3), exact=True, batch_size=1))
    hint = "HINT: pass the DataLoader's batch_size."
    with told(ValueError, f"ElasticSampler: exact=True without batch_size\n{hint}"):
        ElasticSampler(range(3), exact=True)


def commit_steps(state: TorchState, model: torch.nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.randn(4, *SHAPE)).square().mean().backward()
        optimizer.step()
        state.commit()


SHAPE = (3, 6, 6)


@pytest.fixture
def convolution(monkeypatch):
    at_place(monkeypatch, 0, 1)
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Conv2d(4, 2, 3))


def test_frozen_parameters_of_an_optimizer_are_copied(convolution):
    convolution[0].requires_grad_(False)
    optimizer = torch.optim.SGD(convolution.parameters(), 0.1)
    state = TorchState(convolution, optimizer)
    commit_steps(state, convolution, optimizer, 4)
    held = convolution[0].weight.clone()
    with torch.no_grad():
        convolution[0].weight.mul_(0.9)  # a momentum encoder, in the forward pass of a step that fails
    state._go_back()
    assert torch.equal(convolution[0].weight, held)


def test_a_buffer_that_is_replaced_by_another_tensor_is_copied(convolution):
    convolution.register_buffer("average", torch.zeros(2))
    optimizer = torch.optim.SGD(convolution.parameters(), 0.1)
    state = TorchState(convolution, optimizer)
    for number in range(6):
        convolution.average = torch.full((2,), float(number))
        commit_steps(state, convolution, optimizer, 1)
    convolution.average = torch.full((2,), 100.0)
    state._go_back()
    assert convolution.average.tolist() == [5.0, 5.0]


def test_a_change_of_parameters_outside_of_a_step_is_told(convolution, caplog):
    optimizer = torch.optim.SGD(convolution.parameters(), 0.1)
    state = TorchState(convolution, optimizer)
    commit_steps(state, convolution, optimizer, 4)
    state._go_back()
    assert caplog.text == ""
    with torch.no_grad():
        convolution[0].weight.mul_(0.9)
    state._go_back()
    (record,) = caplog.records
    assert record.getMessage() == (
        "Parameters were changed since the last commit, but not by a step of their optimizer; they stay as they are: "
        "the script commits each step, so there is no copy to restore.\n"
        "HINT: change parameters between step() and commit(), or undo a swap of averaged parameters in a finally block."
    )


def test_what_a_lost_rank_owed_is_told(monkeypatch, caplog):
    at_place(monkeypatch, 0, 1)
    layer = torch.nn.Linear(3, 4)
    plain = torch.optim.SGD(layer.parameters(), 0.1)
    TorchState(layer, hvd.DistributedOptimizer(plain, compression=hvd.Compression.int8)).restore()
    (record,) = caplog.records
    assert record.getMessage() == "If a rank was lost, its residuals, which compression has not sent yet, are lost too."


def test_an_optimizer_with_a_closure_is_copied(convolution):
    optimizer = torch.optim.SGD(convolution.parameters(), 0.1)
    state = TorchState(convolution, optimizer)
    for _ in range(4):
        optimizer.step(lambda: convolution(torch.randn(4, *SHAPE)).mean())
        state.commit()
    assert state._is_copied


@pytest.mark.parametrize("is_subclass", [False, True])
def test_each_step_moves_an_exact_sampler_once(convolution, is_subclass):
    class Named(torch.optim.Adam):
        def step(self, closure=None):
            return super().step(closure)

    torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))])  # which has PyTorch hook the step of that class, too
    optimizer = (Named if is_subclass else torch.optim.Adam)(convolution.parameters())
    sampler = ElasticSampler(range(1000), exact=True, batch_size=10)
    for phase in (1, 2, 3):
        state = TorchState(convolution, optimizer, sampler=sampler)
        commit_steps(state, convolution, optimizer, 4)
        assert sampler.processed_num == 40 * phase
    state.optimizer = torch.optim.SGD(convolution.parameters(), 0.1)
    commit_steps(state, convolution, state.optimizer, 2)
    assert sampler.processed_num == 140
    with pytest.raises(ValueError, match="a GradScaler skips steps"):
        TorchState(convolution, optimizer, sampler=sampler, scaler=torch.amp.GradScaler("cpu"))


def test_a_state_that_is_sent_keeps_the_layout_of_its_memory(convolution):
    convolution.to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(convolution.parameters(), fused=True)
    state = TorchState(convolution, optimizer, kept=torch.nn.Parameter(torch.randn(5).to(torch.bfloat16)))
    commit_steps(state, convolution, optimizer, 2)
    data, *buffers = _pickled(state._content())
    attributes, parts = pickle.loads(bytes(data), buffers=[bytearray(buffer) for buffer in buffers])  # noqa: S301 (own)
    assert isinstance(attributes["kept"], torch.nn.Parameter)
    assert torch.equal(attributes["kept"], state.kept)
    moment = parts["optimizer"]["state"][0]["exp_avg"]
    assert moment.stride() == optimizer.state[convolution[0].weight]["exp_avg"].stride() != (27, 9, 3, 1)
    assert torch.equal(moment, optimizer.state[convolution[0].weight]["exp_avg"])


class CountingState(State):
    """A state as a user of Horovod writes it."""

    def __init__(self, bcast_object, get_rank):
        self.saved = 0
        super().__init__(bcast_object, get_rank)

    def save(self):
        self.saved += 1

    def restore(self):
        pass

    def sync(self):
        pass


def test_the_classes_can_be_derived_from_as_those_of_horovod(convolution):
    state = CountingState(lambda value: value, lambda: 0)
    state.commit()
    assert state.saved == 1

    class Late(StateHandler):
        def __init__(self, value):
            super().__init__(value)
            self.kept = None

        def save(self):
            self.kept = list(self.value)

        def restore(self):
            self.value[:] = self.kept

        def sync(self):
            pass

    class Early(TorchState):
        def __init__(self, **kwargs):
            self.early = 1
            super().__init__(**kwargs)

    former = get_handler_registry()
    set_handler_registry([*former, (list, Late)])
    try:
        state = Early(model=convolution, values=[1, 2])
    finally:
        set_handler_registry(former)
    state.values.append(3)
    state.restore()
    assert (state.values, state.early) == ([1, 2], 1)
