"""The staged output: written next to its destination, recorded in a journal file by file, published by one rename.

`.out.surgeon/` next to `out` contains `lock` (locked while a process works here), `journal.jsonl` (the files that are
complete and flushed) and `out/` (the files so far). If the run is interrupted, `out` is absent or complete, and the
same command continues from the journal.

An `out` that is an empty folder may be a mounted volume, which nothing can be renamed to. In this case `.out.surgeon/`
is created inside `out`, and each file is renamed into `out`; the files that identify the folder to loaders come last.
"""

from __future__ import annotations

import glob
import json
import os
import shutil
import stat
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from surgeon.checkpoint.folder import CONFIG_FILE, DELTA_FILE
from surgeon.checkpoint.peft_folder import ADAPTER_CONFIG
from surgeon.common.disk_space import check_room
from surgeon.common.names import check_new_name
from surgeon.common.work_folders import LOCK_FILE, WorkFolder, foreign_in, read_own, sync, work_folder
from surgeon.errors import BadInput, printable

_JOURNAL = "journal.jsonl"
_STAGED = "out"
_FORMAT = 1
# The files by which loaders recognise the kind of a folder; they are moved last.
_LAST = (DELTA_FILE, ADAPTER_CONFIG, CONFIG_FILE)


@dataclass
class _Journal:
    """The content of a working folder's journal.

    `fingerprint` identifies the run, None where the journal is of another format. `done` maps finished files to their
    entries. `valid_bytes` is the size of the complete lines; it ends before a line that a kill truncated.
    """

    fingerprint: str | None = None
    done: dict[str, dict[str, Any]] = field(default_factory=dict)
    # Inode and device of the staged folder when it was about to be renamed: a rename keeps both.
    published: list[int] | None = None
    valid_bytes: int = 0

    @classmethod
    def read(cls, path: Path) -> _Journal:
        """Return the journal at `path`, empty where there is none. Raises BadInput where `path` is no regular file."""
        journal = cls()
        for line in (read_own(path) or b"").splitlines(keepends=True):
            try:
                entry = json.loads(line) if line.endswith(b"\n") else None
            except ValueError:
                entry = None
            if not isinstance(entry, dict):
                break
            journal.valid_bytes += len(line)
            if "fingerprint" in entry:
                journal.fingerprint = entry["fingerprint"] if entry.get("format") == _FORMAT else None
            elif isinstance(entry.get("file"), str):
                journal.done[entry["file"]] = entry
            elif "published" in entry:
                journal.published = entry["published"]
        return journal


