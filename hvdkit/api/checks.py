"""Checks of arguments that all frameworks share; every error names the function and the argument."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

from hvdkit.engine.ops.requests import ReduceRequest
from hvdkit.engine.session.process_sets import ProcessSet, global_process_set
from hvdkit.errors import UnsupportedReductionError
from hvdkit.kernels.dtypes import COMPLEX, FLOATS
from hvdkit.kernels.reduce_op import ReduceOp

FLOATING = frozenset(map(str, FLOATS))


def check_registered(function: str, process_set: Any) -> int:
    """Return the set's id. Raises TypeError unless it is a ProcessSet, ValueError unless it is registered."""
    if not isinstance(process_set, ProcessSet):
        raise TypeError(f"{function}: process_set must be a hvd.ProcessSet, got {type(process_set).__name__}")
    if process_set.lost:
        raise ValueError(
            f"{function}: {process_set} has ended: {process_set.lost}.\n"
            "HINT: make a set of the present ranks with hvd.add_process_set()."
        )
    if process_set.process_set_id is None:
        hint = "pass it to hvd.init(process_sets=[...]) or to hvd.add_process_set()."
        raise ValueError(f"{function}: process_set must be registered, got {process_set}\nHINT: {hint}")
    return process_set.process_set_id


def check_variables(function: str, variables: Iterable[Any]) -> list[Any]:
    """Return a list. Raises TypeError for an object without ``assign``, ValueError for a variable without a value."""
    listed = list(variables)  # an iterator gives them once
    for index, variable in enumerate(listed):
        if not hasattr(variable, "assign"):
            raise TypeError(f"{function}: variables[{index}] must be a variable, got {variable!r}")
        if getattr(variable, "shape", None) is None:
            hint = "build the model first, by model.build(), by running a batch, or by optimizer.build(variables)."
            raise ValueError(f"{function}: variables[{index}] has no value yet\nHINT: {hint}")
    return listed


def check_process_set(function: str, process_set: Any) -> int:
    """Return the set's id. Raises TypeError or ValueError unless it is registered and has this rank."""
    if process_set is global_process_set:
        return 0
    process_set_id = check_registered(function, process_set)
    if not process_set.included():
        fact = f"this rank is not a member of process_set {process_set_id}, which has the ranks {process_set.ranks}"
        hint = f"call {function}() only where process_set.included() is true."
        raise ValueError(f"{function}: {fact}\nHINT: {hint}")
    return process_set_id


def size_of(process_set: ProcessSet) -> int:
    """Return the number of ranks of a set that check_process_set() accepted."""
    size = process_set.size()
    assert size is not None
    return size


def check_name(function: str, name: Any) -> None:
    """Raise TypeError unless ``name`` is a string or None."""
    if name is not None and not isinstance(name, str):
        raise TypeError(f"{function}: name must be a string or None, got {type(name).__name__}")


def check_passes(function: str, passes: Any) -> int:
    """Return ``backward_passes_per_step``. Raises TypeError unless it is an integer, ValueError unless positive."""
    if isinstance(passes, bool) or not hasattr(passes, "__index__"):
        raise TypeError(f"{function}: backward_passes_per_step must be an integer, got {passes!r}")
    if passes <= 0:
        raise ValueError(f"backward_passes_per_step must be > 0\n{function}: got {passes!r}")
    return int(passes.__index__())


def check_handle(function: str, handle: Any) -> int:
    """Return the handle of an asynchronous operation. Raises TypeError unless it is an integer."""
    if not isinstance(handle, int):
        raise TypeError(f"{function}: handle must be an integer of an asynchronous operation, got {handle!r}")
    return handle


def check_factor(function: str, argument: str, factor: Any) -> float:
    """Return a scale factor as a float. Raises TypeError unless it is a number."""
    try:
        return float(factor)
    except (TypeError, ValueError):
        raise TypeError(f"{function}: {argument} must be a number, got {factor!r}") from None


def check_factors(function: str, prescale_factor: Any, postscale_factor: Any) -> tuple[float, float]:
    """Return the factors of elements before and after a reduction. Raises TypeError unless both are numbers."""
    if type(prescale_factor) is float and type(postscale_factor) is float:
        return prescale_factor, postscale_factor
    prescale = check_factor(function, "prescale_factor", prescale_factor)
    return prescale, check_factor(function, "postscale_factor", postscale_factor)


def check_op(function: str, op: Any, allowed: Sequence[ReduceOp] = tuple(ReduceOp)) -> ReduceOp:
    """Return the reduction. Raises ValueError, for one that is not ``allowed`` an UnsupportedReductionError."""
    is_number = isinstance(op, int) and not isinstance(op, bool)
    if is_number and op in allowed:
        return ReduceOp(op)
    expected = ", ".join(map(_public_name, allowed))
    if is_number and op in list(ReduceOp):
        got = _public_name(ReduceOp(op))
        raise UnsupportedReductionError(f"{function}: op must be one of {expected}, got {got}")
    raise ValueError(f"{function}: op must be one of {expected}, got {op!r}")


def _public_name(op: ReduceOp) -> str:
    return f"hvd.{op.name.capitalize()}"


def op_or_average(function: str, op: Any, average: Any, stacklevel: int = 3) -> ReduceOp:
    """Return the reduction for ``op`` or the deprecated ``average``, or the average. Raises ValueError for both."""
    if average is None:
        return ReduceOp.AVERAGE if op is None else check_op(function, op)
    if op is not None:
        got = f"got op={op!r} and average={average!r}"
        raise ValueError(f"{function}: the op parameter supersedes average. Please provide only one of them, {got}")
    advice = "Parameter `average` has been replaced with `op`: use op=hvd.Average or op=hvd.Sum"
    warnings.warn(advice, DeprecationWarning, stacklevel=stacklevel)
    return ReduceOp.AVERAGE if average else ReduceOp.SUM


