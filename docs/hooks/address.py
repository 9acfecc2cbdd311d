"""The address of the repository, which pyproject.toml has, on every page that shows it.

``python -m docs.hooks.address`` writes it into these files. mkdocs calls ``on_config`` for the head and the foot of the
site's pages.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig

ROOT = Path(__file__).parents[2]
SHOWN = {
    "README.md": r"git clone (\S+) hvdkit",
    "CONTRIBUTING.md": r"git clone (\S+) hvdkit",
    "docs/start.md": r"git clone (\S+) hvdkit|@ git\+([^\s']+)'",
    "CITATION.cff": r"(?m)^repository-code: (\S+)$",
}


def address() -> str:
    """Return the address in pyproject.toml."""
    found = re.search(r'(?m)^Repository = "(.+)"$', (ROOT / "pyproject.toml").read_text())
    assert found is not None
    return found[1]


def shown(path: str) -> list[str]:
    """Return the addresses that a file shows."""
    return [next(filter(None, match.groups())) for match in re.finditer(SHOWN[path], (ROOT / path).read_text())]


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Let each page of the site tell the version, and link to the repository."""
    version = re.search(r'(?m)^__version__ = "(.+)"$', (ROOT / "hvdkit" / "__init__.py").read_text())
    assert version is not None
    config.repo_url, config.repo_name = address(), "Repository"
    config.copyright = f'hvdkit {version[1]}, Apache-2.0, <a href="{address()}">repository</a>'
    return config


def write() -> None:
    """Write the address into all files that show it."""
    for path in SHOWN:
        text = (ROOT / path).read_text()
        for former in shown(path):
            text = text.replace(former, address())
        (ROOT / path).write_text(text)


if __name__ == "__main__":
    write()
