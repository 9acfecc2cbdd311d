"""What is said at once about arguments that cannot work, and that nothing is left behind by it."""

from __future__ import annotations

import torch

from tests.on_ranks import on_ranks
from tests.ranks import Skip
from tests.told import told
from tests.torch.data import equal
from tests.torch.operations import grouped_operations, still_works, tensor_operations

pytestmark = on_ranks(1, 2, 3, 4)


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
    if hvd.size() & (hvd.size() - 1):
        with told(NotImplementedError, "non-power of 2", str(hvd.size())):
            hvd.allreduce(tensor, op=hvd.Adasum)
    else:
        with told(ValueError, "floating point", "int64"):
            hvd.allreduce(torch.ones(1, dtype=torch.int64), op=hvd.Adasum)


def test_names_and_factors_of_the_wrong_type(hvd):
    for name, operation in tensor_operations(hvd).items():
        with told(TypeError, f"{name}: name", "int"):
            operation(torch.ones(hvd.size()), name=3)
    for argument in ("prescale_factor", "postscale_factor"):
        with told(TypeError, argument, "'x'"):
            hvd.allreduce(torch.ones(1), **{argument: "x"})
        with told(TypeError, argument, "None"):
            hvd.reducescatter(torch.ones(1), **{argument: None})
    with told(TypeError, "process_set", "list"):
        hvd.allreduce(torch.ones(1), process_set=[0])
    with told(TypeError, "process_set", "list"):
        hvd.barrier(process_set=[0])
    unregistered = hvd.ProcessSet([0])
    with told(ValueError, "registered", "HINT"):
        hvd.allgather(torch.ones(1), process_set=unregistered)


def test_roots_outside_the_job(hvd):
    for root in (-1, hvd.size(), 1000):
        with told(ValueError, "broadcast: root_rank", str(root)):
            hvd.broadcast(torch.ones(1), root)
        with told(ValueError, "broadcast_object: root_rank"):
            hvd.broadcast_object(1, root)
        with told(ValueError, "root_rank"):
            hvd.broadcast_parameters([torch.ones(1)], root)
    for root in (None, "0", 0.0):
        with told(TypeError, "broadcast_: root_rank"):
            hvd.broadcast_(torch.ones(1), root)


def test_splits_that_do_not_fit(hvd):
    size = hvd.size()
    tensor = torch.ones(2 * size)
    if size > 1:
        with told(ValueError, "not an even multiple"):
            hvd.alltoall(torch.ones(size + 1))
    with told(ValueError, "one entry for each worker", str(size)):
        hvd.alltoall(tensor, splits=[1] * (size + 1))
    with told(ValueError, "negative"):
        hvd.alltoall(tensor, splits=[-1] * size)
    with told(ValueError, "greater than the first dimension"):
        hvd.alltoall(tensor, splits=[3] * size)
    with told(ValueError, "splits", "float32"):
        hvd.alltoall(tensor, splits=torch.ones(size))
    with told(TypeError, "splits"):
        hvd.alltoall(tensor, splits=[1.0] * size)
    with told(TypeError, "splits"):
        hvd.alltoall(tensor, splits=torch.ones(size, 1).int())
    with told(TypeError, "splits"):
        hvd.alltoall(tensor, splits=2)


def test_scalars_have_no_rows(hvd):
    for name in ("allgather", "allgather_async", "alltoall", "alltoall_async", "reducescatter", "reducescatter_async"):
        with told(ValueError, name, "0-d", "HINT"):
            tensor_operations(hvd)[name](torch.tensor(1.0))


def test_expanded_tensors_cannot_be_written(hvd):
    expanded = torch.ones(1).expand(4)
    for name in ("allreduce_", "allreduce_async_", "broadcast_", "broadcast_async_"):
        with told(ValueError, name, "expanded", "HINT"):
            tensor_operations(hvd)[name](expanded)


def test_poll_of_an_unknown_handle(hvd):
    with told(ValueError, "handle 123456789"):
        hvd.poll(123456789)
    handle = hvd.allreduce_async(torch.ones(1))
    hvd.synchronize(handle)
    with told(ValueError, f"handle {handle}"):
        hvd.poll(handle)


def test_a_name_that_is_in_flight(hvd):
    if hvd.size() == 1:
        raise Skip("needs two ranks")
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


def test_arguments_that_were_refused_left_nothing_behind(hvd):
    still_works(hvd)
