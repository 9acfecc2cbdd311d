"""Everything that Horovod has in its module of this name, for scripts that import from it."""

from hvdkit.torch import *  # noqa: F403 (the same names)
from hvdkit.torch import __all__ as __all__
