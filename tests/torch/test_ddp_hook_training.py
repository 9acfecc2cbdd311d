"""Codecs as communication hooks of DistributedDataParallel: what they lose, send, keep and resume."""

from __future__ import annotations

import io
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.on_ranks import on_ranks
from tests.ranks import Skip
from tests.told import told
from tests.torch import ddp_hook_support as ddp
from tests.torch.codec_support import Constant
from tests.torch.data import same
from tests.torch.optimizer_support import assert_close

pytestmark = [
    on_ranks((3, "torch"), runner=ddp.__name__),
    on_ranks((1, "torch"), (2, "torch"), thorough=True, runner=ddp.__name__),
]


def test_nothing_is_lost_when_buckets_are_laid_out_anew(hvd: Any) -> None:
    for name, codec in ddp.keeping(hvd).items():
        job = ddp.constant(hvd, codec)
        for step in range(1, 6):
            job.step()
            ddp.assert_identical(job.net)
            ddp.assert_nothing_lost(job, ddp.times(step, ddp.means()))
        encoded = {"first", "wide", "odd"} if dist.get_world_size() > 1 else set()
        assert set(ddp.owed(job.hook.state_dict())) == encoded, f"{name}: biases are not encoded"


def test_all_codecs_train(hvd: Any) -> None:
    def module() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(20, 80), nn.Tanh(), nn.Linear(80, 40), nn.Tanh(), nn.Linear(40, 30))

    generator = torch.Generator().manual_seed(dist.get_rank())
    inputs = torch.randn(64, 20, generator=generator)
    targets = torch.tanh(inputs[:, :1] * torch.linspace(-1, 1, 30))
    for name, codec in {**ddp.every_codec(hvd), "threshold": hvd.Compression.threshold(1e-3)}.items():
        job = ddp.Job(module(), hvd.ddp_hook(codec), rate=2.0, bucket_cap_mb=0.01)
        losses = [job.step(inputs, loss=lambda out: nn.functional.mse_loss(out, targets)) for _ in range(30)]
        ddp.assert_identical(job.net)
        first, last = (sum(ddp.gathered(loss)) for loss in (losses[0], losses[-1]))
        assert last < 0.5 * first, (name, losses)


def test_none_is_plain_ddp_and_what_is_not_encoded_is_exact(hvd: Any) -> None:
    plain = ddp.Job(ddp.net_of(), None).steps(3)
    for codec, names in ((hvd.Compression.none, list(ddp.SHAPES)), (hvd.Compression.onebit, ["bias", "scale"])):
        job = ddp.constant(hvd, codec).steps(3)
        for name in names:
            assert_close(getattr(job.net, name).detach(), getattr(plain.net, name).detach())


def test_less_is_sent(hvd: Any) -> None:
    ddp.for_several_ranks()
    sent = {name: ddp.constant(hvd, codec).steps(4).hook.bytes_sent for name, codec in ddp.every_codec(hvd).items()}
    # Of what two phases send of all gradients. Where the wire's latency says so, what is not encoded, and a cast,
    # goes from all to all, which on three ranks is half as much again.
    least = min(sent["none"], 2 * sent["fp16"])
    limits = {"none": 1.51, "fp16": 0.76, "bf16": 0.76, "custom": 0.9, "threshold": 0.9}
    for name, bytes_sent in sent.items():
        assert bytes_sent < limits.get(name, 0.65) * least, (name, sent)


def test_other_types(hvd: Any) -> None:
    for dtype, tolerance in ((torch.float64, 1e-4), (torch.float16, 0.02), (torch.bfloat16, 0.1)):
        for name in ("none", "bf16", "int8", "powersgd"):
            job = ddp.constant(hvd, ddp.every_codec(hvd)[name], dtype).steps(3)
            rounded = max(tolerance, 0.05) if name == "bf16" else tolerance
            ddp.assert_nothing_lost(job, ddp.times(3, ddp.means()), rounded)
            ddp.assert_identical(job.net)


def test_what_is_not_finite_reaches_all_ranks_and_is_not_kept(hvd: Any) -> None:
    for name, codec in ddp.every_codec(hvd).items():
        job = ddp.constant(hvd, codec).steps(2)
        for odd in (float("nan"), float("inf")):
            gradient = job.net.first_gradient.clone()
            if ddp.is_last():
                job.net.first_gradient[20, 7] = odd
            job.optimizer.zero_grad()
            job.model().backward()
            job.net.first_gradient.copy_(gradient)
            assert not torch.isfinite(job.net.first.grad).all(), name
            assert all(torch.isfinite(array).all() for array in ddp.kept(job.hook.state_dict()).values()), name
        job.optimizer.zero_grad()
        job.model().backward()
        assert all(torch.isfinite(parameter.grad).all() for parameter in job.net.parameters()), name


