"""What needs no ranks: Horovod's names and signatures, calls before ``init()``, checks, and buffers for results."""

from __future__ import annotations

import gc
import importlib
import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hvdkit.torch as hvd
from hvdkit.api.framework import KEPT_RESULTS, STEP_BYTES, ResultBuffers
from hvdkit.api.gradients.planning import check_groups, form_groups
from hvdkit.torch.gradients import compression_state
from hvdkit.torch.gradients.names import check_names
from hvdkit.torch.ops.framework import HUGE_BYTES, host_like
from tests.told import told

# Functions, and the names of their arguments.
GROUPED = {
    "allreduce": "tensor average name compression op prescale_factor postscale_factor process_set",
    "allreduce_ allreduce_async allreduce_async_": (
        "tensor average name op prescale_factor postscale_factor process_set"
    ),
    "allgather allgather_async": "tensor name process_set",
    "reducescatter": "tensor name compression op process_set prescale_factor postscale_factor",
    "reducescatter_async": "tensor name op process_set prescale_factor postscale_factor",
}
ALONE = {
    "sparse_allreduce_async": "tensor name op process_set",
    "broadcast broadcast_ broadcast_async broadcast_async_": "tensor root_rank name process_set",
    "alltoall alltoall_async": "tensor splits name process_set",
    "join": "device",
    "barrier": "process_set",
    "poll synchronize": "handle",
    "broadcast_parameters": "params root_rank",
    "broadcast_optimizer_state": "optimizer root_rank model",
    "broadcast_object": "obj root_rank name process_set",
    "start_timeline": "file_path mark_cycles",
}
SIGNATURES = {name: arguments for names, arguments in (GROUPED | ALONE).items() for name in names.split()}
for names, arguments in GROUPED.items():
    SIGNATURES |= {f"grouped_{name}": arguments.replace("tensor", "tensors") for name in names.split()}
DEFAULTS = {
    "average": None,
    "name": None,
    "compression": hvd.Compression.none,
    "op": None,
    "prescale_factor": 1.0,
    "postscale_factor": 1.0,
    "process_set": hvd.global_process_set,
    "splits": None,
    "device": -1,
    "model": None,
    "mark_cycles": False,
}


@pytest.mark.parametrize("function", SIGNATURES)
def test_signatures_and_defaults_are_horovods(function: str) -> None:
    parameters = inspect.signature(getattr(hvd, function)).parameters
    assert list(parameters) == SIGNATURES[function].split()
    for name, parameter in parameters.items():
        if parameter.default is not inspect.Parameter.empty and name != "root_rank":
            expected = hvd.Average if name == "op" and "reducescatter" in function else DEFAULTS[name]
            assert parameter.default == expected


@pytest.mark.parametrize("module", ["mpi_ops", "functions", "compression", "sync_batch_norm", "optimizer"])
def test_horovods_modules_can_be_imported(module: str) -> None:
    assert importlib.import_module(f"hvdkit.torch.{module}")


def test_what_a_shell_completes_is_the_api_alone() -> None:
    assert dir(hvd) == sorted(hvd.__all__)
    assert all(hasattr(hvd, name) for name in dir(hvd))


def test_mpi_ops_has_what_scripts_import_from_it() -> None:
    from hvdkit.torch import mpi_ops

    assert set(hvd.__all__) < set(mpi_ops.__all__)
    assert all(hasattr(mpi_ops, name) for name in mpi_ops.__all__)
    assert mpi_ops.handle_average_backwards_compatibility(None, None) is hvd.Average
    assert mpi_ops.handle_average_backwards_compatibility(hvd.Max, None) is hvd.Max
    with pytest.warns(DeprecationWarning, match="op=hvd.Average or op=hvd.Sum"):
        assert mpi_ops.handle_average_backwards_compatibility(None, False) is hvd.Sum
    assert [n for n in range(9) if mpi_ops.num_rank_is_power_2(n)] == [1, 2, 4, 8]
    forward = list(inspect.signature(mpi_ops.HorovodBroadcast.forward).parameters)
    assert forward == ["ctx", "tensor", "root_rank", "name", "process_set"]  # Horovod's order


