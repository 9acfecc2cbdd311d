"""``python -m hvdkit.launch`` is ``hvdkitrun``."""

import sys

from hvdkit.launch.main import main

sys.exit(main())
