"""What an operation may find out about a base before its plan is drawn, and the facts that are kept of it.

A blueprint is drawn from headers, config and facts alone. `Operation.prepare(base)` looks at the opened base, once, and
returns facts; `Operation.edit(draft, facts)` gets them back. surgery.json keeps them, so that `verify` draws the same
blueprint with no text, tokenizer or other model at hand.

Other models that tensors are taken from must each be a fine-tune of the base.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import ConfigDict, Field

from surgeon.anatomy.anatomy import Anatomy
from surgeon.blueprint.blueprint import Blueprint
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.checkpoint.hub import locate, locate_adapter, remote_folder
from surgeon.checkpoint.peft_folder import AdapterFolder
from surgeon.checkpoint.source import MAX_SIDE_FILE_BYTES
from surgeon.checkpoint.strict_json import parse_json_strict
from surgeon.checkpoint.tokenizer_files import TOKENIZER_FILE, without
from surgeon.common.check import Check
from surgeon.common.json_results import same_json
from surgeon.common.listener import Listener, Quiet
from surgeon.common.places import meant
from surgeon.common.schema import Bounded, Many
from surgeon.errors import BadInput, printable


@dataclass(frozen=True)
class Scale:
    """From a base to its twin: the anatomies of both, and what the plan makes of the base."""

    base: Anatomy
    twin: Anatomy
    blueprint: Blueprint


class SideFile(Bounded):
    """How a side file of the output differs from the base's of the same name.

    `inserted` are the bytes that it has more, as begin and length in the output's file: `verify` and `revert` take them
    out again. Where nothing was inserted, `sha256` is its digest; None: the output is without it.
    """

    inserted: list[Annotated[list[Many], Field(min_length=2, max_length=2)]] = []  # noqa: RUF012  # pydantic copies it
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None

    @classmethod
    def of(cls, content: bytes | None) -> SideFile:
        """A file with other bytes; without content, one that is left out."""
        return cls(sha256=None if content is None else hashlib.sha256(content).hexdigest())

    def grew(self, content: bytes, digest: str) -> bool:
        """Whether an output's file is, but for what was inserted, the base's of this digest.

        Inserted bytes lie one after the other, each with something in it: there is one way to say it.
        """
        ends = [0, *(begin + length for begin, length in self.inserted)]
        apart = all(end <= begin and length for end, (begin, length) in zip(ends, self.inserted, strict=False))
        return apart and SideFile.of(without(content, self.inserted)).sha256 == digest


class TextCounts(Bounded):
    """What a change of the vocabulary makes of a text (`surgeon.checkpoint.tokenizer_files.MeasuredText`)."""

    use: str
    text: str
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    documents: Many
    unchanged: Many
    words: Many
    before: Many
    after: Many

    @property
    def fertility(self) -> tuple[float, float]:
        """Tokens a word, before and after."""
        return self.before / max(1, self.words), self.after / max(1, self.words)


class Facts(Bounded):
    """What an operation found out about its base: JSON data, all that `edit` needs beside headers and config.

    In a surgery.json they are a claim, which anybody may have written: `edit` raises BadInput for facts that do not fit
    the model, and promises nothing that rests on them alone.
    `side_files` are the side files that the output has otherwise than the base, `texts` what becomes of texts.
    """

    # Neither NaN nor infinity is JSON.
    model_config = ConfigDict(allow_inf_nan=False)

    side_files: dict[str, SideFile] = {}  # noqa: RUF012
    texts: list[TextCounts] = []  # noqa: RUF012

    def small(self, scale: Scale) -> Self:
        """The same of a small twin of the base: where they name tokens that only the base has, such as the twin has.

        A twin has no side files.
        """
        return self.model_copy(update={"side_files": {}})

    def check(self, file: str) -> None:
        """Raise BadInput where facts that were read from `file` contradict themselves."""

    def checks(self, base: CheckpointFolder | None, out: CheckpointFolder) -> list[Check]:
        """What `verify` checks of an output beside tensors and digests.

        `base` is what the operation was carried out on; None where `out` is compared with an earlier state.
        """
        return []

    def figures(self) -> dict[str, Any]:
        """What `preview --json` shows of them beside texts: JSON data by key."""
        return {}


class KeptFacts(Facts):
    """Facts as surgery.json keeps them, of whatever operation: what all have in common, and the rest as JSON data."""

    model_config = ConfigDict(extra="allow")


# A text of the plan, or several.
Paths = str | Annotated[list[str], Field(min_length=1)]


class WeightsNeeded(BadInput):
    """Weights were asked for of a base whose headers alone are at hand."""


@dataclass(frozen=True)
class OpenedBase:
    """A base that was opened for a plan: what operations may ask of it, and what they leave beside their facts.

    `plan_folder` is where paths of the plan start, `number` the place in the plan of the operation that asks. Without
    `weights` other models on the Hub are known by their headers alone. `notes` are lines for the user; `side_files` are
    the base's side files that the output has with other bytes, or (None) is without; `adapters` and `models` are what
    was opened beside the base, by the plan's names.
    """

    folder: CheckpointFolder
    anatomy: Anatomy
    plan_folder: Path = Path()
    listener: Listener = field(default_factory=Quiet)
    weights: bool = True
    number: int = 0
    notes: list[str] = field(default_factory=list)
    side_files: dict[str, bytes | None] = field(default_factory=dict)
    adapters: dict[str, AdapterFolder] = field(default_factory=dict)
    models: dict[str, CheckpointFolder] = field(default_factory=dict)

    def text(self, name: str) -> Path:
        """The path of a text that the plan calls `name`. Raises BadInput where there is none."""
        path = self.plan_folder / meant(name)
        if not path.is_file():
            raise BadInput(f"{printable(str(path))}: no such text; check the path, which starts at the plan's folder")
        return path

    def texts(self, names: Paths | None) -> tuple[Path, ...]:
        """The paths of the texts that a plan names. Raises BadInput where one is missing."""
        listed = [names] if isinstance(names, str) else names or []
        return tuple(map(self.text, listed))

    def lines(self, name: str) -> dict[int, str]:
        """The words of a text that has one a line, by the numbers of their lines. Raises BadInput."""
        path = self.text(name)
        shown = printable(str(path))
        if path.stat().st_size > MAX_SIDE_FILE_BYTES:
            raise BadInput(f"{shown}: more than {MAX_SIDE_FILE_BYTES:,} bytes of tokens; is this the right file?")
        try:
            # Some editors put a byte order mark before the first word.
            lines = path.read_text(encoding="utf-8-sig").split("\n")
        except UnicodeDecodeError as error:
            raise BadInput(f"{shown}: not UTF-8 (byte {error.start}: {error.reason}); save it as UTF-8") from None
        words = {number: line for number, line in enumerate(lines, start=1) if line.strip()}
        if not words:
            raise BadInput(f"{shown}: empty, so there is nothing to add; write at least one word, one a line")
        return words

    def need_weights(self, why: str) -> None:
        """Raise WeightsNeeded where the base's weights cannot be read; `why` says what only they show."""
        if not self.folder.source.at_hand:
            raise WeightsNeeded(
                f"{self.folder.source.shown}: {why}, only the weights say; download the base first, and give its folder"
            )

    def adapter(self, name: str) -> AdapterFolder:
        """The PEFT adapter that the plan calls `name`: a folder, or a Hub id. Raises BadInput."""
        if name not in self.adapters:
            path = self._path(name)
            if path.exists():
                self.adapters[name] = AdapterFolder.open(path, id=path.resolve().name)
            else:
                found = locate_adapter(meant(name))
                self.adapters[name] = AdapterFolder.open(found.path, id=found.repo_id or name, revision=found.revision)
        return self.adapters[name]

    def model(self, name: str) -> CheckpointFolder:
        """The other model that the plan calls `name`: a folder, or a Hub id with or without `@revision`.

        Raises BadInput where it cannot be opened.
        """
        if name not in self.models:
            path = self._path(name)
            if path.exists():
                self.models[name] = CheckpointFolder.open(path)
            elif self.weights:
                self.models[name] = CheckpointFolder.open(locate(meant(name), revision=None).path)
            else:
                self.models[name] = remote_folder(meant(name), None)
        return self.models[name]

    def _path(self, name: str) -> Path:
        """A path of the plan: seen from the plan's folder, else from the working directory."""
        beside = self.plan_folder / meant(name)
        return beside if beside.exists() else Path(meant(name))


