"""Found in place of Horovod where hvdkitrun --as-horovod started the process."""

import sys

from hvdkit.as_horovod import install

install(in_place_of=sys.modules[__name__])