def test_resumed_with_the_same_bits(hvd: Any) -> None:
    for name, codec in ddp.every_codec(hvd).items():
        job = ddp.constant(hvd, codec).steps(3)
        file = io.BytesIO()
        torch.save({"net": job.net.state_dict(), "hook": job.hook.state_dict()}, file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        job.steps(3)
        for states in (saved["hook"], ddp.gathered(saved["hook"])):
            hook = hvd.ddp_hook(codec)
            hook.load_state_dict(states)
            assert same(hook.state_dict(), saved["hook"]), name
            resumed = ddp.Job(ddp.net_of(), hook)
            resumed.net.load_state_dict(saved["net"])
            assert same(hook.state_dict(), saved["hook"]), name
            resumed.steps(3)
            assert ddp.same_weights(resumed.net, job.net), name
            assert same(hook.state_dict(), job.hook.state_dict()), name
        job.net.load_state_dict(saved["net"])  # between two steps
        job.hook.load_state_dict(saved["hook"])
        assert ddp.same_weights(job.steps(3).net, resumed.net), name


def as_of(state: dict[str, Any], rank: int, size: int) -> dict[str, Any]:
    """A state as if rank ``rank`` of ``size`` had saved it, of a sum of which as much is applied as of this job's."""
    of = {"rank": rank, "size": size}
    return {**state, **of, "kept": [{**one, **of, "place": f"{rank} of {size}"} for one in state["kept"]]}


def test_states_of_more_and_fewer_ranks_are_summed(hvd: Any) -> None:
    for codec in (hvd.Compression.topk(0.05), hvd.Compression.powersgd(rank=2)):
        everyones = ddp.gathered(ddp.constant(hvd, codec).steps(3).hook.state_dict())
        for count in (1, dist.get_world_size() + 1):
            states = [as_of(everyones[n % len(everyones)], n, count) for n in range(count)]
            before = ddp.total([ddp.kept(state) for state in states])
            again = hvd.ddp_hook(codec)
            again.load_state_dict(list(reversed(states)))
            for loaded in (list(reversed(states)), ddp.gathered(again.state_dict())):
                job = ddp.resumed(hvd, codec, loaded)
                back = ddp.owed(job.hook.state_dict())
                assert back.keys() == before.keys()
                for name in back:
                    assert_close(back[name], before[name], 1e-5)
                ddp.assert_nothing_lost(job.steps(3), ddp.means_and(3, before))
                ddp.assert_identical(job.net)


def test_another_codec_takes_over_what_was_kept(hvd: Any) -> None:
    ddp.for_several_ranks()
    state = ddp.constant(hvd, hvd.Compression.topk(0.01)).steps(3).hook.state_dict()
    came = ddp.means_and(2, ddp.owed(state))
    for codec in (hvd.Compression.int8, hvd.Compression.none):
        ddp.assert_nothing_lost(ddp.resumed(hvd, codec, state).steps(2), came)


def test_a_state_that_cannot_be_used_is_an_error_in_the_first_step(hvd: Any) -> None:
    int8 = hvd.Compression.int8
    state = ddp.constant(hvd, int8).steps(3).hook.state_dict()
    turned = {**state, "shapes": [shape[::-1] for shape in state["shapes"]]}
    index = state["shapes"].index([50, 60])
    fact = f"the state_dict is of another model: parameter {index} is of shape [50, 60] here, but was of shape [60, 50]"
    with told(RuntimeError, "ValueError", f"{fact} there.\nHINT: load a state that a hook of this model saved."):
        ddp.resumed(hvd, int8, turned).step()
    ddp.for_several_ranks()
    job = ddp.resumed(hvd, int8, state) if dist.get_rank() == 0 else ddp.constant(hvd, int8)
    with told(RuntimeError, "Mismatched numbers of earlier steps", "rank 0 sent 3", "sent 0", "HINT"):
        job.step()


def test_a_state_on_some_ranks_only_between_two_steps(hvd: Any) -> None:
    ddp.for_several_ranks()
    job = ddp.constant(hvd, hvd.Compression.int8).steps(2)
    state = job.hook.state_dict()
    job.step()
    began = time.monotonic()
    if dist.get_rank() == 0:
        job.hook.load_state_dict(state)
    hint = (
        "HINT: all ranks of a group must call the same operations in the same order, with the same shapes and dtypes."
    )
    with told(RuntimeError, "ddp_hook", " of the group is not the same on its ranks: ", "gradients of", f".\n{hint}"):
        job.step()
    assert time.monotonic() - began < 30, "that is half of the hook's time limit"


def test_accumulated_gradients(hvd: Any) -> None:
    job = ddp.constant(hvd, hvd.Compression.topk(0.05), gradient_as_bucket_view=True)
    for _ in range(3):
        job.optimizer.zero_grad()
        with job.model.no_sync():
            job.model().backward()
        job.model().backward()
        job.optimizer.step()
    ddp.assert_nothing_lost(job, ddp.times(6, ddp.means()))


class Sometimes(Constant):
    """Uses one parameter in every other step only, and has one that it never uses."""

    def __init__(self) -> None:
        super().__init__(ddp.SHAPES, dist.get_rank())
        self.never = nn.Parameter(torch.zeros(40, 40))
        self.calls = 0

    def used(self) -> list[str]:
        self.calls += 1
        return [name for name in ddp.SHAPES if name != "wide" or self.calls % 2]


def test_parameters_that_are_not_used(hvd: Any) -> None:
    job = ddp.Job(Sometimes(), hvd.ddp_hook(hvd.Compression.int8), find_unused_parameters=True).steps(4)
    assert_close(-job.net.first.detach(), 4 * ddp.means()["first"], 0.02)
    assert_close(-job.net.wide.detach(), 2 * ddp.means()["wide"], 0.02)
    assert not job.net.never.any()


def test_frozen_and_shared_parameters(hvd: Any) -> None:
    net = ddp.net_of()
    net.wide.requires_grad_(False)
    net.again = net.first
    job = ddp.Job(net, hvd.ddp_hook(hvd.Compression.int8)).steps(3)
    assert not net.wide.any()
    assert_close(-net.first.detach(), 3 * ddp.means()["first"], 0.02)
    assert job.hook.state_dict()["shapes"] == [list(shape) for name, shape in ddp.SHAPES.items() if name != "wide"]


def test_matrices_in_the_order_of_memory(hvd: Any) -> None:
    """Gradients lie in buckets as parameters lie in memory."""
    net = ddp.net_of()
    net.first = nn.Parameter(torch.zeros(60, 50).t())
    job = ddp.Job(net, hvd.ddp_hook(hvd.Compression.powersgd(rank=2)))
    for step in range(1, 4):
        job.step()
        state = job.hook.state_dict()
        assert state["shapes"][0] == [60, 50]
        ddp.assert_identical(job.net)
        residual = next(iter(state["kept"][0]["kept"].values())).get("residual", torch.zeros(3000)).view(60, 50).t()
        owes = sum(ddp.gathered(residual.contiguous())) / dist.get_world_size()
        assert_close(owes - net.first.detach(), step * ddp.means()["first"], 1e-4)


def test_complex_parameters(hvd: Any) -> None:
    net = nn.Module()
    net.weight = nn.Parameter(torch.zeros(40, 50, dtype=torch.complex64))
    gradient = torch.randn(40, 50, 2, generator=torch.Generator().manual_seed(dist.get_rank()))
    net.forward = lambda: (torch.view_as_real(net.weight) * gradient).sum()
    job = ddp.Job(net, hvd.ddp_hook(hvd.Compression.int8)).steps(4)
    assert job.hook.state_dict()["shapes"] == [[40, 50, 2]]
    mean = sum(ddp.gathered(gradient)) / dist.get_world_size()
    assert_close(-torch.view_as_real(net.weight.detach()), 4 * mean, 0.02)


def test_tensors_on_cuda(hvd: Any) -> None:
    if not torch.cuda.is_available():
        raise Skip("needs a GPU")
    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
    for name, codec in ddp.every_codec(hvd).items():
        on_host = ddp.constant(hvd, codec).steps(4)
        net = ddp.net_of().to(device)
        job = ddp.Job(net, hvd.ddp_hook(codec)).steps(4)
        assert ddp.same_weights(net.cpu(), on_host.net), name
        assert same(job.hook.state_dict(), on_host.hook.state_dict()), name
