"""One execution as plain data: for a surgery, a restored state, a delta, or a trained output."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from surgeon._version import __version__
from surgeon.blueprint.blueprint import Blueprint, Output
from surgeon.blueprint.recipes import Copy
from surgeon.blueprint.shards import Shard, is_unchanged
from surgeon.checkpoint.card_metadata import Metadata
from surgeon.checkpoint.folder import CARD_FILE, CONFIG_FILE, MANIFEST_FILE, MAX_CONFIG_BYTES, CheckpointFolder
from surgeon.checkpoint.header import Header, TensorInfo
from surgeon.checkpoint.peft_folder import AdapterFolder
from surgeon.checkpoint.piece_bytes import in_files
from surgeon.checkpoint.pieces import Pieces, stacked
from surgeon.checkpoint.source import Source
from surgeon.checkpoint.weights import INDEX_FILE, SINGLE_FILE
from surgeon.errors import BadInput, printable
from surgeon.manifest.card import card
from surgeon.manifest.manifest import Manifest
from surgeon.writing.readback import ReadBack


@dataclass(frozen=True)
class Computing:
    """What computed tensors need: a plan's blueprint, the checkpoints it reads from, and the device."""

    blueprint: Blueprint
    base: CheckpointFolder
    adapters: Mapping[str, AdapterFolder]
    models: Mapping[str, CheckpointFolder]
    device: str


class Mirrored(NamedTuple):
    """The file that a shard mirrors: a file of the named source, and its header."""

    source: str
    file: str
    header: Header

    @property
    def place(self) -> str:
        """Return the name by which `OpenShards` opens the file."""
        return f"{self.source}/{self.file}"


