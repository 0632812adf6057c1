"""The files that reports write: each is the old one or the new one; a link of its name is replaced, not followed."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from surgeon.common.disk_space import writing
from surgeon.common.work_folders import write_durably


def write_text(text: str, to: Path) -> None:
    """Write a page or a record. Raises BadInput where it cannot be written, or `to` is no file's name."""
    with writing(to):
        write_durably(to, text)


def save_picture(figure: Any, to: Path) -> Path:
    """Write a matplotlib figure as the PNG file `to`, whose folder is made at need. Raises BadInput as `write_text`."""
    content = io.BytesIO()
    figure.savefig(content, format="png")
    with writing(to):
        to.parent.mkdir(parents=True, exist_ok=True)
        write_durably(to, content.getvalue())
    return to
