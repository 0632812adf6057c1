"""The common part of the schemas of all YAML files: the strict entry, words, distinct names, shares that sum to 1."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

# The roles of texts in a training config, beside `task:NAME`.
ORIGINAL, NEW = "original", "new"
# Of a text that a model writes: what it begins with, where that is no file.
BEGIN, TEMPLATE = "begin", "template"

# Shares are written with a few decimals: 0.333 three times is meant to be 1.
SHARE_TOLERANCE = 0.005


class Entry(BaseModel):
    """A part of a config; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def first_doubled(names: Sequence[str]) -> str | None:
    """Return the first name that is given twice."""
    return next((name for name in names if names.count(name) > 1), None)


def check_shares(shares: Sequence[float | None], *, of: str = "the sources'") -> None:
    """Raise ValueError where shares cannot sum to 1; those that are None take what the others leave."""
    given = [share for share in shares if share is not None]
    total, whole = math.fsum(given), len(given) == len(shares)
    if shares and ((whole and abs(total - 1) > SHARE_TOLERANCE) or (not whole and total >= 1)):
        raise ValueError(f"{of} shares sum to {total:g}; they must sum to 1")
