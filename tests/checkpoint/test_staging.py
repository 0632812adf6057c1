"""The staged output: absent or complete, continued, never mixed, one writer."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from surgeon.checkpoint.staging import Staging, check_destination, check_space
from surgeon.common.work_folders import WorkFolder, write_durably
from surgeon.errors import BadInput

FILES = {"model-1.safetensors": b"1" * 1000, "model-2.safetensors": b"2" * 2000, "config.json": b"{}", "t/x": b"x"}


def staging(out: Path, fingerprint: str = "f", said: list[str] | None = None) -> Staging:
    return Staging(out, fingerprint=fingerprint, say=(said if said is not None else []).append)


def make(stage: Staging, name: str) -> None:
    (stage.folder / name).parent.mkdir(exist_ok=True)
    (stage.folder / name).write_bytes(FILES[name])
    stage.done(name, {"digest": name})


def finish(stage: Staging) -> list[str]:
    """Make what is not made yet and publish; returns what had to be made."""
    made = [name for name in FILES if stage.is_done(name) is None]
    for name in made:
        make(stage, name)
    stage.publish()
    return made


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def cut_off(out: Path, *done: str, fingerprint: str = "f") -> None:
    """What a run leaves that was stopped after these files."""
    with pytest.raises(KeyboardInterrupt), staging(out, fingerprint) as stage:
        for name in done:
            make(stage, name)
        raise KeyboardInterrupt


def test_published_at_once_and_nothing_left(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with staging(out) as stage:
        assert not stage.already_published
        assert finish(stage) == list(FILES)
        assert content(out) == FILES
    assert names(tmp_path) == ["out"]


def test_leaving_without_publishing_leaves_out_absent(tmp_path: Path) -> None:
    with staging(tmp_path / "out") as stage:
        make(stage, "config.json")
    assert names(tmp_path) == [".out.surgeon"]


def test_nothing_journalled_nothing_left(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), staging(tmp_path / "out") as stage:
        (stage.folder / "half").write_bytes(b"x")
        raise RuntimeError
    assert names(tmp_path) == []


def test_continued_after_a_stop(tmp_path: Path) -> None:
    out = tmp_path / "out"
    cut_off(out, "model-1.safetensors", "config.json")
    said: list[str] = []
    with staging(out, said=said) as stage:
        assert stage.is_done("model-1.safetensors") == {"digest": "model-1.safetensors"}
        assert finish(stage) == ["model-2.safetensors", "t/x"]
    assert content(out) == FILES
    assert "2 files" in said[0]


def grow(path: Path) -> None:
    times = path.stat()
    with path.open("ab") as file:
        file.write(b"x")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.parametrize("change", [grow, lambda path: os.utime(path, ns=(1, 1)), Path.unlink])
def test_a_staged_file_that_changed_is_made_anew(change: Callable[[Path], object], tmp_path: Path) -> None:
    out = tmp_path / "out"
    cut_off(out, "model-1.safetensors", "config.json")
    change(tmp_path / ".out.surgeon" / "out" / "model-1.safetensors")
    with staging(out) as stage:
        assert "model-1.safetensors" in finish(stage)
    assert content(out) == FILES


@pytest.mark.parametrize("tail", [b'{"file":"model-2.saf', b"\x00" * 40, b"[]\n", b"null\n", b"\xff\n"])
def test_a_journal_line_cut_short_does_not_count(tail: bytes, tmp_path: Path) -> None:
    out = tmp_path / "out"
    cut_off(out, "model-1.safetensors")
    journal = tmp_path / ".out.surgeon" / "journal.jsonl"
    with journal.open("ab") as file:
        file.write(tail)
    with staging(out) as stage:
        assert stage.is_done("model-1.safetensors") is not None
        make(stage, "model-2.safetensors")
    assert [json.loads(line).get("file") for line in journal.read_bytes().splitlines()] == [
        None,
        "model-1.safetensors",
        "model-2.safetensors",
    ]
    with staging(out) as stage:
        assert stage.is_done("model-2.safetensors") is not None


def test_a_staged_file_is_named_as_the_output_s(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(BadInput) as said, staging(out) as stage:
        raise BadInput(f"{stage.folder / 'config.json'}: no JSON")
    assert str(said.value) == f"{out / 'config.json'}: no JSON"


def test_another_plan_s_files_are_set_aside_and_never_mixed_in(tmp_path: Path) -> None:
    out = tmp_path / "out"
    cut_off(out, "model-1.safetensors", fingerprint="one")
    said: list[str] = []
    with staging(out, "two", said) as stage:
        assert stage.is_done("model-1.safetensors") is None
        assert names(stage.folder) == []
        make(stage, "config.json")
    assert ".out.surgeon.old-1" in said[0]
    assert (tmp_path / ".out.surgeon.old-1" / "out" / "model-1.safetensors").read_bytes() == b"1" * 1000
    with staging(out, "three") as stage:
        finish(stage)
    assert names(tmp_path) == [".out.surgeon.old-1", ".out.surgeon.old-2", "out"]


def test_staged_files_without_a_readable_journal_are_set_aside(tmp_path: Path) -> None:
    out = tmp_path / "out"
    cut_off(out, "model-1.safetensors")
    (tmp_path / ".out.surgeon" / "journal.jsonl").write_bytes(b"\x00" * 100)
    with staging(out) as stage:
        assert finish(stage) == list(FILES)
    assert names(tmp_path) == [".out.surgeon.old-1", "out"]


def test_a_file_that_this_run_does_not_want_is_dropped(tmp_path: Path) -> None:
    """A side file that the base has lost between two runs."""
    out = tmp_path / "out"
    cut_off(out, "config.json", "t/x")
    with staging(out) as stage:
        assert stage.is_done("config.json") is not None
        stage.publish()
    assert names(out) == ["config.json"]


def test_a_half_written_file_of_an_earlier_run_is_dropped(tmp_path: Path) -> None:
    out = tmp_path / "out"
    cut_off(out, "config.json")
    (tmp_path / ".out.surgeon" / "out" / "half").write_bytes(b"x")
    with staging(out) as stage:
        assert names(stage.folder) == ["config.json"]
        finish(stage)
    assert content(out) == FILES


def test_what_is_not_journalled_is_not_published(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="not journalled"), staging(tmp_path / "out") as stage:
        make(stage, "config.json")
        (stage.folder / "stray").touch()
        stage.publish()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("existing", [Path.mkdir, Path.touch, lambda path: path.symlink_to("nowhere")])
def test_an_out_that_came_meanwhile_is_not_touched(existing: Callable[[Path], object], tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(BadInput, match="exists now"), staging(out) as stage:
        for name in FILES:
            make(stage, name)
        existing(out)
        stage.publish()
    before = os.lstat(out)
    with pytest.raises(BadInput, match="exists; choose another"), staging(out):
        pass
    assert os.path.samestat(before, os.lstat(out))
    out.rmdir() if out.is_dir() else out.unlink()
    with staging(out) as stage:
        assert finish(stage) == []
    assert content(out) == FILES


def test_an_existing_out_is_refused_and_nothing_left_beside(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    for check in (lambda: check_destination(tmp_path / "out", None), staging(tmp_path / "out").__enter__):
        with pytest.raises(BadInput, match="out: exists and holds mine; choose another folder"):
            check()
    assert names(tmp_path) == ["out"]
    assert names(tmp_path / "out") == ["mine"]


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    """An empty folder whose parent nobody may write to, as a mounted volume is; ext4 has a folder of its own there."""
    out = tmp_path / "out"
    (out / "lost+found").mkdir(parents=True)
    (out / "lost+found").chmod(0)
    return out


def test_an_empty_folder_is_written_into(volume: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = volume.stat()
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) == volume)
    monkeypatch.chdir(volume)
    for out in (volume, Path()):
        check_destination(out, None)
    with staging(Path()) as stage:
        finish(stage)
    assert os.path.samestat(before, volume.stat())
    assert content(volume) == FILES
    assert names(volume.parent) == ["out"]
    with pytest.raises(BadInput, match=r"exists and holds config\.json"):
        check_destination(volume, None)


def test_what_comes_into_the_folder_meanwhile_is_not_touched(volume: Path) -> None:
    with pytest.raises(BadInput, match=r"exists and holds config\.json now"), staging(volume) as stage:
        for name in FILES:
            make(stage, name)
        (volume / "config.json").write_text("mine")
        stage.publish()
    with pytest.raises(BadInput, match=r"exists and holds config\.json"), staging(volume):
        pass
    assert (volume / "config.json").read_text() == "mine"
    (volume / "config.json").unlink()
    with staging(volume) as stage:
        assert stage.already_published
    assert content(volume) == FILES


def test_a_folder_with_all_but_a_few_files_is_taken_for_nothing(volume: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed at any rename: the file that says what the folder is comes last, and the same command does the rest."""
    real = Path.rename
    for moved in range(len(FILES) + 1):
        seen: list[str] = []

        def rename(self: Path, target: Path) -> Path:
            if len(seen) == moved:  # noqa: B023 (called within this round)
                raise KeyboardInterrupt
            seen.append(target.name)  # noqa: B023
            return real(self, target)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", rename)
            patch.setattr(Staging, "_clean_up", lambda _: None)
            if moved < len(FILES):
                with pytest.raises(KeyboardInterrupt), staging(volume) as stage:
                    finish(stage)
            else:
                with staging(volume) as stage:
                    finish(stage)
        assert ("config.json" in names(volume)) == (moved == len(FILES))
        check_destination(volume, None)
        if moved:
            with pytest.raises(BadInput, match="exists and holds"), staging(volume, "another"):
                pass
        if moved % 2:
            # A file that is another by now, though of the same size: the output is not taken for ours.
            (volume / seen[0]).write_bytes(FILES[seen[0]])
            with pytest.raises(BadInput, match="exists and holds"), staging(volume):
                pass
        else:
            with staging(volume) as stage:
                assert stage.already_published
            assert content(volume) == FILES
        assert (volume / "lost+found").is_dir()
        for path in (path for path in volume.iterdir() if path.name != "lost+found"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def killed_after_rename(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Staging, "_clean_up", lambda _: None)
        with staging(out) as stage:
            finish(stage)


def test_cut_off_between_rename_and_clean_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    killed_after_rename(out, monkeypatch)
    assert names(tmp_path) == [".out.surgeon", "out"]
    check_destination(out, None)
    with staging(out) as stage:
        assert stage.already_published
    assert names(tmp_path) == ["out"]
    assert content(out) == FILES
    with pytest.raises(BadInput, match="exists"):
        check_destination(out, None)


def test_another_plan_does_not_take_it_for_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    killed_after_rename(out, monkeypatch)
    with pytest.raises(BadInput, match="exists"), staging(out, "another"):
        pass
    assert content(out) == FILES


def test_somebody_else_s_out_is_not_taken_for_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    killed_after_rename(out, monkeypatch)
    out.rename(tmp_path / "kept")
    out.mkdir()
    with pytest.raises(BadInput, match="exists"), staging(out):
        pass
    out.rmdir()
    with staging(out) as stage:
        assert not stage.already_published
        assert finish(stage) == list(FILES)
    assert content(out) == content(tmp_path / "kept") == FILES


def test_a_journal_that_guesses_the_folder_does_not_make_an_out_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder's number can be guessed: of an archive that brings both, that was all it took."""
    killed_after_rename(tmp_path / "out", monkeypatch)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("out", ".out.surgeon"):
        shutil.copytree(tmp_path / name, elsewhere / name)
    journal = elsewhere / ".out.surgeon" / "journal.jsonl"
    *done, _ = journal.read_text().splitlines()
    found = (elsewhere / "out").stat()
    journal.write_text("\n".join([*done, json.dumps({"published": [found.st_ino, found.st_dev]}), ""]))
    with pytest.raises(BadInput, match="exists"), staging(elsewhere / "out"):
        pass
    # Of what is staged, a copy is written again, and that is said.
    cut_off(tmp_path / "cut", "model-1.safetensors", "config.json")
    shutil.copytree(tmp_path / ".cut.surgeon", elsewhere / ".cut.surgeon")
    said: list[str] = []
    with staging(elsewhere / "cut", said=said) as stage:
        assert finish(stage) == list(FILES)
    assert any("2 files are not as they were written here, so they are written again" in line for line in said)


def test_one_writer(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with staging(out) as stage:
        make(stage, "config.json")
        before = names(tmp_path / ".out.surgeon")
        for fingerprint in ("f", "another"):
            with pytest.raises(BadInput, match=f"process {os.getpid()} is writing it"), staging(out, fingerprint):
                pass
        assert names(tmp_path) == [".out.surgeon"]
        assert names(tmp_path / ".out.surgeon") == before
        finish(stage)
    assert content(out) == FILES


def test_a_lock_that_its_holder_removed_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between our opening the lock and holding it, its holder published and cleaned up: start over."""
    out = tmp_path / "out"
    real, tried = WorkFolder._still_there, []

    def vanished(self: WorkFolder, lock: int) -> bool:
        tried.append(lock)
        if len(tried) == 1:
            (self.path / "lock").unlink()
        return real(self, lock)

    monkeypatch.setattr(WorkFolder, "_still_there", vanished)
    with staging(out) as stage:
        with pytest.raises(BadInput, match="is writing it"), staging(out):
            pass
        assert len(tried) == 2
        finish(stage)


def test_one_writer_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second one neither removes what the first has written so far, nor gives it its name."""
    page = tmp_path / "page.html"
    page.write_text("old")
    replace, seen = Path.replace, []

    def meanwhile(self: Path, target: Path) -> Path:
        with monkeypatch.context() as patched:
            patched.setattr(Path, "replace", replace)
            with pytest.raises(BadInput, match=r"page\.html: another process is writing it"):
                write_durably(page, "second")
        seen.append(page.read_text())
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", meanwhile)
    write_durably(page, "first")
    assert seen == ["old"]
    assert page.read_text() == "first"
    assert names(tmp_path) == ["page.html"]


def test_a_file_that_is_taken_for_a_killed_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process finds it new and not yet locked, and removes it: start over."""
    beside, lock, tried = tmp_path / ".page.html.new", fcntl.flock, []

    def taken(handle: int, how: int) -> None:
        tried.append(handle)
        if len(tried) == 1:
            beside.unlink()
            beside.write_text("another's")
        lock(handle, how)

    monkeypatch.setattr(fcntl, "flock", taken)
    write_durably(tmp_path / "page.html", "whole")
    assert (tmp_path / "page.html").read_text() == "whole"
    assert names(tmp_path) == ["page.html"]
    assert len(tried) == 3


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EBADF])
def test_a_file_where_there_are_no_locks(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: int) -> None:
        raise OSError(code, os.strerror(code))

    (tmp_path / ".page.html.new").write_text("half")
    monkeypatch.setattr(fcntl, "flock", none)
    write_durably(tmp_path / "page.html", "whole")
    assert (tmp_path / "page.html").read_text() == "whole"
    assert names(tmp_path) == ["page.html"]


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o002])
def test_modes_follow_the_umask(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        with staging(tmp_path / "out") as stage:
            finish(stage)
    finally:
        os.umask(before)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o777 & ~umask
    assert (tmp_path / "out" / "config.json").stat().st_mode & 0o777 == 0o666 & ~umask


def test_order_of_flushes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """file → journal … staged folder → intent → rename → parent: what TRUST promises, call by call."""
    log: list[str] = []
    real_sync, real_rename = os.fsync, Path.rename

    def name(path: str) -> str:
        return str(Path(path).relative_to(tmp_path))

    def fsync(fd: int) -> None:
        log.append(f"fsync {name(str(Path(f'/proc/self/fd/{fd}').readlink()))}")
        real_sync(fd)

    def rename(self: Path, target: Path) -> Path:
        log.append(f"rename {name(str(self))} {name(str(target))}")
        return real_rename(self, target)

    if not Path("/proc/self/fd").is_dir():
        pytest.skip("descriptors are named through /proc")
    with staging(tmp_path / "out") as stage:
        monkeypatch.setattr(os, "fsync", fsync)
        monkeypatch.setattr(Path, "rename", rename)
        make(stage, "config.json")
        make(stage, "t/x")
        stage.publish()
    w = ".out.surgeon"
    assert log == [
        f"fsync {w}/out/config.json",
        f"fsync {w}/journal.jsonl",
        f"fsync {w}/out/t/x",
        f"fsync {w}/journal.jsonl",
        f"fsync {w}/out/t",
        f"fsync {w}/out",
        f"fsync {w}/journal.jsonl",
        f"rename {w}/out out",
        "fsync .",
    ]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_failures_at_every_flush(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, real = tmp_path / "out", os.fsync
    # Two to begin, two a file, the folder in the folder, the folder, the intent, the parent.
    for failing in range(2 + 2 * len(FILES) + 4):
        count = 0

        def fsync(fd: int) -> None:
            nonlocal count
            count += 1
            if count == failing + 1:  # noqa: B023 (called within this round)
                raise OSError(number, os.strerror(number))
            real(fd)

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fsync)
            with pytest.raises(OSError, match=os.strerror(number)), staging(out) as stage:
                finish(stage)
        if out.exists():
            assert content(out) == FILES
        with staging(out) as stage:
            if not stage.already_published:
                finish(stage)
        assert content(out) == FILES
        assert names(tmp_path) == ["out"]
        for path in sorted(out.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        out.rmdir()


def test_a_clean_up_that_fails_is_told_and_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, said = tmp_path / "out", []

    def refuse(_: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with staging(out, said=said) as stage:
        monkeypatch.setattr(Path, "rmdir", refuse)
        finish(stage)
    assert content(out) == FILES
    assert "remove it by hand" in said[-1]


def test_the_working_folder_must_be_ours(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    working = tmp_path / ".out.surgeon"
    working.symlink_to("theirs")
    with pytest.raises(BadInput, match="a link"), staging(tmp_path / "out"):
        pass
    working.unlink()
    working.touch()
    with pytest.raises(BadInput, match="not a folder, but surgeon works in this place"), staging(tmp_path / "out"):
        pass
    assert names(tmp_path / "theirs") == []


def test_a_missing_parent(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no such folder"), staging(tmp_path / "no" / "out"):
        pass


def refused(out: Path, base: Path | None) -> str:
    with pytest.raises(BadInput) as caught:
        check_destination(out, base)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_destinations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tmp_path / "models" / "base"
    (base / "sub").mkdir(parents=True)
    check_destination(tmp_path / "out", base)
    check_destination(tmp_path / "models" / "base-2", base)
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to("nowhere")
    for taken in ("file", "dangling"):
        assert "exists" in refused(tmp_path / taken, base)
    assert "is the base itself" in refused(base, base)
    assert "is inside the base" in refused(base / "out", base)
    assert "is inside the base" in refused(base / "sub" / "out", base)
    assert "holds the base" in refused(tmp_path / "models", base)
    assert "holds the base" in refused(tmp_path, base)
    (tmp_path / "link").symlink_to(base)
    assert "is the base itself" in refused(tmp_path / "link", base)
    assert "is inside the base" in refused(tmp_path / "link" / "out", base)
    assert "is inside the base" in refused(base / "sub" / ".." / "out", base)
    assert "is the base itself" in refused(base, tmp_path / "link")
    assert "write the path without it" in refused(base / "..", base)
    monkeypatch.chdir(base)
    assert "is the base itself" in refused(Path(), base)
    assert "is inside the base" in refused(Path("out"), base)
    assert "is not a folder" in refused(tmp_path / "no" / "out", base)
    assert "is not a folder" in refused(tmp_path / "file" / "out", base)
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert "not writable" in refused(tmp_path / "out", base)


def test_room_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=1_000, f_frsize=4096))
    out = tmp_path / "out"
    check_space(out, 4_096_000)
    with pytest.raises(BadInput, match=r"5 GB are needed, 4\.1 MB are free"):
        check_space(out, 5_000_000_000)
    cut_off(out, "model-1.safetensors")
    check_space(out, 4_096_001, fingerprint="f")
    with pytest.raises(BadInput, match="are needed"):
        check_space(out, 4_096_001, fingerprint="another")


WRITER = """
import os, random, signal, sys, time
from pathlib import Path
from surgeon.checkpoint.ranges import reserve, write_all
from surgeon.checkpoint.staging import Staging

def write(out):
    with Staging(out, fingerprint="f", say=lambda line: None) as stage:
        if stage.already_published:
            return
        for number in range(12):
            name = f"shard-{number}" if number else "config.json"
            if stage.is_done(name) is None:
                fd = os.open(stage.folder / name, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
                reserve(fd, 80_000)
                for piece in range(8):
                    write_all(fd, random.Random(f"{number} {piece}").randbytes(10_000), piece * 10_000)
                os.close(fd)
                stage.done(name, {"number": number})
        stage.publish()

def ended_at(calls):
    # Each call that changes the disk counts; before call number `calls` the process is killed.
    made = 0
    def counted(real):
        def call(*given, **named):
            nonlocal made
            made += 1
            if made == calls:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*given, **named)
        return call
    for name in ("write", "pwrite", "fsync", "ftruncate", "mkdir", "rename", "replace", "unlink", "rmdir"):
        setattr(os, name, counted(getattr(os, name)))
    return lambda: made

print("ready", flush=True)
# A fork a request: Python's start-up is not what the kills should hit.
for line in sys.stdin:
    out, calls = line.split()
    reads, sends = os.pipe()
    child = os.fork()
    if child == 0:
        code, made = 1, ended_at(int(calls))
        try:
            write(Path(out))
            code = 0
        finally:
            with open(sends, "w") as told:
                print(made(), file=told)
            os._exit(code)
    os.close(sends)
    with open(reads) as told:
        made = told.read().strip() or "0"
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), made, flush=True)
"""


@pytest.mark.parametrize("within", [False, True])
def test_killed_at_forty_moments(tmp_path: Path, within: bool) -> None:
    """Killed at a call: out is absent or complete, and the run after is byte-equal to an uninterrupted one."""
    server = subprocess.Popen([sys.executable, "-c", WRITER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdin is not None
    assert server.stdout is not None

    def write(out: Path, calls: int = 0) -> tuple[int, int]:
        """The exit code, and how many calls were made; killed at call number `calls`, 0: never."""
        server.stdin.write(f"{out} {calls}\n")
        server.stdin.flush()
        code, made = server.stdout.readline().split()
        return int(code), int(made)

    try:
        assert server.stdout.readline() == "ready\n"
        code, whole = write(tmp_path / "whole")
        assert code == 0 and whole > 100
        expected = content(tmp_path / "whole")
        assert len(expected) == 12
        rng = random.Random(0)
        unfinished = resumed = 0
        for trial in range(40):
            out = tmp_path / f"out-{trial % 20}"
            out.mkdir(exist_ok=True) if within else None
            working = (out if within else tmp_path) / f".{out.name}.surgeon"
            if not (out / "config.json").exists():
                resumed += working.exists()
                # The renames are few among the calls, and the last of them.
                first = 1 if not within or trial % 3 else whole - 5
                assert write(out, rng.randint(first, whole + 12 * within))[0] in (0, -signal.SIGKILL)
            if (out / "config.json").exists():
                assert {name: made for name, made in content(out).items() if "/" not in name} == expected
            else:
                unfinished += 1
        assert unfinished
        assert resumed
        for trial in range(20):
            out = tmp_path / f"out-{trial}"
            working = (out if within else tmp_path) / f".{out.name}.surgeon"
            if working.exists():
                # Killed at the very last step: all is done but for an empty folder, and `out` is there already.
                over = (out / "config.json").exists() and not (working / "journal.jsonl").exists()
                assert write(out)[0] == (1 if over else 0)
                working.rmdir() if over and within else None
            elif not (out / "config.json").exists():
                assert write(out)[0] == 0
            assert content(out) == expected
            assert not working.exists()
    finally:
        server.stdin.close()
        server.stdout.close()
        server.wait()
