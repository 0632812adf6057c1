"""A checkpoint's folder: headers, config and side files are read and checked at once; weights are read on demand."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surgeon.checkpoint.damages import damage_of, led_below
from surgeon.checkpoint.header import Header, TensorInfo
from surgeon.checkpoint.own_code import OwnCode, has_own_code, own_code
from surgeon.checkpoint.piece_bytes import Gap, OtherBytes, compared, in_files, read_in_order
from surgeon.checkpoint.pieces import Pieces
from surgeon.checkpoint.ranges import sha256_pieces, sha256_range
from surgeon.checkpoint.source import MAX_SIDE_FILE_BYTES, LocalSource, OpenShards, Source, is_side_file, read_tensor
from surgeon.checkpoint.strict_json import parse_json_strict, with_tagged_floats
from surgeon.checkpoint.trust import (
    MAX_CODE_BYTES,
    NO_CODE,
    Brought,
    Classes,
    Code,
    beside_weights,
    brought_by,
    check_config,
    check_trusted,
    names_code,
    without_code,
)
from surgeon.checkpoint.weights import INDEX_FILE, SINGLE_FILE, check_weights, choose_weights
from surgeon.common.plugins import missing_plugins
from surgeon.errors import BadInput, printable, said_of
from surgeon.grafts.bundle import CODE_FILE

CONFIG_FILE = "config.json"
MANIFEST_FILE = "surgery.json"
CARD_FILE = "README.md"
# The measurements of a continual run (surgeon/lab/courses).
RECORD_FILE = "continual.json"
# Marks a folder that lacks its base's tensors (surgeon/rework/make_delta.py).
DELTA_FILE = "delta.json"
MAX_CONFIG_BYTES = 4_000_000
MAX_MANIFEST_BYTES = 64_000_000
MAX_CARD_BYTES = 1_000_000


@dataclass(frozen=True)
class CheckpointFolder:
    """An opened checkpoint: everything except the weights has been read and checked.

    `tensors` and `headers` cover all shards; `shards` are the shards' file names, sorted. `side_files` are the relative
    names that an output keeps, `left_behind` the folder's other files. `manifest` is the parsed `surgery.json`, not
    validated. `notes` are lines for the user. `code` states which code is in the folder: none, exactly the code that
    this version of surgeon ships for its config, or foreign code. Foreign code is listed by `scripts`, described by
    `foreign`, and trusted by the user, for this folder only. `classes` states whose classes the model is built of.
    Where the model, tokenizer or processor is built of the folder's own code, `own` is that code, whose files count as
    side files too. Where code was left out, `config` is the config without it, `settings` contains the side files
    without it, and `model_code` names the model class in that code.
    """

    path: Path
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    shards: tuple[str, ...]
    headers: dict[str, Header]
    side_files: tuple[str, ...]
    left_behind: tuple[str, ...]
    manifest: dict[str, Any] | None
    notes: list[str]
    source: Source
    code: Code = "none"
    classes: Classes = "installed"
    scripts: tuple[str, ...] = ()
    foreign: str = ""
    own: OwnCode | None = None
    settings: Mapping[str, bytes] = field(default_factory=dict)
    model_code: str = ""

    @classmethod
    def open(cls, path: Path, *, trust_remote_code: bool = False) -> CheckpointFolder:
        """Open a local folder. Raises BadInput, in one line, for the first file that is missing or wrong."""
        source = LocalSource(path)
        with said_of(source.shown):
            return cls.assemble(source, path=path, trust_remote_code=trust_remote_code)

    @classmethod
    def assemble(cls, source: Source, *, path: Path, trust_remote_code: bool) -> CheckpointFolder:
        """Build the folder from `source`: read and check everything but the weights.

        `path` is stored as the folder's path. Raises BadInput for the first fault, ForeignCode (a BadInput) where the
        folder needs its own code and it is not trusted.
        """
        listing = source.listing()
        if DELTA_FILE in listing:
            raise BadInput(
                f"{source.shown}: a delta, which lacks its base's tensors; apply it to its base first:"
                f" `surgeon apply --delta {source.shown} BASE OUT`"
            )
        weights = choose_weights(source)
        config = _config(source, listing)
        # Accept NaN and Infinity: losses of a training run may be infinite.
        has_manifest = MANIFEST_FILE in listing
        manifest = _object(source, MANIFEST_FILE, MAX_MANIFEST_BYTES, constants=True) if has_manifest else None
        if missing := missing_plugins((manifest or {}).get("plugins")):
            raise BadInput(
                f"{source.shown}: made with {', '.join(missing)}, which is not installed here; install this plugin (or"
                " all of them), as nothing else knows its tensors"
            )
        brought = brought_by(config, source)
        notes = list(weights.notes)
        settings: Mapping[str, bytes] = {}
        model_code = ""
        if brought.code == "foreign" and not trust_remote_code and manifest is None:
            without = without_code(config, source, brought)
            config, settings, brought = without.config, without.settings, NO_CODE
            notes.append(without.note)
            model_code = without.model_code
        # An output contains no code but surgeon's own. So foreign code in an output is refused, not just left out.
        check_trusted(brought, source.shown, trust_remote_code=trust_remote_code)
        if brought.code != "foreign" and config.get("model_type") == "mistral" and "layer_types" in config:
            config = _ministral(config)
            notes.append("config.json: transformers reads a mistral with `layer_types` as ministral, and so it is here")
        headers = source.headers(list(weights.files))
        if damage := damage_of(config, (info for header in headers.values() for info in header.tensors)):
            raise BadInput(f"{source.shown}: {damage}")
        check_config(config)
        tensors = check_weights(weights, headers, config)
        beside = beside_weights(listing, weights.files)
        notes += [f"{printable(name)} is set aside: {does}" for name, does in beside.items()]
        side_files = _side_files(source, listing, notes)
        own = _own_code(config, source, brought)
        if own is not None:
            side_files = tuple(sorted({*side_files, *own.files}))
        known = {CONFIG_FILE, MANIFEST_FILE, *weights.files, *side_files}
        known.update(f"{name.partition('/')[0]}/" for name in (*side_files, *weights.files) if "/" in name)
        if SINGLE_FILE not in weights.files:
            known.add(INDEX_FILE)
        if brought.code == "shipped":  # the output gets the same files, from the package
            known.update(name for name in listing if name.endswith(".py"))
        return cls(
            path=path,
            config=config,
            tensors=tensors,
            shards=weights.files,
            headers=headers,
            side_files=side_files,
            left_behind=tuple(name for name in listing if name not in known),
            manifest=manifest,
            notes=notes,
            source=source,
            code=brought.code,
            classes=brought.classes,
            scripts=brought.scripts,
            foreign=brought.found,
            own=own,
            settings=settings,
            model_code=model_code,
        )

    def read(self, name: str) -> bytearray:
        """Return the bytes of one tensor. Raises BadInput where its shard has changed or was truncated."""
        return read_tensor(self.source, self.tensors[name])

    def read_part(self, name: str, part: slice) -> bytearray:
        """Return the bytes in the range `part` of one tensor. Raises BadInput as `read` does."""
        return read_tensor(self.source, self.tensors[name], part)

    def read_side_file(self, name: str) -> bytes:
        """Return the content of one of `side_files`, without an `auto_map` that was left out.

        Raises BadInput if unreadable.
        """
        assert name in self.side_files, name
        found = self.settings.get(name)
        return self.source.small(name, max_bytes=MAX_SIDE_FILE_BYTES) if found is None else found

    def read_code(self, name: str) -> bytes | None:
        """Return the content of a code file in the folder as bytes; None where the folder has no file of this name."""
        return self.source.small(name, max_bytes=MAX_CODE_BYTES) if name in self.source.listing() else None

    def open_shard(self, file: str) -> int:
        """Return a read-only file descriptor of a shard; the caller closes it.

        Raises BadInput where the shard has changed.
        """
        return self.source.open_shard(file)

    def identity(self) -> list[dict[str, Any]]:
        """Return the name, size, mtime_ns and inode of every shard at the time when the folder was opened."""
        return self.source.identity()

    def check_unchanged(self) -> None:
        """Raise BadInput where a shard's size, mtime or inode has changed since the folder was opened."""
        self.source.check_unchanged()


