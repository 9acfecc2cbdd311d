"""Takes what pages link to outside of docs/ into the site, so that one link is right there and on a git host.

``../benchmarks/results/step.png`` on a page becomes a file of the site; ``../SECURITY.md``, on a page or in the ``nav``
of mkdocs.yml, becomes a page, and so does what its links lead to. mkdocs then checks these links like all others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from posixpath import dirname, join, normpath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

_LINK = re.compile(r"\]\(([^)\s#:]+)[^)]*\)")
_SECTION = re.compile(r"^## ", re.MULTILINE)
_FOLDER = "repository"  # of the site


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add them to mkdocs' list."""
    docs = Path(config.docs_dir)
    found = [*_paths(config.nav), *(uri for file in files.documentation_pages() for uri in _links(file))]
    while found:
        uri = found.pop()
        outside = uri.startswith("../") and not uri.startswith("../docs/")
        if not outside or files.get_file_from_path(uri) or not (docs / uri).is_file():
            continue
        file = File.generated(config, uri, abs_src_path=str(docs / uri), inclusion=InclusionLevel.NOT_IN_NAV)
        inside = Path(_FOLDER, uri.removeprefix("../"))
        file.dest_uri = str(inside.with_suffix("") / "index.html" if file.is_documentation_page() else inside)
        files.append(file)
        if file.is_documentation_page():
            found += _links(file)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let what is outside of docs/ link to pages inside, which mkdocs knows by their paths from there.

    Short pages, and pages with a script, have no table of contents at their side: the code needs its width.
    """
    if page.file.src_uri.startswith("howto/") or len(_SECTION.findall(markdown)) < 2:
        page.meta.setdefault("hide", ["toc"])

    def from_docs(link: re.Match[str]) -> str:
        uri = normpath(join(dirname(page.file.src_uri), link[1]))
        inside = uri.startswith("../docs/")
        return link[0].replace(link[1], f"/{uri.removeprefix('../docs/')}", 1) if inside else link[0]

    return _LINK.sub(from_docs, markdown)


def _paths(nav: Any) -> Iterator[str]:
    """The files that mkdocs.yml names."""
    if isinstance(nav, str):
        yield nav
    else:
        for one in nav.values() if isinstance(nav, dict) else nav or ():
            yield from _paths(one)


def _links(page: File) -> list[str]:
    return [normpath(join(dirname(page.src_uri), link)) for link in _LINK.findall(page.content_string)]