def digest_of_file(path: Path) -> str:
    """The sha256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


_MOST_ITEMS = 10_000_000
# What a layer's MLP computes by, beside its weights, and what shows a model of another shape.
_SAME = (
    *("model_type", "hidden_act", "hidden_activation", "hidden_size", "intermediate_size"),
    *("num_hidden_layers", "num_attention_heads"),
)


def check_fine_tune(name: str, model: CheckpointFolder, base: CheckpointFolder) -> None:
    """Raise BadInput where the model that the plan calls `name` has another architecture or vocabulary than the base.

    That its tensors are the base's by name and shape is checked of those that are taken, once the plan is drawn.
    """
    shown = printable(name)
    for key in _SAME:
        one, other = base.config.get(key), model.config.get(key)
        if one != other:
            raise BadInput(
                f"{shown}: `{key}` is {printable(repr(other), 60)}, the base's {printable(repr(one), 60)}; experts"
                " must be fine-tunes of the base's own architecture"
            )
    one, other = _vocabulary(base), _vocabulary(model)
    if one is not None and other is not None and not same_json(one, other):
        raise BadInput(f"{shown}: its {TOKENIZER_FILE} has another vocabulary than the base's; give a fine-tune of it")


def _vocabulary(folder: CheckpointFolder) -> object:
    """The pieces of its tokenizer; nothing where it has none of this kind, which then says nothing."""
    if TOKENIZER_FILE not in folder.side_files:
        return None
    content = folder.read_side_file(TOKENIZER_FILE)
    data = parse_json_strict(content, file=TOKENIZER_FILE, max_bytes=MAX_SIDE_FILE_BYTES, max_items=_MOST_ITEMS)
    model = data.get("model") if isinstance(data, dict) else None
    return model.get("vocab") if isinstance(model, dict) else None
