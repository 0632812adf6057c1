"""Folders next to outputs in which surgeon works: they must be the user's only, else they are refused.

No link in them is ever followed. Their names derive from outputs' names, so whoever may write next to an output can
create such a folder first, or hide one in an archive.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from surgeon.errors import BadInput, printable

LOCK_FILE = "lock"
# How often to try: another process may remove the folder after this one opens the lock file and before it locks it.
_LOCK_ATTEMPTS = 20


def work_folder(target: Path, what: str) -> Path:
    """Return the folder in which surgeon makes `target`: next to it, or inside if it was a folder before work began."""
    target = target if target.name else target.absolute()
    beside = target.with_name(f".{target.name}.{what}")
    inside = target.is_dir() and not target.is_symlink() and not os.path.lexists(beside)
    return target / beside.name if inside else beside


def foreign_in(folder: Path) -> list[Path]:
    """Return the files in a folder other than surgeon's own working files and the `lost+found` of new ext4 volumes."""
    own = (f".{folder.name}.", "lost+found")
    return sorted(path for path in folder.iterdir() if not path.name.startswith(own))


def sync(path: Path) -> None:
    """Flush a file's content, or a folder's entries, to disk."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_new(path: Path, content: bytes) -> None:
    """Write a new file in place of any existing file; a link of this name is removed, never followed."""
    path.unlink(missing_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    with os.fdopen(handle, "wb") as file:
        file.write(content)


def write_durably(path: Path, content: str | bytes | Iterable[bytes | memoryview]) -> None:
    """Replace the file at `path` by `content`, whole or in pieces; it has the old or the new content at every moment.

    Raises BadInput where the path is no file (a folder, a device), and where another process is writing it.
    """
    try:
        if not stat.S_ISREG(kind := os.lstat(path).st_mode) and not stat.S_ISLNK(kind):
            raise BadInput(f"{printable(str(path))}: not a file, so nothing is written there; give a file's name")
    except FileNotFoundError:
        pass
    beside = path.with_name(f".{path.name}.new")
    # Locked until it is renamed: else a second process could replace it, and this one would rename a partial file.
    with os.fdopen(_new_and_locked(beside, target=path), "wb") as file:
        try:
            whole = content.encode() if isinstance(content, str) else content
            file.writelines([whole] if isinstance(whole, bytes) else whole)
            file.flush()
            os.fsync(file.fileno())
            beside.replace(path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
    sync(path.parent)


def _new_and_locked(path: Path, *, target: Path) -> int:
    """Return a descriptor of a new locked file; a leftover of a killed run with this name is removed, also a link."""
    for _ in range(_LOCK_ATTEMPTS):
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            if not _removed(path):
                break
            continue
        # Before the lock, another process may have mistaken the file for a leftover and removed it.
        if _locked(handle) and _is_at(handle, path):
            return handle
        os.close(handle)
    raise BadInput(f"{printable(str(target))}: another process is writing it; wait for it, or choose another name")


def _removed(path: Path) -> bool:
    """Remove the file unless a process is writing it; return whether it is gone."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        # It is gone by now, or surgeon cannot have made it: for example a link.
        path.unlink(missing_ok=True)
        return True
    try:
        if not _locked(handle):
            return False
        if _is_at(handle, path):
            path.unlink(missing_ok=True)
        return True
    finally:
        os.close(handle)


def _locked(handle: int) -> bool:
    """Lock the file and return whether this succeeded; on a file system without locks this returns true."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
    return True


def _is_at(handle: int, path: Path) -> bool:
    """Return whether the path leads to the open file."""
    try:
        return os.path.samestat(os.fstat(handle), os.lstat(path))
    except (FileNotFoundError, NotADirectoryError):
        return False


def read_own(path: Path) -> bytes | None:
    """Return the content of a file in a folder of surgeon's own; None where there is no file of this name.

    Raises BadInput for anything but a regular file: links are not followed, and FIFOs are not waited for.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK):
            raise _foreign(path, "a link") from None
        raise
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise _foreign(path, "not a file")
        return file.read()


