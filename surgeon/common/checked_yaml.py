"""A YAML document checked by a schema: one line per problem, with file, line, key and the probable intention."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from surgeon.common.formatting import did_you_mean, nearest, value_text
from surgeon.common.places import meant
from surgeon.common.schema import Forms, holds
from surgeon.common.yaml import Document, Place
from surgeon.errors import bad_input, printable

ModelT = TypeVar("ModelT", bound=BaseModel)
MOST_PROBLEMS = 20  # shown of one file

# The words for a bound, by pydantic's name for it.
_BOUNDS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}


def check_yaml(model: type[ModelT], document: Document, habits: Mapping[str, str] | None = None) -> ModelT:
    """Check a document by its schema.

    Args:
        model: the schema
        document: the document as it was read, with what options changed in it
        habits: what keys of other programs, and former values, are called here

    Returns:
        the document as an instance of `model`

    Raises:
        BadInput: with every problem, one line each: file, line, key, the fault, and the key or value that was
            probably meant
    """
    data = document.data
    try:
        # JSON mode is strict about types, but accepts lists for tuples and whole numbers for floats.
        return model.model_validate_json(json.dumps(data))
    except ValidationError as error:
        problems = {_place_of(problem, data): problem for problem in _problems(error, data)}
    said = _Said(Forms(model.model_json_schema()), data, document.what, habits or {})
    misspelt = {
        (*place[:-1], meant)
        for place, problem in problems.items()
        if problem["type"] == "extra_forbidden" and (meant := nearest(str(place[-1]), said.keys_beside(place)))
    }
    found = [
        _where(place, document) + said.about(problem, place)
        for place, problem in sorted(problems.items(), key=lambda entry: _line_of(entry[0], document.lines))
        if not (problem["type"] == "missing" and place in misspelt)
    ]
    raise bad_input(found[:MOST_PROBLEMS])


def check_given(model: type[ModelT], **given: Any) -> ModelT:
    """Return the options of a call as an instance of `model`. Raises BadInput with every invalid one, one line each."""
    try:
        return model(**given)
    except ValidationError as error:
        problems = error.errors()
    said = _Said(Forms(model.model_json_schema()), given, "options", {})
    raise bad_input([said.about_value(problem, problem["loc"]) for problem in problems])


def _where(place: Place, file: Document | Loaded[Any]) -> str:
    """Return the beginning of an error about a place: the option that set it, or file, line and inner options."""
    for cut in range(len(place), 0, -1):
        if (option := file.given.get(place[:cut])) is not None:
            return f"{printable(option)}: "
    inside = dict.fromkeys(printable(option) for at, option in file.given.items() if at[: len(place)] == place)
    changed = f", with {' '.join(inside)}" if inside else ""
    return f"{printable(str(file.source))}:{_line_of(place, file.lines)}{changed}: "


@dataclass(frozen=True)
class Loaded(Generic[ModelT]):
    """A file as read; relative paths in it start at its folder.

    `lines` are the lines of its keys. `given` names, for keys that were set otherwise, what set them, for example
    options.
    """

    config: ModelT
    source: Path
    lines: Mapping[Place, int] = field(default_factory=dict)
    given: Mapping[Place, str] = field(default_factory=dict)

    def where(self, *place: str | int) -> str:
        """Return the beginning of an error about a key: the file and line, or the option that set it."""
        if not self.lines and place not in self.given:
            return f"{printable(str(self.source))}: "
        return _where(place, self)

    def resolve(self, path: str) -> Path:
        """Return the path to open for a path in the file."""
        return self.source.parent / meant(path)


def _line_of(place: Place, lines: Mapping[Place, int]) -> int:
    """Return the line of a place, or of the nearest place around it that has a line; 1 where none has."""
    return next((lines[place[:cut]] for cut in range(len(place), -1, -1) if place[:cut] in lines), 1)


def editor_schema(model: type[BaseModel], title: str) -> dict[str, Any]:
    """Return the JSON schema of a kind of file, with which editors complete YAML."""
    return model.model_json_schema() | {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title}


def _place_of(problem: ErrorDetails, data: dict[str, Any]) -> Place:
    """Return the place in the document of a problem that pydantic reports."""
    if problem["type"] == "value_error":
        # The last step of its location is a form of a union, not a place in the document.
        return _tried_at(data, problem)
    place = _place_in(data, problem["loc"], lacking=problem["type"] == "missing")
    if problem["type"] == "union_tag_invalid":
        place = (*place, str(problem["ctx"]["discriminator"]).strip("'"))
    return place


@dataclass(frozen=True)
class _Said:
    """A writer of errors about a document, from its schema's forms, its data, its kind, and other programs' habits.

    `what` is the document's kind. `habits` maps what other programs write to what is written here.
    """

    forms: Forms
    data: Any
    what: str
    habits: Mapping[str, str]

    def keys_beside(self, place: Place) -> list[str]:
        """Return the keys that the mapping around a key may have."""
        return self.forms.keys(self.data, place[:-1])

    def about(self, problem: ErrorDetails, place: Place) -> str:
        """Return what is wrong at a place."""
        match problem["type"]:
            case "extra_forbidden":
                key = str(place[-1])
                return f"unknown key `{printable(key)}`{self._meant(key, place)}"
            case "union_tag_not_found":
                name = str(problem["ctx"]["discriminator"]).strip("'")
                tags = self.forms.tags(self.data, place, name)
                return f"`{_shown_place(place, self.what)}` needs `{name}:`, one of {', '.join(tags)}"
            case "value_error":
                # A complete sentence of our own about several keys: only the entry's name is added.
                return _entry_of(self.data, place) + problem["msg"].removeprefix("Value error, ")
        return self.about_value(problem, place)

    def about_value(self, problem: ErrorDetails, place: Place) -> str:
        """Return what is wrong with the value at a place."""
        key, context = _shown_place(place, self.what), problem.get("ctx", {})
        match problem["type"]:
            case "missing":
                takes = self.forms.words(self.data, place)
                return f"`{key}` is missing" + (f"; it takes {takes}" if takes else "")
            case "union_tag_invalid":
                tag, name = str(context["tag"]), str(context["discriminator"]).strip("'")
                return f"unknown {name} `{printable(tag)}`{self._here(tag, _listed(context['expected_tags']))}"
            case "too_short" | "too_long" as kind:
                entries = "at least" if kind == "too_short" else "at most"
                count = context["min_length" if kind == "too_short" else "max_length"]
                noun = "entry" if count == 1 else "entries"
                return f"`{key}` is {value_text(problem['input'])}; it takes {entries} {count} {noun}"
        value, takes = problem["input"], self.forms.words(self.data, place)
        if isinstance(value, str) and (close := nearest(value, self.forms.values(self.data, place))) is not None:
            return f"`{key}` is {value_text(value)}; did you mean `{close}`?"
        if not takes and (bound := next((_BOUNDS[name] for name in context if name in _BOUNDS), None)):
            takes = f"a number {bound} {next(context[name] for name in context if name in _BOUNDS):g}"
        if not takes:
            return f"`{key}`: {problem['msg']}"
        return f"`{key}` is {value_text(value)}; it takes {takes}"

    def _meant(self, key: str, place: Place) -> str:
        """Return the name here of an unknown key, as far as it can be guessed."""
        beside = self.keys_beside(place)
        if key in self.habits or len(place) != 1 or key in beside or (home := self.forms.home_of(key)) is None:
            return self._here(key, beside)
        return f"; here it is `{home}`"

    def _here(self, word: str, known: Sequence[str]) -> str:
        """Return what replaces an unknown key or value: by `habits`, else the nearest known one."""
        return f"; here it is {self.habits[word]}" if word in self.habits else did_you_mean(word, known)


def _listed(options: object) -> list[str]:
    """Return the options in pydantic's text of quoted options with commas."""
    return [option.strip(" '") for option in str(options).split(",")]


