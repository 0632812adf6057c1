"""The kind of a YAML file of surgeon's, judged by the key that gives the version of its format."""

from __future__ import annotations

import re
from pathlib import Path

from surgeon.common.files import read_given
from surgeon.common.places import meant
from surgeon.errors import BadInput

_KINDS = {
    "surgeon": "a plan",
    "surgeon_continual": "a tasks file",
    "surgeon_study": "a study",
}
_FORMAT = re.compile(r"^[{\s]*[\"']?(surgeon(?:_[a-z]+)?)[\"']?\s*:", re.MULTILINE)
_MOST_READ = 1_000_000


def kind_of(given: str) -> str:
    """Return the kind of the file `given`; empty where it is another file, or cannot be read."""
    try:
        path = Path(meant(given))
        if path.suffix not in (".yaml", ".yml"):
            return ""
        text = read_given(path, what="file", most=_MOST_READ).decode("utf-8", "replace")
    except BadInput:
        return ""
    return next((_KINDS[key] for key in _FORMAT.findall(text) if key in _KINDS), "")
