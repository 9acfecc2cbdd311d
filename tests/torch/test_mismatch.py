"""What is said on every rank where ranks disagree, and that the job goes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tests.on_ranks import on_ranks
from tests.told import told
from tests.torch.data import equal
from tests.torch.operations import still_works, tensor_operations

pytestmark = on_ranks(2, 3)


@contextmanager
def clash(hvd, *texts: str) -> Iterator[bool]:
    """What runs inside fails on every rank with ``texts``; gives whether this rank is the odd one, the last."""
    assert hvd.size() > 1
    with told(hvd.HorovodInternalError, "clash", *texts):
        yield hvd.rank() == hvd.size() - 1
    still_works(hvd)


def test_different_shapes(hvd):
    last = hvd.size() - 1
    for name in ("allreduce", "allreduce_", "broadcast", "broadcast_", "reducescatter"):
        operation = tensor_operations(hvd)[name]
        with clash(hvd, f"clash.{name}", "[4, 2]", "[5, 2]", f"rank {last}") as odd:
            operation(torch.ones(5 if odd else 4, 2), name=f"clash.{name}")
    with clash(hvd, "[6]", "[2, 3]") as odd:
        hvd.allreduce(torch.ones((6,) if odd else (2, 3)), name="clash.rank")
    with clash(hvd, "[]", "[1]") as odd:
        hvd.allreduce(torch.ones(() if odd else (1,)), name="clash.scalar")


def test_different_rows_are_fine_but_not_different_columns(hvd):
    for name in ("allgather", "alltoall"):
        operation = tensor_operations(hvd)[name]
        rows = 2 * hvd.size()
        with clash(hvd, f"clash.{name}", "2", "3", f"rank {hvd.size() - 1}") as odd:
            operation(torch.ones(rows, 3 if odd else 2), name=f"clash.{name}")
        with clash(hvd, f"clash.{name}") as odd:
            operation(torch.ones((rows, 2) if odd else (rows,)), name=f"clash.{name}")


def test_different_types(hvd):
    for name in ("allreduce", "allreduce_", "broadcast", "allgather", "alltoall", "reducescatter"):
        operation = tensor_operations(hvd)[name]
        tensors = {True: torch.ones(hvd.size()), False: torch.ones(hvd.size(), dtype=torch.int32)}
        with clash(hvd, f"clash.{name}", "int32", "float32", f"rank {hvd.size() - 1}") as odd:
            operation(tensors[odd].clone(), name=f"clash.{name}")


def test_different_reductions_and_factors(hvd):
    for name in ("allreduce", "reducescatter"):
        operation = tensor_operations(hvd)[name]
        with clash(hvd, "SUM", "AVERAGE", f"rank {hvd.size() - 1}") as odd:
            operation(torch.ones(4), op=hvd.Sum if odd else hvd.Average, name="clash.op")
        for factor in ("prescale_factor", "postscale_factor"):
            with clash(hvd, "2.5", "0.75") as odd:
                operation(torch.ones(4), name="clash.scale", **{factor: 2.5 if odd else 0.75})


def test_different_roots(hvd):
    with clash(hvd, "root", "0", "1", f"rank {hvd.size() - 1}") as odd:
        hvd.broadcast(torch.ones(4), int(odd), name="clash.root")


def test_groups_of_different_length(hvd):
    with clash(hvd, f"rank {hvd.size() - 1}") as odd:
        hvd.grouped_allreduce([torch.ones(2)] * (3 if odd else 2), name="clash.group")
    with clash(hvd, "[3]", "[4]") as odd:
        hvd.grouped_allreduce([torch.ones(2), torch.ones(3 if odd else 4)], name="clash.in.group")


def test_an_error_of_one_operation_leaves_others_in_flight_alone(hvd):
    good = [hvd.allreduce_async(torch.full((n + 1,), 1.0), op=hvd.Sum, name=f"good.{n}") for n in range(5)]
    rows = 3 if hvd.rank() == 0 else 2
    bad = hvd.allreduce_async(torch.ones(rows), name="clash.among.good")
    good += [hvd.allreduce_async(torch.full((n + 1,), 1.0), op=hvd.Sum, name=f"good.{n}") for n in range(5, 10)]
    with told(hvd.HorovodInternalError, "clash.among.good", "[3]", "[2]"):
        hvd.synchronize(bad)
    assert hvd.synchronize(bad) is None
    for n, handle in enumerate(good):
        assert equal(hvd.synchronize(handle), torch.full((n + 1,), float(hvd.size())))


def test_an_error_in_broadcast_parameters_names_the_parameter(hvd):
    parameters = {f"layer.{n}": torch.full((3,), float(hvd.rank())) for n in range(4)}
    parameters["layer.2"] = torch.ones(3 if hvd.rank() == 0 else 4)
    with told(hvd.HorovodInternalError, "layer.2", "[3]", "[4]"):
        hvd.broadcast_parameters(parameters, 0)
    assert equal(parameters["layer.3"], torch.zeros(3))
    still_works(hvd)


def test_a_sparse_tensor_of_another_shape(hvd):
    shape = (2,) if hvd.rank() == 0 else (2, 2)
    wait = hvd.sparse_allreduce_async(torch.ones(shape).to_sparse(), name="clash.sparse", op=hvd.Sum)
    with told(hvd.HorovodInternalError, "clash.sparse"):
        wait()
    still_works(hvd)


def test_splits_that_are_wrong_on_one_rank(hvd):
    size, last = hvd.size(), hvd.size() - 1
    for wrong, kind, text in (
        ([-1] * size, ValueError, "splits must not be negative"),
        ([1] * (size + 1), ValueError, "splits must have one entry for each worker"),
        ([100] * size, ValueError, "sum of splits entries is greater"),
        (torch.ones(size), ValueError, "float32"),
        ([0.5] * size, TypeError, "splits must be a list or 1-d tensor of integers"),
        (2, TypeError, "splits must be a list"),
        (None, ValueError, "not an even multiple"),
    ):
        rows = torch.ones(2 * size + 1 if wrong is None else 2 * size, 2)
        for name in ("clash.splits", None):
            for alltoall in (hvd.alltoall, hvd.alltoall_async):
                with told(kind if hvd.rank() == last else hvd.HorovodInternalError, text) as caught:
                    result = alltoall(rows, splits=wrong if hvd.rank() == last else [2] * size, name=name)
                    hvd.synchronize(result)
                if hvd.rank() != last:
                    assert f"alltoall '{name or 'alltoall.noname'}" in str(caught.value)
                    assert f"rank {last}" in str(caught.value)
    assert hvd.alltoall(torch.ones(2 * size), splits=[2] * size, name="clash.splits")[0].shape == (2 * size,)
    still_works(hvd)


def test_different_operations(hvd):
    with clash(hvd, "allreduce", "broadcast", f"rank {hvd.size() - 1}") as odd:
        if odd:
            hvd.broadcast(torch.ones(4), 0, name="clash.kind")
        else:
            hvd.allreduce(torch.ones(4), name="clash.kind")
