"""Small files of the user's cache that save work, in `$SURGEON_CACHE`, or in `surgeon` in the user's cache folder.

The cache is never needed. An entry has a code (HMAC-SHA256) by the user's own key, so only this user's surgeon can have
written it. Missing or damaged entries are made again. Nothing here raises for an unusable cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from surgeon.common.signed import own_key, user_folder

# `SURGEON_CACHE=off` switches the cache off.
VARIABLE = "SURGEON_CACHE"
_OFF = "off"
MAX_ENTRY_BYTES = 16_000_000
_MAX_ENTRIES = 128
_MAX_BYTES = 128_000_000


def is_off() -> bool:
    """Return whether the user has switched the cache off."""
    return os.environ.get(VARIABLE, "").strip() == _OFF


def cache_folder(kind: str) -> Path | None:
    """Return the folder of entries of this kind; None where the cache is off, or the user has no home folder."""
    folder = None if is_off() else user_folder(VARIABLE, "XDG_CACHE_HOME", ".cache")
    return None if folder is None else folder / kind


def read_entry(folder: Path, name: str) -> bytes | None:
    """Return the content of an entry; None where there is none, or its code does not prove that this user wrote it."""
    try:
        handle = os.open(folder / name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0))
    except OSError:
        return None
    with os.fdopen(handle, "rb") as file:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_ENTRY_BYTES or not _is_ours(found):
            return None
        try:
            code, _, content = file.read(MAX_ENTRY_BYTES + 1).partition(b"\n")
        except OSError:
            return None
    return content if hmac.compare_digest(code, _code(folder, name, content)) else None


def _code(folder: Path, name: str, content: bytes) -> bytes:
    """Return the code that proves an entry to be this user's."""
    told = f"{folder.name}/{name}\n".encode() + content
    return hmac.new(own_key().secret, told, "sha256").hexdigest().encode()


def write_entry(folder: Path, name: str, content: bytes, *, most: int = _MAX_ENTRIES) -> None:
    """Write an entry by one rename; remove the oldest where there are more than `most`, or too many bytes.

    Does nothing for an entry that is too large, or where the folder is not only the user's or cannot be written.
    """
    content = _code(folder, name, content) + b"\n" + content
    if len(content) > MAX_ENTRY_BYTES:
        return
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_ours(os.lstat(folder)):
            return
        handle, staged = tempfile.mkstemp(prefix=".", suffix=".part", dir=folder)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            Path(staged).replace(folder / name)
        finally:
            with contextlib.suppress(FileNotFoundError):
                Path(staged).unlink()
        _prune(folder, most)


def _is_ours(found: os.stat_result) -> bool:
    """Return whether only this user can have written it."""
    return not hasattr(os, "getuid") or (found.st_uid == os.getuid() and not found.st_mode & 0o022)


def _prune(folder: Path, most: int) -> None:
    """Remove the oldest entries of a folder where there are more than `most`, or more than `_MAX_BYTES` bytes."""
    files: list[tuple[os.stat_result, str]] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            # Another writer may have renamed or removed it since it was listed.
            with contextlib.suppress(FileNotFoundError):
                files.append((entry.stat(follow_symlinks=False), entry.path))
    files.sort(key=lambda each: each[0].st_mtime_ns, reverse=True)
    total = 0
    for number, (found, path) in enumerate(files, 1):
        total += found.st_size
        if number > most or total > _MAX_BYTES:
            with contextlib.suppress(FileNotFoundError):
                Path(path).unlink()


def digest_of(content: Any) -> str:
    """Return a digest of JSON data, made of any mappings and sequences.

    The digest serves as the name of an entry, or of an answer in an entry.
    """

    def plain(each: Any) -> Any:
        """Return a mapping as a dict, any other sequence as a list."""
        return dict(each) if isinstance(each, Mapping) else list(each)

    return hashlib.sha256(json.dumps(content, sort_keys=True, default=plain).encode()).hexdigest()
