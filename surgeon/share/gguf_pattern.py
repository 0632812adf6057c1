"""`surgeon gguf-pattern`: which layers of a GGUF file look through a window, written into it from config.json.

llama.cpp's reader of Gemma 2 and 3 takes every second and every sixth layer for a full one unless the file says
otherwise, and its converter writes nothing of it for them. The reader takes an array of one boolean a layer, true for a
window (`load_swa_pattern`, `{arch}.attention.sliding_window_pattern`). Everything else of the file keeps its bytes.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from rich.console import RenderableType
from rich.text import Text

from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.checkpoint.ranges import pieces_of
from surgeon.checkpoint.staging import check_destination
from surgeon.common.disk_space import check_room, writing
from surgeon.common.formatting import size
from surgeon.common.json_results import plain_fields
from surgeon.common.listener import Listener, Quiet
from surgeon.common.work_folders import write_durably
from surgeon.errors import BadInput, printable

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
# Types of values (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): their formats; a text and an array.
_NUMBERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_BOOL, _TEXT, _ARRAY = 7, 8, 9
# Architectures whose reader has a fixed pattern and takes an array in its place; tried in benchmarks/engines.
_ARCHITECTURES = {"gemma2", "gemma3"}
_PIECE = 8 * 1024 * 1024
# More than any name or value that is held as a whole; tokens are passed over.
_MOST_TEXT = 64 * 1024 * 1024
# Of a header: bytes, of which the longest vocabularies take thirty million; keys, tensors, entries of an array.
_MOST_HEADER, _MOST_ENTRIES = 256 * 1024 * 1024, 10_000_000
_MOST_ALIGNMENT = 1024 * 1024


@dataclass(frozen=True)
class GgufPattern:
    """A GGUF file that says of each layer whether it looks through a window; `pattern` has one entry a layer."""

    file: Path
    path: Path
    pattern: tuple[bool, ...]
    nbytes: int

    def __repr__(self) -> str:
        return f"GgufPattern({str(self.path)!r}, {sum(self.pattern)} of {len(self.pattern)} layers have a window)"

    def to_json(self) -> dict[str, Any]:
        """Return plain data for `--json`.

        Keys:
            `file`, `path`, `bytes`, `pattern`: the file that was read; the one that was written; for each layer, true
                if its attention has a window
        """
        return plain_fields(self)


def gguf_pattern(
    out: str | Path,
    file: str | Path,
    dest: str | Path,
    *,
    trust_remote_code: bool = False,
    listener: Listener | None = None,
) -> GgufPattern:
    """Write a GGUF file with each layer's kind of attention in it; `dest` is absent or complete at any moment.

    Args:
        out: the checkpoint's folder
        file: the GGUF file that was converted from it
        dest: the GGUF file to write
        trust_remote_code: run the checkpoint's own code
        listener: gets progress

    Returns:
        the new file and its pattern

    Raises:
        BadInput: for a file that is no GGUF, is of another architecture than Gemma 2 or 3 or has another number of
            layers, and for one that has the pattern already
    """
    listener, source, target = listener or Quiet(), Path(file), Path(dest)
    folder = CheckpointFolder.open(Path(out), trust_remote_code=trust_remote_code)
    pattern = _pattern(folder)
    with _opened(source) as opened:
        read = _Reader(opened, source)
        header = read.header()
        key = _checked(header, pattern, folder, source)
        check_destination(target, source)
        made = _head(header, read, key, pattern)
        rest = read.end - header.data
        check_room(target, len(made) + rest)
        listener.begin("writing", len(made) + rest)
        with writing(target):
            write_durably(target, _content(made, opened.fileno(), header.data, rest, listener.advance))
    return GgufPattern(source, target, pattern, len(made) + rest)


def _opened(file: Path) -> BinaryIO:
    try:
        if not file.is_file():
            raise BadInput(f"{printable(str(file))}: no such file; give a GGUF file")
        return file.open("rb")
    except OSError as error:
        raise BadInput(f"{printable(str(file))}: {error.strerror or error}; give a file that you may read") from None


def _content(
    made: bytes, handle: int, begin: int, rest: int, advance: Callable[[int], None]
) -> Iterator[bytes | memoryview]:
    """The new header, and the bytes of tensors as they are."""
    yield made
    advance(len(made))
    for piece in pieces_of(handle, begin, begin + rest, _PIECE):
        yield piece
        advance(len(piece))


def _pattern(folder: CheckpointFolder) -> tuple[bool, ...]:
    """Return for each layer whether it looks through a window. Raises BadInput where config.json does not say so."""
    config: Mapping[str, Any] = folder.config
    inner = config.get("text_config")
    kinds = (inner if isinstance(inner, Mapping) else config).get("layer_types")
    if not isinstance(kinds, list) or any(kind not in ("sliding_attention", "full_attention") for kind in kinds):
        raise BadInput(
            f"{printable(str(folder.path))}: config.json has no `layer_types` of sliding_attention and full_attention;"
            " give the checkpoint of Gemma 2 or 3 that the file was converted from"
        )
    return tuple(kind == "sliding_attention" for kind in kinds)


def _checked(header: _Header, pattern: tuple[bool, ...], folder: CheckpointFolder, file: Path) -> str:
    """The key to write. Raises BadInput where the file is not the checkpoint's, or needs nothing."""
    shown, architecture = printable(str(file)), header.values.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise BadInput(
            f"{shown}: architecture `{printable(str(architecture))}`; only the readers of"
            f" {' and '.join(sorted(_ARCHITECTURES))} take a fixed pattern where a file has none: use it as it is"
        )
    layers = header.values.get(f"{architecture}.block_count")
    if layers != len(pattern):
        raise BadInput(
            f"{shown}: has {layers} layers, config.json of {printable(str(folder.path))} has {len(pattern)}; give the"
            " checkpoint that it was converted from"
        )
    key = f"{architecture}.attention.sliding_window_pattern"
    if key in header.keys:
        raise BadInput(f"{shown}: has `{key}` already; use it as it is, or convert the checkpoint again")
    return key


