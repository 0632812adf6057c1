"""Reading hand-written YAML: safe YAML 1.2 scalars, line numbers in every message, no guesses.

ruamel.yaml was considered: it also reports lines and duplicates, but has no limits, and its scalars would have to be
replaced too. The document is read as a graph of nodes and converted here. So no tag can create a Python object,
duplicate keys are found, `6e-2` is a number, and `010` is refused, not read as 8. `what` names the kind of file in
errors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from surgeon.common.files import read_given
from surgeon.common.formatting import did_you_mean, value_text
from surgeon.errors import BadInput, printable

LARGEST_FILE = 1_000_000  # bytes
MOST_NODES = 20_000
DEEPEST = 40
_INT = re.compile(r"[-+]?(0|[1-9][0-9]{0,18})")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]{1,4})?")
_LOOKS_NUMERIC = re.compile(r"[-+]?(0[0-9]+|0x[0-9a-fA-F]+|0o[0-7]+|[0-9]+)")
# Characters that look like spaces but are letters to YAML, before or after a key or a dash.
_ODD_SPACE = re.compile(r"^ *(?:- *)*(?:[\w.-]+:)? *([\u00a0\u2000-\u200b\u202f\u205f\u3000])", re.MULTILINE)
_CORE_TAGS = ("str", "int", "float", "bool", "null", "map", "seq")
Place = tuple[str | int, ...]


@dataclass
class Document:
    """A YAML document as it was read, which may be changed until its schema checks it (`check_yaml`).

    `lines` gives the line of every place in it. `source` is the file's name and `what` its kind, for errors. `given`
    are the options that changed it, by the place that they set.
    """

    data: dict[str, Any]
    lines: dict[Place, int]
    source: str
    what: str
    given: dict[Place, str] = field(default_factory=dict)

    def override(self, settings: Sequence[str], *, example: str, called: str = "--set") -> None:
        """Set values by `dotted.path=VALUE`, VALUE in YAML; a step into a list is an entry's name or number.

        Missing sections are created. Errors begin with `called` and the setting. Raises BadInput, which shows
        `example`, for a setting of another form, and BadInput where the path leads through a value or to a missing
        entry. Keys that the schema does not know are reported later, with the rest of the document.
        """
        for setting in settings:
            option = f"{called} {setting}"
            path, equals, value = setting.partition("=")
            steps = path.split(".")
            if not equals or not all(steps):
                raise BadInput(f"{printable(option)}: give a key and a value, as in --set {example}")
            if len(steps) > DEEPEST:
                raise BadInput(
                    f"{printable(option)}: nested more than {DEEPEST} deep; give a key, as in --set {example}"
                )
            node: Any = self.data
            place: Place = ()
            for number, step in enumerate(steps):
                key = _key_in(node, step, option, ".".join(steps[:number]))
                place = (*place, key)
                if number + 1 == len(steps):
                    node[key] = parse_yaml(f"value: {value}", option, what="value", needs="a value").data["value"]
                elif isinstance(node, dict) and node.get(key) is None:
                    # A section that the file leaves out; of a wrong name it is this option's.
                    node[key] = {}
                    self.given[place] = option
                node = node[key]
            self.given[place] = option


def read_text(path: Path, *, what: str) -> str:
    """Return the text of a regular file. Raises BadInput, with file and line, where it cannot be read as UTF-8."""
    return decoded(read_given(path, what=what, most=LARGEST_FILE), str(path))


def decoded(raw: bytes, source: str) -> str:
    """Decode bytes read from `source`. Raises BadInput, with file and line, where they are not UTF-8."""
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        where = f"{printable(source)}:{line}"
        raise BadInput(f"{where}: not UTF-8 text (byte {raw[error.start]:#04x}); save it as UTF-8") from None


def read_yaml(path: Path, *, what: str, needs: str) -> Document:
    """Read a file that holds a document; `what` and `needs` are for errors, as in `parse_yaml`.

    Raises BadInput as `read_text` and `parse_yaml` do, and for a file of rows.
    """
    if path.suffix in (".jsonl", ".parquet"):
        raise BadInput(f"{printable(str(path))}: holds rows, not a {what}; name it in one: YAML with {needs}")
    return parse_yaml(read_text(path, what=what), str(path), what=what, needs=needs)


def parse_yaml(text: str, source: str, *, what: str, needs: str) -> Document:
    """Read a document that is given as text; `needs` describes, for errors, the keys that it must have.

    Raises BadInput where the text is not valid YAML, nests too deep, repeats a key, is empty or no mapping.
    """
    shown = printable(source)
    if odd := _ODD_SPACE.search(text):
        raise BadInput(
            f"{shown}:{text.count(chr(10), 0, odd.end()) + 1}: U+{ord(odd[1]):04X} where a space belongs (U+00A0 is a"
            " non-breaking space), a letter to YAML; type a plain space"
        )
    try:
        node = _Reader(text, shown, what).get_single_node()
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        # The parser often reports the fault one line too late: after `key:value`, or an unclosed bracket.
        raise BadInput(
            f"{shown}:{line}: not valid YAML: {printable(error.problem or error.context or '')}; mend this line, or the"
            " one before it"
        ) from None
    except yaml.reader.ReaderError as error:
        raise BadInput(
            f"{shown}:{text.count(chr(10), 0, error.position) + 1}: not valid YAML: a control character"
            f" ({printable(chr(error.character))}); remove it"
        ) from None
    lines: dict[Place, int] = {}
    if node is None:
        raise BadInput(f"{shown}: the {what} is empty; it needs {needs}")
    data = _Builder(shown, lines, what).build(node, ())
    if not isinstance(data, dict):
        raise BadInput(f"{shown}: a {what} is a mapping with {needs}, not {_kind_of(data)}; write one")
    return Document(data, lines, source, what)


class _Reader(yaml.SafeLoader):
    """A loader that counts events before the recursive composer receives them, and so refuses deep nesting early."""

    def __init__(self, text: str, shown: str, what: str) -> None:
        super().__init__(text)
        self.shown, self.what = shown, what
        self.depth = self.count = 0

    def get_event(self) -> yaml.Event:
        """Return the next event. Raises BadInput where the document nests too deep or has too many entries."""
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
    """A builder of plain data from a node graph, which records the line of every place in it."""

    shown: str
    lines: dict[Place, int]
    what: str
    built: int = field(default=0, init=False)

    def build(self, node: yaml.Node, place: Place) -> Any:
        """Return a node as plain data, and record the lines of its places.

        Raises BadInput for anything but plain data.
        """
        line = node.start_mark.line + 1
        self.lines.setdefault(place, line)
        # Expanded entries are counted: aliases repeat their node here, so an alias bomb stops at the limit.
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
        """Return a mapping node as a dict.

        Raises BadInput for a repeated key, a merge key, or a key that is no scalar.
        """
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise BadInput(
                    f"{self.shown}:{line}: a key must be a plain word, not a list or a mapping; write one in its place"
                )
            if key_node.tag.endswith(":merge"):
                raise BadInput(f"{self.shown}:{line}: merge keys (`<<`) are not read; write out what it brings in")
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
        """Return the text.

        Raises BadInput where its escapes (`\\0`, `\\ud800`) encode a NUL character or half a UTF-16 pair.
        """
        # A plan written by json encodes a character beyond 16 bits as two escapes.
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
        wrong = next((c for c in text if c == "\0" or "\ud800" <= c <= "\udfff"), None)
        if wrong is not None:
            kind = "a NUL character" if wrong == "\0" else "half of a UTF-16 pair"
            raise BadInput(f"{self.shown}:{line}: {kind} ({printable(wrong)}) in a text; remove it")
        return text

    def _scalar(self, node: yaml.ScalarNode, line: int) -> Any:
        """Return a scalar node's value by YAML 1.2's rules.

        Raises BadInput for a number in an ambiguous or infinite form.
        """
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


def _key_in(node: Any, step: str, option: str, above: str) -> str | int:
    """Return the key, or the list entry's number, for one step of a dotted path.

    Raises BadInput where the step leads into a value, or to no entry or several entries of a list.
    """
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
    problem = f"{printable(option)}: `{printable(above)}` has no entry `{printable(step)}`"
    if named and not step.isdecimal():
        raise BadInput(f"{problem}{did_you_mean(step, named)}")
    raise BadInput(f"{problem}; it has {len(node)}, counted from 0")


class _Writer(yaml.SafeDumper):
    """A dumper of plain data that quotes every text that is not a plain word."""

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
    """Return plain data as YAML that `parse_yaml` reads back unchanged, although PyYAML treats `6e-2` as text."""
    return str(yaml.dump(dict(data), Dumper=_Writer, sort_keys=False, allow_unicode=True, width=120))


def _kind_of(value: Any) -> str:
    """Return the kind of a value, for an error."""
    if isinstance(value, list):
        return "a list"
    return "empty" if value is None else f"`{value_text(value)}`"
