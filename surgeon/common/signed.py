"""Signed records from which a run continues: only this user, in this folder, can have written them.

A work folder may come from an archive, a copy or another person, and all digests in it may match. So a record has a
code (HMAC-SHA256, RFC 2104) over its content, its name and its folder, with a key that only this user has: 32 random
bytes, mode 0600, made at first use. A record without a valid code is reported, and used only with the user's consent.

The key is in `$SURGEON_STATE`, or in `surgeon` in the user's state folder. It is no cache, but without it only the
proof is lost that a work folder is this user's.
"""

from __future__ import annotations

import datetime
import fcntl
import functools
import getpass
import hashlib
import hmac
import json
import os
import platform
import secrets
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surgeon.common.work_folders import read_own, write_durably
from surgeon.errors import BadInput, printable

VARIABLE = "SURGEON_STATE"
KEY_FILE = "key"
_BYTES = 32


@dataclass(frozen=True)
class Key:
    """The secret key; `why_not` explains why only this process has it (empty: the key is stored)."""

    secret: bytes
    why_not: str = ""


def own_key() -> Key:
    """Return this user's key. If it cannot be stored, a new one is made for this process; this is no error."""
    return _key_in(user_folder(VARIABLE, "XDG_STATE_HOME", ".local", "state"))


def user_folder(variable: str, xdg: str, *usual: str) -> Path | None:
    """Return the user's folder that `variable` names, else `surgeon` in the one that `xdg` names, or in the usual one.

    None where the user has no home folder.

    Args:
        variable: surgeon's environment variable.
        xdg: the environment variable of the XDG base directory specification, by which a relative path is ignored.
        usual: the path from the home folder where neither is set.
    """
    if named := os.environ.get(variable, "").strip():
        return Path(named).expanduser().absolute()
    home = Path(os.environ.get(xdg, ""))
    try:
        return (home if home.is_absolute() else Path.home().joinpath(*usual)) / "surgeon"
    except RuntimeError:
        return None


@functools.cache
def _key_in(folder: Path | None) -> Key:
    """Return the key in a folder, made at first use; where it cannot be stored, a key for this process only."""
    if folder is None:
        return _for_this_process("this user has no home folder")
    file = folder / KEY_FILE
    try:
        # An existing key can be read even where the home folder is full or read-only.
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
    """Read the key file, or create it where `how` allows; None where it is missing, or others can write it."""
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
        # With the lock, two simultaneous first runs make only one key. Not every file system has locks.
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
    """Return a new key that only this process has, with the reason."""
    return Key(secrets.token_bytes(_BYTES), f"{why_not}; {VARIABLE} may name a folder for it")


@dataclass(frozen=True)
class Signed:
    """The data of a record, and its origin.

    `here`: this user wrote it in this very folder. `own`: this user wrote it, in the folder named in `by`. `by` names
    who wrote it, where and when; without `own`, this is only the record's own statement.
    """

    data: Any
    here: bool
    own: bool
    by: str


# Used for a file without a signed record.
UNSIGNED = Signed(None, here=False, own=False, by="")


def write_signed(path: Path, data: Any) -> None:
    """Write `data` (JSON data) as a signed record at `path`, durably, in place of any older record."""
    folder, inode = _place(path.parent)
    at = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    entry = {"user": _user(), "host": platform.node(), "folder": folder, "inode": inode, "at": at, "data": data}
    body = json.dumps(entry).encode()
    kept = _code(path.name, folder, inode, body) + b"\n" + body
    write_durably(path, hashlib.sha256(kept).hexdigest().encode() + b"\n" + kept)


def read_signed(path: Path) -> Signed | None:
    """Return the record at `path`; None where there is none.

    Raises ValueError for a record that is damaged, BadInput for anything but a file.
    """
    content = read_own(path)
    if content is None:
        return None
    digest, _, kept = content.partition(b"\n")
    if digest != hashlib.sha256(kept).hexdigest().encode():
        raise ValueError("it is not what its first line says")
    code, _, body = kept.partition(b"\n")
    try:
        entry = json.loads(body)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(entry, dict):
        raise ValueError("it is no record")
    try:
        says = str(entry["folder"]), int(entry["inode"])
        by = f"{entry['user']} on {entry['host']} in {says[0]}, {entry['at']}"
        data = entry["data"]
    except (KeyError, TypeError) as error:
        raise ValueError(f"it lacks {error}") from None
    here, own = (hmac.compare_digest(code, _code(path.name, *place, body)) for place in (_place(path.parent), says))
    return Signed(data, here=here, own=own, by=by)


def check_own(
    found: Signed | None,
    folder: Path,
    holds: str,
    *,
    take_over: bool,
    say: Callable[[str], None],
    again: str = "start again",
    unsigned: str = "this user did not write it here, and it does not say who did",
) -> None:
    """Raise BadInput where this user did not write the record here, unless `take_over` is set; then this is reported.

    `holds` describes the content of `folder`. `again` names what the same command does once the folder is removed.
    `unsigned` is the statement where nothing names a writer. Where this user's key cannot be stored, this is reported
    too: an interrupted run will then need `--take-over`.
    """
    why_not = own_key().why_not
    if found is None or found.here:
        if why_not:
            say(f"the key of this user's work folders is not kept: {why_not}. What is cut off goes on with --take-over")
        return
    shown = printable(str(folder))
    if found.own:
        whence = f"this user wrote it in another place: {printable(found.by, 400)}"
    elif found.by:
        whence = f"this user did not write it here; it says, by {printable(found.by, 400)}"
    else:
        whence = unsigned
    if take_over:
        say(f"{shown}: holds {holds}; {whence}. Taken over as it is")
        return
    kept = f" The key of this user's work folders is not kept: {why_not}." if why_not else ""
    raise BadInput(
        f"{shown}: holds {holds}; {whence}.{kept} To go on with it as it is, give --take-over; to {again}, remove it"
    )


def _place(folder: Path) -> tuple[str, int]:
    """Return the identity of a folder: its resolved path and its inode.

    The device number is left out, as reboots change it.
    """
    return os.path.realpath(folder), folder.stat().st_ino


def _code(name: str, folder: str, inode: int, body: bytes) -> bytes:
    """Return the code (HMAC-SHA256) that proves that this user wrote the record `name` in this folder."""
    head = json.dumps([name, folder, inode]).encode() + b"\n"
    return hmac.new(own_key().secret, head + body, "sha256").hexdigest().encode()


def _user() -> str:
    """Return the user's name, or the user's number where there is no name."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return str(os.geteuid())
