"""All of ``hvdkit.tensorflow``, under the name of Horovod's module."""

from hvdkit.tensorflow import *  # noqa: F403 (the same names)
from hvdkit.tensorflow import __all__ as __all__
