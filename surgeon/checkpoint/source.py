"""The files of a checkpoint and how they are opened: only regular files, and no links that lead out of the folder.

An allow-list defines which side files (tokenizer, chat template, licence) an output keeps.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Never, Protocol, Self

from surgeon.checkpoint.header import Header, TensorInfo, read_header
from surgeon.errors import BadInput, printable

# The most files and folders below a checkpoint's folder. Real checkpoints have a few dozen.
MAX_ENTRIES = 100_000
_SHARED_BLOB = re.compile(r"[0-9a-f]{2}/[0-9a-f]{64}")


def open_regular(folder: Path, name: str) -> int:
    """Return a read-only file descriptor of the regular file `name` in `folder`.

    The caller checks that `name` is relative. Raises BadInput for anything but a regular file: a FIFO would hang, and
    opening a device may have effects.
    """
    path = resolved(folder, name)
    try:
        # The file may have been replaced since: do not follow a link now, do not wait for a FIFO's writer.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        _refuse(error, folder / name)
    try:
        _check_regular(os.fstat(fd), folder / name)
    except BadInput:
        os.close(fd)
        raise
    return fd


def resolved(folder: Path, name: str) -> Path:
    """Return the path of the regular file `name` in `folder`, after following a permitted link.

    Raises BadInput where the file is missing or not regular, or where a link leads out of the folder (a link of the
    Hub's cache is permitted).
    """
    path = named = folder / name
    try:
        if "/" in name and not Path(os.path.realpath(path.parent)).is_relative_to(os.path.realpath(folder)):
            raise BadInput(
                f"{printable(str(named))}: behind a folder's link that leads out; put the folder itself here"
            )
        found = os.lstat(path)
        if stat.S_ISLNK(found.st_mode):
            path = _behind_link(folder, named)
            found = os.lstat(path)
        _check_regular(found, named)
    except OSError as error:
        _refuse(error, named)
    return path


def read_capped(folder: Path, name: str, *, max_bytes: int) -> bytes:
    """Return all bytes of a small regular file in `folder`. Raises BadInput where it is unreadable or too large."""
    fd = open_regular(folder, name)
    try:
        size = os.fstat(fd).st_size
        if size > max_bytes:
            shown = printable(str(folder / name))
            raise BadInput(f"{shown}: {size:,} bytes, at most {max_bytes:,} are read; is this the right file?")
        with open(fd, "rb", closefd=False) as file:
            return file.read(max_bytes)
    except OSError as error:
        _refuse(error, folder / name)
    finally:
        os.close(fd)


def _behind_link(folder: Path, link: Path) -> Path:
    """Return the file to which a link in `folder` leads.

    This must be inside the folder, or in the Hub cache that contains the folder. Raises BadInput where it is elsewhere.
    """
    home = Path(os.path.realpath(folder))
    target = _target(link)
    if target.is_relative_to(home):
        return target
    # `folder` may be a subfolder of a snapshot in the Hub's cache.
    snapshot = next((place for place in (home, *home.parents) if place.parent.name == "snapshots"), None)
    repository = home if snapshot is None else snapshot.parent.parent
    if snapshot is not None and target.parent == repository / "blobs":
        if not target.is_symlink():
            return target
        shared = _target(target)
        store = repository.parent / "blobs"
        if shared.parent.parent == store and _SHARED_BLOB.fullmatch(f"{shared.parent.name}/{shared.name}"):
            return shared
    raise BadInput(
        f"{printable(str(link))}: a link that leads out of the folder, to {printable(str(target))}; only the Hub"
        " cache's own links are followed: put the file itself here"
    )


def _target(link: Path) -> Path:
    """Return the absolute path to which a link leads, without following a link in the last component."""
    # The last component is not resolved: it must be a file, not another link.
    joined = link.parent / os.readlink(link)  # noqa: PTH115 (an absolute target replaces the parent)
    return Path(os.path.realpath(joined.parent)) / joined.name


def _check_regular(found: os.stat_result, path: Path) -> None:
    """Raise BadInput, which names the kind of file, for anything but a regular file."""
    if not stat.S_ISREG(found.st_mode):
        kinds = {
            stat.S_IFDIR: "a directory",
            stat.S_IFIFO: "a FIFO",
            stat.S_IFLNK: "a link behind a link",
            stat.S_IFSOCK: "a socket",
        }
        kind = kinds.get(stat.S_IFMT(found.st_mode), "a device")
        raise BadInput(f"{printable(str(path))}: {kind}, expected a regular file; put the file itself here")


def _refuse(error: OSError | ValueError, path: Path) -> Never:
    """Raise BadInput with advice for an error of opening or reading the file at `path`."""
    shown = printable(str(path))
    if isinstance(error, ValueError):
        raise BadInput(f"{shown}: a name with a NUL character, which no file has; check the path") from None
    if isinstance(error, FileNotFoundError):
        raise BadInput(f"{shown}: no such file, or a link to nowhere; is the download complete?") from None
    if isinstance(error, PermissionError):
        raise BadInput(f"{shown}: permission denied; make it readable (`chmod u+r`) or run as its owner") from None
    raise BadInput(f"{shown}: cannot be read ({error.strerror}); check the path and the disk") from None


MAX_SIDE_FILE_BYTES = 64_000_000
# Side files that define how images, videos and sounds are preprocessed for the towers next to the text model.
IMAGE_FILES = frozenset(
    {
        "preprocessor_config.json",
        "processor_config.json",
        "video_preprocessor_config.json",
        "audio_tokenizer_config.json",
    }
)

# What a checkpoint that was read from a GGUF file says of that file.
GGUF_RECORD = "gguf.json"
_EXACT = frozenset(
    {
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "merges.txt",
        "vocab.txt",
        "chat_template.json",
        "chat_template.jinja",
        GGUF_RECORD,
        *IMAGE_FILES,
        # Further tokenizer files that only single model types have.
        "tekken.json",
        "bpe.codes",
        "byte_maps.json",
        "dict.txt",
        "emoji.json",
        "entity_vocab.json",
        "normalizer.json",
        "prophetnet.tokenizer",
        "target_vocab.json",
        "vocab-src.json",
        "vocab-tgt.json",
        "word_pronunciation.json",
        "word_shape.json",
    }
)

# Only plain names: the first character is a letter, digit or underscore, so no hidden file matches. `*.model` files are
# sentencepiece tokenizers, some with a version suffix (`tokenizer.model.v3`).
_PATTERN = re.compile(
    r"[A-Za-z0-9_][A-Za-z0-9_.+-]*\.(model(\.v[0-9][a-z0-9]*)?|tiktoken)"
    r"|(LICENSE|LICENCE|NOTICE|USE_POLICY)[A-Za-z0-9_-]*(\.md|\.txt)?"
    r"|additional_chat_templates/[A-Za-z0-9_][A-Za-z0-9_.-]*\.jinja"
)

TEMPLATES_FOLDER = "additional_chat_templates"


def is_side_file(name: str) -> bool:
    """Return whether an output keeps a file of this name (relative to the checkpoint's folder, parts joined by `/`)."""
    return name in _EXACT or _PATTERN.fullmatch(name) is not None


class Source(Protocol):
    """The files of one checkpoint. Its methods raise BadInput where a file is missing, refused or has changed."""

    @property
    def shown(self) -> str:
        """The checkpoint's name in error messages, safe to print on a terminal."""

    @property
    def at_hand(self) -> bool:
        """Whether the small files can be read without a download."""

    def listing(self) -> dict[str, int]:
        """Return every file's relative name and size in bytes, sorted; a folder's name ends in `/`."""

    def tree(self) -> Iterator[str]:
        """Yield every file's relative name, also in subfolders; links to folders are not followed."""

    def small(self, name: str, *, max_bytes: int) -> bytes:
        """Return the content of a small file."""

    def check_small(self, name: str) -> None:
        """Raise BadInput where `small` would refuse the file."""

    def headers(self, files: list[str]) -> dict[str, Header]:
        """Return the header of each shard."""

    def open_shard(self, file: str) -> int:
        """Return a read-only file descriptor of a shard after `headers` has read its header."""

    def identity(self) -> list[dict[str, Any]]:
        """Return facts that reveal whether a shard has changed."""

    def check_unchanged(self) -> None:
        """Raise BadInput where a shard has changed since its header was read."""


def read_tensor(source: Source, info: TensorInfo, part: slice | None = None) -> bytearray:
    """Return the bytes of one tensor, or of a `part` of it.

    Raises BadInput where its file has changed or was truncated.
    """
    begin, end, _ = (part or slice(None)).indices(info.nbytes)
    content, position = bytearray(end - begin), info.begin + begin
    rest = memoryview(content)
    fd = source.open_shard(info.file)
    try:
        while rest:
            count = os.preadv(fd, [rest], position)
            if count == 0:
                raise BadInput(
                    f"{source.shown}: {printable(info.file)}: ends within tensor {printable(info.name)}; was it cut"
                    " meanwhile?"
                )
            rest, position = rest[count:], position + count
    except OSError as error:
        raise BadInput(
            f"{source.shown}: {printable(info.file)}: cannot be read ({error.strerror}); check the disk"
        ) from None
    finally:
        os.close(fd)
    return content


@dataclass(frozen=True)
class Stamp:
    """File facts of which at least one changes when somebody modifies the file."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, found: os.stat_result) -> Stamp:
        """Return the stamp of a `stat` result; the ctime cannot be set back."""
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)

    def same_content(self, other: Stamp) -> bool:
        """Return whether `other` is of the same file with the same content; its name and mode may have changed."""
        return astuple(self)[:-1] == astuple(other)[:-1]


_NO_FOLDER = "not a folder; give the folder of a transformers checkpoint"
_NOT_READ = {
    ".safetensors": "a file of weights; give the folder that it is in, with its config.json",
}


class LocalSource:
    """A checkpoint in a folder on this machine."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.shown = printable(str(path))
        self.at_hand = True
        self._identities: dict[str, Stamp] = {}

    def listing(self) -> dict[str, int]:
        """Return every file's relative name and size in bytes, chat templates included.

        Raises BadInput for an unreadable folder.
        """
        try:
            return dict(sorted({**_list(self.path, ""), **self._templates()}.items()))
        except FileNotFoundError:
            raise BadInput(f"{self.shown}: no such folder; check the path") from None
        except NotADirectoryError:
            raise BadInput(f"{self.shown}: {_NOT_READ.get(self.path.suffix, _NO_FOLDER)}") from None
        except PermissionError:
            raise BadInput(f"{self.shown}: permission denied; make it readable or run as its owner") from None
        except OSError as error:
            raise BadInput(f"{self.shown}: cannot be read ({error.strerror}); check the path and the disk") from None
        except ValueError:
            raise BadInput(f"{self.shown}: a name with a NUL character, which no folder has; check the path") from None

    def tree(self) -> Iterator[str]:
        """Yield every file's relative name, also in subfolders. Raises BadInput where there are too many files."""
        waiting, seen = [""], 0
        while waiting:
            folder = waiting.pop()
            try:
                found = _list(self.path / folder, folder)
            except OSError:
                # No loader can read this subfolder either. `listing` refuses a missing or unreadable top folder.
                continue
            seen += len(found)
            if seen > MAX_ENTRIES:
                raise BadInput(
                    f"{self.shown}: more than {MAX_ENTRIES:,} files and folders below it; give the checkpoint a folder"
                    " of its own"
                )
            for name in found:
                if name.endswith("/"):
                    waiting.append(name)
                else:
                    yield name

    def _templates(self) -> dict[str, int]:
        """Return the entries of the folder of chat templates with their sizes; empty where it is missing or a link."""
        folder = self.path / TEMPLATES_FOLDER
        if folder.is_symlink() or not folder.is_dir():
            return {}
        return _list(folder, f"{TEMPLATES_FOLDER}/")

    def small(self, name: str, *, max_bytes: int) -> bytes:
        """Return a small file's content. Raises BadInput where it cannot be opened or is too large."""
        return read_capped(self.path, name, max_bytes=max_bytes)

    def check_small(self, name: str) -> None:
        """Raise BadInput where the file is not a regular one inside the folder."""
        os.close(open_regular(self.path, name))

    def headers(self, files: list[str]) -> dict[str, Header]:
        """Read each shard's header and remember the shard's identity. Raises BadInput for a damaged shard.

        `open_shard` refuses a shard that changes after this.
        """
        found: dict[str, Header] = {}
        for file in files:
            fd = open_regular(self.path, file)
            try:
                self._identities[file] = Stamp.of(os.fstat(fd))
                found[file] = read_header(fd, file=file)
            except OSError as error:
                raise BadInput(f"{printable(file)}: cannot be read ({error.strerror}); check the disk") from None
            finally:
                os.close(fd)
        return found

    def open_shard(self, file: str) -> int:
        """Return a read-only file descriptor of a shard.

        Raises BadInput where the shard changed since its header was read.
        """
        fd = open_regular(self.path, file)
        if not Stamp.of(os.fstat(fd)).same_content(self._identities[file]):
            os.close(fd)
            raise BadInput(
                f"{printable(str(self.path / file))}: changed since the run began (size, time or inode differ);"
                " start again when nothing writes to the base"
            )
        return fd

    def place(self, file: str) -> Path:
        """Return a file's real path, after following a link of the Hub's cache.

        Raises BadInput where it is no regular file.
        """
        return resolved(self.path, file)

    def identity(self) -> list[dict[str, Any]]:
        """Return the name, size, mtime in nanoseconds and inode of every shard."""
        return [
            {"name": file, "size": known.size, "mtime_ns": known.mtime_ns, "inode": known.inode}
            for file, known in sorted(self._identities.items())
        ]

    def check_unchanged(self) -> None:
        """Open every shard again and compare its identity. Raises BadInput where one has changed."""
        for file in self._identities:
            os.close(self.open_shard(file))


def _list(folder: Path, prefix: str) -> dict[str, int]:
    """Return the entries of one folder with sizes in bytes, each name after `prefix`.

    A subfolder's name ends in `/`, and its size is 0. A link to a folder counts as a file. Raises OSError.
    """
    found: dict[str, int] = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                found[f"{prefix}{entry.name}/"] = 0
            else:
                found[f"{prefix}{entry.name}"] = _size(entry)
    return found


def _size(entry: os.DirEntry[str]) -> int:
    """Return the size in bytes of a directory entry, after following a link; 0 for a broken link or no regular file."""
    try:
        followed = entry.stat()
    except OSError:
        # A link to nowhere (or in a circle) is listed with size 0; opening it gives the error.
        return 0
    return followed.st_size if stat.S_ISREG(followed.st_mode) else 0


class OpenShards:
    """Shards that are opened when first needed and closed together.

    `sources` maps names, which the caller chooses, to sources. A shard's place is its source's name, `/` and its file
    name.
    """

    def __init__(self, sources: Mapping[str, Source]) -> None:
        self._sources = sources
        self._opened: dict[str, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._opened.values():
            os.close(descriptor)

    def opened(self, place: str) -> int:
        """Return a shard's file descriptor. Raises BadInput where the shard changed since its header was read."""
        if place not in self._opened:
            source, _, file = place.partition("/")
            self._opened[place] = self._sources[source].open_shard(file)
        return self._opened[place]