def digest_of_pieces(folder: CheckpointFolder, pieces: Pieces) -> str:
    """Return the hex sha256 of the bytes that `pieces` of a folder's tensors make up, in order.

    Spans must cover all bytes. Raises BadInput where a shard has changed or was truncated.
    """
    with OpenShards({"": folder.source}) as shards:
        read = read_in_order(in_files({"": pieces}, folder.tensors)[""], shards.opened)
        return sha256_pieces(piece for piece in read if not isinstance(piece, Gap))


def holds_pieces(folder: CheckpointFolder, name: str, pieces: Pieces, of: CheckpointFolder) -> bool:
    """Return whether a folder's tensor `name` contains, byte for byte, these pieces of tensors of the folder `of`.

    Raises BadInput where a shard has changed or was truncated.
    """
    info, place = folder.tensors[name], in_files({name: pieces}, of.tensors)[name]
    with OpenShards({"": of.source, "holder": folder.source}) as shards:
        written = shards.opened(f"holder/{info.file}")
        try:
            for _ in compared(place, shards.opened, written, info.begin):
                pass
        except OtherBytes:
            return False
    return True


def digests_of(folder: CheckpointFolder, names: Iterable[str], advance: Callable[[int], None]) -> dict[str, str]:
    """Return the hex sha256 of each named tensor's bytes, read by several threads.

    `advance` receives the count of bytes read. Raises BadInput where a shard has changed or was truncated.
    """

    def digest(name: str) -> tuple[str, str]:
        """Return (name, hex sha256) of one tensor, and report its bytes to `advance`."""
        info = folder.tensors[name]
        found = sha256_range(opened[info.file], info.begin, info.end)
        advance(info.nbytes)
        return name, found

    with OpenShards({"": folder.source}) as shards, ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        opened = {file: shards.opened(f"/{file}") for file in folder.shards}
        return dict(pool.map(digest, names))


