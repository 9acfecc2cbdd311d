"""README's generated parts are up to date."""

from __future__ import annotations

from pathlib import Path

from hvdkit import config

README = Path(__file__).resolve().parent.parent / "README.md"


def test_the_settings_table_is_the_one_that_config_generates():
    table = README.read_text().split("<!-- settings -->")[1].split("<!-- /settings -->")[0].strip()
    assert table == config.markdown_table(), "run: python -m hvdkit.config --write README.md"
