"""What an operation may learn about a base before its plan is drawn, and the facts that are kept.

A blueprint is drawn only from headers, config and facts. `Operation.prepare(base)` reads the opened base, once, and
returns facts; `Operation.edit(draft, facts)` receives them. surgery.json keeps them, so that `verify` draws the same
blueprint without any text, tokenizer or other model.

Other models that tensors are taken from must each be a fine-tune of the base.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Self

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
    """The step from a base to its twin: the anatomies of both, and the blueprint of the plan on the base."""

    base: Anatomy
    twin: Anatomy
    blueprint: Blueprint


class SideFile(Bounded):
    """How a side file of the output differs from the base's of the same name.

    `inserted` are the added bytes, as begin and length in the output's file: `verify` and `revert` remove them again.
    Where nothing was inserted, `sha256` is the file's digest; None: the output lacks the file.
    """

    inserted: list[Annotated[list[Many], Field(min_length=2, max_length=2)]] = []  # noqa: RUF012  # pydantic copies it
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None

    @classmethod
    def of(cls, content: bytes | None) -> SideFile:
        """Return the entry of a file with other bytes; without content, of a file that is left out."""
        return cls(sha256=None if content is None else hashlib.sha256(content).hexdigest())

    def grew(self, content: bytes, digest: str) -> bool:
        """Return whether an output's file, without the inserted bytes, is the base's file of this digest.

        Inserted ranges must be ascending, disjoint and not empty, so that each change has only one form.
        """
        ends = [0, *(begin + length for begin, length in self.inserted)]
        apart = all(end <= begin and length for end, (begin, length) in zip(ends, self.inserted, strict=False))
        return apart and SideFile.of(without(content, self.inserted)).sha256 == digest


class TextCounts(Bounded):
    """The effect of a change of the vocabulary on a text: its tokens before and after, unchanged documents, words.

    `unchanged` counts documents that are tokenised as before; `words` are separated by white space. `use` states what
    the text was used for. `sha256` is the digest of its first file, or of all files one after another.
    """

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
        """Return (before, after): tokens per word."""
        return self.before / max(1, self.words), self.after / max(1, self.words)


class Facts(Bounded):
    """What an operation learnt about its base: JSON data, all that `edit` needs in addition to headers and config.

    In a surgery.json facts are a claim, which anybody may have written: `edit` raises BadInput for facts that do not
    fit the model, and makes no promise that depends only on them. `side_files` are the side files that differ between
    output and base, `texts` the effects on texts.
    """

    # Neither NaN nor infinity is JSON.
    model_config = ConfigDict(allow_inf_nan=False)

    side_files: dict[str, SideFile] = {}  # noqa: RUF012
    texts: list[TextCounts] = []  # noqa: RUF012

    def small(self, scale: Scale) -> Self:
        """Return the facts for a small twin of the base, with the twin's tokens in place of the base's.

        A twin has no side files.
        """
        return self.model_copy(update={"side_files": {}})

    def check(self, file: str) -> None:
        """Raise BadInput where facts that were read from `file` contradict themselves; here, nothing is checked."""

    def checks(self, base: CheckpointFolder | None, out: CheckpointFolder) -> list[Check]:
        """Return what `verify` checks of an output in addition to tensors and digests; by default nothing.

        `base` is what the operation was carried out on; None where `out` is compared with an earlier state.
        """
        return []


class KeptFacts(Facts):
    """Facts of any operation as surgery.json keeps them: the common fields, and the rest as JSON data."""

    model_config = ConfigDict(extra="allow")


# A text of the plan, or several.
Paths = str | Annotated[list[str], Field(min_length=1)]


class WeightsNeeded(BadInput):
    """The error where weights are needed of a base of which only headers are at hand."""


@dataclass(frozen=True)
class OpenedBase:
    """A base opened for a plan: what operations may read from it, and what they leave in addition to their facts.

    `plan_folder` is where paths of the plan start, `number` the place in the plan of the operation that asks. Without
    `weights` only headers of other models on the Hub are read. `notes` are lines for the user; `side_files` are the
    base's side files that the output has with other bytes, or (None) lacks; `adapters` and `models` are the other
    checkpoints that were opened, by the plan's names.
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
        """Return the path of the plan's text `name`. Raises BadInput where there is none."""
        path = self.plan_folder / meant(name)
        if not path.is_file():
            raise BadInput(f"{printable(str(path))}: no such text; check the path, which starts at the plan's folder")
        return path

    def texts(self, names: Paths | None) -> tuple[Path, ...]:
        """Return the paths of the texts that a plan names. Raises BadInput where one is missing."""
        listed = [names] if isinstance(names, str) else names or []
        return tuple(map(self.text, listed))

    def lines(self, name: str) -> dict[int, str]:
        """Return the words of a text with one word a line, by line number from 1; empty lines are left out.

        Raises BadInput where the file is missing, too large, not UTF-8 or empty.
        """
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
        """Raise WeightsNeeded where the base's weights cannot be read; `why` names what needs them."""
        if not self.folder.source.at_hand:
            raise WeightsNeeded(
                f"{self.folder.source.shown}: {why}, only the weights say; download the base first, and give its folder"
            )

    def adapter(self, name: str) -> AdapterFolder:
        """Return the plan's PEFT adapter `name`: a folder, or a Hub id. Raises BadInput where it cannot be opened.

        An opened adapter is kept in `adapters`, so each is opened once.
        """
        if name not in self.adapters:
            path = self._path(name)
            if path.exists():
                self.adapters[name] = AdapterFolder.open(path, id=path.resolve().name)
            else:
                found = locate_adapter(meant(name))
                self.adapters[name] = AdapterFolder.open(found.path, id=found.repo_id or name, revision=found.revision)
        return self.adapters[name]

    def model(self, name: str) -> CheckpointFolder:
        """Return the plan's other model `name`: a folder, or a Hub id with or without `@revision`.

        An opened model is kept in `models`. From the Hub, only headers are read where `weights` is false. Raises
        BadInput where it cannot be opened.
        """
        if name not in self.models:
            path = self._path(name)
            if path.exists():
                self.models[name] = CheckpointFolder.open(path)
                return self.models[name]
            if self.weights:
                self.models[name] = CheckpointFolder.open(locate(meant(name), revision=None).path)
            else:
                self.models[name] = remote_folder(meant(name), None)
        return self.models[name]

    def _path(self, name: str) -> Path:
        """Return a path of the plan: from the plan's folder if it exists there, else the working directory."""
        beside = self.plan_folder / meant(name)
        return beside if beside.exists() else Path(meant(name))


def digest_of_file(path: Path) -> str:
    """Return the sha256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


_MOST_ITEMS = 10_000_000
# Config keys that affect an MLP's output besides its weights, or the model's shape.
_SAME = (
    *("model_type", "hidden_act", "hidden_activation", "hidden_size", "intermediate_size"),
    *("num_hidden_layers", "num_attention_heads"),
)


def check_fine_tune(name: str, model: CheckpointFolder, base: CheckpointFolder) -> None:
    """Raise BadInput where the plan's model `name` has another architecture or vocabulary than the base.

    Vocabularies are compared only where both folders have a tokenizer.json. Names and shapes of tensors are checked
    later, only for the tensors that are used.
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
    """Return the vocabulary of a folder's tokenizer.json; None where there is none."""
    if TOKENIZER_FILE not in folder.side_files:
        return None
    content = folder.read_side_file(TOKENIZER_FILE)
    data = parse_json_strict(content, file=TOKENIZER_FILE, max_bytes=MAX_SIDE_FILE_BYTES, max_items=_MOST_ITEMS)
    model = data.get("model") if isinstance(data, dict) else None
    return model.get("vocab") if isinstance(model, dict) else None
