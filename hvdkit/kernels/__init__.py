"""Loops over flat buffers: C++ where it was compiled, numpy elsewhere, with the same bits either way."""

from __future__ import annotations

import warnings

from hvdkit.kernels.dtypes import BFLOAT16, COMPLEX, DTYPES, FLOATS, HALVES, NAMES, as_real
from hvdkit.kernels.reduce_op import ONE, ReduceOp, Scale

try:
    from hvdkit.kernels._native import (
        DefaultFloats,
        abs_sample_into,
        add_and_project_into,
        checksum,
        convert_into,
        dequantise_into,
        momentum_into,
        orthonormalise,
        project_back_into,
        project_into,
        quantise_into,
        reconstruct_into,
        reduce_into,
        scale_into,
        scatter_add_into,
        select_into,
        sign_into,
        sum_pairs_into,
        unsign_into,
    )

    _backend = "native"
except ImportError as error:
    from hvdkit.kernels.numpy_codecs import (
        add_and_project_into,
        dequantise_into,
        orthonormalise,
        project_back_into,
        project_into,
        quantise_into,
        reconstruct_into,
        sign_into,
        unsign_into,
    )
    from hvdkit.kernels.numpy_kernels import DefaultFloats, checksum, convert_into, reduce_into, scale_into  # type: ignore[assignment]
    from hvdkit.kernels.numpy_sparse import (
        abs_sample_into,
        momentum_into,
        scatter_add_into,
        select_into,
        sum_pairs_into,
    )

    _backend = "numpy"
    # Kernels that were built and cannot be loaded would be slow without a visible reason.
    if not isinstance(error, ModuleNotFoundError):
        warnings.warn(f"hvdkit: the native kernels cannot be loaded, using the numpy kernels: {error}", stacklevel=2)


def backend() -> str:
    """Return the kind of the kernels in this process: "native" or "numpy"."""
    return _backend