class Staging:
    """An output that one run is writing; no other process can write it at the same time.

    Files are written into `folder`. `done` adds each to a journal, `is_done` finds files of an earlier run with the
    same `fingerprint`, and `publish` renames them to `out`. Leaving the `with` block without `publish` leaves `out`
    absent and keeps the staged files for the next run. `already_published`: an earlier run of this fingerprint was
    killed after its `out` was complete. Entering raises BadInput when another process writes the same `out` or when
    `out` exists already; an OSError of the file system (disk full, …) is passed on.
    """

    def __init__(self, out: Path, *, fingerprint: str, say: Callable[[str], None]) -> None:
        self.out = _absolute(out)
        self.working = working_folder(self.out)
        self._work = WorkFolder(self.working, target=self.out)
        self.folder = self.working / _STAGED
        self.fingerprint = fingerprint
        self.already_published = False
        self._say = say
        self._journal = -1
        self._done: dict[str, dict[str, Any]] = {}
        # Files that this run reused or wrote; an earlier run may have left further files.
        self._used: set[str] = set()
        self._writing = threading.Lock()
        self._published = False

    def __enter__(self) -> Self:
        """Lock the working folder, and continue or begin the output in it. Raises BadInput as the class describes."""
        self._work.__enter__()
        try:
            self._continue_or_begin()
        except BaseException:
            if not (self.folder.exists() or (self.working / _JOURNAL).exists()):
                self._clean_up()
            self._release()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        """Unlock the working folder; remove it where no file is finished.

        A BadInput then names `out`, not the staged folder.
        """
        if isinstance(error, BadInput) and error.args:
            # The user knows OUT and its files, not the staged ones.
            error.args = (str(error).replace(str(self.folder), str(self.out)), *error.args[1:])
        try:
            if not self._published and not self.already_published and not self._done:
                self._clean_up()
        finally:
            self._release()

    def is_done(self, file: str) -> dict[str, Any] | None:
        """Return the journal's record of a file that is unchanged since it was staged, else None."""
        record = self._unchanged(file)
        if record is not None:
            self._used.add(file)
        return record

    def _unchanged(self, file: str) -> dict[str, Any] | None:
        """Return the journal's record of a staged file if the file is unchanged since then; else None."""
        entry = self._done.get(file)
        record = None if entry is None else entry.get("record")
        return record if _is_as(self.folder / file, entry) and isinstance(record, dict) else None

    def done(self, file: str, record: dict[str, Any]) -> None:
        """Flush a finished file of `folder` to disk, then add it to the journal with `record` (JSON data).

        Raises BadInput where the working folder was moved or replaced meanwhile.
        """
        self._work.check_there()
        sync(self.folder / file)
        found = os.lstat(self.folder / file)
        entry = {"file": file, **_facts(found), "record": record}
        self._append(entry)
        self._done[file] = entry
        self._used.add(file)

    def abandon(self) -> None:
        """Forget the finished files, so that leaving removes them: for a run that the same command can never finish."""
        self._done.clear()

    def publish(self) -> None:
        """Rename the staged folder to `out`, durably. Every file in it must be in the journal.

        Files of an earlier run that this run neither needed nor wrote are dropped: the base may have lost a side file
        in between. Raises BadInput where `out` exists by now, or a folder on the way to it was moved or replaced.
        """
        self._work.check_there()
        staged = self._staged()
        assert staged <= self._done.keys(), f"not journalled: {sorted(staged - self._done.keys())}"
        assert self._used <= staged, f"journalled, yet not there: {sorted(self._used - staged)}"
        for name in staged - self._used:
            (self.folder / name).unlink()
            if "/" in name and not any((self.folder / name).parent.iterdir()):
                (self.folder / name).parent.rmdir()
        folders = {(self.folder / name).parent for name in self._used} | {self.folder}
        for folder in sorted(folders, reverse=True):
            sync(folder)
        found = self.folder.stat()
        self._append({"published": [found.st_ino, found.st_dev]})
        _check_free(
            self.out,
            self.working,
            " now; it was not so when the run began. Nothing is lost: move it away and run the same command again",
        )
        self._work.check_there()
        self._move()
        self._published = True
        self._clean_up()
        aside = sorted(self.working.parent.glob(f"{glob.escape(self.working.name)}.old-*"))
        if aside:
            self._say(
                f"{printable(', '.join(path.name for path in aside))}: unfinished work of other plans on"
                f" {printable(self.out.name)}; remove it when you do not need it"
            )

    def _move(self) -> None:
        """Move every staged file to its place in `out`; continues a move that a killed run began."""
        if not self._within:
            if self.folder.exists():
                self.folder.rename(self.out)
            sync(self.out.parent)
            return
        for path in sorted(self.folder.glob("*"), key=lambda path: (path.name in _LAST, path.name)):
            path.rename(self.out / path.name)
        sync(self.out)

    @property
    def _within(self) -> bool:
        """Whether the working folder is inside `out`, an empty folder that nothing can be renamed to."""
        return self.working.parent == self.out

    def _staged(self) -> set[str]:
        """Return the relative names of all staged files."""
        return {str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if not path.is_dir()}

    def _continue_or_begin(self) -> None:
        """Prepare the working folder, by what an earlier run left in it.

        A run of the same fingerprint that was complete is published; an incomplete one is continued, without files that
        changed since. The work of another fingerprint is set aside. Raises BadInput where `out` is not free.
        """
        journal = _Journal.read(self.working / _JOURNAL)
        if journal.fingerprint == self.fingerprint and self._was_published(journal):
            self.already_published = True
            self._move()
            self._clean_up()
            return
        _check_free(self.out, self.working)
        if journal.fingerprint != self.fingerprint and (journal.fingerprint is not None or self.folder.exists()):
            self._set_aside()
            journal = _Journal()
        self._done = journal.done
        begun = journal.fingerprint is not None
        self._journal = os.open(
            self.working / _JOURNAL, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_APPEND, 0o600
        )
        os.ftruncate(self._journal, journal.valid_bytes if begun else 0)
        if not begun:
            self._append({"format": _FORMAT, "fingerprint": self.fingerprint})
            sync(self.working)
        self.folder.mkdir(exist_ok=True)
        for name in self._staged():
            if self._unchanged(name) is None:
                (self.folder / name).unlink()
        kept = sum(self._unchanged(file) is not None for file in self._done)
        if lost := len(self._done) - kept:
            # For example the folder was copied or unpacked here: inodes and times then differ from the journal.
            self._say(
                f"{printable(str(self.working))}: {lost} files are not as they were written here, so they are written"
                " again"
            )
        if kept:
            self._say(f"continuing an earlier run: {kept} files are done already")

    def _was_published(self, journal: _Journal) -> bool:
        """Return whether `out` contains exactly the output that an earlier run with this journal was publishing."""
        if journal.published is None or not self.out.is_dir() or self.out.is_symlink():
            return False
        found = self.out.stat()
        if not self._within and (self.folder.exists() or journal.published != [found.st_ino, found.st_dev]):
            return False
        # A journal copied from elsewhere could match the folder's inode by chance, but not each file's write time.
        staged = {self.folder / name: name for name in self._staged()} if self._within else {}
        there = {path: str(path.relative_to(self.out)) for top in foreign_in(self.out) for path in _below(top)}
        return bool(staged or there) and all(
            _is_as(path, journal.done.get(name), moved=self._within) for path, name in (staged | there).items()
        )

    def _set_aside(self) -> None:
        """Rename the working folder of another run, with its lock, and lock a new one."""
        number = 1
        while os.path.lexists(aside := self.working.with_name(f"{self.working.name}.old-{number}")):
            number += 1
        self.working.rename(aside)
        self._say(
            f"{printable(str(self.working))} belonged to another plan, base or version; it was renamed to"
            f" {printable(aside.name)}, remove it when you do not need it"
        )
        self._release()
        self._work.__enter__()

    def _append(self, entry: dict[str, Any]) -> None:
        """Append an entry to the journal as one line, and flush it to disk."""
        # Keys stay unsorted, so that an earlier run's records enter the manifest in the order of an uninterrupted run.
        line = (json.dumps(entry, separators=(",", ":")) + "\n").encode()
        with self._writing:
            while line:
                line = line[os.write(self._journal, line) :]
            os.fsync(self._journal)

    def _clean_up(self) -> None:
        """Remove the working folder and everything in it; an OSError is only reported to the user."""
        published = self._published or self.already_published
        # After publishing, the journal is removed last: after a kill it shows the next run that `out` is complete.
        order = (LOCK_FILE, _JOURNAL) if published else (_JOURNAL, LOCK_FILE)
        try:
            if self.folder.exists():
                shutil.rmtree(self.folder)
            for name in order:
                (self.working / name).unlink(missing_ok=True)
            self.working.rmdir()
        except OSError as error:
            self._say(f"{printable(str(self.working))} could not be removed ({error.strerror}); remove it by hand")

    def _release(self) -> None:
        """Close the journal and release the working folder's lock."""
        if self._journal >= 0:
            os.close(self._journal)
        self._journal = -1
        self._work.release()


