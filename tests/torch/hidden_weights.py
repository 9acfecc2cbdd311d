"""The program tests/torch/weights.py, after statements that take something from it were executed."""

import os
import runpy
import sys
import warnings

warnings.simplefilter("ignore")
exec(sys.argv.pop(1), {"os": os, "sys": sys})  # noqa: S102 (the tests' own statements)
runpy.run_module("tests.torch.weights", run_name="__main__")
