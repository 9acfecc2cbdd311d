"""Print what hvdkit and these extras of it need, a line each: ``python requirements.py pyproject.toml torch``."""

import sys
from pathlib import Path

import tomllib  # Debian bookworm's Python has it

project = tomllib.loads(Path(sys.argv[1]).read_text())["project"]
extras = [one for name in sys.argv[2:] for one in project["optional-dependencies"][name]]
print("\n".join([*project["dependencies"], *extras]))
