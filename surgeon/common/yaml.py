"""Reading YAML that people write: safe 1.2 scalars, line numbers in every message, nothing guessed.

The document is read as a graph of nodes and built here, so that no tag can create a Python object, duplicate
keys are found, `6e-2` is a number and `010` is refused, not read as 8. `what` names the kind of file in errors.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from surgeon.common.files import read_given
from surgeon.errors import BadInput, printable

LARGEST_FILE = 1_000_000  # bytes
MOST_NODES = 20_000
DEEPEST = 40
_INT = re.compile(r"[-+]?(0|[1-9][0-9]{0,18})")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]{1,4})?")
_LOOKS_NUMERIC = re.compile(r"[-+]?(0[0-9]+|0x[0-9a-fA-F]+|0o[0-7]+|[0-9]+)")
_CORE_TAGS = ("str", "int", "float", "bool", "null", "map", "seq")
Place = tuple[str | int, ...]
ModelT = TypeVar("ModelT", bound=BaseModel)


def read_text(path: Path, *, what: str) -> str:
    """The text of a regular file. Raises BadInput, which names file and line, where it cannot be read as UTF-8."""
    raw = read_given(path, what=what, most=LARGEST_FILE)
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        where = f"{printable(str(path))}:{line}"
        raise BadInput(f"{where}: not UTF-8 text (byte {raw[error.start]:#04x}); save it as UTF-8") from None


def parse_yaml(text: str, source: str, *, what: str, needs: str) -> tuple[dict[str, Any], dict[Place, int]]:
    """The document as plain data and the line of every place in it; `needs` are the keys that it must have.

    Raises BadInput for what is not valid YAML, nests too deep, repeats a key, is empty or no mapping.
    """
    shown = printable(source)
    try:
        _check_events(text, shown, what)
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise BadInput(
            f"{shown}:{line}: not valid YAML: {printable(error.problem or error.context or '')}; mend this line"
        ) from None
    except yaml.YAMLError as error:
        raise BadInput(
            f"{shown}: not valid YAML: {printable(str(error).splitlines()[0])}; save it as plain text"
        ) from None
    lines: dict[Place, int] = {}
    if node is None:
        raise BadInput(f"{shown}: the {what} is empty; it needs {needs}")
    data = _Builder(shown, lines, what).build(node, ())
    if not isinstance(data, dict):
        raise BadInput(f"{shown}: a {what} is a mapping with {needs}, not {_kind_of(data)}; write one")
    return data, lines


def _check_events(text: str, shown: str, what: str) -> None:
    """Refuse deep nesting before the composer, which recurses, sees it."""
    depth = 0
    for count, event in enumerate(yaml.parse(text, Loader=yaml.SafeLoader)):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > DEEPEST:
            line = event.start_mark.line + 1 if event.start_mark else 1
            raise BadInput(f"{shown}:{line}: nested more than {DEEPEST} deep; is this a {what}?")
        if count > 2 * MOST_NODES:
            raise BadInput(f"{shown}: more than {MOST_NODES} entries; is this a {what}?")


@dataclass(eq=False)
class _Builder:
    """Builds plain data from a node graph and remembers the line of every place in it."""

    shown: str
    lines: dict[Place, int]
    what: str
    built: int = field(default=0, init=False)

    def build(self, node: yaml.Node, place: Place) -> Any:
        line = node.start_mark.line + 1
        self.lines.setdefault(place, line)
        # Counted as expanded: aliases repeat their node here, so a bomb of them stops at the cap.
        self.built += 1
        if self.built > MOST_NODES:
            raise BadInput(f"{self.shown}:{line}: expands to more than {MOST_NODES} entries; remove aliases")
        if len(place) > DEEPEST:
            raise BadInput(
                f"{self.shown}:{line}: an alias contains itself, or it nests more than {DEEPEST} deep; write it out"
            )
        if not any(node.tag == f"tag:yaml.org,2002:{tag}" for tag in (*_CORE_TAGS, "timestamp", "merge", "value")):
            raise BadInput(
                f"{self.shown}:{line}: tag {printable(node.tag)!r} is not allowed in a {self.what}; write plain data"
            )
        match node:
            case yaml.MappingNode():
                return self._mapping(node, place)
            case yaml.SequenceNode():
                return [self.build(item, (*place, index)) for index, item in enumerate(node.value)]
            case _:
                assert isinstance(node, yaml.ScalarNode)
                return self._scalar(node, line)

    def _mapping(self, node: yaml.MappingNode, place: Place) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise BadInput(
                    f"{self.shown}:{line}: a key must be a plain word, not a list or a mapping; write one in its place"
                )
            key = self._characters(key_node.value, line)
            if key in result:
                first = self.lines[(*place, key)]
                raise BadInput(
                    f"{self.shown}:{line}: key `{printable(key)}` given twice (first on line {first}); remove one"
                )
            self.lines[(*place, key)] = line
            result[key] = self.build(value_node, (*place, key))
        return result

    def _characters(self, text: str, line: int) -> str:
        """The text itself; its escapes (`\\0`, `\\ud800`) may stand for what no file name and no encoding has."""
        wrong = next((c for c in text if c == "\0" or "\ud800" <= c <= "\udfff"), None)
        if wrong is not None:
            kind = "a NUL character" if wrong == "\0" else "half of a UTF-16 pair"
            raise BadInput(f"{self.shown}:{line}: {kind} ({printable(wrong)}) in a text; remove it")
        return text

    def _scalar(self, node: yaml.ScalarNode, line: int) -> Any:
        text = self._characters(node.value, line)
        if node.style in ("'", '"', "|", ">") or (node.tag.endswith(":str") and not _FLOAT.fullmatch(text)):
            return text
        if text in ("", "~", "null", "Null", "NULL"):
            return None
        if text in ("true", "True", "TRUE"):
            return True
        if text in ("false", "False", "FALSE"):
            return False
        if _INT.fullmatch(text):
            return int(text)
        if _LOOKS_NUMERIC.fullmatch(text):
            raise BadInput(f"{self.shown}:{line}: write the number `{printable(text)}` in plain decimal digits")
        if _FLOAT.fullmatch(text):
            value = float(text)
            if math.isfinite(value):
                return value
        if text.lower().lstrip("+-") in (".inf", ".nan") or _FLOAT.fullmatch(text):
            raise BadInput(f"{self.shown}:{line}: `{printable(text)}` is not a finite number; write a plain number")
        return text


def check_yaml(
    model: type[ModelT],
    data: dict[str, Any],
    lines: dict[Place, int],
    source: str,
    *,
    what: str,
    known_keys: Callable[[ErrorDetails, Place], list[str]],
    tags: Callable[[str], list[str]] = lambda _: [],
) -> ModelT:
    """What `parse_yaml` read, as `model` has it.

    Raises BadInput with the first problem as one line: file, line, key, what is wrong, and the key or value that was
    probably meant. `known_keys` are those the schema knows at the place of an unknown one, `tags` the values of a
    discriminator.
    """
    try:
        # JSON mode: strict about types, yet lists are lists and whole numbers count as numbers.
        return model.model_validate_json(json.dumps(data))
    except ValidationError as error:
        raise BadInput(_explained(_most_specific(error), data, lines, source, what, known_keys, tags)) from None


def keys_by_section(
    whole: type[BaseModel], sections: Mapping[str, type[BaseModel]]
) -> Callable[[ErrorDetails, Place], list[str]]:
    """The `known_keys` of a file whose entries are `sections` by the key under which they stand."""

    def known_keys(_problem: ErrorDetails, place: Place) -> list[str]:
        within = [step for step in place[:-1] if isinstance(step, str)]
        return list((sections[within[-1]] if within else whole).model_fields)

    return known_keys


def editor_schema(model: type[BaseModel], title: str) -> dict[str, Any]:
    """The JSON schema of a kind of file, for editors that complete YAML by it."""
    return model.model_json_schema() | {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title}


def _explained(
    problem: ErrorDetails,
    data: dict[str, Any],
    lines: dict[Place, int],
    source: str,
    what: str,
    known_keys: Callable[[ErrorDetails, Place], list[str]],
    tags: Callable[[str], list[str]],
) -> str:
    place = _place_in(data, problem["loc"])
    if problem["type"] == "union_tag_invalid":
        place = (*place, str(problem["ctx"]["discriminator"]).strip("'"))
    line = next((lines[place[:cut]] for cut in range(len(place), -1, -1) if place[:cut] in lines), 1)
    where = f"{printable(source)}:{line}: "
    match problem["type"]:
        case "extra_forbidden":
            key = str(place[-1])
            return f"{where}unknown key `{printable(key)}`{_did_you_mean(key, known_keys(problem, place))}"
        case "union_tag_not_found":
            name = str(problem["ctx"]["discriminator"]).strip("'")
            return f"{where}`{_shown_place(place, what)}` needs `{name}:`, one of {', '.join(tags(name))}"
        case "value_error":
            # A sentence of ours about several keys, which says all there is to say: only the entry is named.
            return where + _entry_of(data, place) + problem["msg"].removeprefix("Value error, ")
    return where + _about_value(problem, _shown_place(place, what))


def _about_value(problem: ErrorDetails, key: str) -> str:
    """What is wrong with the value of `key`."""
    context = problem.get("ctx", {})
    match problem["type"]:
        case "missing":
            return f"`{key}` is missing"
        case "union_tag_invalid":
            tag, name = str(context["tag"]), str(context["discriminator"]).strip("'")
            return f"unknown {name} `{printable(tag)}`{_did_you_mean(tag, _listed(context['expected_tags']))}"
        case "literal_error":
            options = _listed(str(context["expected"]).replace(" or ", ", "))
            return f"`{key}` is {_shown(problem['input'])}{_did_you_mean(str(problem['input']), options)}"
        case _:
            # "Input should be greater than 0", "List should have at least 1 item": the words after the subject.
            _, should, wanted = problem["msg"].partition(" should ")
            if should:
                return f"`{key}` is {_shown(problem['input'])}; it should {wanted}"
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


def _most_specific(error: ValidationError) -> ErrorDetails:
    """Of several problems (a union tries every form) the one deepest in the file, unknown keys first."""
    problems = error.errors(include_url=False)
    order = {"extra_forbidden": 0, "union_tag_invalid": 0}
    return min(problems, key=lambda p: (order.get(p["type"], 1), -len(p["loc"])))


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


def _did_you_mean(given: str, options: list[str]) -> str:
    close = difflib.get_close_matches(given, options, n=1, cutoff=0.5)
    if close:
        return f"; did you mean `{close[0]}`?"
    return f"; known: {', '.join(options)}" if options else ""


def _kind_of(value: Any) -> str:
    """What kind of value this is, for an error."""
    if isinstance(value, list):
        return "a list"
    return "empty" if value is None else f"`{_shown(value)}`"


def _shown(value: Any) -> str:
    return printable(json.dumps(value, ensure_ascii=False), 60)
