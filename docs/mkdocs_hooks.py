"""What the site needs beside docs/: the repository's files that pages link to, as README.md and benchmarks/results.

In the repository such links lead out of docs/ (`../README.md`). The site has each of these files at `repository/`, and
every link to it is turned there; a link to a folder stays as its words.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\])\(([^)\s]+)\)")
BESIDE = "repository/"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add every file of the repository that a page of docs/, or a page added here, links to."""
    from mkdocs.structure.files import File, InclusionLevel

    open_ = [file.src_uri for file in files.documentation_pages()]
    while open_:
        uri = open_.pop()
        for _, target in LINK.findall((ROOT / _path(uri)).read_text(encoding="utf-8")):
            found = _found(uri, target)
            if found is None or files.get_file_from_path(linked := _uri(found)) or not (ROOT / found).is_file():
                continue
            added = File.generated(config, linked, abs_src_path=str(ROOT / found), inclusion=InclusionLevel.NOT_IN_NAV)
            files.append(added)
            if added.is_documentation_page():
                open_.append(linked)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The page with its links into and out of docs/ turned to where their files stand in the site."""

    def turned(match: re.Match[str]) -> str:
        words, target = match.groups()
        found = _found(page.file.src_uri, target)
        if found is None:
            return match[0]
        if not (ROOT / found).is_file():
            return words[1:-1]
        here, there = PurePosixPath(page.file.src_uri).parent, PurePosixPath(_uri(found))
        anchor = "#" + target.partition("#")[2] if "#" in target else ""
        return f"{words}({'../' * len(here.parts)}{there}{anchor})"

    return LINK.sub(turned, markdown)


def _path(uri: str) -> str:
    """Where a file of the site stands in the repository."""
    return uri.removeprefix(BESIDE) if uri.startswith(BESIDE) else f"docs/{uri}"


def _uri(path: str) -> str:
    """Where a file of the repository stands in the site."""
    return path.removeprefix("docs/") if path.startswith("docs/") else BESIDE + path


def _found(uri: str, target: str) -> str | None:
    """What a link leads to, seen from the repository's root; None for what is elsewhere, or is not there."""
    path = target.partition("#")[0]
    if not path or "://" in path or path.startswith("mailto:"):
        return None
    found = ((ROOT / _path(uri)).parent / path).resolve()
    return str(found.relative_to(ROOT)) if found.is_relative_to(ROOT) and found.exists() else None
