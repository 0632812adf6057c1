"""Load study.yaml: its values with their lines, the plans that methods name, and checks that all texts exist."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

from surgeon import (
    LoadedPlan,
    SourceSpec,
    check_source,
    find_plan,
    load_plan,
    overrides_of,
    shipped_studies,
    text_files,
)
from surgeon.common.checked_yaml import Loaded, check_yaml, editor_schema
from surgeon.common.installation import lacking
from surgeon.common.places import find_file, from_here, named
from surgeon.common.yaml import read_yaml
from surgeon.errors import BadInput, Mistakes, bad_input, printable
from surgeon.lab.studies.config.entries import PEERS, StudyText
from surgeon.lab.studies.config.schema import Study, spelled_out

Group = Literal["new", "original", "replayed"]
GROUPS = get_args(Group)

_WHAT = "study"
# The operation whose gate is fitted before the first step.
_GATE = "domain_gate"
_NEEDS = "`surgeon_study: 1` and `methods:`"


@dataclass(frozen=True)
class LoadedStudy(Loaded[Study]):
    """A study as loaded; relative paths in command-line options start at the current folder.

    `plans` contains the plans by the names of their methods. `notes` lists remarks about the base.
    """

    plans: Mapping[str, LoadedPlan] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def gated(self) -> frozenset[str]:
        """The names of methods whose plan has a domain gate, which is fitted before the first step."""
        operations = {name: loaded.plan.operations for name, loaded in self.plans.items()}
        return frozenset(name for name, each in operations.items() if any(op.op == _GATE for op in each))

    @property
    def shown(self) -> str:
        """The study's name in errors: its short name where it ships with surgeon, else its file."""
        names = (name for name, path in shipped_studies().items() if path == self.source)
        return next(names, printable(str(self.source)))

    def texts(self, group: Group) -> list[StudyText]:
        """Return the texts of a group, with shares that sum to 1."""
        texts = getattr(self.config, group)
        given = math.fsum(text.share for text in texts if text.share is not None)
        sizes = [0 if text.share is not None else self._size(text) for text in texts]
        parts = [
            text.share if text.share is not None else (1 - given) * size / sum(sizes)
            for text, size in zip(texts, sizes, strict=True)
        ]
        return [
            text.model_copy(update={"share": part / math.fsum(parts)}) for text, part in zip(texts, parts, strict=True)
        ]

    def _size(self, text: StudyText) -> int:
        """Return the size of a text's files in bytes; 1 for a dataset on the Hub."""
        if text.path.startswith("dataset:"):
            return 1
        return sum(file.stat().st_size for file in text_files(self.resolve(text.path))) or 1


def load_study(
    study: str | Path,
    overrides: Sequence[str] = (),
    *,
    new: Sequence[str | Path] = (),
    original: Sequence[str | Path] = (),
    replayed: Sequence[str | Path] = (),
) -> LoadedStudy:
    """Read and check a study; `overrides` and given texts replace the file's. Raises BadInput with file and line."""
    path = find_file(study, shipped_studies(), what=_WHAT)
    document = read_yaml(path, what=_WHAT, needs=_NEEDS)
    _spell_out(document.data)
    document.override(overrides, example="steps=100")
    for group, files in (("new", new), ("original", original), ("replayed", replayed)):
        if files:
            document.data[group] = [_text_of(file) for file in files]
            document.given |= {(group, nth): f"--{group} {file}" for nth, file in enumerate(files)}
            document.given[(group,)] = f"--{group} {files[0]}"
    config = check_yaml(Study, document)
    loaded = LoadedStudy(config, path, document.lines, document.given)
    wrong: list[str] = []
    if not config.new:
        wrong.append(f"{loaded.shown}: no text to learn; give `new:`, or --new FILE")
    if not config.original and not config.replayed and config.replays("text"):
        wrong.append(
            f"{loaded.shown}: a remedy replays text, and the study has none; give `original:` (--original"
            " FILE), or let the remedy replay what the base writes (`source: recall`)"
        )
    if any(method.lora is not None for method in config.methods) and find_spec("peft") is None:
        wrong.append(lacking(f"{loaded.shown}: the method lora", "PEFT", "peft"))
    wrong += _absent(loaded)
    wrong += _learned_and_kept(loaded)
    plans = _plans(loaded, wrong)
    if wrong:
        raise bad_input(wrong)
    return replace(loaded, plans=plans)


def _spell_out(data: dict[str, Any]) -> None:
    """Replace methods and texts that are given only by a name or a path with mappings, in place."""
    for key, entry_of in _SHORT.items():
        if isinstance(data.get(key), list):
            data[key] = [entry_of(entry) if isinstance(entry, str) else entry for entry in data[key]]


_SHORT: dict[str, Callable[[str], dict[str, Any]]] = {
    "methods": spelled_out,
    **dict.fromkeys(GROUPS, lambda path: {"path": path}),
}


def _text_of(given: str | Path) -> dict[str, Any]:
    """Return the entry for a file that an option gives as FILE or NAME=FILE; its path starts in the current folder."""
    name, file = named(given)
    return {"path": from_here(file)} | ({} if name is None else {"name": name})


def _absent(loaded: LoadedStudy) -> list[str]:
    """Return an error for every text that does not exist, with its line or option."""
    return [
        f"{loaded.where(group, number, key)}{why}"
        for group in GROUPS
        for number, text in enumerate(getattr(loaded.config, group))
        for key, why in check_source(source_of(text), loaded)
    ]


def source_of(text: StudyText) -> SourceSpec:
    """Return a text of a study as a source of a training config."""
    return SourceSpec(name=text.called, path=text.path, share=1.0, validation=text.validation, **text.reading)


def _learned_and_kept(loaded: LoadedStudy) -> list[str]:
    """Return an error for every file that is both new text and original or replayed text."""
    new = {loaded.resolve(text.path).resolve() for text in loaded.config.new if not text.path.startswith("dataset:")}
    return [
        f"{loaded.where(group, number, 'path')}{printable(text.path)} is new text too, and what is learned cannot be"
        " forgotten; give another file"
        for group in ("original", "replayed")
        for number, text in enumerate(getattr(loaded.config, group))
        if loaded.resolve(text.path).resolve() in new
    ]


def _plans(loaded: LoadedStudy, wrong: list[str]) -> dict[str, LoadedPlan]:
    """Return the plans of methods by name; append errors about missing or invalid plans to `wrong`."""
    found = {}
    for number, method in enumerate(loaded.config.methods):
        if method.plan is None:
            continue
        try:
            plan = find_plan(method.plan, beside=loaded.source.parent)
        except BadInput as error:
            peers = "" if "did you mean" in str(error) else f" (or {', '.join(PEERS)})"
            wrong.append(f"{loaded.where('methods', number, 'plan')}method {error}{peers}")
            continue
        try:
            found[method.called] = load_plan(plan, overrides_of(method.set or {}))
        except BadInput as error:
            wrong += error.lines if isinstance(error, Mistakes) else [str(error)]
    return found


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of studies, for completion in editors."""
    schema = editor_schema(Study, "surgeon study")
    for key in _SHORT:
        # An entry may also be only a name or a path.
        schema["properties"][key]["items"] = {"anyOf": [{"type": "string"}, schema["properties"][key]["items"]]}
    return schema
