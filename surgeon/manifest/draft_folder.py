"""A draft head as a folder of its own: DRAFT_FILE says which base it is of, and what was written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from surgeon._version import __version__
from surgeon.checkpoint.folder import CONFIG_FILE, MAX_CONFIG_BYTES, MAX_MANIFEST_BYTES, CheckpointFolder
from surgeon.checkpoint.header import TensorInfo
from surgeon.checkpoint.source import LocalSource, read_tensor
from surgeon.checkpoint.strict_json import parse_json_strict
from surgeon.checkpoint.weights import SINGLE_FILE
from surgeon.errors import BadInput, printable
from surgeon.families.anatomy import Anatomy
from surgeon.manifest.manifest import Entry, Manifest, Sha256, StoredTensor, seal_of
from surgeon.manifest.reading import checked
from surgeon.manifest.trainable import TrainableSet
from surgeon.models.draft_shape import EMBEDDINGS, DraftShape, shape_in

DRAFT_FILE = "draft.json"


def draft_set(base: CheckpointFolder, anatomy: Anatomy) -> TrainableSet:
    """Return the tensors of a draft head, none of which `base` holds. Raises BadInput where none is made of it."""
    names = tuple(DraftShape.of(base, anatomy).tensors)
    return TrainableSet(names, (), title="a draft head", mtp=True, draft=True)


class DraftBase(Entry):
    """The base whose hidden states a head reads; `sha256` is over all of its tensors (`digest_of_all`)."""

    id: str
    sha256: Sha256


class DraftRecord(Entry):
    """Everything that DRAFT_FILE says; `training` is the run. `sha256` is over all of this."""

    surgeon_draft: Literal[1]
    sha256: Sha256
    tool: str
    base: DraftBase
    tensors: dict[str, StoredTensor]
    training: dict[str, Any]

    @classmethod
    def made(cls, base: DraftBase, tensors: Mapping[str, StoredTensor], training: Mapping[str, Any]) -> DraftRecord:
        """Return a sealed record."""
        plain = json.loads(json.dumps(training))
        record = cls(
            surgeon_draft=1, sha256="0" * 64, tool=__version__, base=base, tensors=dict(tensors), training=plain
        )
        return record.model_copy(update={"sha256": seal_of(record.model_dump())})

    def to_bytes(self) -> bytes:
        """The file's content."""
        return (json.dumps(self.model_dump(), indent=1, ensure_ascii=False) + "\n").encode()


def digest_of_all(digests: Mapping[str, str]) -> str:
    """Return one digest of a checkpoint's tensors, whose own are given by name."""
    return hashlib.sha256(json.dumps(dict(digests), sort_keys=True).encode()).hexdigest()


def base_of(base: CheckpointFolder, manifest: Manifest | None, digests: Mapping[str, str]) -> DraftBase:
    """Return what a head's record says of its base, whose tensors have these digests."""
    named = base.path.resolve().name if manifest is None or manifest.operations else manifest.base.id
    return DraftBase(id=named, sha256=digest_of_all(digests))


@dataclass(frozen=True)
class DraftFolder:
    """A draft head that was opened and checked, but for its weights."""

    path: Path
    record: DraftRecord
    shape: DraftShape
    tensors: Mapping[str, TensorInfo]
    source: LocalSource

    @classmethod
    def open(cls, path: Path) -> DraftFolder:
        """Open a local folder. Raises BadInput for what is no draft head of surgeon's, or was edited."""
        source, shown = LocalSource(path), printable(str(path))
        listing = source.listing()
        if missing := [name for name in (DRAFT_FILE, CONFIG_FILE, SINGLE_FILE) if name not in listing]:
            raise BadInput(f"{shown}: no {missing[0]} here; give the folder of a run with `what: draft_head`")
        record = checked(
            DraftRecord, _json(source, DRAFT_FILE, MAX_MANIFEST_BYTES), "draft", file=str(path / DRAFT_FILE)
        )
        if seal_of(record.model_dump()) != record.sha256:
            raise BadInput(f"{shown}: {DRAFT_FILE} is not what its sha256 says; get the draft head again")
        shape = shape_in(_json(source, CONFIG_FILE, MAX_CONFIG_BYTES), printable(str(path / CONFIG_FILE)))
        infos = {info.name: info for info in source.headers([SINGLE_FILE])[SINGLE_FILE].tensors}
        if wrong := [name for name, size in shape.tensors.items() if name not in infos or infos[name].shape != size]:
            raise BadInput(f"{shown}: {SINGLE_FILE} has no {wrong[0]} of {list(shape.tensors[wrong[0]])}; get it again")
        return cls(path, record, shape, infos, source)

    def read(self, name: str) -> bytearray:
        """Return a tensor's bytes. Raises BadInput where they are not what the record says."""
        content, told = read_tensor(self.source, self.tensors[name]), self.record.tensors.get(name)
        found = StoredTensor.of(self.tensors[name], hashlib.sha256(content).hexdigest())
        if found != told:
            raise BadInput(
                f"{printable(str(self.path))}: {printable(name)} is not what {DRAFT_FILE} says; get the head again"
            )
        return content

    def check_base(self, base: CheckpointFolder, digests: Mapping[str, str]) -> None:
        """Raise BadInput unless the head was made for this base, whose tensors have these digests."""
        shown, found = printable(str(self.path)), base.path.resolve().name
        vocabulary = next((info.shape[0] for name, info in base.tensors.items() if name == EMBEDDINGS), None)
        if vocabulary != self.shape.vocab_size:
            raise BadInput(
                f"{shown}: drafts of {self.shape.vocab_size} tokens, and {printable(found)} has {vocabulary or 'none'}"
                f" under {EMBEDDINGS}; give the base that it was made for, {printable(self.record.base.id)}"
            )
        if digest_of_all(digests) != self.record.base.sha256:
            raise BadInput(
                f"{shown}: made for {printable(self.record.base.id)}, and {printable(found)} has other weights; give"
                " that base, or train a head for this one (`what: draft_head`)"
            )


def _json(source: LocalSource, name: str, most: int) -> Any:
    return parse_json_strict(source.small(name, max_bytes=most), file=name, max_bytes=most)