def reduce_request(function: str, op: Any, average: Any, prescale_factor: Any, postscale_factor: Any) -> ReduceRequest:
    """Return the request of a public operation. Raises TypeError or ValueError for wrong arguments."""
    reduce_op = op_or_average(function, op, average, stacklevel=4)
    return ReduceRequest(reduce_op, *check_factors(function, prescale_factor, postscale_factor))


def handle_average_backwards_compatibility(op: int | None, average: bool | None) -> ReduceOp:
    """Return the reduction for ``op``, or for the deprecated ``average``. Returns hvd.Average without either.

    Raises ValueError if both are given, or ``op`` is no reduction.

    Examples:
        >>> hvd.handle_average_backwards_compatibility(op=hvd.Sum, average=None) == hvd.Sum
        True
    """
    return op_or_average("handle_average_backwards_compatibility", op, average)


def num_rank_is_power_2(num_rank: int) -> bool:
    """True if Adasum works among ``num_rank`` ranks. Returns True for a power of 2. Raises TypeError for no integer.

    Examples:
        >>> hvd.check_num_rank_power_of_2(hvd.size())
        True
    """
    return num_rank != 0 and num_rank & (num_rank - 1) == 0


def check_adasum(function: str, dtypes: Iterable[str], process_set: ProcessSet, size: int) -> None:
    """Raise NotImplementedError for ranks that Adasum does not support, ValueError for a dtype that is not floating."""
    if process_set is not global_process_set:
        raise NotImplementedError(f"{function}: Adasum does not support non-global process sets yet.")
    if not num_rank_is_power_2(size):
        fact = "Running Adasum with non-power of 2 ranks is not supported yet"
        raise NotImplementedError(f"{function}: {fact}, got {size} ranks.")
    for dtype in set(dtypes) - FLOATING:
        raise ValueError(f"{function}: Adasum needs floating point tensors, got {dtype}")


def check_op_for(function: str, op: ReduceOp, dtypes: Iterable[str]) -> None:
    """Raise UnsupportedReductionError, a ValueError, for complex numbers unless the reduction is Average or Sum."""
    for dtype in dtypes:
        if dtype in COMPLEX and op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
            fact = f"op={_public_name(op)} is not defined for complex numbers, got a tensor of type {dtype}"
            hint = "use hvd.Average or hvd.Sum, or reduce real and imaginary parts separately."
            raise UnsupportedReductionError(f"{function}: {fact}\nHINT: {hint}")


def check_has_rows(function: str, shapes: Sequence[tuple[int, ...]], scalar_to_row: str) -> None:
    """Raise ValueError for a scalar, as an operation does that works along the first dimension."""
    if () in shapes:
        fact = "tensor must have at least one dimension, got a scalar (0-d) tensor"
        raise ValueError(f"{function}: {fact}\nHINT: use {scalar_to_row}.")


def wrong_dtype(function: str, argument: str, allowed: Iterable[str], got: str) -> ValueError:
    """Return the error for a tensor whose dtype an operation does not support."""
    return ValueError(f"{function}: {argument} must be of one of the types {', '.join(allowed)}, got {got}")


def check_listed(function: str, tensors: Any, kinds: tuple[type, ...]) -> None:
    """Raise TypeError unless ``tensors`` is an iterable and not itself a tensor, of one of the classes ``kinds``."""
    if isinstance(tensors, kinds) or not isinstance(tensors, Iterable):
        raise TypeError(f"{function}: tensors must be a list of tensors, got {type(tensors).__name__}")


def no_integers(function: str, argument: str, dtype: str) -> ValueError:
    """Return the error for a tensor that should hold integers."""
    return ValueError(f"{function}: {argument} must hold integers, got a tensor of type {dtype}")


def check_root(function: str, root_rank: Any, process_set: ProcessSet, size: int) -> int:
    """Return the root's global rank. Raises TypeError unless it is an integer, ValueError unless the set has it."""
    if not hasattr(root_rank, "__index__"):
        raise TypeError(f"{function}: root_rank must be an integer, got {root_rank!r}")
    root = int(root_rank.__index__())
    ranks = range(size) if process_set is global_process_set else process_set.ranks or ()
    if root not in ranks:
        expected = f"root_rank must be one of the process set's ranks {list(ranks)}"
        hint = "HINT: ranks count from 0; in a process set, root_rank is the rank in the whole job."
        raise ValueError(f"{function}: {expected}, got invalid root rank {root}\n{hint}")
    return root


def check_splits(function: str, splits: Any, rows: int, size: int) -> list[int] | None:
    """Return the number of rows for each rank, or None for equal shares. Raises TypeError or ValueError."""
    if splits is None:
        if rows % size:
            fact = f"first dimension of tensor ({rows}) is not an even multiple of the number of workers ({size})"
            raise ValueError(f"{function}: splits not provided, but {fact}")
        return None
    values = splits.tolist() if hasattr(splits, "tolist") else splits
    try:
        shares = [int(value.__index__()) for value in values]
    except (TypeError, AttributeError):
        raise TypeError(f"{function}: splits must be a list or 1-d tensor of integers, got {splits!r}") from None
    if len(shares) != size:
        expected = f"splits must have one entry for each worker, that is {size}"
        raise ValueError(f"{function}: {expected}, got {len(shares)}: {shares}")
    if any(share < 0 for share in shares):
        raise ValueError(f"{function}: splits must not be negative, got {shares}")
    if sum(shares) > rows:
        fact = "sum of splits entries is greater than the first dimension of tensor"
        raise ValueError(f"{function}: {fact}: expected at most {rows}, got {sum(shares)} from {shares}")
    return shares
