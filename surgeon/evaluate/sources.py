"""The texts to evaluate on: files named on the command line, a data file, or the held-out text of a training config.

All sources are opened and read through once before any model is loaded.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, model_validator

from surgeon.common.schema import Entry
from surgeon.common.yaml import check_yaml, keys_by_section, parse_yaml, read_text, where
from surgeon.data.documents import Corpus
from surgeon.data.packing import generator, split
from surgeon.data.sources import HeldOut, Naming, check_there, open_source
from surgeon.data.specs import SourceSpec, TextSpec
from surgeon.errors import BadInput, bad_input, printable
from surgeon.train.config.loading import load_config

_NAMED = re.compile(r"([A-Za-z0-9_-]{1,60})=(.+)", re.S)
_CONFIGS = (".yaml", ".yml")
_WHAT = "data file"
_NEEDS = "`surgeon_data: 1` and `sources:`"


class DataConfig(Entry):
    """Texts to evaluate on."""

    surgeon_data: Annotated[Literal[1], Field(description="version of this format")]
    sources: Annotated[list[TextSpec], Field(min_length=1, max_length=100)]

    @model_validator(mode="after")
    def _differ(self) -> DataConfig:
        names = [source.name for source in self.sources]
        if doubled := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"two sources are called {doubled!r}; names must differ")
        return self


@dataclass(frozen=True)
class _Named:
    """The file that names a source: a data file, or the text itself where the command line names it."""

    source: Path

    def resolve(self, path: str) -> Path:
        """The path to open for one that the file names."""
        return self.source.parent / path


def open_sources(
    data: str | Path | Sequence[str | Path] | Mapping[str, str | Path],
    *,
    only: Sequence[str] = (),
    most: int = 0,
    say: Callable[[str], None] = lambda _line: None,
    labels: bool = False,
) -> list[HeldOut]:
    """Open every source of `data`, or those named in `only`, with at most `most` documents each (0: all).

    `data` is one or more of: a text file or folder, `NAME=FILE`, a data file (.yaml with `surgeon_data: 1`), a training
    config, for the text that `train` holds out; or files by their names. It takes a fixed random choice of a source
    with more documents. With `labels` each text has one. Raises BadInput where a file
    cannot be read, two sources share a name, some have labels and are not to, or nothing is held out.
    """
    found: dict[str, HeldOut] = {}
    known: list[str] = []
    for name, path in _entries(data):
        for source, open_it in _sources(name, path, say, labels):
            if source in known:
                raise BadInput(
                    f"{printable(str(path))}: the name {source} is used twice; give this source another: NAME=FILE"
                )
            known.append(source)
            if (not only or source in only) and (held := open_it()) is not None:
                found[source] = _sample(held, most, say)
    for name in only:
        if name not in known:
            raise BadInput(f"--source {printable(name)}: no such source; the data has {', '.join(known)}")
    if not found:
        raise BadInput("nothing to evaluate on: the data has no held-out documents; set `validation:` of a source")
    return list(found.values())


_Opener = Callable[[], HeldOut | None]


def _entries(data: str | Path | Sequence[str | Path] | Mapping[str, str | Path]) -> list[tuple[str | None, Path]]:
    if isinstance(data, Mapping):
        return [(name, Path(path)) for name, path in data.items()]
    entries: list[tuple[str | None, Path]] = []
    for given in [data] if isinstance(data, str | Path) else data:
        match = _NAMED.fullmatch(str(given))
        if match and not Path(given).exists():
            entries.append((match[1], Path(match[2])))
        else:
            entries.append((None, Path(given)))
    if not entries:
        raise BadInput("no data: give a text file, NAME=FILE or a data file")
    return entries


def _sources(name: str | None, path: Path, say: Callable[[str], None], labels: bool) -> list[tuple[str, _Opener]]:
    """The sources of one entry of the data: names, and how to open each."""
    kind: Literal["text", "labels"] = "labels" if labels else "text"
    if path.suffix not in _CONFIGS:
        called = name or re.sub(r"[^A-Za-z0-9_-]", "_", Path(os.path.realpath(path)).stem)[:60]
        spec = TextSpec(name=called, path=str(path), kind=kind)
        return [(called, _opener(_whole, spec, _Named(Path("--data")), say))]
    content, lines = parse_yaml(read_text(path, what=_WHAT), str(path), what=_WHAT, needs=_NEEDS)
    if name is not None:
        raise BadInput(f"{name}={printable(str(path))}: a {_WHAT} names its sources itself; leave `{name}=` out")
    if "surgeon_train" in content:
        config = load_config(path)
        _check_kinds(config.config.sources, path, labels)
        return [(spec.name, _opener(_held_by_training, spec, config, say)) for spec in config.config.sources]
    known_keys = keys_by_section(DataConfig)
    texts = check_yaml(DataConfig, content, lines, str(path), what=_WHAT, known_keys=known_keys)
    _check_kinds(texts.sources, path, labels)
    wrong = [
        where(("sources", number, key), lines, str(path)) + why
        for number, spec in enumerate(texts.sources)
        for key, why in check_there(spec, _Named(path))
    ]
    if wrong:
        raise bad_input(wrong)
    return [(spec.name, _opener(_whole, spec, _Named(path), say)) for spec in texts.sources]


def _check_kinds(specs: Sequence[TextSpec], path: Path, labels: bool) -> None:
    """BadInput where labels are asked for and a source has none, or the other way round."""
    for spec in specs:
        if (spec.kind == "labels") is not labels:
            there, do = ("labels", "give --labels") if spec.kind == "labels" else ("no labels", "leave --labels out")
            raise BadInput(f"{printable(str(path))}: source {spec.name} has {there} (`kind: {spec.kind}`); {do}")


def _opener(function: Callable[..., HeldOut | None], *arguments: Any) -> _Opener:
    return lambda: function(*arguments)


def _whole(spec: TextSpec, named_by: Naming, say: Callable[[str], None]) -> HeldOut:
    documents = open_source(spec, named_by).text
    _note_blanks(spec.name, documents, say)
    return HeldOut(spec.name, documents, np.arange(len(documents)))


def _held_by_training(spec: SourceSpec, named_by: Naming, say: Callable[[str], None]) -> HeldOut | None:
    """The documents that `train` holds out of a source: never trained on, for any seed."""
    if not spec.validation:
        say(f"source {spec.name}: skipped, because the training config holds none of it out")
        return None
    if spec.generate is not None:
        say(f"source {spec.name}: skipped, because the model writes it itself; `surgeon recall` makes a file of it")
        return None
    opened = open_source(spec, named_by)
    if opened.held_out is not None:
        _note_blanks(spec.name, opened.held_out, say)
        return HeldOut(spec.name, opened.held_out, np.arange(len(opened.held_out)))
    assert isinstance(spec.validation, float)
    _note_blanks(spec.name, opened.text, say)
    _, held = split(opened.text, spec.validation, name=spec.name)
    return HeldOut(spec.name, opened.text, held)


def _note_blanks(name: str, documents: Corpus, say: Callable[[str], None]) -> None:
    if documents.blank:
        say(f"source {name}: {documents.blank} blank documents are left out")


def _sample(held: HeldOut, most: int, say: Callable[[str], None]) -> HeldOut:
    count = len(held.numbers)
    if not most or count <= most:
        return held
    say(f"source {held.name}: {most} of its {count} documents (--most)")
    drawn = generator(0, "evaluated", 0).permutation(count)[:most]
    return HeldOut(held.name, held.documents, held.numbers[np.sort(drawn)])
