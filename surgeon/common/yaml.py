"""Reading YAML that people write: safe 1.2 scalars, line numbers in every message, nothing guessed.

ruamel.yaml was weighed: it knows lines and duplicates too, but not the limits, and its scalars would be replaced all
the same.

The document is read as a graph of nodes and built here, so that no tag can create a Python object, duplicate
keys are found, `6e-2` is a number and `010` is refused, not read as 8. `what` names the kind of file in errors.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from surgeon.common.files import read_given
from surgeon.errors import BadInput, bad_input, printable

LARGEST_FILE = 1_000_000  # bytes
MOST_NODES = 20_000
DEEPEST = 40
_INT = re.compile(r"[-+]?(0|[1-9][0-9]{0,18})")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]{1,4})?")
_LOOKS_NUMERIC = re.compile(r"[-+]?(0[0-9]+|0x[0-9a-fA-F]+|0o[0-7]+|[0-9]+)")
_CORE_TAGS = ("str", "int", "float", "bool", "null", "map", "seq")
Place = tuple[str | int, ...]
ModelT = TypeVar("ModelT", bound=BaseModel)
MOST_PROBLEMS = 20  # shown of one file
NOTHING_GIVEN: Mapping[Place, str] = MappingProxyType({})


def read_text(path: Path, *, what: str) -> str:
    """The text of a regular file. Raises BadInput, which names file and line, where it cannot be read as UTF-8."""
    return decoded(read_given(path, what=what, most=LARGEST_FILE), str(path))


def decoded(raw: bytes, source: str) -> str:
    """Decode what was read from `source`. Raises BadInput, which names file and line, where it is not UTF-8."""
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        where = f"{printable(source)}:{line}"
        raise BadInput(f"{where}: not UTF-8 text (byte {raw[error.start]:#04x}); save it as UTF-8") from None


def parse_yaml(text: str, source: str, *, what: str, needs: str) -> tuple[dict[str, Any], dict[Place, int]]:
    """The document as plain data and the line of every place in it; `needs` are the keys that it must have.

    Raises BadInput for what is not valid YAML, nests too deep, repeats a key, is empty or no mapping.
    """
    shown = printable(source)
    try:
        node = _Reader(text, shown, what).get_single_node()
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


class _Reader(yaml.SafeLoader):
    """Hands events to the composer, which recurses, and refuses deep nesting before it does."""

    def __init__(self, text: str, shown: str, what: str) -> None:
        super().__init__(text)
        self.shown, self.what = shown, what
        self.depth = self.count = 0

    def get_event(self) -> yaml.Event:
        event: yaml.Event = super().get_event()  # type: ignore[no-untyped-call]
        self.count += 1
        if isinstance(event, yaml.CollectionStartEvent):
            self.depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            self.depth -= 1
        if self.depth > DEEPEST:
            line = event.start_mark.line + 1 if event.start_mark else 1
            raise BadInput(f"{self.shown}:{line}: nested more than {DEEPEST} deep; is this a {self.what}?")
        if self.count > 2 * MOST_NODES + 1:
            raise BadInput(f"{self.shown}: more than {MOST_NODES} entries; is this a {self.what}?")
        return event


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
        if _LOOKS_NUMERIC.fullmatch(text) and text.lstrip("+-").isdigit() and text.lstrip("+-")[0] != "0":
            raise BadInput(f"{self.shown}:{line}: the number `{printable(text, 60)}` has more than 19 digits; lower it")
        if _LOOKS_NUMERIC.fullmatch(text):
            raise BadInput(f"{self.shown}:{line}: write the number `{printable(text)}` in plain decimal digits")
        if _FLOAT.fullmatch(text):
            value = float(text)
            if math.isfinite(value):
                return value
        if text.lower().lstrip("+-") in (".inf", ".nan") or _FLOAT.fullmatch(text):
            raise BadInput(f"{self.shown}:{line}: `{printable(text)}` is not a finite number; write a plain number")
        return text


def override(data: dict[str, Any], settings: Sequence[str], *, example: str) -> dict[Place, str]:
    """Set values of a document by `dotted.path=VALUE`, VALUE in YAML; an entry of a list goes by its name or number.

    Returns for every place that was set the option, as errors name it. Raises BadInput for what is no such setting (it
    shows `example`), and where the path leads through a value or to an entry that is not there; keys that the schema
    does not know are found with the rest of the document (`check_yaml`).
    """
    given: dict[Place, str] = {}
    for setting in settings:
        option = f"--set {setting}"
        path, equals, value = setting.partition("=")
        steps = path.split(".")
        if not equals or not all(steps):
            raise BadInput(f"{printable(option)}: give a key and a value, as in --set {example}")
        if len(steps) > DEEPEST:
            raise BadInput(f"{printable(option)}: nested more than {DEEPEST} deep; give a key, as in --set {example}")
        node: Any = data
        place: Place = ()
        for number, step in enumerate(steps):
            key = _key_in(node, step, option, ".".join(steps[:number]))
            place = (*place, key)
            if number + 1 == len(steps):
                node[key] = parse_yaml(f"value: {value}", option, what="value", needs="a value")[0]["value"]
            elif isinstance(node, dict) and node.get(key) is None:
                # A section that the file leaves out; of a wrong name it is this option's.
                node[key] = {}
                given[place] = option
            node = node[key]
        given[place] = option
    return given


def _key_in(node: Any, step: str, option: str, above: str) -> str | int:
    """The key, or the number of the list's entry, that a step of a dotted path means. Raises BadInput."""
    if isinstance(node, dict):
        return step
    if not isinstance(node, list):
        raise BadInput(f"{printable(option)}: `{printable(above)}` is a value, which has no keys; set it as it is")
    names = [str(entry.get("name", entry.get("op", ""))) if isinstance(entry, dict) else "" for entry in node]
    if names.count(step) > 1:
        raise BadInput(
            f"{printable(option)}: `{printable(above)}` has {names.count(step)} entries `{printable(step)}`; give the"
            " number of one, counted from 0"
        )
    if step in names:
        return names.index(step)
    if step.isdecimal() and int(step) < len(node):
        return int(step)
    named = [name for name in dict.fromkeys(names) if name]
    counted = f"; it has {len(node)}, counted from 0"
    raise BadInput(
        f"{printable(option)}: `{printable(above)}` has no entry `{printable(step)}`"
        f"{did_you_mean(step, named) if named and not step.isdecimal() else counted}"
    )