class WorkFolder:
    """A locked private folder that no other process uses inside the `with` block; made if missing, with mode 0700.

    `target` names, in messages, what is made in it. Entering raises BadInput where another process has the lock, and
    for a folder that is not only the user's: a link, another user's, or with a link or another user's file anywhere in
    it.
    """

    def __init__(self, path: Path, *, target: Path) -> None:
        self.path = path
        self.target = target
        self._lock = -1

    def __enter__(self) -> Self:
        """Lock the folder, made if missing, and check its content. Raises BadInput as the class describes."""
        self._lock = self._take_lock()
        try:
            self._check_content()
        except BaseException:
            self.release()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Unlock the folder, so that other processes can work here."""
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1

    def check_marked(self, marker: str) -> None:
        """Raise BadInput where the folder has files but not `marker`, which every run writes first."""
        names = {path.name for path in self.path.iterdir()}
        strange = names - {LOCK_FILE, marker, f".{marker}.new"}
        if marker not in names and strange:
            raise BadInput(
                f"{printable(str(self.path))}: holds {printable(min(strange))}, but no {marker}, so no run of surgeon"
                " left it as it is; look at it, then remove the folder"
            )

    def check_there(self) -> None:
        """Raise BadInput where the path now leads to another folder."""
        if not self._still_there(self._lock):
            raise BadInput(
                f"{printable(str(self.path))}: moved or replaced while {printable(str(self.target))} was made in it;"
                " put it back, and run the same command again when nobody moves it"
            )

    def remove(self, last: str | None = None) -> None:
        """Remove the folder with its content; the file `last` and the lock file are removed at the end.

        Raises OSError.
        """
        self.clear(but=(last,))
        self.clear()
        (self.path / LOCK_FILE).unlink(missing_ok=True)
        self.path.rmdir()

    def clear(self, but: Collection[str | None] = ()) -> None:
        """Remove everything except the lock and the files `but`. Raises OSError."""
        with os.scandir(self.path) as entries:
            there = list(entries)
        for entry in there:
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            elif entry.name not in (LOCK_FILE, *but):
                Path(entry.path).unlink()

    def _take_lock(self) -> int:
        """Make the folder where it is missing, lock it, and return the lock file's descriptor.

        Raises BadInput where another process has the lock, or the folder or the lock file is not the user's own.
        """
        for _ in range(_LOCK_ATTEMPTS):
            try:
                self._make_or_check()
                lock = os.open(
                    self.path / LOCK_FILE,
                    os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC,
                    0o600,
                )
            except FileNotFoundError:
                if self.path.parent.is_dir():
                    continue
                raise BadInput(f"{printable(str(self.path.parent))}: no such folder to write into; make it") from None
            except OSError as error:
                if error.errno not in (errno.ELOOP, errno.EMLINK, errno.ENXIO, errno.EISDIR):
                    raise
                raise _foreign(self.path / LOCK_FILE, "not a file") from None
            if not _is_single_file(os.fstat(lock)):
                os.close(lock)
                raise _foreign(self.path / LOCK_FILE, "not a file of its own")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                holder = os.pread(lock, 20, 0).decode("ascii", "replace").strip()
                os.close(lock)
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise
                raise BadInput(
                    f"{printable(str(self.target))}: process {printable(holder) or '(unknown)'} is writing it; wait for"
                    " it or choose another folder"
                ) from None
            if self._still_there(lock):
                os.ftruncate(lock, 0)
                os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
                return lock
            os.close(lock)
        raise BadInput(
            f"{printable(str(self.path))}: other processes keep making and removing it; choose another folder"
        )

    def _make_or_check(self) -> None:
        """Make the folder with mode 0700, or check an existing one and set that mode.

        Raises BadInput for a link, anything but a folder, and another user's folder.
        """
        try:
            self.path.mkdir(0o700)
            return
        except FileExistsError:
            found = os.lstat(self.path)
        if not stat.S_ISDIR(found.st_mode):
            raise _foreign(self.path, "a link" if stat.S_ISLNK(found.st_mode) else "not a folder")
        if not _is_ours(found, self.path.parent):
            raise _foreign(self.path, "another user's")
        if found.st_mode & 0o077:
            # A folder of an older version. A file system without modes refuses this, or only pretends.
            with suppress(PermissionError):
                self.path.chmod(0o700)

    def _check_content(self) -> None:
        """Raise BadInput where the folder contains a link, a special file, or another user's file."""
        owner = os.lstat(self.path).st_uid
        for folder, folders, files in os.walk(self.path):
            for name in (*folders, *files):
                path = Path(folder) / name
                found = os.lstat(path)
                if stat.S_ISLNK(found.st_mode):
                    raise _foreign(path, "a link")
                if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
                    raise _foreign(path, "not a file")
                if found.st_uid != owner:
                    raise _foreign(path, "another user's")
                # Top-level files are written in place: with a second hard link this would change another file.
                if path.parent == self.path and name in files and not _is_single_file(found):
                    raise _foreign(path, "a second name of another file")

    def _still_there(self, lock: int) -> bool:
        """Return whether the lock file at the folder's path is the locked file."""
        return _is_at(lock, self.path / LOCK_FILE)


def _is_single_file(found: os.stat_result) -> bool:
    """Return whether it is a regular file with only one name."""
    return stat.S_ISREG(found.st_mode) and found.st_nlink == 1


def _is_ours(found: os.stat_result, parent: Path) -> bool:
    """Return whether the user owns it; file systems that assign other owners are tested with a temporary file."""
    if found.st_uid == os.geteuid():
        return True
    try:
        with tempfile.TemporaryFile(dir=parent) as made:
            return os.fstat(made.fileno()).st_uid == found.st_uid
    except OSError:
        return False


def _foreign(path: Path, what: str) -> BadInput:
    """Return the error for a file or folder that surgeon did not make."""
    return BadInput(
        f"{printable(str(path))}: {what}, but surgeon works in this place, in files of its own; look at it, then remove"
        " it or choose another folder"
    )


@contextmanager
def working_in(folder: Path, *, target: Path, marker: str) -> Iterator[WorkFolder]:
    """Lock the private `folder` in which `target` is made.

    Raises BadInput as `WorkFolder` does, and if `marker` is missing.
    """
    with WorkFolder(folder, target=target) as work:
        work.check_marked(marker)
        yield work
