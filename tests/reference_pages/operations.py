"""Where each operation's section stands in docs/reference/operations: `## op`, in the page of its group."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent.parent / "docs" / "reference" / "operations"


@cache
def sections() -> dict[str, tuple[Path, str]]:
    """By operation the page and the section's text, its heading included."""
    found: dict[str, tuple[Path, str]] = {}
    for page in sorted(FOLDER.glob("*.md")):
        if page.name != "index.md":
            for part in re.split(r"^(?=## )", page.read_text(encoding="utf-8"), flags=re.M)[1:]:
                op = part.partition("\n")[0].removeprefix("## ")
                assert op not in found, f"{op} has two sections"
                found[op] = page, part
    return found


def link(op: str) -> str:
    """The address of an operation's section, seen from docs/reference."""
    found = sections()
    assert op in found, f"no page of docs/reference/operations has a section `## {op}`"
    return f"operations/{found[op][0].name}#{op}"