def _shown_place(place: Place, what: str) -> str:
    """Return a place as a dotted path; `what` for the top level."""
    return printable(".".join(str(step) for step in place)) or what


def _entry_of(data: Any, place: Place) -> str:
    """Return the name in errors of the list entry around a place, `operations[0] (control_llm): `; "" for no entry."""
    if len(place) < 2 or not isinstance(place[1], int):
        return ""
    entry = data[place[0]][place[1]]
    names = [entry[key] for key in ("op", "name") if key in entry] if isinstance(entry, dict) else []
    called = f" ({printable(str(names[0]))})" if names else ""
    return f"{printable(str(place[0]))}[{place[1]}]{called}: "


def _problems(error: ValidationError, data: dict[str, Any]) -> list[ErrorDetails]:
    """Return every problem once: among the problems from the forms of a union, the most specific one."""
    by_place: dict[Place, list[ErrorDetails]] = {}
    for problem in error.errors(include_url=False):
        by_place.setdefault(_tried_at(data, problem), []).append(problem)
    return [_most_specific(problems) for problems in by_place.values()]


def _most_specific(problems: Sequence[ErrorDetails]) -> ErrorDetails:
    """Return the problem deepest in the file, unknown keys first; a key known to one form of a union is not unknown."""
    order = {"extra_forbidden": 0, "union_tag_invalid": 0}
    unknown_or_known = [p for p in problems if not _known_to_another(p, problems)]
    return min(unknown_or_known, key=lambda p: (order.get(p["type"], 1), -len(p["loc"]), p["type"] == "missing"))


def _known_to_another(problem: ErrorDetails, problems: Sequence[ErrorDetails]) -> bool:
    """Return whether another form of the union accepts the key that this form refuses, and found its value wrong."""
    if problem["type"] != "extra_forbidden":
        return False
    at = len(problem["loc"]) - 1
    return any(
        other["type"] not in ("extra_forbidden", "missing") and other["loc"][at : at + 1] == problem["loc"][at:]
        for other in problems
    )


def _tried_at(data: Any, problem: ErrorDetails) -> Place:
    """Return the place of a problem; for a problem in a form of a union, the place of the union's value.

    A location step that is no key of the data names a form of a union, unless it is the value of the entry's
    discriminator (`op`, `kind`), or the last step, which may be a missing key.
    """
    place: list[str | int] = []
    *steps, last = problem["loc"] or ("",)
    for step in steps:
        if holds(data, step):
            data = data[step]
            place.append(step)
        elif not (isinstance(data, dict) and step in data.values()):
            return tuple(place)
    return (*place, last) if holds(data, last) or problem["type"] == "missing" else tuple(place)


def _place_in(data: Any, location: tuple[int | str, ...], *, lacking: bool) -> Place:
    """Return the steps of a pydantic location that are steps in the data; other steps name members of unions.

    With `lacking`, the last step is a key that is missing in the data.
    """
    place: list[str | int] = []
    for number, step in enumerate(location):
        if holds(data, step):
            data = data[step]
        elif not (lacking and number + 1 == len(location)):
            continue
        place.append(step)
    return tuple(place)
