"""How the processor computes while numpy does what every rank does for itself: see csrc/default_floats.h."""

from __future__ import annotations

import ctypes
import sys

# The C library's "as a process starts", which is no address of anything (fenv.h of glibc and musl).
_DEFAULT = ctypes.c_void_p(-1)
_ENVIRONMENT_BYTES = 64  # more than fenv_t has on any processor

# PyDLL: a call that only sets registers keeps the interpreter's lock.
_LIBRARY = ctypes.PyDLL(None) if sys.platform == "linux" else None
_HAS_ENVIRONMENT = hasattr(_LIBRARY, "fegetenv") and hasattr(_LIBRARY, "fesetenv")


class DefaultFloats:
    """In a ``with`` statement this thread rounds to nearest and keeps subnormal numbers, whatever it was set to.

    A thread may have been told to flush them to zero (``torch.set_flush_denormal``). Where the C library does not say
    how, that stays as it is.
    """

    def __init__(self) -> None:
        self._before = ctypes.create_string_buffer(_ENVIRONMENT_BYTES)

    def __enter__(self) -> None:
        if _LIBRARY is not None and _HAS_ENVIRONMENT:
            _LIBRARY.fegetenv(self._before)
            _LIBRARY.fesetenv(_DEFAULT)

    def __exit__(self, *error: object) -> None:
        if _LIBRARY is not None and _HAS_ENVIRONMENT:
            _LIBRARY.fesetenv(self._before)
