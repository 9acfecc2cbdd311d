"""The scripts that pages show. ``python -m docs.hooks.code`` copies each behind its mark, ``<!-- code: PATH -->``."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
_SHOWN = re.compile(r"^<!-- code: (\S+) -->\n```python\n.*?^```$", re.MULTILINE | re.DOTALL)


def with_code(page: str) -> str:
    """Return the text of a page with each script as it is now."""
    return _SHOWN.sub(lambda mark: shown(mark[1]), page)


def shown(script: str) -> str:
    """Return the part of a page that shows a script, by its path in the repository."""
    return f"<!-- code: {script} -->\n```python\n{(ROOT / script).read_text().rstrip()}\n```"


def pages() -> list[Path]:
    """Return the pages that show scripts."""
    return [page for page in sorted((ROOT / "docs").rglob("*.md")) if _SHOWN.search(page.read_text())]


if __name__ == "__main__":
    for page in pages():
        page.write_text(with_code(page.read_text()))
