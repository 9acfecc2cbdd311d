"""What codecs make of tensors of a device, next to what they make of arrays on the host; the device is the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hvdkit.compression import DGC, CodecState, Int4, Int8, LossyCodec, OneBit, PowerSGD, RandomK, TopK
from hvdkit.compression.sparse import Threshold
from hvdkit.compression.state import OWED, RESIDUAL
from hvdkit.engine.steps.device_reducer import stays_on_device
from hvdkit.kernels import ONE, Scale
from hvdkit.transports.gpu.device_compression import DeviceMemory, Exchange, reduce_encoded
from tests.compression.codecs import decoded, encoded, memory_for
from tests.transports.thread_group import Together

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]
EXACT = {"int8": Int8(block=32), "int4": Int4(block=32), "onebit": OneBit(block=512)}


class Alone:
    """A process group of one rank that plays all of ``size`` ranks, whose gradients are the same."""

    def __init__(self, size: int) -> None:
        self.size = size

    def _allgather_base(self, everyones: torch.Tensor, own: torch.Tensor) -> None:
        everyones.view(self.size, -1).copy_(own.view(1, -1).expand(self.size, -1))

    def alltoall_base(self, incoming: torch.Tensor, payloads: torch.Tensor, *_: object) -> None:
        incoming.copy_(payloads[:1].expand_as(incoming))

    def allreduce(self, tensors: list[torch.Tensor], options: object) -> None:
        tensors[0].mul_(self.size)


def exchange(
    codec: LossyCodec, size: int = 1, way: str = "", turn: int = 0, matrices: Sequence[tuple[int, int, int]] = ()
) -> Exchange:
    way = way or ("gather" if isinstance(codec, TopK) else codec.way(ELEMENTS, size)[0])
    return Exchange(Alone(size), 0, size, ONE, codec, way, turn, matrices, lambda work: None)


def memory_of(
    codec: LossyCodec, elements: int, gaps: list[tuple[int, int]] | None = None, device: str = "cpu"
) -> DeviceMemory:
    return DeviceMemory(elements, codec.keeps, gaps or [], torch.device(device))


@pytest.mark.parametrize("name", EXACT)
@given(st.integers(0, 2**32 - 1), st.integers(1, 700), st.floats(1e-6, 1e6))
@example(583, 583, 87450.25)  # a value in the middle of two codes
@settings(deadline=None, max_examples=40)
def test_a_payload_stands_for_what_it_stands_for_on_the_host(name, seed, count, size):
    codec, draw = EXACT[name], np.random.default_rng(seed)
    values, kept = (draw.normal(size=count).astype(np.float32) * np.float32(size) for _ in range(2))
    on_host = memory_for(codec, count)
    on_host.residual[...] = kept
    expected = decoded(codec, encoded(codec, values.copy(), on_host), count)
    memory, flat = memory_of(codec, count), torch.from_numpy(values.copy())
    memory.array(RESIDUAL).copy_(torch.from_numpy(kept))
    reduce_encoded(exchange(codec), flat, memory)
    np.testing.assert_allclose(flat.numpy(), expected, rtol=1e-5, atol=1e-6 * size)
    np.testing.assert_allclose(memory.array(RESIDUAL).numpy(), on_host.residual, rtol=1e-4, atol=2e-6 * size)


ALL = {
    **EXACT,
    "int8 stochastic": Int8(block=32, stochastic=True),
    "topk": TopK(ratio=0.1),
    "dgc": DGC(ratio=0.1, momentum=0.0),
    "topk of nearly all": TopK(ratio=0.9),
    "powersgd": PowerSGD(rank=2),
}
MATRICES = [(0, 20, 30), (640, 5, 3), (656, 40, 10)]
ELEMENTS = 1056
GAPS = [(600, 640), (655, 656)]
IN_GAPS = torch.tensor([*range(600, 640), 655])


def gradient(seed: int) -> torch.Tensor:
    drawn = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(seed))
    return drawn.index_fill_(0, IN_GAPS, 0.0)


# One rank cannot play several that get chunks of their own.
WAYS = [
    *((name, 1, "two_phase") for name in ALL if name != "powersgd"),
    *((name, size, "gather") for name in ("topk", "dgc") for size in (1, 3)),
    ("topk of nearly all", 3, "gather"),
    *(("powersgd", size, "sums") for size in (1, 3)),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "size", "way"), WAYS)
def test_what_was_handed_on_and_what_is_kept_is_all_that_came(name, size, way, device):
    codec = ALL[name]
    memory, came, went = memory_of(codec, ELEMENTS, GAPS, device), torch.zeros(ELEMENTS), torch.zeros(ELEMENTS)
    for step in range(6):
        flat = gradient(step)
        came += size * flat
        flat[600] = 7.0  # in a gap, as an earlier result may have left it
        on_device = flat.to(device)
        reduce_encoded(exchange(codec, size, way, step, matrices=MATRICES), on_device, memory)
        flat = on_device.cpu()
        flat.index_fill_(0, IN_GAPS, 0.0)
        went += flat
    assert went.abs().sum() > 0
    kept = memory.array(RESIDUAL).cpu().clone().index_fill_(0, IN_GAPS, 0.0)
    torch.testing.assert_close(went + size * kept, came, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("way", ["gather", "two_phase"])
@pytest.mark.parametrize(("ranks", "elements"), [(2, 16), (3, 1040), (3, 7)])
@pytest.mark.parametrize("name", ALL)
def test_ranks_get_the_same_and_nothing_is_lost_and_nothing_is_too_large(name, ranks, elements, way):
    codec, group = ALL[name], Together(ranks)
    if not isinstance(codec, TopK):
        way, _ = codec.way(elements, ranks)
    matrices = [(0, 1, elements)] if elements < 1000 else [(0, 20, 52)]
    gradients = [torch.randn(elements, generator=torch.Generator().manual_seed(rank)) for rank in range(ranks)]
    memories = [memory_of(codec, elements) for _ in range(ranks)]

    def step(rank: int, turn: int) -> torch.Tensor:
        flat = gradients[rank].clone()
        exchange = Exchange(group.of(rank), rank, ranks, Scale(0.5), codec, way, turn, matrices, lambda work: None)
        reduce_encoded(exchange, flat, memories[rank])
        return flat

    went = torch.zeros(elements)
    with ThreadPoolExecutor(ranks) as pool:
        for turn in range(4):
            results = list(pool.map(step, range(ranks), [turn] * ranks))
            assert all(torch.equal(one, results[0]) for one in results)
            # Four gradients of each rank at most, or as much as their block's mean or largest.
            assert results[0].abs().max() <= 0.5 * 4 * ranks * max(one.abs().max() for one in gradients)
            went += results[0] / 0.5
    kept = sum(memory.array(RESIDUAL) for memory in memories)
    torch.testing.assert_close(went + kept, 4 * sum(gradients), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ALL)
def test_what_is_not_finite_is_told_and_not_kept(name, device, value):
    codec = ALL[name]
    memory = memory_of(codec, ELEMENTS, GAPS, device)
    reduce_encoded(exchange(codec, matrices=MATRICES), gradient(0).to(device), memory)
    flat = gradient(1).to(device)
    flat[70] = value
    reduce_encoded(exchange(codec, turn=1, matrices=MATRICES), flat, memory)
    assert not torch.isfinite(flat).all()
    assert all(torch.isfinite(kept).all() for kept in memory.tensors())


def test_dgc_adds_momentum_and_masks_what_was_sent():
    codec = DGC(ratio=1 / 64, momentum=0.5)
    memory = memory_of(codec, 64)
    flat = torch.ones(64)
    flat[5] = 10.0
    reduce_encoded(exchange(codec), flat, memory)
    assert flat.nonzero().flatten().tolist() == [5]
    velocity = memory.array("velocity")
    assert velocity[5] == 0
    assert velocity[6] == 1
    flat = torch.ones(64)
    reduce_encoded(exchange(codec, turn=1), flat, memory)
    assert memory.array(RESIDUAL).max() == 2.5  # 1, and 0.5 + 1
    assert memory.array(RESIDUAL)[5] == 1


ONE_NODE, TWO_NODES, PAIRS = [[0, 1]], [[0], [1]], [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("expected", "codecs", "nodes", "members", "encodes"),
    [
        (True, [Int8()], ONE_NODE, [0, 1], True),  # where nothing is encoded
        (True, [Threshold()], ONE_NODE, [0, 1], True),
        (True, [Int8()], ONE_NODE, [0, 1], False),
        (False, [Int8()], TWO_NODES, [0, 1], False),
        (True, [Int8()], TWO_NODES, [0, 1], True),
        (False, [Int8(), Threshold()], TWO_NODES, [0, 1], True),
        (False, [RandomK()], TWO_NODES, [0, 1], True),
        (False, [DGC(warmup_epochs=2)], TWO_NODES, [0, 1], True),
        (False, [Int8()], PAIRS, [0, 1, 2, 3], True),
        (True, [Int8()], PAIRS, [0, 2], True),
        (True, [Int8(compress="everywhere")], PAIRS, [0, 1, 2, 3], True),
    ],
)
def test_who_encodes_on_the_device(expected, codecs, nodes, members, encodes):
    assert stays_on_device(codecs, nodes, members, encodes=encodes) == expected


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_owed_waits_on_a_device_for_a_gradient_that_has_room_for_it(device):
    host = CodecState(8)
    host.arrays[OWED] = np.array([0, 0, 0.25, 0.25, 65000.0, 0.25, 0, 0], dtype=np.float32)
    memory = memory_of(Int8(), 8, device=device)
    memory.push(host)

    def pay(values: list[float]) -> list[float]:
        gradient = torch.tensor(values, dtype=torch.float16, device=device)
        assert memory.pay([(2, gradient)], 0.5) == 1.0, "its factor is in there already"
        found = gradient.tolist()  # which waits for the device, as the engine does
        memory.forget_paid(host)
        return found

    assert pay([2.0, 2.0, 2.0, np.inf]) == [1.0, 1.0, 1.0, np.inf]
    assert pay([2.0, 2.0, 64000.0, 2.0]) == [1.25, 1.25, 32000.0, 1.25]
    assert OWED in host.arrays
    assert pay([2.0, 2.0, 2.0, 2.0]) == [1.0, 1.0, torch.tensor(65001.0, dtype=torch.float16).item(), 1.0]
    assert OWED not in host.arrays
    assert OWED not in memory.arrays
    assert memory.pay([], 0.5) == 0.5