def test_reductions_have_horovods_numbers() -> None:
    assert [hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "call",
    [
        hvd.size,
        hvd.rank,
        hvd.local_size,
        hvd.local_rank,
        hvd.cross_size,
        hvd.cross_rank,
        hvd.is_homogeneous,
        hvd.join,
        hvd.barrier,
        hvd.stop_timeline,
        hvd.mpi_threads_supported,
        lambda: hvd.allreduce(torch.ones(1)),
        lambda: hvd.allgather_async(torch.ones(1)),
        lambda: hvd.broadcast_object(1),
        lambda: hvd.broadcast_parameters([torch.ones(1)], 0),
        lambda: hvd.SyncBatchNorm(2)(torch.ones(3, 2)),
    ],
)
def test_calls_before_init_say_so(call: Callable[[], Any]) -> None:
    assert not hvd.is_initialized()
    with pytest.raises(ValueError, match=r"has not been initialized; use hvd.init\(\)"):
        call()


def test_what_is_built_can_be_asked_before_init() -> None:
    finds_mpi = subprocess.run([sys.executable, "-c", "from mpi4py import MPI"], capture_output=True, check=False)
    assert hvd.mpi_built() is (finds_mpi.returncode == 0)
    assert hvd.gloo_built() is True  # every PyTorch that the tests run on
    assert (hvd.nccl_built() >= 20000) is (torch.cuda.is_available() and torch.distributed.is_nccl_available())
    assert hvd.cuda_built() is torch.backends.cuda.is_built()
    assert not any((hvd.mpi_enabled(), hvd.gloo_enabled(), hvd.ddl_built(), hvd.ccl_built()))


