"""The upload of an output: which of its files, which of them are new to the repository, and the card."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from surgeon.checkpoint.card_metadata import NOTHING_KNOWN, Metadata, check_license, read_metadata
from surgeon.checkpoint.folder import CARD_FILE, CONFIG_FILE, DELTA_FILE, MAX_CARD_BYTES, RECORD_FILE, CheckpointFolder
from surgeon.checkpoint.uploading import Destination, Repository
from surgeon.checkpoint.weights import INDEX_FILE, SINGLE_FILE
from surgeon.errors import BadInput, printable
from surgeon.manifest.card import HUB_ID, card
from surgeon.manifest.manifest import MANIFEST_FILE, Manifest
from surgeon.runtime.bundle import CODE_FILE


@dataclass(frozen=True)
class Parcel:
    """The files that the repository will hold: contents (paths, or bytes made here) by name, and their sizes.

    `left_behind` are files of the folder that are not uploaded.
    """

    files: Mapping[str, Path | bytes]
    sizes: Mapping[str, int]
    left_behind: tuple[str, ...]

    def missing_in(self, there: Repository) -> tuple[str, ...]:
        """The names that the repository lacks, or holds with other content."""
        return tuple(name for name, content in self.files.items() if not there.holds(name, content))

    def stale_in(self, there: Repository) -> tuple[str, ...]:
        """Files of the repository that transformers would load instead of these, or beside them."""
        loaded = (name for name in there.files if name not in self.files and "/" not in name and _is_loaded(name))
        return tuple(sorted(loaded))


def pack(folder: CheckpointFolder, manifest: Manifest, text: bytes) -> Parcel:
    """An output's files by the allow-list: weights, config, manifest, side files, its code, and the card `text`."""
    listing = folder.source.listing()
    # The manifest names the code files, and anybody can write a manifest.
    code = [name for name in manifest.code if name in listing and "/" not in name and name.endswith(".py")]
    names = [CONFIG_FILE, *folder.shards, *folder.side_files, *code, MANIFEST_FILE]
    if SINGLE_FILE not in folder.shards:
        names.append(INDEX_FILE)
    if RECORD_FILE in listing:
        names.append(RECORD_FILE)
    files: dict[str, Path | bytes] = {name: folder.path / name for name in sorted(names)}
    files[CARD_FILE] = text
    sizes = {name: len(c) if isinstance(c, bytes) else c.stat().st_size for name, c in files.items()}
    left = {name for name in listing if name not in files and not name.endswith("/")}
    return Parcel(files, sizes, tuple(sorted(left | {n for n in folder.left_behind if n not in files})))


def pack_delta(folder: Path) -> Parcel:
    """A delta's files; surgeon has just written all of them."""
    files: dict[str, Path | bytes] = {
        path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()
    }
    return Parcel(files, {name: (folder / name).stat().st_size for name in files}, ())


@dataclass(frozen=True)
class Given:
    """What a push writes into the card: licence and base model where they were given, and lines about the checks."""

    license: str | None
    base_model: str | None
    verified: tuple[str, ...]

    def over(self, metadata: Metadata) -> Metadata:
        """The metadata of the base's card, with the given values in place."""
        if self.license is not None:
            metadata = dataclasses.replace(metadata, license=self.license, license_name=None, license_link=None)
        if self.base_model is not None:
            metadata = dataclasses.replace(metadata, base_model=self.base_model)
        return metadata


def card_for(folder: CheckpointFolder, manifest: Manifest, repo_id: str, given: Given) -> bytes:
    """The card to upload: with the repository's name and the checks, unless somebody edited the folder's card.

    An edited card is uploaded unchanged. Raises BadInput where a licence or base model is given for an edited card.
    """
    sizes = {name: info.numel for name, info in folder.tensors.items()}
    found: bytes | None = None
    if CARD_FILE in folder.source.listing():
        found = folder.source.small(CARD_FILE, max_bytes=MAX_CARD_BYTES)
    metadata = read_metadata(found) if found is not None else NOTHING_KNOWN
    if found is not None and found != card(manifest, folder.config, sizes, metadata):
        if given.license is not None or given.base_model is not None:
            option = "--license" if given.license is not None else "--base-model"
            raise BadInput(
                f"{printable(str(folder.path / CARD_FILE))}: edited by hand, so {option} has no effect; edit it too"
            )
        return found
    return card(manifest, folder.config, sizes, given.over(metadata), repo_id=repo_id, verified=given.verified)


def check_names(license: str | None, base_model: str | None) -> None:
    """Raise BadInput where the Hub knows no licence or model spelled like this."""
    if license is not None:
        check_license(license)
    if base_model is not None and not HUB_ID.fullmatch(base_model):
        raise BadInput(f"--base-model {printable(base_model)}: not a model of the Hub; give `user/name`")


def check_way(to: Destination, there: Repository, *, force: bool) -> None:
    """Raise BadInput where a push would publish what should be private, or overwrite a model of another tool."""
    if to.private and there.exists and there.private is False:
        raise BadInput(
            f"{to.repo_id} exists and is public; --private is for new ones: make it private in its settings first"
        )
    if to.pull_request and not there.exists:
        raise BadInput(
            f"{to.repo_id}: no such repository (or the token may not see it) to open a pull request in; check the name"
        )
    weights = [name for name in there.files if name.endswith((".safetensors", ".bin", ".gguf"))]
    if weights and MANIFEST_FILE not in there.files and not to.pull_request and not force:
        raise BadInput(
            f"{to.shown} holds a model that is not an output of surgeon ({printable(weights[0])}); use another name, or"
            " --pr, or --force to commit over it"
        )


def _is_loaded(name: str) -> bool:
    """Whether transformers may load a file of this name, at the top of a repository, as weights or code."""
    # With a delta's mark beside it, surgeon would not open the checkpoint.
    return name in (INDEX_FILE, DELTA_FILE, CODE_FILE) or name.endswith(".safetensors")