def _below(path: Path) -> list[Path]:
    """Return all files below a folder, at any depth; for a file, only the file itself."""
    return [file for file in path.rglob("*") if not file.is_dir()] if path.is_dir() else [path]


def _is_as(file: Path, entry: dict[str, Any] | None, *, moved: bool = False) -> bool:
    """Return whether `file` is a regular file, unchanged since the journal's `entry` (False for None).

    With `moved`, the file may have been renamed, which changes its ctime.
    """
    try:
        found = os.lstat(file)
    except OSError:
        return False
    facts = _facts(found)
    if moved:
        del facts["ctime_ns"]
    return entry is not None and stat.S_ISREG(found.st_mode) and {**entry, **facts} == entry


def _facts(found: os.stat_result) -> dict[str, int]:
    """Return stat facts that change when somebody modifies the file: its ctime cannot be set back."""
    return {"size": found.st_size, "mtime_ns": found.st_mtime_ns, "ctime_ns": found.st_ctime_ns, "inode": found.st_ino}


def check_destination(out: Path, base: Path | None) -> None:
    """Raise BadInput where an output cannot be written to `out`.

    This is so where `out` has an invalid name, exists and is no empty folder, or has no writable parent, and where
    `out` is the `base`, contains the `base` or is inside it. An `out` that a killed run completed but did not clean up
    is accepted: `Staging` finds out which run wrote it.
    """
    check_new_name(out)
    target = _absolute(out)
    shown = printable(str(out))
    # Check the path as written, not resolved: `absent/..` leads nowhere.
    if not out.absolute().parent.is_dir():
        raise BadInput(f"{shown}: {printable(str(out.absolute().parent))} is not a folder; make it first")
    if base is not None:
        _check_apart(target, base, shown)
    working = working_folder(target)
    if _Journal.read(working / _JOURNAL).published is None:
        _check_free(target, working)
    if not os.access(working.parent, os.W_OK | os.X_OK):
        raise BadInput(f"{shown}: {printable(str(working.parent))} is not writable for you; choose another folder")


