"""Digests of the tensors of files that were read before: a file that nobody touched since need not be hashed again.

An entry is of one file as the file system knows it: device, inode, size, and the times of its last change, of which
that of the inode cannot be set back. A second `apply` saves the hashing of its base by them (what that is:
benchmarks/second_apply.py); copies are compared with the base's bytes all the same, and `verify` hashes.
"""

from __future__ import annotations

import os
from dataclasses import astuple, dataclass

from surgeon.checkpoint.header import Header
from surgeon.common.cache import cache_folder, read_entry, write_entry
from surgeon.common.work_folders import parse_record, record_of

# Raised whenever entries mean something else.
_FORMAT = 1
_KIND = "digests"
# One a file; the largest checkpoints have about two hundred.
_MOST_ENTRIES = 4096
# What is written within one tick of a file system's clock leaves no trace in its times; the coarsest ticks two seconds.
_SETTLED_NS = 2_000_000_000


@dataclass(frozen=True)
class Stamp:
    """What differs once somebody touched a file."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, found: os.stat_result) -> Stamp:
        """Return the stamp of what `stat` finds; the time of change cannot be set back."""
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)

    def same_content(self, other: Stamp) -> bool:
        """Whether it is the same file with the same content, which may have got a name or another mode."""
        return astuple(self)[:-1] == astuple(other)[:-1]


@dataclass(frozen=True)
class FileDigests:
    """sha256 (hex) of every tensor of a file, in the order of their bytes; `not_finite` hold NaN or infinity."""

    digests: dict[str, str]
    not_finite: tuple[str, ...]


def known_digests(stamp: Stamp, header: Header) -> FileDigests | None:
    """What is known of a file that was read before, and is as it was; None where nothing is, or there is no cache."""
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
    """Remember the digests of a file that was as `stamp` says from `since` (`time.time_ns`) on, and was read then."""
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
    return f"{stamp.device:x}-{stamp.inode:x}"


def _key(stamp: Stamp, header: Header) -> list[object]:
    return [_FORMAT, *astuple(stamp), header.sha256]
