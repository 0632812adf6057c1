"""What is known of a base without deriving it: what was derived of it before.

A derived anatomy is kept from one command to the next, so that the second needs neither torch nor a twin: that saves
4 to 10 processor seconds, nearly all of them the import of torch and transformers.

An entry holds what `dissect` found out of a config and headers, and the answers that its derivation gave since, as
grown configs; proofs of plans are kept beside them (apply/proofs.py). It counts for the same config, tensors, versions
and code of surgeon alone, and where this user's surgeon wrote it. Only answers are kept, never refusals: those are made
anew each time.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import BaseModel, ConfigDict, JsonValue, TypeAdapter

from surgeon._version import __version__
from surgeon.checkpoint.header import TensorInfo
from surgeon.checkpoint.own_code import OwnCode
from surgeon.common.cache import cache_folder, is_off, read_entry, write_entry
from surgeon.common.plugins import any_installed
from surgeon.families.anatomy import Anatomy, Derivation, LayerKind, Stream
from surgeon.families.dissect import dissect
from surgeon.families.family import Family, Sizes, Space
from surgeon.families.grafted_config import is_grafted

# Raised whenever entries mean something else.
_FORMAT = 3
_KIND = "anatomies"
# What a derivation runs on.
_LIBRARIES = ("transformers", "torch", "accelerate", "safetensors")
_Answer = TypeVar("_Answer")


class _Entry(BaseModel):
    """One base as it was found, but for what its own headers say; `answers` are the derivation's, by their question."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    day: datetime.date
    evidence: str
    stack: str
    path: tuple[str, ...]
    prefix: str
    stem: str
    encoder: bool
    sizes: Sizes
    kinds: tuple[LayerKind, ...]
    kind_of: tuple[int, ...]
    # Each layer's tensors in order: the lists that occur, and which of them each layer has.
    suffixes: tuple[tuple[str, ...], ...]
    suffixes_of: tuple[int, ...]
    outer: tuple[str, ...]
    beyond: tuple[tuple[str, ...], ...]
    layer_types: tuple[str, ...] | None
    tied: bool
    idle: tuple[str, ...]
    answers: dict[str, JsonValue]