class _Writer(yaml.SafeDumper):
    """Writes plain data, with quotes around every text that is not a plain word."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_PLAIN_WORD = re.compile(r"[A-Za-z][A-Za-z_]*")
_Writer.add_representer(
    str,
    lambda writer, text: writer.represent_scalar(
        "tag:yaml.org,2002:str", text, style=None if _PLAIN_WORD.fullmatch(text) else '"'
    ),
)


def written_yaml(data: Mapping[str, Any]) -> str:
    """Plain data as YAML that `parse_yaml` reads back as it is: to YAML 1.1, by which PyYAML writes, `6e-2` is text."""
    return str(yaml.dump(dict(data), Dumper=_Writer, sort_keys=False, allow_unicode=True, width=120))


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
        if problem["type"] == "extra_forbidden" and (meant := _nearest(str(place[-1]), known_keys(problem, place)))
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
            return f"`{key}` is {_shown(problem['input'])}{did_you_mean(str(problem['input']), options)}"
        case _:
            # "Input should be greater than 0", "List should have at least 1 item": the words after the subject.
            _, should, rule = problem["msg"].partition(" should ")
            if should:
                return f"`{key}` is {_shown(problem['input'])}; it should {rule}"
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


def did_you_mean(given: str, options: Sequence[str]) -> str:
    """Return what to add to an error about `given`: the option that is nearest, or all of them."""
    if (close := _nearest(given, options)) is not None:
        return f"; did you mean `{close}`?"
    return f"; known: {', '.join(options)}" if options else ""


def _nearest(given: str, options: Sequence[str]) -> str | None:
    return next(iter(difflib.get_close_matches(given, options, n=1, cutoff=0.5)), None)


def _kind_of(value: Any) -> str:
    """Name the kind of a value, for an error."""
    if isinstance(value, list):
        return "a list"
    return "empty" if value is None else f"`{_shown(value)}`"


def _shown(value: Any) -> str:
    return printable(json.dumps(value, ensure_ascii=False), 60)