@dataclass
class _Header:
    """The part before the tensors' bytes: how many tensors and keys; where keys and tensors' list end, bytes begin.

    `keys` are all of them, `values` hold those that are a number or a text.
    """

    version: int
    tensors: int
    count: int
    values: dict[str, Any] = field(default_factory=dict)
    keys: set[str] = field(default_factory=set)
    keys_end: int = 0
    list_end: int = 0
    data: int = 0

    @property
    def alignment(self) -> int:
        """The number of bytes to a multiple of which tensors' bytes are padded."""
        given = self.values.get("general.alignment", 32)
        return given if type(given) is int and 0 < given <= _MOST_ALIGNMENT else 32


class _Reader:
    """Reads a GGUF file's header. Raises BadInput where the file ends early or is none."""

    def __init__(self, opened: BinaryIO, file: Path) -> None:
        self.opened, self.shown = opened, printable(str(file))
        self.end = os.fstat(opened.fileno()).st_size

    def header(self) -> _Header:
        """The header."""
        if self.opened.read(len(_MAGIC)) != _MAGIC:
            raise BadInput(f"{self.shown}: is no GGUF file; give one that llama.cpp's converter wrote")
        version = self.number("<I")
        if version not in _VERSIONS:
            raise BadInput(f"{self.shown}: GGUF version {version}; convert the checkpoint again to version 3")
        header = _Header(version, self.count(), self.count())
        for _ in range(header.count):
            key = self.text()
            header.keys.add(key)
            kind = self.number("<I")
            if kind in _NUMBERS:
                header.values[key] = self.number(_NUMBERS[kind])
            elif kind == _TEXT:
                header.values[key] = self.text()
            else:
                self.pass_array(kind)
        header.keys_end = self.opened.tell()
        for _ in range(header.tensors):
            self.text()
            self.skip(8 * self.number("<I") + 12)
        header.list_end = self.opened.tell()
        header.data = -(-header.list_end // header.alignment) * header.alignment
        if header.data > self.end:
            raise self.early()
        return header

    def early(self) -> BadInput:
        """The file is cut off."""
        return BadInput(f"{self.shown}: ends before its header does; convert the checkpoint again")

    def count(self) -> int:
        """A number of entries."""
        found: int = self.number("<Q")
        if found > _MOST_ENTRIES:
            raise self.large(f"{found:,} entries of one kind")
        return found

    def large(self, what: str) -> BadInput:
        """The header is longer than any."""
        return BadInput(f"{self.shown}: its header has {what}, more than any model's; convert the checkpoint again")

    def take(self, count: int) -> bytes:
        """The next so many bytes."""
        if count > min(_MOST_TEXT, self.end - self.opened.tell()):
            raise self.early()
        if count + self.opened.tell() > _MOST_HEADER:
            raise self.large(f"more than {_MOST_HEADER:,} bytes")
        return self.opened.read(count)

    def skip(self, count: int) -> None:
        """Pass over so many bytes."""
        if count > self.end - self.opened.tell():
            raise self.early()
        if count + self.opened.tell() > _MOST_HEADER:
            raise self.large(f"more than {_MOST_HEADER:,} bytes")
        self.opened.seek(count, os.SEEK_CUR)

    def number(self, form: str) -> Any:
        """A number."""
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def text(self) -> str:
        """A text."""
        return self.take(self.number("<Q")).decode("utf-8", "replace")

    def pass_array(self, kind: int) -> None:
        """Pass over an array."""
        if kind != _ARRAY:
            raise BadInput(f"{self.shown}: a value of the unknown type {kind}; convert the checkpoint again")
        entry, count = self.number("<I"), self.count()
        if entry in _NUMBERS:
            self.skip(struct.calcsize(_NUMBERS[entry]) * count)
        elif entry == _TEXT:
            for _ in range(count):
                self.skip(self.number("<Q"))
        else:
            raise BadInput(f"{self.shown}: an array of the unknown type {entry}; convert the checkpoint again")

    def between(self, begin: int, end: int) -> bytes:
        """The bytes between two places."""
        self.opened.seek(begin)
        return self.opened.read(end - begin)


def _head(header: _Header, read: _Reader, key: str, pattern: tuple[bool, ...]) -> bytes:
    """The header with the pattern as its last value; tensors' places are counted from the end of it, so they hold."""
    named = struct.pack("<Q", len(key)) + key.encode()
    array = struct.pack("<IIQ", _ARRAY, _BOOL, len(pattern)) + bytes(pattern)
    counts = _MAGIC + struct.pack("<IQQ", header.version, header.tensors, header.count + 1)
    made = counts + read.between(len(counts), header.keys_end) + named + array
    made += read.between(header.keys_end, header.list_end)
    return made + bytes(-len(made) % header.alignment)


def gguf_pattern_view(written: GgufPattern) -> RenderableType:
    """The file that was written, and its pattern."""
    drawn = "".join("w" if windowed else "F" for windowed in written.pattern)
    return Text.assemble(
        ("done ", "bold green"),
        f"{printable(str(written.path))}: {size(written.nbytes)}, layers {drawn} (w: with a window, F: full)",
        overflow="fold",
    )