def run(program: str, *arguments: str) -> None:
    command, environment = [sys.executable, "-c", program, *arguments], {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert done.returncode == 0, done.stderr


def test_mpi_built_does_not_start_mpi() -> None:
    program = "import sys, hvdkit.torch as hvd; hvd.mpi_built(); assert 'mpi4py.MPI' not in sys.modules"
    run(program)


def test_one_process_can_start_stop_and_start_again() -> None:
    program = """
import torch, hvdkit.torch as hvd
hvd.shutdown()
for _ in range(2):
    hvd.init(); hvd.init()
    assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.cross_size()) == (0, 1, 0, 1)
    handle = hvd.allreduce_async(torch.ones(2))
    hvd.shutdown()
    assert not hvd.is_initialized() and hvd.synchronize(handle) is None
"""
    run(program)


def test_process_sets_cannot_be_added_after_init_unless_it_was_asked_for() -> None:
    program = """
import hvdkit.torch as hvd
hvd.init()
try:
    hvd.add_process_set([0])
except ValueError as error:
    assert str(error) == (
        "Set HOROVOD_DYNAMIC_PROCESS_SETS=1 to allow adding process sets after Horovod initialization.\\n"
        'HINT: call hvd.init(process_sets="dynamic"), or set the variable before the job starts.'
    ), error
else:
    raise AssertionError("it was added")
"""
    run(program)


def test_a_forked_child_starts_a_job_of_its_own() -> None:
    program = (
        "import os, sys, torch, hvdkit.torch as hvd\n"
        "if sys.argv[1] == 'initialized': hvd.init()\n"
        "if os.fork() == 0:\n"
        "    hvd.init()\n"
        "    assert (hvd.rank(), hvd.size(), hvd.allreduce(torch.ones(2)).tolist()) == (0, 1, [1, 1])\n"
        "    hvd.shutdown()\n"
        "    assert not hvd.is_initialized()\n"
        "    os._exit(0)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))"
    )
    for state in ("initialized", "fresh"):
        run(program, state)


def test_compression_keeps_types() -> None:
    none, fp16 = hvd.Compression.none, hvd.Compression.fp16
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        compressed, context = fp16.compress(torch.ones(3, dtype=dtype))
        assert compressed.dtype == torch.float16
        assert fp16.decompress(compressed, context).dtype == dtype
    for compression, tensor in ((fp16, torch.ones(3, dtype=torch.int32)), (none, torch.ones(3))):
        compressed, context = compression.compress(tensor)
        assert compressed is tensor
        assert compression.decompress(compressed, context) is tensor


def test_unnamed_parameters_are_named_by_place() -> None:
    tensors = [torch.zeros(1) for _ in range(3)]
    names = check_names(None, [{"params": tensors[:2]}, {"params": tensors[2:]}])
    assert [name for name, _ in names] == ["allreduce.noname.0.0", "allreduce.noname.0.1", "allreduce.noname.1.0"]


def test_names_may_be_more_than_the_optimizer_has() -> None:
    tensors = [torch.zeros(1) for _ in range(3)]
    pairs = [(str(i), tensor) for i, tensor in enumerate(tensors)]
    assert check_names(iter(pairs), [{"params": tensors[:2]}]) == pairs


@pytest.mark.parametrize("groups", [0, -2, 1.5, "two", [[torch.zeros(1), 3]]])
def test_groups_that_make_no_sense_are_value_errors(groups: object) -> None:
    with pytest.raises(ValueError, match="groups"):
        check_groups("DistributedOptimizer", groups, "torch.Tensor", torch.is_tensor)


def test_groups_of_one_and_absent_members_are_left_out() -> None:
    a, b, c, absent = (torch.zeros(1) for _ in range(4))
    formed = form_groups([a, b, c], [[a, absent], [b, c]])
    assert [[id(member) for member in group] for group in formed] == [[id(b), id(c)]]
    assert form_groups([a, b, c], 3) == []
    assert form_groups([a, b, c], None) == []


OURS = {"weight": (50, 60)}


def saved(**changes: Any) -> dict[str, Any]:
    """A state of one parameter of 50 x 60."""
    kept = {"weight": {"residual": torch.ones(3000)}}
    units = {"weight": {"residual": 1.0, "owed": 1.0}}
    where = {"format": compression_state.FORMAT, "rank": 0, "size": 2, "place": "", "turn": 1, "notes": []}
    return {**where, "shapes": {"weight": [50, 60]}, "kept": kept, "units": units, **changes}


def test_what_was_saved_is_taken() -> None:
    two = [saved(), saved(rank=1)]
    assert compression_state.check(two, OURS) == two
    assert compression_state.check(two[0], OURS) == two[:1]
    assert compression_state.check(saved(), {"bias": (60,)}), "of a parameter that is not here"


@pytest.mark.parametrize(
    ("wrong", "error", "texts"),
    [
        (3, TypeError, ("got int",)),
        ("state", TypeError, ("got str",)),
        ([3], TypeError, ("got int in a list",)),
        (
            [saved(), saved(format=1)],
            ValueError,
            (
                "The state of the compression in the state_dict was not written by this version of hvdkit.",
                "HINT: load without it (the entry 'compression' of an optimizer's state_dict, or the whole state_dict "
                "of a ddp_hook), which loses the parts of gradients that compression has not sent yet.",
            ),
        ),
        (
            [saved(), saved()],
            ValueError,
            (
                'the state_dict\'s "compression": the state of rank 0 of 2 is there twice',
                "HINT: give each rank's state once.",
            ),
        ),
        (
            saved(shapes={"weight": [60, 50]}),
            ValueError,
            (
                "the state_dict's \"compression\": 'weight' was 60 x 50 when it was saved, but is 50 x 60 here",
                "HINT: load the state of the same model, or leave the entry out, which loses what was not sent yet.",
            ),
        ),
    ],
)
def test_what_was_not_saved_is_refused(wrong: Any, error: type[Exception], texts: tuple[str, ...]) -> None:
    with told(error, *texts):
        compression_state.check(wrong, OURS)


def test_a_buffer_is_used_again_only_after_the_last_reference_is_gone():
    buffers = ResultBuffers()
    first = buffers.take(3 * STEP_BYTES)
    address = first.ctypes.data
    view = torch.from_numpy(first)[5:].view(torch.uint8)
    del first
    gc.collect()
    assert buffers.take(3 * STEP_BYTES).ctypes.data != address, "a view of it is still there"
    del view
    gc.collect()
    assert buffers.take(3 * STEP_BYTES - 1).ctypes.data == address


def test_no_more_is_kept_than_two_of_the_largest_and_sizes_unused_longest_go_first():
    buffers = ResultBuffers()
    lent = [buffers.take(size * STEP_BYTES) for size in (1, 2, 3, 4, 4, 4)]
    address = lent[-1].ctypes.data
    while lent:
        del lent[0]
        gc.collect()
        assert buffers.kept() <= KEPT_RESULTS * 4 * STEP_BYTES
    assert buffers.take(4 * STEP_BYTES).ctypes.data == address


def test_tensors_of_any_type_and_shape_lie_on_it():
    for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.int64):
        like = torch.zeros(HUGE_BYTES // 8 + 3, 9, dtype=dtype)
        made = host_like(like)
        assert (made.shape, made.dtype) == (like.shape, like.dtype)
        made.copy_(torch.ones_like(like))
        assert bool((made == 1).all())
