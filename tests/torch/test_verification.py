"""HVDKIT_VERIFY on real ranks, and what hashes see."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hvdkit import kernels
from hvdkit.torch.gradients.verification import CHUNK, device_hash, hashes_of
from tests.ranks import RankedCases

EACH_STEP = RankedCases("tests.torch.verification_cases", HVDKIT_VERIFY="1", HVDKIT_DYNAMIC_PROCESS_SETS="1")
SETTINGS = RankedCases("tests.torch.verification_settings_cases")
OFF = RankedCases("tests.torch.verification_off_cases", HVDKIT_VERIFY="0")


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("case", EACH_STEP.names)
def test_each_step(case: str, ranks: int, transport: str) -> None:
    EACH_STEP.check(case, ranks, transport)


@pytest.mark.parametrize("case", SETTINGS.names)
def test_by_default(case: str) -> None:
    SETTINGS.check(case, 2, "torch")


@pytest.mark.parametrize("case", OFF.names)
def test_switched_off(case: str) -> None:
    OFF.check(case, 2, "torch")


def tensors() -> list[torch.Tensor]:
    torch.manual_seed(1)
    wide = torch.randn(5, 7, 3, 3)
    return [
        wide,
        wide.to(memory_format=torch.channels_last),
        wide[:, ::2],
        wide.half(),
        wide.bfloat16(),
        wide.double(),
        wide.to(torch.complex64),
        wide.to(torch.complex128).conj(),
        (wide > 0),
        torch.tensor(3.0),
        torch.zeros(0),
    ]


@pytest.mark.parametrize("hashes", [hashes_of, lambda some: np.array([device_hash(one).item() for one in some])])
def test_hashes_follow_values_not_strides_and_see_one_bit(hashes) -> None:
    some = tensors()
    values = [one.clone() for one in some]
    before = hashes(some)
    assert all(torch.equal(one, value) for one, value in zip(some, values, strict=True))
    assert before[0] == before[1]
    assert len(set(before.tolist())) == len(some) - 1
    for one, its in zip(some, before, strict=True):
        assert hashes([one.clone()])[0] == its, one.dtype
        flat = one.clone().reshape(-1)
        for index in range(0, flat.numel(), 13):
            other = flat.clone()
            other[index] = ~other[index] if one.dtype is torch.bool else 3 - other[index]
            assert hashes([other])[0] != its
    assert len(set(hashes([torch.tensor([0.0, -0.0]), torch.tensor([-0.0, 0.0]), torch.zeros(2)]).tolist())) == 3


def test_the_hash_of_host_memory_is_the_kernels_checksum() -> None:
    values = torch.randn(1000)
    assert hashes_of([values])[0] == kernels.checksum(values.numpy().view(np.uint8))


def test_the_hash_on_a_device_is_the_weighted_sum_that_it_says() -> None:
    values = torch.randint(-(2**31), 2**31 - 1, (CHUNK + 3,), dtype=torch.int32)
    words = values.numpy().astype(np.int64).view(np.uint64)
    offsets = np.arange(CHUNK, dtype=np.uint64)
    weights = (offsets * np.uint64(0x9E3779B97F4A7C15)) ^ (offsets << np.uint64(21)) | np.uint64(1)
    with np.errstate(over="ignore"):
        first = (words[:CHUNK] * weights).sum(dtype=np.uint64)
        expected = first * np.uint64(0xC2B2AE3D27D4EB4F) + (words[CHUNK:] * weights[:3]).sum(dtype=np.uint64)
    assert device_hash(values).numpy().view(np.uint64) == expected
