"""A cache of derived anatomies, from one command to the next.

With a cached anatomy, the second command needs neither torch nor a twin: that saves 4 to 10 processor seconds, nearly
all of them the import of torch and transformers.

An entry holds what `dissect` found from a config and headers, and the answers that its derivation has given since, such
as grown configs; proofs of plans are cached next to them (writing/proofs.py). It is valid only for the same config,
tensors, versions and code of surgeon, and only if this user's surgeon wrote it. Only answers are cached, never
refusals, which are computed each time.
"""

from __future__ import annotations

import datetime
import hashlib
import platform
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, JsonValue

from surgeon._version import __version__
from surgeon.anatomy.anatomy import Anatomy, Found
from surgeon.anatomy.derivation import Derivation
from surgeon.anatomy.dissect import dissect
from surgeon.anatomy.grafted_config import is_grafted
from surgeon.checkpoint.header import TensorInfo
from surgeon.checkpoint.own_code import OwnCode
from surgeon.common.cache import cache_folder, digest_of, is_off, read_entry, write_entry
from surgeon.common.plugins import any_installed

# Increased whenever the meaning of entries changes.
_FORMAT = 5
_KIND = "anatomies"
# The libraries that a derivation runs on.
_LIBRARIES = ("transformers", "torch", "accelerate", "safetensors")


class _Entry(BaseModel):
    """A base's cached findings, without what its headers contain; `answers` are the derivation's, by question."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    day: datetime.date
    found: Found
    # Each layer's tensors in order: the lists that occur, and which of them each layer has.
    suffixes: tuple[tuple[str, ...], ...]
    suffixes_of: tuple[int, ...]
    outer: tuple[str, ...]
    beyond: tuple[tuple[str, ...], ...]
    answers: dict[str, JsonValue]


def recalled(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo], own: OwnCode | None = None) -> Anatomy:
    """Return a checkpoint's anatomy from the cache, or else from `dissect`; `keep` stores a new one afterwards.

    Raises BadInput as `dissect` does.
    """
    folder = cache_folder(_KIND)
    if is_off() or any_installed() or is_grafted(config):
        return dissect(config, tensors, own)
    entry = None if folder is None else _read(folder, _key(config, tensors, own))
    if entry is not None:
        return _anatomy_of(entry, config, tensors, own)
    return dissect(config, tensors, own)


def keep(
    anatomy: Anatomy, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo], own: OwnCode | None = None
) -> None:
    """Store the findings about a base whose anatomy `recalled` returned, if any are new."""
    folder, derivation = cache_folder(_KIND), anatomy.derivation
    if folder is None or any_installed() or is_grafted(config) or not derivation.is_new:
        return
    lists = list(dict.fromkeys(tuple(layer) for layer in anatomy.layers))
    entry = _Entry(
        day=datetime.date.today(),
        found=Found(**{each.name: getattr(anatomy, each.name) for each in fields(Found)}),
        suffixes=tuple(lists),
        suffixes_of=tuple(lists.index(tuple(layer)) for layer in anatomy.layers),
        outer=tuple(anatomy.outer),
        beyond=tuple(tuple(layer) for layer in anatomy.beyond),
        answers=dict(sorted(derivation.answers.items())),
    )
    write_entry(folder, f"{_key(config, tensors, own)}.json", entry.model_dump_json().encode())


def _read(folder: Path, key: str) -> _Entry | None:
    """Return the entry of this key; None where there is none."""
    content = read_entry(folder, f"{key}.json")
    return None if content is None else _Entry.model_validate_json(content)


def _anatomy_of(
    entry: _Entry, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo], own: OwnCode | None
) -> Anatomy:
    """Return the anatomy of an entry, with this base's tensors, which equal those that it was found from."""
    stem = entry.found.family.stem
    layers = [entry.suffixes[number] for number in entry.suffixes_of]
    held = tuple(
        {suffix: tensors[f"{stem}{index}.{suffix}"] for suffix in suffixes}
        for index, suffixes in enumerate([*layers, *entry.beyond])
    )
    return Anatomy(
        **vars(entry.found),
        layers=held[: len(layers)],
        outer={name: tensors[name] for name in entry.outer},
        grafted=tuple({} for _ in layers),
        bank={},
        beyond=held[len(layers) :],
        derivation=Derivation(lambda: dissect(config, tensors, own).derivation.seen, entry.answers, entry.day),
    )


def _key(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo], own: OwnCode | None = None) -> str:
    """Return the key of an anatomy: a digest of config, headers, and the code and libraries that derive it."""
    held = [(name, info.dtype, info.shape) for name, info in tensors.items()]
    return digest_of([_FORMAT, found_with(), config, held, own and own.digest])


@cache
def versions() -> dict[str, str]:
    """Return the versions of the libraries that a proof runs on."""
    return {name: metadata.version(name) for name in _LIBRARIES}


def found_with() -> list[Any]:
    """Return what an answer depends on besides its question: surgeon's code, the libraries and the kind of machine."""
    return [__version__, _code(), versions(), platform.python_version(), platform.machine()]


@cache
def _code() -> str:
    """Return a digest of surgeon's own modules: in a working copy, the version does not identify the code."""
    package = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(f"{file.relative_to(package)} {file.stat().st_size}\n".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()
