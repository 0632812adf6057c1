"""Records of surgeon's own that a run goes on from: only this user, in this folder, can have written them.

A work folder may come in an archive, as a copy or from somebody else, and all digests in it may fit. So a record
carries a code (HMAC-SHA256, RFC 2104) over its content, its name and the folder in which it lies, by a key that this
user alone has (own_key.py). One without it is shown, and taken only where the user says so.
"""

from __future__ import annotations

import datetime
import getpass
import hashlib
import hmac
import json
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surgeon.common.own_key import own_key
from surgeon.common.work_folders import read_own, write_durably
from surgeon.errors import BadInput, printable


@dataclass(frozen=True)
class Signed:
    """The data of a record, and where it comes from.

    `here`: this user wrote it in this very folder. `own`: this user wrote it, in a folder of the name that `by` has.
    `by` says who wrote it, where and when; without `own` nothing but the record itself says so.
    """

    data: Any
    here: bool
    own: bool
    by: str


# Of a file that no signed record knows.
UNSIGNED = Signed(None, here=False, own=False, by="")


def write_signed(path: Path, data: Any) -> None:
    """Replace a record, durably."""
    folder, inode = _place(path.parent)
    at = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    entry = {"user": _user(), "host": platform.node(), "folder": folder, "inode": inode, "at": at, "data": data}
    body = json.dumps(entry).encode()
    kept = _code(path.name, folder, inode, body) + b"\n" + body
    write_durably(path, hashlib.sha256(kept).hexdigest().encode() + b"\n" + kept)


def read_signed(path: Path) -> Signed | None:
    """The record at `path`; None where there is none. Raises ValueError for one that is not as it was written.

    Raises BadInput for anything but a file.
    """
    content = read_own(path)
    if content is None:
        return None
    digest, _, kept = content.partition(b"\n")
    if digest != hashlib.sha256(kept).hexdigest().encode():
        raise ValueError("it is not what its first line says")
    code, _, body = kept.partition(b"\n")
    try:
        entry = json.loads(body or code)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not body:
        # As versions before wrote it.
        return Signed(entry, here=False, own=False, by="")
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
) -> None:
    """Raise BadInput where a record was not written here by this user, unless it is to be taken over, which is said.

    `holds` is what lies in `folder`, in words; without the folder the same command does what `again` says. Where this
    user's key cannot be kept, that is said too: what is cut off will have to be taken over.
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
        whence = "this user did not write it here, and it does not say who did"
    if take_over:
        say(f"{shown}: holds {holds}; {whence}. Taken over as it is")
        return
    kept = f" The key of this user's work folders is not kept: {why_not}." if why_not else ""
    raise BadInput(
        f"{shown}: holds {holds}; {whence}.{kept} To go on with it as it is, give --take-over; to {again}, remove it"
    )


def _place(folder: Path) -> tuple[str, int]:
    """Return what a folder is known by: its path, links resolved, and its inode. Its device changes with a reboot."""
    return os.path.realpath(folder), folder.stat().st_ino


def _code(name: str, folder: str, inode: int, body: bytes) -> bytes:
    head = json.dumps([name, folder, inode]).encode() + b"\n"
    return hmac.new(own_key().secret, head + body, "sha256").hexdigest().encode()


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return str(os.geteuid())
