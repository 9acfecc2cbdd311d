"""hvd.elastic with PyTorch under hvdkitrun: what ranks hold after others were killed is what a replay gives."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hvdkit.engine.session import runtime
from hvdkit.torch.elastic import ElasticSampler
from tests.launch.launching import call_bare

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
    from hvdkit.torch.elastic import TorchState

    layer = VersionedLayer(2, 3)
    state, held = TorchState(layer), layer.weight.detach().clone()
    with torch.no_grad():
        layer.weight.zero_()
    state.restore()
    assert torch.equal(layer.weight, held)


def test_a_state_goes_back_to_its_last_save_whatever_changed(monkeypatch):
    at_place(monkeypatch, 0, 1)
    from hvdkit.torch.elastic import TorchState

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