def _check_free(out: Path, working: Path, then: str = "; choose another folder, or move it away") -> None:
    """Raise BadInput where an output cannot be written to `out`; the message ends with `then`."""
    held = foreign_in(out)[:1] if working.parent == out else []
    if held or (working.parent != out and os.path.lexists(out)):
        raise BadInput(f"{printable(str(out))}: exists{''.join(f' and holds {printable(p.name)}' for p in held)}{then}")


def _check_apart(target: Path, base: Path, shown: str) -> None:
    """Raise BadInput where the target folder is the base, is inside the base or contains it."""
    real_base = Path(os.path.realpath(base))
    # Compare inodes: links, bind mounts and case-insensitive names give one folder many paths.
    base_stat = real_base.stat()
    real_target = Path(os.path.realpath(target))
    for folder in (real_target, *real_target.parents):
        if folder.exists() and os.path.samestat(folder.stat(), base_stat):
            where = "is the base itself" if folder == real_target else "is inside the base"
            raise BadInput(f"{shown}: {where}, which is never written to; choose another folder")
    if real_target.exists():
        target_stat = real_target.stat()
        if any(os.path.samestat(folder.stat(), target_stat) for folder in real_base.parents):
            raise BadInput(f"{shown}: holds the base, which is never written to; choose another folder")


def check_space(out: Path, needed_bytes: int, *, fingerprint: str | None = None) -> None:
    """Raise BadInput, with both numbers, where the file system of `out` has less room than `needed_bytes`.

    Files that an earlier run of the same `fingerprint` has staged are not counted.
    """
    target = _absolute(out)
    working = working_folder(target)
    if fingerprint is not None and _Journal.read(working / _JOURNAL).fingerprint == fingerprint:
        needed_bytes -= sum(path.lstat().st_blocks * 512 for path in (working / _STAGED).glob("*"))
    check_room(target, needed_bytes)


def _absolute(out: Path) -> Path:
    """Return the absolute path of `out` with all links followed, except a link in the last component."""
    # The last part is not resolved: a link there must be found, not followed.
    if out.name in ("", ".."):
        return Path(os.path.realpath(out))
    return Path(os.path.realpath(out.parent)) / out.name


def working_folder(out: Path) -> Path:
    """Return the folder in which an output is staged."""
    return work_folder(out, "surgeon")
