"""What is said at once about arguments that cannot work, and on every rank where ranks disagree; the job goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tests.on_ranks import on_ranks
from tests.told import told
from tests.torch.data import equal
from tests.torch.operations import grouped_operations, still_works, tensor_operations
from tests.torch.optimizer_support import assert_close

pytestmark = on_ranks(2, 3)


def test_what_is_no_tensor_is_told_with_function_and_argument(hvd):
    for name, operation in tensor_operations(hvd).items():
        for wrong in (3.0, [1, 2], None):
            with told(TypeError, f"{name}: tensor must be a torch.Tensor", type(wrong).__name__):
                operation(wrong)
    for name, operation in grouped_operations(hvd).items():
        with told(TypeError, f"{name}: tensors[1] must be a torch.Tensor, got int"):
            operation([torch.ones(1), 3])
        with told(TypeError, f"{name}: tensors must be a list", "Tensor"):
            operation(torch.ones(2))
        with told(ValueError, f"{name}: tensors must hold at least one"):
            operation([])


def test_types_that_do_not_work_are_told_with_those_that_do(hvd):
    for name, operation in tensor_operations(hvd).items():
        for dtype in (torch.complex32, torch.float8_e4m3fn, torch.uint16):
            wrong = torch.zeros(hvd.size(), dtype=dtype)
            with told(ValueError, f"{name}: tensor", "float32, float64", str(dtype)[6:]):
                operation(wrong)
    for name in ("allreduce", "allreduce_", "reducescatter"):
        operation = tensor_operations(hvd)[name]
        with told(ValueError, f"{name}: tensor", "got bool"):
            operation(torch.ones(4, dtype=torch.bool))


def test_sparse_and_meta_tensors_are_refused_with_a_hint(hvd):
    for name, operation in tensor_operations(hvd).items():
        with told(ValueError, name, "dense", "HINT"):
            operation(torch.ones(4).to_sparse())
        with told(ValueError, name, "meta"):
            operation(torch.ones(4, device="meta"))
    with told(ValueError, "sparse"):
        hvd.sparse_allreduce_async(torch.ones(2), "name", hvd.Sum)
    with told(TypeError, "torch.Tensor"):
        hvd.sparse_allreduce_async(3, "name", hvd.Sum)
    with told(ValueError, "hvd.Min"):
        hvd.sparse_allreduce_async(torch.ones(2).to_sparse(), "name", hvd.Min)


def test_reductions_that_do_not_work_are_told_with_those_that_do(hvd):
    tensor = torch.ones(4)
    for wrong in (7, -1, "sum", 1.0, True):
        with told(ValueError, "allreduce: op", "hvd.Sum", repr(wrong)):
            hvd.allreduce(tensor, op=wrong)
    for op in (hvd.Min, hvd.Max, hvd.Product, hvd.Adasum):
        texts = ["reducescatter: op must be one of hvd.Average, hvd.Sum", f"hvd.{op.name.capitalize()}"]
        for kind in (ValueError, RuntimeError):  # of which the second is Horovod's
            with told(kind, *texts):
                hvd.reducescatter(tensor, op=op)
            with told(kind, "grouped_reducescatter: op must be one of", texts[1]):
                hvd.grouped_reducescatter([tensor], op=op)
    for average in (True, False):
        with told(ValueError, "supersedes average"):
            hvd.allreduce(tensor, op=hvd.Sum, average=average)
    kind, *texts = (
        (NotImplementedError, "non-power of 2", "3") if hvd.size() == 3 else (ValueError, "floating", "int64")
    )
    with told(kind, *texts):
        hvd.allreduce(tensor if hvd.size() == 3 else tensor.long(), op=hvd.Adasum)


def refused(kind: type[Exception], texts: tuple[str, ...], call: Callable[..., Any], *given: Any, **named: Any) -> None:
    with told(kind, *texts):
        call(*given, **named)


def test_other_arguments_of_the_wrong_type_or_value(hvd):
    size, ones, operations = hvd.size(), torch.ones, tensor_operations(hvd)
    for name, operation in operations.items():
        refused(TypeError, (f"{name}: name", "int"), operation, ones(size), name=3)
    for argument in ("prescale_factor", "postscale_factor"):
        refused(TypeError, (argument, "'x'"), hvd.allreduce, ones(1), **{argument: "x"})
        refused(TypeError, (argument, "None"), hvd.reducescatter, ones(1), **{argument: None})
    for root in (-1, size, 1000):
        refused(ValueError, ("broadcast: root_rank", str(root)), hvd.broadcast, ones(1), root)
        refused(ValueError, ("broadcast_object: root_rank",), hvd.broadcast_object, 1, root)
        refused(ValueError, ("root_rank",), hvd.broadcast_parameters, [ones(1)], root)
    for root in (None, "0", 0.0):
        refused(TypeError, ("broadcast_: root_rank",), hvd.broadcast_, ones(1), root)
    for name in ("allgather", "allgather_async", "alltoall", "alltoall_async", "reducescatter", "reducescatter_async"):
        refused(ValueError, (name, "0-d", "HINT"), operations[name], torch.tensor(1.0))
    for name in ("allreduce_", "allreduce_async_", "broadcast_", "broadcast_async_"):
        refused(ValueError, (name, "expanded", "HINT"), operations[name], ones(1).expand(4))
    for splits, kind, text in (
        ([1] * (size + 1), ValueError, "one entry for each worker"),
        ([-1] * size, ValueError, "negative"),
        ([3] * size, ValueError, "greater than the first dimension"),
        (ones(size), ValueError, "float32"),
        ([1.0] * size, TypeError, "splits"),
        (ones(size, 1).int(), TypeError, "splits"),
        (2, TypeError, "splits"),
    ):
        refused(kind, (text,), hvd.alltoall, ones(2 * size), splits=splits)
    refused(ValueError, ("not an even multiple",), hvd.alltoall, ones(size + 1))
    refused(TypeError, ("process_set", "list"), hvd.allreduce, ones(1), process_set=[0])
    refused(TypeError, ("process_set", "list"), hvd.barrier, process_set=[0])
    refused(ValueError, ("registered", "HINT"), hvd.allgather, ones(1), process_set=hvd.ProcessSet([0]))
    handle = hvd.allreduce_async(ones(1))
    hvd.synchronize(handle)
    for unknown in (handle, 123456789):
        refused(ValueError, (f"handle {unknown}",), hvd.poll, unknown)


def test_a_name_that_is_in_flight(hvd):
    # Rank 0 holds its part back until all have seen the error, so that the first operation cannot have ended.
    if hvd.rank() == 0:
        hvd.barrier()
        handle = hvd.allreduce_async(torch.ones(2), op=hvd.Sum, name="twice")
    else:
        handle = hvd.allreduce_async(torch.ones(2), op=hvd.Sum, name="twice")
        with told(hvd.HorovodInternalError, "twice"):
            hvd.allreduce_async(torch.ones(2), op=hvd.Sum, name="twice")
        with told(ValueError, "twice"):
            hvd.allreduce_async(torch.ones(2), op=hvd.Sum, name="twice")
        hvd.barrier()
    assert equal(hvd.synchronize(handle), torch.full((2,), float(hvd.size())))


@contextmanager
def clash(hvd, *texts: str) -> Iterator[bool]:
    """What runs inside fails on every rank with ``texts``; gives whether this rank is the odd one, the last."""
    with told(hvd.HorovodInternalError, "clash", *texts):
        yield hvd.rank() == hvd.size() - 1
    still_works(hvd)


def test_ranks_that_differ_in_one_argument_are_told_which(hvd):
    size = hvd.size()
    ones, last, operations = torch.ones, f"rank {size - 1}", tensor_operations(hvd)

    def check(name: str, usual: Any, odd: Any, *texts: str, **options: tuple[Any, Any]) -> None:
        with clash(hvd, f"clash.{name}", *texts) as is_odd:
            chosen = {option: pair[is_odd] for option, pair in options.items()}
            operations[name]((odd if is_odd else usual).clone(), name=f"clash.{name}", **chosen)

    for name in ("allreduce", "allreduce_", "broadcast", "broadcast_", "reducescatter"):
        check(name, ones(4, 2), ones(5, 2), "[4, 2]", "[5, 2]", last)
    check("allreduce", ones(2, 3), ones(6), "[6]", "[2, 3]")
    check("allreduce", ones(1), ones(()), "[]", "[1]")
    for name in ("allgather", "alltoall"):  # other rows are fine, other columns are not
        check(name, ones(2 * size, 2), ones(2 * size, 3), "2", "3", last)
        check(name, ones(2 * size), ones(2 * size, 2))
    for name in ("allreduce", "allreduce_", "broadcast", "allgather", "alltoall", "reducescatter"):
        check(name, ones(size).int(), ones(size), "int32", "float32", last)
    for name in ("allreduce", "reducescatter"):
        check(name, ones(4), ones(4), "SUM", "AVERAGE", last, op=(hvd.Average, hvd.Sum))
        for factor in ("prescale_factor", "postscale_factor"):
            check(name, ones(4), ones(4), "2.5", "0.75", **{factor: (0.75, 2.5)})
    with clash(hvd, "root", "0", "1", last) as is_odd:
        hvd.broadcast(ones(4), int(is_odd), name="clash.root")
    with clash(hvd, last) as is_odd:
        hvd.grouped_allreduce([ones(2)] * (3 if is_odd else 2), name="clash.group")
    with clash(hvd, "[3]", "[4]") as is_odd:
        hvd.grouped_allreduce([ones(2), ones(3 if is_odd else 4)], name="clash.in.group")
    with clash(hvd, "allreduce", "broadcast", last) as is_odd:
        operations["broadcast" if is_odd else "allreduce"](ones(4), name="clash.kind")


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
        ([100] * size, ValueError, "sum of splits entries is greater"),
        ([0.5] * size, TypeError, "splits must be a list or 1-d tensor of integers"),
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


ROWS = 6


def model(dtype: torch.dtype = torch.float32, width: int = 4) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, width), nn.Linear(width, 2)).to(dtype)


def step(hvd: Any, optimizer: Any, net: nn.Module) -> None:
    inputs = torch.full((ROWS, 3), hvd.rank() + 1.0, dtype=next(net.parameters()).dtype)
    net(inputs).sum().backward()
    optimizer.synchronize()


def optimizers_clash(hvd: Any, make: Callable[[bool], dict[str, Any]], *texts: str) -> None:
    """``make(odd)`` gives the last rank another model or other options. All ranks raise, and then train together."""
    options = {"net": model(), **make(hvd.rank() == hvd.size() - 1)}
    net = options.pop("net")
    names = options.pop("names", net.named_parameters())
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), names, **options)
    with told(hvd.HorovodInternalError, "SGD", f"rank {hvd.size() - 1} ", "rank 0", *texts):
        step(hvd, optimizer, net)
    still_works(hvd)
    net = model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())
    for _ in range(2):
        optimizer.zero_grad()
        step(hvd, optimizer, net)
        assert_close(net[1].bias.grad, torch.full((2,), float(ROWS)))


def test_optimizers_that_differ_in_one_thing(hvd: Any) -> None:
    def renamed(odd: bool) -> dict[str, Any]:
        net = model()
        return {"net": net, "names": [(f"{'odd.' if odd else ''}{name}", one) for name, one in net.named_parameters()]}

    def frozen(odd: bool) -> dict[str, Any]:
        net = model()
        net[0].requires_grad_(not odd)
        return {"net": net}

    codecs = {True: hvd.Compression.fp16, False: hvd.Compression.none}
    for make, *texts in (
        (lambda odd: {"net": model(torch.float64 if odd else torch.float32)}, "'0.weight'", "float32", "float64"),
        (lambda odd: {"net": model(width=5 if odd else 4)}, "'0.weight'", "[4, 3]", "[5, 3]"),
        (renamed, "'odd.0.weight'", "'0.weight'"),
        (lambda odd: {"op": hvd.Max if odd else hvd.Sum}, "reduce operations", "MAX", "SUM"),
        (lambda odd: {"compression": codecs[odd]}, "compressions", "fp16", "none"),
        (lambda odd: {"gradient_predivide_factor": 4.0 if odd else 2.0}, "factors"),
        (lambda odd: {"groups": 1 if odd else 2}, "groups", "[0, 1, 2, 3]", "[0, 1]"),
        (frozen, "parameter number 0", "'0.weight'", "'1.weight'", "HINT"),
    ):
        optimizers_clash(hvd, make, *texts)
