"""Runs cases with updates left to the next forward pass wherever that can be: nothing else changes."""

from __future__ import annotations

import sys

from tests.keras.runner import main
from tests.torch.overlapped import Overlapping

if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Overlapping)