class Remembered(Derivation):
    """A derivation whose answers are kept; what was not asked before is asked of the base's own, made when needed.

    Making it takes torch and transformers. Proofs are always its own.
    """

    def __init__(self, make: Callable[[], Derivation], entry: _Entry | None, answers: dict[str, JsonValue]) -> None:
        self._make, self._entry, self.answers = make, entry, answers
        self._made: Derivation | None = None

    @property
    def own(self) -> Derivation:
        """The base's own derivation."""
        if self._made is None:
            self._made = self._make()
        return self._made

    @property
    def is_new(self) -> bool:
        """Whether the base's own derivation was needed."""
        return self._made is not None

    @property
    def evidence(self) -> str:  # type: ignore[override]
        """As `Derivation` says, and whether that was proven earlier."""
        if self._entry is None or self.is_new:
            return self.own.evidence
        return f"{self._entry.evidence} (on {self._entry.day}, kept in the cache)"

    @property
    def stack(self) -> str:  # type: ignore[override]
        """As `Derivation` says."""
        return self.own.stack if self._entry is None else self._entry.stack

    @property
    def path(self) -> tuple[str, ...]:  # type: ignore[override]
        """As `Derivation` says."""
        return self.own.path if self._entry is None else self._entry.path

    @property
    def activation(self) -> str:
        """As `Derivation` says."""
        return self._asked(str, lambda own: own.activation, "activation")

    def own_activation(self, layer: int) -> str:
        """As `Derivation` says."""
        return self._asked(str, lambda own: own.own_activation(layer), "own activation", layer)

    def blocks(self, layer: int) -> Mapping[str, str]:
        """As `Derivation` says."""
        return self._asked(dict[str, str], lambda own: dict(own.blocks(layer)), "blocks", layer)

    def whole_heads(self, layer: int) -> bool:
        """As `Derivation` says."""
        return self._asked(bool, lambda own: own.whole_heads(layer), "heads", layer)

    def spaces(self, layer: int) -> tuple[Space, ...]:
        """As `Derivation` says."""
        return self._asked(tuple[Space, ...], lambda own: own.spaces(layer), "spaces", layer)

    def linear(self, layer: int) -> Mapping[str, tuple[int, ...]]:
        """As `Derivation` says."""
        return self._asked(dict[str, tuple[int, ...]], lambda own: dict(own.linear(layer)), "linear", layer)

    def grown(self, order: Sequence[int], opened: Sequence[int] = ()) -> dict[str, Any]:
        """As `Derivation` says."""
        return self._asked(dict[str, Any], lambda own: own.grown(order, opened), "grown", [*order], [*opened])

    def grafted(
        self, trunk: Mapping[str, Any], order: Sequence[int], twins: Sequence[int], modules: Sequence[str]
    ) -> dict[str, Any]:
        """As `Derivation` says."""
        asked = ("grafted", trunk, [*order], [*twins], [*modules])
        return self._asked(dict[str, Any], lambda own: own.grafted(trunk, order, twins, modules), *asked)

    def vocabulary_tensors(self, rows: int) -> dict[str, bool]:
        """As `Derivation` says."""
        return self._asked(dict[str, bool], lambda own: own.vocabulary_tensors(rows), "vocabulary", rows)

    def untied(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """As `Derivation` says."""
        return self._asked(dict[str, Any], lambda own: own.untied(config), "untied", config)

    def head_tensors(self) -> dict[str, str]:
        """As `Derivation` says."""
        return self._asked(dict[str, str], lambda own: own.head_tensors(), "head")

    def text_model(self) -> tuple[dict[str, Any], dict[str, str]]:
        """As `Derivation` says."""
        kind = tuple[dict[str, Any], dict[str, str]]
        return self._asked(kind, lambda own: own.text_model(), "text model")

    def layer_axes(self, grown: Mapping[str, Any], layers: int) -> dict[str, int]:
        """As `Derivation` says."""
        return self._asked(dict[str, int], lambda own: own.layer_axes(grown, layers), "axes", grown, layers)

    def inner_fields(self, *, by: int = 0, multiple_of: int = 1) -> dict[str, int]:
        """As `Derivation` says."""
        question = ("inner fields", by, multiple_of)
        return self._asked(dict[str, int], lambda own: own.inner_fields(by=by, multiple_of=multiple_of), *question)

    def growths(self, fields: Mapping[str, int]) -> tuple[dict[str, tuple[int, int, int]], ...]:
        """As `Derivation` says."""
        kind = tuple[dict[str, tuple[int, int, int]], ...]
        return self._asked(kind, lambda own: own.growths(fields), "growths", dict(fields))

    def stream(self, times: int) -> Stream:
        """As `Derivation` says."""
        return self._asked(Stream, lambda own: own.stream(times), "stream", times)

    def shared_places(self, order: Sequence[int]) -> dict[str, tuple[str, tuple[int, ...]]]:
        """As `Derivation` says."""
        kind = dict[str, tuple[str, tuple[int, ...]]]
        return self._asked(kind, lambda own: own.shared_places(order), "shared places", [*order])

    def parameters(self) -> dict[str, tuple[str, str]]:
        """As `Derivation` says."""
        return self._asked(dict[str, tuple[str, str]], lambda own: own.parameters(), "parameters")

    def _asked(self, kind: Any, ask: Callable[[Derivation], _Answer], *question: Any) -> _Answer:
        """The answer kept for this question, which is of this kind; else the base's own, which may refuse."""
        key = digest_of(question)
        if key in self.answers:
            return cast(_Answer, TypeAdapter(kind).validate_python(self.answers[key]))
        answer = ask(self.own)
        self.answers[key] = json.loads(json.dumps(answer))
        return answer


def recalled(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo], own: OwnCode | None = None) -> Anatomy:
    """As `dissect`, from what is kept of this base; `keep` then stores what was found out.

    Raises BadInput as `dissect` does.
    """
    folder = cache_folder(_KIND)
    if is_off() or any_installed() or is_grafted(config):
        return dissect(config, tensors, own)
    entry = None if folder is None else _read(folder, _key(config, tensors, own))
    if entry is not None:
        return _anatomy_of(entry, config, tensors, own)
    anatomy = dissect(config, tensors, own)
    if folder is None:
        return anatomy
    derivation = anatomy.derivation
    return replace(anatomy, derivation=Remembered(lambda: derivation, None, {}))


