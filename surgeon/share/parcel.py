"""The files of a push: which files the repository will have, which are missing there, and which must be removed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from surgeon.checkpoint.folder import CARD_FILE, DELTA_FILE, CheckpointFolder
from surgeon.checkpoint.open_files import HeldFolder
from surgeon.checkpoint.uploading import Repository
from surgeon.checkpoint.weights import INDEX_FILE
from surgeon.grafts.bundle import CODE_FILE


@dataclass(frozen=True)
class Upload:
    """A file of a push: its size in bytes, and whether it is new to the repository, changed, or already there."""

    name: str
    nbytes: int
    state: Literal["new", "changed", "there"]


@dataclass(frozen=True)
class Parcel:
    """The files that the repository will have: contents (paths, or bytes made here) by name, and sizes.

    `left_behind` are files of the folder that are not uploaded.
    """

    files: Mapping[str, Path | bytes]
    sizes: Mapping[str, int]
    left_behind: tuple[str, ...]

    def missing_in(self, there: Repository) -> tuple[str, ...]:
        """Return the names that the repository lacks, or has with other content."""
        return tuple(name for name, content in self.files.items() if not there.holds(name, content))

    def uploads(self, there: Repository, missing: Collection[str]) -> tuple[Upload, ...]:
        """Return each file with its size and state; `missing` are the names that are absent or different in the
        repository.
        """
        return tuple(
            Upload(name, size, "there" if name not in missing else "changed" if name in there.files else "new")
            for name, size in self.sizes.items()
        )

    def stale_in(self, there: Repository) -> tuple[str, ...]:
        """Return files of the repository that transformers would load instead of these, or in addition."""
        loaded = (name for name in there.files if name not in self.files and "/" not in name and _is_loaded(name))
        return tuple(sorted(loaded))


def pack(folder: CheckpointFolder, held: HeldFolder, text: bytes) -> Parcel:
    """Return the files of an output for a push: all files that `held` keeps open, with `text` as the card."""
    # Shards are sent as paths, all other files as the checked bytes.
    files: dict[str, Path | bytes] = {
        name: held.place(name) if name in folder.shards else held.content(name) for name in held.sizes
    }
    files[CARD_FILE] = text
    sizes = {**held.sizes, CARD_FILE: len(text)}
    left = {name for name in folder.source.listing() if name not in files and not name.endswith("/")}
    return Parcel(files, sizes, tuple(sorted(left | {n for n in folder.left_behind if n not in files})))


def _is_loaded(name: str) -> bool:
    """Return whether transformers may load a file of this name, at the top of a repository, as weights or code."""
    # DELTA_FILE too: surgeon refuses to open a checkpoint that contains it.
    return name in (INDEX_FILE, DELTA_FILE, CODE_FILE) or name.endswith(".safetensors")
