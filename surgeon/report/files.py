"""The files that reports write: each is the old one or the new one; a link of its name is replaced, not followed."""

from __future__ import annotations

from pathlib import Path

from surgeon.common.disk_space import writing
from surgeon.common.work_folders import write_durably


def write_text(text: str, to: Path) -> None:
    """Write a page or a record. Raises BadInput where it cannot be written, or `to` is no file's name."""
    with writing(to):
        write_durably(to, text)