def keep(
    anatomy: Anatomy, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo], own: OwnCode | None = None
) -> None:
    """Store what was found out of a base that `recalled` gave, if anything is new."""
    folder, derivation = cache_folder(_KIND), anatomy.derivation
    if folder is None or not isinstance(derivation, Remembered) or not derivation.is_new:
        return
    lists = list(dict.fromkeys(tuple(layer) for layer in anatomy.layers))
    entry = _Entry(
        day=datetime.date.today(),
        evidence=derivation.evidence,
        stack=derivation.stack,
        path=derivation.path,
        prefix=anatomy.prefix,
        stem=anatomy.family.stem,
        encoder=anatomy.family.encoder,
        sizes=anatomy.sizes,
        kinds=anatomy.kinds,
        kind_of=anatomy.kind_of,
        suffixes=tuple(lists),
        suffixes_of=tuple(lists.index(tuple(layer)) for layer in anatomy.layers),
        outer=tuple(anatomy.outer),
        beyond=tuple(tuple(layer) for layer in anatomy.beyond),
        layer_types=None if anatomy.layer_types is None else tuple(anatomy.layer_types),
        tied=anatomy.tied,
        idle=anatomy.idle,
        answers=derivation.answers,
    )
    write_entry(folder, f"{_key(config, tensors, own)}.json", entry.model_dump_json().encode())


def _read(folder: Path, key: str) -> _Entry | None:
    """The entry of this key; None where there is none."""
    content = read_entry(folder, f"{key}.json")
    return None if content is None else _Entry.model_validate_json(content)


def _anatomy_of(
    entry: _Entry, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo], own: OwnCode | None
) -> Anatomy:
    """The anatomy that an entry tells of, with this base's tensors, which are those that it was found out of."""
    layers = tuple(
        {suffix: tensors[f"{entry.stem}{index}.{suffix}"] for suffix in entry.suffixes[number]}
        for index, number in enumerate(entry.suffixes_of)
    )
    beyond = tuple(
        {suffix: tensors[f"{entry.stem}{index}.{suffix}"] for suffix in suffixes}
        for index, suffixes in enumerate(entry.beyond, len(layers))
    )
    types = entry.layer_types

    def made() -> Derivation:
        return dissect(config, tensors, own).derivation

    return Anatomy(
        family=Family(str(config["model_type"]), entry.stem, entry.encoder),
        sizes=entry.sizes,
        kinds=entry.kinds,
        kind_of=entry.kind_of,
        prefix=entry.prefix,
        layers=layers,
        outer={name: tensors[name] for name in entry.outer},
        layer_types=None if types is None else list(types),
        tied=entry.tied,
        grafted=tuple({} for _ in layers),
        bank={},
        idle=entry.idle,
        beyond=beyond,
        derivation=Remembered(made, entry, dict(entry.answers)),
    )


def _key(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo], own: OwnCode | None = None) -> str:
    """What an anatomy follows from: the base's config and headers, and the code and libraries that found it out."""
    held = [(name, info.dtype, info.shape) for name, info in tensors.items()]
    return digest_of([_FORMAT, found_with(), config, held, own and own.digest])


@cache
def versions() -> dict[str, str]:
    """The versions of the libraries that a proof runs on."""
    return {name: metadata.version(name) for name in _LIBRARIES}


def found_with() -> list[Any]:
    """What an answer depends on beside its question: surgeon's code, the libraries and the machine's kind."""
    return [__version__, _code(), versions(), platform.python_version(), platform.machine()]


@cache
def _code() -> str:
    """A digest of surgeon's own modules: its version says nothing of a working copy."""
    package = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(f"{file.relative_to(package)} {file.stat().st_size}\n".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


def digest_of(content: Any) -> str:
    """A digest of JSON data."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