@dataclass(frozen=True)
class Job:
    """One execution: shards with their tensors in order, and small files.

    `sources` are the checkpoints, deltas and work folders that are copied from, by the job's own names; the first is
    called "". `places` gives, for every output that holds bytes of a source, the files and byte ranges. `files` are the
    small files whose content is known beforehand; the side files of `carried` (those in `carried_names`; None: all) are
    copied unchanged. `finish` is called when every shard is written and read back and these files are written: it
    raises where the output must not be published, and returns the files that are known only then. `identity` is, as
    JSON data, what the output's bytes depend on besides shards and `files`: the checkpoints that are read, the plan.
    `mirrored` are the files that shards mirror: a shard's data has the alignment of that file. A shard that equals that
    file byte for byte is not written where that can be avoided: it shares the file's blocks, or with `link` is the file
    under a second name.
    """

    shards: tuple[Shard, ...]
    sources: Mapping[str, Source]
    places: Mapping[str, Pieces]
    files: Mapping[str, bytes]
    finish: Callable[[ReadBack], Mapping[str, bytes]]
    identity: Mapping[str, Any]
    carried: CheckpointFolder | None = None
    carried_names: tuple[str, ...] | None = None
    mirrored: Mapping[str, Mirrored] = field(default_factory=dict)
    computing: Computing | None = None
    read_back: bool = True
    link: bool = False
    # Checks the staged folder when it is complete, and raises where it must not be published.
    look: Callable[[Path], None] | None = None

    @cached_property
    def unchanged(self) -> Mapping[str, Mirrored]:
        """Return the shards that equal the files they mirror byte for byte, with these files."""
        return unchanged_among(self.shards, self.places, self.mirrored)

    @property
    def outputs(self) -> tuple[Output, ...]:
        """Return every tensor that is written, shard by shard."""
        return tuple(output for shard in self.shards for output in shard.outputs)

    @property
    def fingerprint(self) -> str:
        """Return a digest of all that the output depends on; only a staged folder with the same is continued."""
        content = {
            "version": __version__,
            "shards": [[shard.file, len(shard.outputs)] for shard in self.shards],
            "files": {name: hashlib.sha256(content).hexdigest() for name, content in self.files.items()},
            "device": self.computing.device if self.computing else "cpu",
            **({"link": True} if self.link else {}),
            **self.identity,
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    @property
    def bytes_to_write(self) -> int:
        """Return the bytes of tensor data without holes, which are written where nothing can be linked or shared."""
        return sum(output.nbytes for output in self.outputs if not output.is_hole)

    @property
    def bytes_unchanged(self) -> int:
        """Return the bytes of unchanged shards, which need not be written where files can be linked or share blocks."""
        return sum(shard.nbytes for shard in self.shards if shard.file in self.unchanged)

    def check_unchanged(self) -> None:
        """Raise BadInput where a shard that was read has changed since it was opened."""
        carried = [] if self.carried is None else [self.carried.source]
        for source in {id(each): each for each in (*self.sources.values(), *carried)}.values():
            source.check_unchanged()


def copied(name: str, info: TensorInfo) -> Output:
    """Return the output `name`, copied from the tensor that `info` describes."""
    return Output(name, Copy.of(info), None)


def in_order(folder: CheckpointFolder) -> dict[str, list[TensorInfo]]:
    """Return the tensors of each shard by the shard's file, in the order of their bytes."""
    held: dict[str, list[TensorInfo]] = {file: [] for file in folder.shards}
    for info in sorted(folder.tensors.values(), key=lambda info: info.begin):
        held[info.file].append(info)
    return held


def places_in(tensors: Mapping[str, TensorInfo], shards: Iterable[Shard]) -> dict[str, Pieces]:
    """Return the places, in the first source's files, of the bytes that outputs take from its `tensors`."""
    outputs = (output for shard in shards for output in shard.outputs)
    return in_files({output.name: output.pieces for output in outputs if output.pieces.spans}, tensors)


def data_of(outputs: Iterable[Output], places: Mapping[str, Pieces]) -> Pieces:
    """Return the data of `outputs`, one tensor after another, as pieces of files.

    A tensor without a place has no pieces.
    """
    return stacked([places.get(output.name, Pieces(output.nbytes, ())) for output in outputs], before=1)


def mirrored_in(folder: CheckpointFolder, shards: Iterable[Shard]) -> dict[str, Mirrored]:
    """Return the files in `folder`, the first source, that the shards mirror."""
    return {s.file: Mirrored("", s.mirrored, folder.headers[s.mirrored]) for s in shards if s.mirrored is not None}


def unchanged_among(
    shards: Iterable[Shard], places: Mapping[str, Pieces], mirrored: Mapping[str, Mirrored]
) -> dict[str, Mirrored]:
    """Return the shards that equal the files they mirror byte for byte, with these files."""
    return {
        shard.file: file
        for shard in shards
        if (file := mirrored.get(shard.file)) is not None
        and is_unchanged(shard, data_of(shard.outputs, places), file.place, file.header)
    }


def model_files(config: Mapping[str, Any], shards: tuple[Shard, ...], code: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return, by name, config.json, the index where there are several shards, and the files of code.

    Raises BadInput for a config.json that is too large to be read again.
    """
    written = (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
    if len(written) > MAX_CONFIG_BYTES:
        longest = max(config, key=lambda key: len(json.dumps(config[key])))
        raise BadInput(
            f"config.json: the output's would have {len(written):,} bytes, at most {MAX_CONFIG_BYTES:,} are read;"
            f" shorten the base's `{printable(longest)}`"
        )
    files = {CONFIG_FILE: written}
    if [shard.file for shard in shards] != [SINGLE_FILE]:
        files[INDEX_FILE] = index_of(shards)
    return {**files, **code}


def index_of(shards: tuple[Shard, ...]) -> bytes:
    """Return the content of the index that names every tensor's shard."""
    outputs = [(output, shard) for shard in shards for output in shard.outputs]
    metadata = {
        "total_parameters": sum(output.numel for output, _ in outputs),
        "total_size": sum(shard.nbytes for shard in shards),
    }
    weight_map = {output.name: shard.file for output, shard in outputs}
    index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode()


def beside_weights(files: Mapping[str, str]) -> dict[str, str]:
    """Return the digests of small files that the manifest records: all but the manifest, the card and the index.

    The card may be edited; the index repeats the headers, and depends on how shards were cut.
    """
    return {name: digest for name, digest in files.items() if name not in (MANIFEST_FILE, CARD_FILE, INDEX_FILE)}


def manifest_and_card(
    manifest: Manifest, config: Mapping[str, Any], shards: tuple[Shard, ...], metadata: Metadata
) -> dict[str, bytes]:
    """Return, by name, the manifest's file and the model card's, which is written from the manifest."""
    sizes = {output.name: output.numel for shard in shards for output in shard.outputs}
    return {MANIFEST_FILE: manifest.to_bytes(), CARD_FILE: card(manifest, config, sizes, metadata)}
