"""README is short, and its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def test_it_is_read_on_one_screen():
    assert len(README.splitlines()) <= 80


def test_what_it_links_to_is_there():
    links = re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", README)
    assert len(links) > 10
    assert [link for link in links if not (ROOT / link).exists()] == []
