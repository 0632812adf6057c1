"""A cache of tensor digests: a file that is unchanged since it was read need not be hashed again.

An entry identifies one file by device, inode, size, mtime and ctime; the ctime cannot be set back. The cache saves a
second `apply` the hashing of its base (measured in benchmarks/second_apply.py). Copies are still compared with the
base's bytes, and `verify` always hashes.
"""

from __future__ import annotations

import os
from dataclasses import astuple, dataclass

from surgeon.checkpoint.header import Header
from surgeon.common.cache import cache_folder, read_entry, write_entry
from surgeon.common.work_folders import parse_record, record_of

# Increased whenever the meaning of an entry changes.
_FORMAT = 1
_KIND = "digests"
# One entry per file; the largest checkpoints have about two hundred files.
_MOST_ENTRIES = 4096
# A second write within one tick of the file system's clock leaves the times unchanged; the longest tick is two seconds.
_SETTLED_NS = 2_000_000_000


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


@dataclass(frozen=True)
class FileDigests:
    """The sha256 (hex) of every tensor of a file, in the order of their bytes; `not_finite` names those with NaN or
    infinity.
    """

    digests: dict[str, str]
    not_finite: tuple[str, ...]


def known_digests(stamp: Stamp, header: Header) -> FileDigests | None:
    """Return the cached digests of an unchanged file that was read before; None without an entry or a cache."""
    folder = cache_folder(_KIND)
    content = None if folder is None else read_entry(folder, _name(stamp))
    try:
        found = parse_record(content) if content is not None else None
        if found is None or found["of"] != _key(stamp, header):
            return None
        digests = dict(zip((info.name for info in header.tensors), map(str, found["digests"]), strict=True))
        return FileDigests(digests, tuple(map(str, found["not_finite"])))
    except (ValueError, TypeError, KeyError):
        return None


def keep_digests(stamp: Stamp, header: Header, found: FileDigests, *, since: int) -> None:
    """Cache the digests of a file that had this `stamp` since `since` (`time.time_ns`) and was read after that.

    Does nothing where there is no cache folder, or where the file was modified less than `_SETTLED_NS` before `since`.
    """
    folder = cache_folder(_KIND)
    if folder is None or since - stamp.mtime_ns < _SETTLED_NS:
        return
    entry = {
        "of": _key(stamp, header),
        "digests": [found.digests[info.name] for info in header.tensors],
        "not_finite": list(found.not_finite),
    }
    write_entry(folder, _name(stamp), record_of(entry), most=_MOST_ENTRIES)


def _name(stamp: Stamp) -> str:
    """Return the name of a file's entry in the cache: its device and inode."""
    return f"{stamp.device:x}-{stamp.inode:x}"


def _key(stamp: Stamp, header: Header) -> list[object]:
    """Return what must be equal for an entry to be valid: the format, the file's stamp and its header's digest."""
    return [_FORMAT, *astuple(stamp), header.sha256]
