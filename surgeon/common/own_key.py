"""A secret of this user's own, by which surgeon knows its records again: made at first use, 32 random bytes, mode 0600.

It lies in `$SURGEON_STATE`, or in `surgeon` in the user's folder for states. It is no cache: without it nothing is lost
but the proof that a work folder is this user's.
"""

from __future__ import annotations

import fcntl
import functools
import os
import secrets
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from surgeon.errors import printable

VARIABLE = "SURGEON_STATE"
KEY_FILE = "key"
_BYTES = 32


@dataclass(frozen=True)
class Key:
    """The secret; `why_not` says in words why it is this process's alone (empty: it is kept)."""

    secret: bytes
    why_not: str = ""


def own_key() -> Key:
    """This user's key. One that cannot be kept is made anew for this process: nothing is refused for that."""
    return _key_in(_state_folder())


def _state_folder() -> Path | None:
    """Return the key's path; None where there is no home for it."""
    if named := os.environ.get(VARIABLE, "").strip():
        return Path(named).expanduser().absolute()
    # As the XDG base directory specification says: a relative path counts as none.
    home = Path(os.environ.get("XDG_STATE_HOME", ""))
    try:
        return (home if home.is_absolute() else Path.home() / ".local" / "state") / "surgeon"
    except RuntimeError:
        return None


@functools.cache
def _key_in(folder: Path | None) -> Key:
    if folder is None:
        return _for_this_process("this user has no home folder")
    file = folder / KEY_FILE
    try:
        # One that is there can be read from a home that takes no more.
        secret = _read_or_make(file, os.O_RDONLY)
        if secret is None:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            secret = _read_or_make(file, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        return _for_this_process(f"{printable(str(file))} cannot be kept ({error.strerror})")
    if secret is None:
        return _for_this_process(f"{printable(str(file))} is no file that this user alone can write")
    return Key(secret)


def _read_or_make(file: Path, how: int) -> bytes | None:
    """Read the file, or create it where it may be; None where it is not there, or somebody else can write it."""
    try:
        handle = os.open(file, how | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        if how & os.O_CREAT:
            raise
        return None
    with os.fdopen(handle, "r+b" if how & os.O_CREAT else "rb", buffering=0) as opened:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            return None
        # Two first runs at once make one key. Not every file system has locks, or modes.
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        secret = opened.read(_BYTES + 1)
        if len(secret) == _BYTES:
            return secret
        if not how & os.O_CREAT:
            return None
        secret = secrets.token_bytes(_BYTES)
        opened.seek(0)
        opened.truncate()
        opened.write(secret)
        os.fsync(handle)
        return secret


def _for_this_process(why_not: str) -> Key:
    return Key(secrets.token_bytes(_BYTES), f"{why_not}; {VARIABLE} may name a folder for it")
