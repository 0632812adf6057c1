"""The table of usual models as a file: what it holds, how it is read, and what it counts for (usual.py asks it)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from surgeon.families.family import Kind, Role

FILE = Path(__file__).with_name("usual.json")
PACKAGE = Path(__file__).parent.parent
TYPES = "layer_types"
LABELS, NUMBERS = "id2label", "label2id"
# Forms that a field may have whatever its text says.
ANY_TEXT = "text"
When = dict[str, JsonValue]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SizeField(_Model):
    """The field of a config.json that holds a size, and what counts where it is left out (None: of other sizes).

    `may_be_null`: null is taken for left out. `may_be_zero`: a model runs without what it counts, as without types of
    tokens.
    """

    field: str
    default: int | None = None
    may_be_null: bool = False
    may_be_zero: bool = False


class PartShape(_Model):
    """A tensor of a layer as in `Part`, its numbers written as names of sizes."""

    shape: tuple[str, ...]
    kind: Kind
    blocks: tuple[tuple[Role, str], ...] = ()
    identity: float | None = None


class LayerEntry(_Model):
    """A layer where a config has these settings (`when`); `whole_heads` says it by how heads are grouped."""

    when: When
    parts: dict[str, PartShape]
    silence: dict[str, float]
    refusal: str = ""
    blocks: dict[str, str]
    linear: dict[str, tuple[str, str]]
    whole_heads: dict[str, bool]


class OuterTensor(_Model):
    """A tensor outside the layers. `reads` as in `Derivation.vocabulary_tensors`; None: it has no row for each id."""

    shape: tuple[str, ...]
    needed: bool
    reads: bool | None = None


class HeadEntry(_Model):
    """What stands outside the layers where a config has these settings; `composition` is one of the type's."""

    when: When
    stack: str
    tied: bool
    outer: dict[str, OuterTensor]
    composition: str


class Period(_Model):
    """Types of layers where a config has these settings: in turn, where it lists none itself."""

    when: When
    types: tuple[str, ...]


class Pattern(_Model):
    """The types of layers that a config may list, and those that its class lists by itself.

    `needs` are settings that a type of layers is nothing without, which must be numbers.
    """

    listed: tuple[Period, ...]
    unlisted: tuple[Period, ...]
    needs: dict[str, str]


class TypeEntry(_Model):
    """A model type: `fields` are those that a config.json may have, with the forms that their values may be of.

    `files` are transformers' own, with their digests; `required` are fields that must be there. `activations` are the
    fields that may name the activation, the first that does counts. `title` is that of layers of a type whose configs
    list no types of layers. `compositions` are the classes that carry grafts, by the head.
    """

    files: dict[str, str]
    prefix: str
    stem: str
    encoder: bool
    sizes: dict[str, SizeField]
    required: tuple[str, ...]
    defaults: dict[str, JsonValue]
    fields: dict[str, tuple[str, ...]]
    activations: tuple[str, ...]
    title: str
    pattern: Pattern | None
    compositions: dict[str, dict[str, JsonValue]]
    layers: tuple[LayerEntry, ...]
    heads: tuple[HeadEntry, ...]

    def value(self, config: Mapping[str, Any], field: str) -> Any:
        """A setting of a config, or what counts where it is left out."""
        return config.get(field, self.defaults.get(field))

    def first(self, entries: Iterable[Any], config: Mapping[str, Any]) -> Any:
        """The first of these entries that is for such a config; None where there is none."""

        def fits(when: When) -> bool:
            found = {field: self.value(config, field) for field in when}
            # JSON tells 1 from true, which are equal to Python.
            return json.dumps(found) == json.dumps(when)

        return next((entry for entry in entries if fits(entry.when)), None)


class Table(_Model):
    """The whole file: what it was made with, and the types.

    `files` are those of transformers that all types follow from, with their digests; `code` are surgeon's, with one
    digest of them all.
    """

    transformers: str
    files: dict[str, str]
    code: tuple[str, ...]
    code_digest: str
    types: dict[str, TypeEntry]


@cache
def read_table() -> Table | None:
    """The table; None where surgeon's code is another than it was made with, or it cannot be read."""
    try:
        table = Table.model_validate_json(FILE.read_bytes())
    except (OSError, ValidationError):
        return None
    return table if digest_of_files(PACKAGE, table.code) == table.code_digest else None


def digest_of_files(folder: Path, names: Iterable[str]) -> str:
    """A digest of files, by their names and content; empty where one cannot be read."""
    digest = hashlib.sha256()
    for name in names:
        try:
            content = (folder / name).read_bytes()
        except OSError:
            return ""
        digest.update(f"{name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def form_of(value: Any, *, inside: bool = False) -> str:
    """What kind of value a config's field has: texts and flags as they are, of numbers only that they are some."""
    match value:
        case None | bool():
            return json.dumps(value)
        case str():
            return f"={value}"
        case int() | float():
            return "number" if inside else type(value).__name__
        case list():
            return f"[{', '.join(sorted({form_of(each, inside=True) for each in value}))}]"
        case dict():
            return f"{{{', '.join(f'{key}: {form_of(value[key], inside=True)}' for key in sorted(value))}}}"
    return type(value).__name__
