"""The common parts of YAML schemas, and a description in words of what a schema allows at a place of a document.

The common parts are the strict entry, words, distinct names, and shares that sum to 1. The description lists the keys
at a place, and the forms that a value may have.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema

from surgeon.common.yaml import Place

# The roles of texts in a training config, in addition to `task:NAME`.
ORIGINAL, NEW = "original", "new"
# How a text that a model writes begins, where no file of prompts is given.
BEGIN, TEMPLATE = "begin", "template"

# Shares are written with few decimals: three times 0.333 should count as 1.
SHARE_TOLERANCE = 0.005


def _bound(schema: Any, most: Mapping[str, float]) -> None:
    """Give every number in a schema that has no upper bound the bound for its type; the schema is changed in place."""
    if isinstance(schema, dict):
        if (bound := most.get(str(schema.get("type")))) is not None and not schema.keys() & {"le", "lt"}:
            schema["le"] = bound
        schema = list(schema.values())
    for each in schema if isinstance(schema, list | tuple) else ():
        _bound(each, most)


class Bounded(BaseModel):
    """Data of a file: unknown keys are refused, and numbers above `largest` where a field has no other bound.

    Without the bound, code that counts up to a number in a file could take unlimited memory and time.
    """

    # Allow the field `model_type`: pydantic before 2.10 warns of fields with the prefix `model_`.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())

    largest: ClassVar[int] = 10_000_000

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return pydantic's schema with an upper bound for every number."""
        schema = handler(source)
        _bound(schema, {"int": cls.largest, "float": 1e300})
        return schema


# Counts of tokens, words and bytes, which no loop counts up to.
Many = Annotated[int, Field(ge=0, le=2**53)]


class Entry(Bounded):
    """A part of a config, with a larger bound for numbers."""

    largest = 2**53


def first_doubled(names: Sequence[str]) -> str | None:
    """Return the first name that is given twice."""
    return next((name for name in names if names.count(name) > 1), None)


def check_shares(shares: Sequence[float | None], *, of: str = "the sources'") -> None:
    """Raise ValueError where shares cannot sum to 1; shares that are None receive the rest."""
    given = [share for share in shares if share is not None]
    total, whole = math.fsum(given), len(given) == len(shares)
    if shares and ((whole and abs(total - 1) > SHARE_TOLERANCE) or (not whole and total >= 1)):
        raise ValueError(f"{of} shares sum to {total:g}; they must sum to 1")


_WORDS = {"integer": "a whole number", "number": "a number", "string": "text", "boolean": "true or false"}
_LETTERS = {"integer": "N", "number": "X", "string": "TEXT", "boolean": "true"}
_BOUNDS = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
# The pattern that names of sources, models and runs must match, as it stands in a schema.
_NAME = re.compile(r"\^\[A-Za-z0-9_-\]\{1,(\d+)\}\$")
# A larger bound only means that a number fits a machine word.
_LARGEST_BOUND = 2**53


