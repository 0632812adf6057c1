"""The texts to evaluate on: files named on the command line, a data file, or the held-out text of a training config.

All sources are opened and read to their end before any model is loaded.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, model_validator

from surgeon import HeldOut, TextSpec, check_source, held_out_text, load_config
from surgeon.common.checked_yaml import Loaded, check_yaml
from surgeon.common.places import meant, named
from surgeon.common.schema import Entry, first_doubled
from surgeon.common.yaml import read_yaml
from surgeon.errors import BadInput, bad_input, printable

_CONFIGS = (".yaml", ".yml")
_WHAT = "data file"
_NEEDS = "`surgeon_data: 1` and `sources:`"

# The forms of texts that `evaluate` accepts.
Texts: TypeAlias = str | Path | HeldOut | Sequence[str | Path | HeldOut] | Mapping[str, str | Path]


class DataConfig(Entry):
    """A data file: texts to evaluate on."""

    surgeon_data: Annotated[Literal[1], Field(description="version of this format")]
    sources: Annotated[list[TextSpec], Field(min_length=1, max_length=100)]

    @model_validator(mode="after")
    def _differ(self) -> DataConfig:
        """Raise ValueError where two sources have the same name."""
        if doubled := first_doubled([source.name for source in self.sources]):
            raise ValueError(f"two sources are called {doubled!r}; names must differ")
        return self


def open_texts(
    data: Texts,
    *,
    only: Sequence[str] = (),
    most: int = 0,
    say: Callable[[str], None] = lambda _line: None,
    labels: bool = False,
) -> list[HeldOut]:
    """Open texts for `evaluate`; each text is read once to its end.

    Args:
        data: One or more of: a text file or folder, `NAME=FILE`, a data file (.yaml with `surgeon_data: 1`), a training
            config, for the text that `train` holds out; or a mapping from names to files; or opened texts.
        only: The names of the sources to open; empty: all.
        most: The largest number of documents of each text, a fixed random choice; 0: all.
        say: Receives notes.
        labels: Whether each text has a label.

    Returns:
        The texts, in the order of `data`.

    Raises:
        BadInput: A file cannot be read, two sources share a name, some have labels without `labels`, or nothing is held
            out.
    """
    found: dict[str, HeldOut] = {}
    known: list[str] = []
    for name, opener, shown in _openers(data, say, labels):
        if name in known:
            raise BadInput(f"{printable(shown)}: the name {name} is used twice; give this source another: NAME=FILE")
        known.append(name)
        if (not only or name in only) and (held := opener()) is not None:
            found[name] = _sample(held, most, say)
    for name in only:
        if name not in known:
            raise BadInput(f"--source {printable(name)}: no such source; the data has {', '.join(known)}")
    if not found:
        raise BadInput("nothing to evaluate on: the data has no held-out documents; set `validation:` of a source")
    return list(found.values())


def _sample(held: HeldOut, most: int, say: Callable[[str], None]) -> HeldOut:
    """Return at most `most` documents of a text (0: all), a fixed random choice; report where some are left out."""
    if not most or len(held) <= most:
        return held
    say(f"source {held.name}: {most} of its {len(held)} documents (--most)")
    return held.sample(most)


_Opener = Callable[[], HeldOut | None]


def _openers(data: Texts, say: Callable[[str], None], labels: bool) -> Iterator[tuple[str, _Opener, str]]:
    """Yield (name, function that opens the source, name in errors) for every source."""
    if isinstance(data, HeldOut):
        data = [data]
    if not isinstance(data, str | Path | Mapping) and (opened := [each for each in data if isinstance(each, HeldOut)]):
        for text in opened:
            yield text.name, partial(replace, text), text.name
        data = [each for each in data if not isinstance(each, HeldOut)]
        if not data:
            return
    for name, path in _entries(data):
        for source, opener in _sources(name, path, say, labels):
            yield source, opener, str(path)


def _entries(
    data: str | Path | Sequence[str | Path | HeldOut] | Mapping[str, str | Path],
) -> list[tuple[str | None, Path]]:
    """Return (name, path) for each given file; name is None where none was given. Raises BadInput for an empty list."""
    if isinstance(data, Mapping):
        return [(name, Path(path)) for name, path in data.items()]
    entries: list[tuple[str | None, Path]] = []
    for given in [data] if isinstance(data, str | Path) else data:
        assert not isinstance(given, HeldOut), "those that are open come first"
        name, file = named(given)
        entries.append((name, Path(meant(file))))
    if not entries:
        raise BadInput("no data: give a text file, NAME=FILE or a data file")
    return entries


def _sources(name: str | None, path: Path, say: Callable[[str], None], labels: bool) -> list[tuple[str, _Opener]]:
    """Return (name, function that opens the source) for each source of one given file: a text, or a YAML file of texts.

    Raises BadInput where the YAML file, or its combination with `name` or `labels`, is not valid.
    """
    if path.suffix not in _CONFIGS:
        called = name or re.sub(r"[^A-Za-z0-9_-]", "_", Path(os.path.realpath(path)).stem)[:60]
        spec = TextSpec(name=called, path=str(path), kind="labels" if labels else None)
        return [(called, partial(held_out_text, spec, Loaded(spec, Path("--data")), say=say))]
    document = read_yaml(path, what=_WHAT, needs=_NEEDS)
    if name is not None:
        raise BadInput(f"{name}={printable(str(path))}: a {_WHAT} names its sources itself; leave `{name}=` out")
    if "surgeon_train" in document.data:
        config = load_config(path)
        _check_kinds(config.config.sources, path, labels)
        opener = partial(held_out_text, named_by=config, template=config.template, say=say)
        return [(spec.name, partial(opener, spec)) for spec in config.config.sources]
    texts = Loaded(check_yaml(DataConfig, document), path, document.lines)
    _check_kinds(texts.config.sources, path, labels)
    wrong = [
        f"{texts.where('sources', number, key)}{why}"
        for number, spec in enumerate(texts.config.sources)
        for key, why in check_source(spec, texts)
    ]
    if wrong:
        raise bad_input(wrong)
    return [(spec.name, partial(held_out_text, spec, texts, say=say)) for spec in texts.config.sources]


def _check_kinds(specs: Sequence[TextSpec], path: Path, labels: bool) -> None:
    """Raise BadInput where a source has no labels but `labels` is set, or has labels but `labels` is not set."""
    for spec in specs:
        if (spec.kind == "labels") is not labels:
            there, do = ("labels", "give --labels") if spec.kind == "labels" else ("no labels", "leave --labels out")
            raise BadInput(f"{printable(str(path))}: source {spec.name} has {there}; {do}")
