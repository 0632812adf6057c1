"""The common part of the schemas of all YAML files: the strict entry, words, distinct names, shares that sum to 1."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema

# The roles of texts in a training config, beside `task:NAME`.
ORIGINAL, NEW = "original", "new"
# Of a text that a model writes: what it begins with, where that is no file.
BEGIN, TEMPLATE = "begin", "template"

# Shares are written with a few decimals: 0.333 three times is meant to be 1.
SHARE_TOLERANCE = 0.005


def _bound(schema: Any, most: Mapping[str, float]) -> None:
    """Give every number of a schema that has no upper bound the one for its type."""
    if isinstance(schema, dict):
        if (bound := most.get(str(schema.get("type")))) is not None and not schema.keys() & {"le", "lt"}:
            schema["le"] = bound
        schema = list(schema.values())
    for each in schema if isinstance(schema, list | tuple) else ():
        _bound(each, most)


class Bounded(BaseModel):
    """Data of a file: unknown keys are refused, and numbers larger than `largest` where a field has no other bound.

    Code that counts up to a number of a file takes memory and time by it.
    """

    # `model_type` is a model's; pydantic before 2.10 warns of every field that begins as its own names do.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())

    largest: ClassVar[int] = 10_000_000

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _bound(schema, {"int": cls.largest, "float": 1e300})
        return schema


# Tokens, words and bytes, which nothing counts up to.
Many = Annotated[int, Field(ge=0, le=2**53)]


class Entry(Bounded):
    """A part of a config."""

    largest = 2**53


def first_doubled(names: Sequence[str]) -> str | None:
    """Return the first name that is given twice."""
    return next((name for name in names if names.count(name) > 1), None)


def check_shares(shares: Sequence[float | None], *, of: str = "the sources'") -> None:
    """Raise ValueError where shares cannot sum to 1; those that are None take what the others leave."""
    given = [share for share in shares if share is not None]
    total, whole = math.fsum(given), len(given) == len(shares)
    if shares and ((whole and abs(total - 1) > SHARE_TOLERANCE) or (not whole and total >= 1)):
        raise ValueError(f"{of} shares sum to {total:g}; they must sum to 1")
