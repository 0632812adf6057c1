"""A YAML document checked by a schema: every problem a line, with file, line, key and what was probably meant."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from surgeon.common.suggestions import did_you_mean, nearest, value_text
from surgeon.common.yaml import Place
from surgeon.errors import bad_input, printable

ModelT = TypeVar("ModelT", bound=BaseModel)
MOST_PROBLEMS = 20  # shown of one file
NOTHING_GIVEN: Mapping[Place, str] = MappingProxyType({})


def check_yaml(
    model: type[ModelT],
    data: dict[str, Any],
    lines: dict[Place, int],
    source: str,
    *,
    what: str,
    known_keys: Callable[[ErrorDetails, Place], list[str]],
    tags: Callable[[str], list[str]] = lambda _: [],
    given: Mapping[Place, str] = NOTHING_GIVEN,
) -> ModelT:
    """Check a document by its schema.

    Args:
        model: the schema
        data: the document, as `parse_yaml` read it
        lines: the line of every place in it
        source: the file's name, for errors
        what: the kind of file, for errors
        known_keys: the keys that the schema knows at the place of an unknown one
        tags: the values of a discriminator
        given: the options that changed the document after it was read, by the place that they set

    Returns:
        the document as `model` has it

    Raises:
        BadInput: with every problem, a line each: file, line, key, what is wrong, and the key or value that was
            probably meant
    """
    try:
        # JSON mode: strict about types, yet lists are lists and whole numbers count as numbers.
        return model.model_validate_json(json.dumps(data))
    except ValidationError as error:
        problems = {_place_of(problem, data): problem for problem in _problems(error, data)}
    misspelt = {
        (*place[:-1], meant)
        for place, problem in problems.items()
        if problem["type"] == "extra_forbidden" and (meant := nearest(str(place[-1]), known_keys(problem, place)))
    }
    found = [
        where(place, lines, source, given) + _explained(problem, place, data, what, known_keys, tags)
        for place, problem in sorted(problems.items(), key=lambda entry: _line_of(entry[0], lines))
        if not (problem["type"] == "missing" and place in misspelt)
    ]
    raise bad_input(found[:MOST_PROBLEMS])


def check_given(model: type[ModelT], **given: Any) -> ModelT:
    """Options of a call as `model` has them. Raises BadInput with every one that it does not allow, a line each."""
    try:
        return model(**given)
    except ValidationError as error:
        problems = error.errors()
    raise bad_input([_about_value(problem, ".".join(map(str, problem["loc"]))) for problem in problems])


def where(place: Place, lines: Mapping[Place, int], source: str, given: Mapping[Place, str] = NOTHING_GIVEN) -> str:
    """The beginning of an error about a place: the option that set it, or file, line and the options inside it."""
    for cut in range(len(place), 0, -1):
        if (option := given.get(place[:cut])) is not None:
            return f"{printable(option)}: "
    inside = dict.fromkeys(printable(option) for at, option in given.items() if at[: len(place)] == place)
    changed = f", with {' '.join(inside)}" if inside else ""
    return f"{printable(source)}:{_line_of(place, lines)}{changed}: "


def _line_of(place: Place, lines: Mapping[Place, int]) -> int:
    return next((lines[place[:cut]] for cut in range(len(place), -1, -1) if place[:cut] in lines), 1)


def keys_by_section(whole: type[BaseModel]) -> Callable[[ErrorDetails, Place], list[str]]:
    """Return the `known_keys` of a file whose sections are the models in the annotations of `whole`."""

    def known_keys(_problem: ErrorDetails, place: Place) -> list[str]:
        models = [whole]
        for key in (step for step in place[:-1] if isinstance(step, str)):
            fields = [model.model_fields[key] for model in models if key in model.model_fields]
            models = [inner for each in fields for inner in _models_in(each.annotation)]
        return list(dict.fromkeys(key for model in models for key in model.model_fields))

    return known_keys


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    """The models that a value of this type may be, or that a list of them holds."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for inner in get_args(annotation) for model in _models_in(inner)]


def editor_schema(model: type[BaseModel], title: str) -> dict[str, Any]:
    """The JSON schema of a kind of file, for editors that complete YAML by it."""
    return model.model_json_schema() | {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title}


def _place_of(problem: ErrorDetails, data: dict[str, Any]) -> Place:
    place = _place_in(data, problem["loc"])
    if problem["type"] == "union_tag_invalid":
        place = (*place, str(problem["ctx"]["discriminator"]).strip("'"))
    if problem["type"] == "value_error":
        # The last step of its location is a form of a union, which is no place.
        place = _tried_at(data, problem)
    return place