class Forms:
    """A JSON schema made by pydantic, with queries about places of a document."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._schema = schema

    def keys(self, data: Any, place: Place) -> list[str]:
        """Return the keys that the mapping at `place` of `data` may have."""
        return list(dict.fromkeys(key for form in self._at(data, place) for key in form.get("properties", {})))

    def tags(self, data: Any, place: Place, key: str) -> list[str]:
        """Return the values of `key` that distinguish the possible forms of the mapping at `place`."""
        return [tag[1] for form in self._at(data, place) if (tag := _tag(form, key)) is not None]

    def values(self, data: Any, place: Place) -> list[str]:
        """Return the fixed values that are allowed at `place`."""
        return [str(value) for form in self._at(data, place) for value in _literals(form)]

    def words(self, data: Any, place: Place) -> str:
        """Return every form allowed for the value at `place`: `all, top_half, {every: N} or {after: [N, …]}`."""
        forms = list(self._at(data, place))
        tagged = [tag for form in forms if (tag := _tag(form)) is not None]
        found = [_shown(value) for form in forms for value in _literals(form)]
        found += [self._outline(form) for form in forms if _tag(form) is None and not _literals(form)]
        if tagged:
            key, first = tagged[0]
            others = f", with {key} one of {', '.join(tag for _, tag in tagged)}" if len(tagged) > 1 else ""
            found.append(f"{{{key}: {first}, …}}{others}")
        return _listed(list(dict.fromkeys(found)))

    def home_of(self, key: str) -> str | None:
        """Return the dotted path of a key that belongs to a section, not to the top level; None if there is none."""
        for section, schema in self._schema.get("properties", {}).items():
            for form in self._flat(schema):
                if key in form.get("properties", {}):
                    return f"{section}.{key}"
        return None

    def _at(self, data: Any, place: Place) -> Iterator[Mapping[str, Any]]:
        """Yield the forms of the value at `place`, except forms whose fixed values contradict the surrounding data."""
        forms = [form for form in self._flat(self._schema) if _agrees(form, data)]
        for step in place:
            inside = data[step] if holds(data, step) else None
            inner = [
                found for form in forms if (schema := _under(form, step)) is not None for found in self._flat(schema)
            ]
            fitting = [form for form in inner if _agrees(form, inside)]
            forms, data = fitting or inner, inside
        yield from forms

    def _flat(self, schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        """Yield the alternatives of a schema, without unions, references and null."""
        if "$ref" in schema:
            yield from self._flat(self._schema["$defs"][str(schema["$ref"]).rpartition("/")[2]])
        elif union := schema.get("anyOf") or schema.get("oneOf"):
            for each in union:
                yield from self._flat(each)
        elif schema.get("type") != "null":
            yield schema

    def _outline(self, form: Mapping[str, Any], *, letters: bool = False) -> str:
        """Return one form as YAML, or in words at the top level."""
        match form.get("type"):
            case "object":
                known = form.get("properties")
                if known is None:
                    return "{KEY: …}"
                shown = form.get("required") or list(known)[:1]
                more = ["…"] if len(known) > len(shown) else []
                outline = "{" + ", ".join([*(f"{key}: {self._inner(known[key])}" for key in shown), *more]) + "}"
                choices = _literals(next(self._flat(known[shown[0]]), {})) if shown and not letters else []
                words = ", ".join(map(_shown, choices))
                return f"{outline}, with {shown[0]} one of {words}" if len(choices) > 1 else outline
            case "array":
                if "prefixItems" in form:
                    return "[" + ", ".join(self._inner(item) for item in form["prefixItems"]) + "]"
                entries = form.get("items", {})
                first = next(self._flat(entries), {})
                if first.get("type") == "object" and not letters:
                    key = next(iter(first.get("required", first["properties"])))
                    return f"a list of entries, each `- {key}: …`"
                fixed = form.get("minItems") if form.get("minItems") == form.get("maxItems") else None
                return f"[{', '.join([self._inner(entries)] * fixed)}]" if fixed else f"[{self._inner(entries)}, …]"
            case str() as kind if kind in _WORDS:
                return _LETTERS[kind] if letters else f"{_WORDS[kind]}{_bounds(form)}"
        return "…"

    def _inner(self, schema: Mapping[str, Any]) -> str:
        """Return the outline of a value inside another: its first fixed value, or its form in short."""
        first = next(self._flat(schema), {})
        if literals := _literals(first):
            return _shown(literals[0])
        # Show at most three levels.
        return "{…}" if first.get("type") == "object" else self._outline(first, letters=True)


def _under(form: Mapping[str, Any], step: str | int) -> Mapping[str, Any] | None:
    """Return the schema of the value at a key or list index inside a form; None where the form has none."""
    if isinstance(step, str):
        properties: dict[str, Mapping[str, Any]] = form.get("properties", {})
        return properties.get(step)
    inside: list[Mapping[str, Any] | None] = [*form.get("prefixItems", []), *[form.get("items")] * (step + 1)]
    return inside[step]


def _agrees(form: Mapping[str, Any], data: Any) -> bool:
    """Return whether the data agrees with the fixed values (`op`, `kind`) of a mapping's form."""
    if not isinstance(data, Mapping):
        return True
    properties = form.get("properties", {}).items()
    fixed = {key: field["const"] for key, field in properties if isinstance(field.get("const"), str)}
    return all(data.get(key, value) == value for key, value in fixed.items())


def _tag(form: Mapping[str, Any], key: str | None = None) -> tuple[str, str] | None:
    """Return (key, fixed text) that distinguish a mapping's form from other forms; None where there is none."""
    for name, field in form.get("properties", {}).items():
        if isinstance(field.get("const"), str) and key in (None, name):
            return name, field["const"]
    return None


def _literals(form: Mapping[str, Any]) -> list[Any]:
    """Return the fixed values that a form allows; empty where it allows others."""
    return [form["const"]] if "const" in form else list(form.get("enum", []))


def _shown(value: Any) -> str:
    """Return a fixed value as it is written in YAML."""
    return str(value) if isinstance(value, str) else json.dumps(value)


def _bounds(form: Mapping[str, Any]) -> str:
    """Return a form's bounds, or its rule for names, in words; "" without bounds."""
    if name := _NAME.fullmatch(form.get("pattern", "")):
        return f" of 1 to {name[1]} letters, digits, _ and -"
    said = {key: form.get(key, _LARGEST_BOUND) for key in _BOUNDS}
    given = [
        f" {_BOUNDS[key]} {bound:{',' if isinstance(bound, int) else 'g'}}"
        for key, bound in said.items()
        if abs(bound) < _LARGEST_BOUND
    ]
    return "," + " and".join(given) if given else ""


def _listed(forms: list[str]) -> str:
    """Return the forms joined by commas, with "or" before the last."""
    return " or ".join([", ".join(forms[:-1]), forms[-1]] if len(forms) > 1 else forms)


def holds(data: Any, step: int | str) -> bool:
    """Return whether a document has an entry at this step."""
    return step in data if isinstance(data, Mapping) else isinstance(data, list) and step in range(len(data))
