"""What errors say of a value that was given: the value itself, and what was probably meant."""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from typing import Any

from surgeon.errors import printable


def did_you_mean(given: str, options: Sequence[str]) -> str:
    """Return what to add to an error about `given`: the option that is nearest, or all of them."""
    if (close := nearest(given, options)) is not None:
        return f"; did you mean `{close}`?"
    return f"; known: {', '.join(options)}" if options else ""


def nearest(given: str, options: Sequence[str]) -> str | None:
    """Return the option that is nearest to what was given; None where none is near."""
    return next(iter(difflib.get_close_matches(given, options, n=1, cutoff=0.5)), None)


def value_text(value: Any) -> str:
    """Return a value as errors show it: JSON, cut short."""
    return printable(json.dumps(value, ensure_ascii=False), 60)