def _explained(
    problem: ErrorDetails,
    place: Place,
    data: dict[str, Any],
    what: str,
    known_keys: Callable[[ErrorDetails, Place], list[str]],
    tags: Callable[[str], list[str]],
) -> str:
    match problem["type"]:
        case "extra_forbidden":
            key = str(place[-1])
            return f"unknown key `{printable(key)}`{did_you_mean(key, known_keys(problem, place))}"
        case "union_tag_not_found":
            name = str(problem["ctx"]["discriminator"]).strip("'")
            return f"`{_shown_place(place, what)}` needs `{name}:`, one of {', '.join(tags(name))}"
        case "value_error":
            # A sentence of ours about several keys, which says all there is to say: only the entry is named.
            return _entry_of(data, place) + problem["msg"].removeprefix("Value error, ")
    return _about_value(problem, _shown_place(place, what))


def _about_value(problem: ErrorDetails, key: str) -> str:
    """Say what is wrong with the value of `key`."""
    context = problem.get("ctx", {})
    match problem["type"]:
        case "missing":
            return f"`{key}` is missing"
        case "union_tag_invalid":
            tag, name = str(context["tag"]), str(context["discriminator"]).strip("'")
            return f"unknown {name} `{printable(tag)}`{did_you_mean(tag, _listed(context['expected_tags']))}"
        case "literal_error":
            options = _listed(str(context["expected"]).replace(" or ", ", "))
            return f"`{key}` is {value_text(problem['input'])}{did_you_mean(str(problem['input']), options)}"
        case _:
            # "Input should be greater than 0", "List should have at least 1 item": the words after the subject.
            _, should, rule = problem["msg"].partition(" should ")
            if should:
                return f"`{key}` is {value_text(problem['input'])}; it should {rule}"
            return f"`{key}`: {problem['msg']}"


def _listed(options: object) -> list[str]:
    return [option.strip(" '") for option in str(options).split(",")]


def _shown_place(place: Place, what: str) -> str:
    return printable(".".join(str(step) for step in place)) or what


def _entry_of(data: Any, place: Place) -> str:
    """The entry of a list that a place lies in: `operations[0] (control_llm): `; empty where it lies in none."""
    if len(place) < 2 or not isinstance(place[1], int):
        return ""
    entry = data[place[0]][place[1]]
    names = [entry[key] for key in ("op", "name") if key in entry] if isinstance(entry, dict) else []
    called = f" ({printable(str(names[0]))})" if names else ""
    return f"{printable(str(place[0]))}[{place[1]}]{called}: "


def _problems(error: ValidationError, data: dict[str, Any]) -> list[ErrorDetails]:
    """Return every problem once: the most specific one of those that a union found as it tried its forms."""
    by_place: dict[Place, list[ErrorDetails]] = {}
    for problem in error.errors(include_url=False):
        by_place.setdefault(_tried_at(data, problem), []).append(problem)
    return [_most_specific(problems) for problems in by_place.values()]


def _most_specific(problems: Sequence[ErrorDetails]) -> ErrorDetails:
    """The one deepest in the file, unknown keys first; a key that one form of a union knows is not unknown."""
    order = {"extra_forbidden": 0, "union_tag_invalid": 0}
    unknown_or_known = [p for p in problems if not _known_to_another(p, problems)]
    return min(unknown_or_known, key=lambda p: (order.get(p["type"], 1), -len(p["loc"]), p["type"] == "missing"))


def _known_to_another(problem: ErrorDetails, problems: Sequence[ErrorDetails]) -> bool:
    """Return whether a form of a union refuses a key that another form takes, which found its value wrong."""
    if problem["type"] != "extra_forbidden":
        return False
    at = len(problem["loc"]) - 1
    return any(
        other["type"] not in ("extra_forbidden", "missing") and other["loc"][at : at + 1] == problem["loc"][at:]
        for other in problems
    )


def _tried_at(data: Any, problem: ErrorDetails) -> Place:
    """The place of a problem; of one that a union found in one of its forms, the place of the union's value.

    A step of a location that is no key of the data names a form of a union, unless it is the value of the entry's
    discriminator (`op`, `kind`), or the last one, which may be a key that is missing.
    """
    place: list[str | int] = []
    *steps, last = problem["loc"] or ("",)
    for step in steps:
        if _holds(data, step):
            data = data[step]
            place.append(step)
        elif not (isinstance(data, dict) and step in data.values()):
            return tuple(place)
    return (*place, last) if _holds(data, last) or problem["type"] == "missing" else tuple(place)


def _holds(data: Any, step: int | str) -> bool:
    return step in data if isinstance(data, dict) else isinstance(data, list) and step in range(len(data))


def _place_in(data: Any, location: tuple[int | str, ...]) -> Place:
    """The steps of a pydantic location that are steps in the data (others name members of unions)."""
    place: list[str | int] = []
    for number, step in enumerate(location):
        if isinstance(data, dict) and step in data:
            data = data[str(step)]
        elif isinstance(data, list) and isinstance(step, int) and step < len(data):
            data = data[step]
        elif number + 1 < len(location) or not isinstance(data, dict) or not isinstance(step, str):
            continue
        place.append(step)
    return tuple(place)