def _config(source: Source, listing: dict[str, int]) -> dict[str, Any]:
    """Return the checked content of config.json, with infinities and NaN in tagged form.

    Raises BadInput where it is missing, no JSON object, or has a field of class names in a wrong form.
    """
    if CONFIG_FILE not in listing and f"{CONFIG_FILE}/" not in listing:
        raise BadInput(
            f"{source.shown}: no config.json here"
            f"{led_below(listing, CONFIG_FILE) or '; expected the folder of a transformers checkpoint'}"
        )
    # The upper `time_step_limit` of Mamba-2 is infinity.
    config: dict[str, Any] = with_tagged_floats(_object(source, CONFIG_FILE, MAX_CONFIG_BYTES, constants=True))
    for part, where in ((config, ""), *((config.get(key), f"{key}.") for key in ("text_config", "vision_config"))):
        if isinstance(part, dict):
            _check_names(part, where, source.shown)
    return config


def _ministral(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mistral config as `AutoConfig` reads it: as ministral, with layers with and without a window."""
    named = config.get("architectures") or ()
    classes = [f"Ministral{name.removeprefix('Mistral')}" if name.startswith("Mistral") else name for name in named]
    return {**config, "model_type": "ministral"} | ({"architectures": classes} if classes else {})


def _check_names(config: dict[str, Any], where: str, shown: str) -> None:
    """Raise BadInput where a field that selects classes or layers is not a name or a list of names, as required."""
    wrong = ""
    if not isinstance(config.get("model_type"), str | None):
        wrong = "model_type"
    for key in ("architectures", "layer_types"):
        names = config.get(key)
        if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
            wrong = key
    if wrong:
        raise BadInput(
            f"{shown}: config.json: `{where}{wrong}` is {printable(repr(config[wrong]), 40)}, expected"
            f" {'a name' if wrong == 'model_type' else 'a list of names'}; get the checkpoint's own file again"
        )


def _own_code(config: Mapping[str, Any], source: Source, brought: Brought) -> OwnCode | None:
    """Return the folder's own code where its model, tokenizer or processor is built of this code; else None.

    The folder is one that the user trusts. Raises BadInput where a code file cannot be read.
    """
    if brought.code != "foreign" or not names_code(config, source):
        return None
    if brought.classes != "own":
        # Surgeon's shipped code is not the folder's own, and the model is built of none of the other scripts.
        return own_code({}, source, [name for name in brought.scripts if name != CODE_FILE])
    return own_code(config, source, brought.scripts) if has_own_code(config) else None


def _object(source: Source, name: str, max_bytes: int, *, constants: bool = False) -> dict[str, Any]:
    """Return the JSON object in a small file; with `constants`, NaN and Infinity are accepted.

    Raises BadInput where the file cannot be read or contains no valid object.
    """
    content = source.small(name, max_bytes=max_bytes)
    found = parse_json_strict(content, file=name, max_bytes=max_bytes, constants=constants)
    if not isinstance(found, dict):
        raise BadInput(
            f"{source.shown}: {name} holds a {type(found).__name__}, expected a JSON object; get the checkpoint's own"
            " file again"
        )
    return found


def _side_files(source: Source, listing: dict[str, int], notes: list[str]) -> tuple[str, ...]:
    """Return the names of the side files that an output keeps.

    Files that are too large or no regular files are left out, and a line about each is appended to `notes`. Raises
    BadInput for a local JSON file that is invalid.
    """
    carried: list[str] = []
    for name, size in listing.items():
        if not is_side_file(name):
            continue
        if size > MAX_SIDE_FILE_BYTES:
            notes.append(f"{printable(name)} is not carried along: {size:,} bytes, at most {MAX_SIDE_FILE_BYTES:,} are")
            continue
        try:
            source.check_small(name)
        except BadInput as error:
            notes.append(f"not carried along: {error}")
            continue
        # Larger JSON files are tokenizers, which are checked when loaded; files on the Hub are checked once downloaded.
        if name.endswith(".json") and size <= MAX_CONFIG_BYTES and source.at_hand:
            _object(source, name, MAX_CONFIG_BYTES)
        carried.append(name)
    return tuple(carried)
