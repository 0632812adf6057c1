"""Shards that go unchanged into an output: hard-linked with `--link`, reflinked where that can be, else copied."""

from __future__ import annotations

import json
import os
import stat
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

import surgeon
from surgeon.checkpoint import linking
from surgeon.cli import app
from surgeon.errors import BadInput
from surgeon.writing import linked_shards

ADAPTERS = {"op": "gated_adapters", "layers": [1, 5], "size": 8}
LAYERS = {"op": "insert_layers", "where": {"after": [4]}, "init": {"kind": "copy"}}

Plan = Callable[..., Path]


def shards(folder: Path) -> dict[str, Path]:
    """A folder's shards by their content: what a graft keeps has another name in its output."""
    return {path.read_bytes().hex(): path for path in sorted(folder.glob("*.safetensors"))}


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def shared(one: Path, other: Path) -> int:
    """How many shards of `one` are the same files as those of `other`; each is read-only then."""
    inodes = {path.stat().st_ino for path in other.glob("*.safetensors")}
    same = [path for path in one.glob("*.safetensors") if path.stat().st_ino in inodes]
    assert not any(path.stat().st_mode & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH) for path in same)
    return len(same)


@pytest.mark.parametrize("operation", [ADAPTERS, LAYERS], ids=["all shards", "those below the new layer"])
def test_a_linked_output_is_the_copied_one(
    operation: dict[str, object], base: Path, tmp_path: Path, plan: Plan
) -> None:
    copied, linked = tmp_path / "copied", tmp_path / "linked" / "out"
    linked.parent.mkdir()
    before = files(base)
    surgeon.apply(plan(operation), base, copied)
    shown = surgeon.preview(plan(operation), base, link=True)
    applied = surgeon.apply(plan(operation), base, linked, link=True)
    same = sum(content in files(base).values() for name, content in files(copied).items() if name.endswith("tensors"))
    assert files(base) == before
    assert files(linked) == files(copied)
    assert shared(linked, base) == same >= (4 if operation is ADAPTERS else 1)
    assert shared(copied, base) == 0
    assert applied.moved.linked == shown.bytes_unchanged > 0
    assert applied.moved.linked + applied.moved.written == shown.bytes_to_write
    assert surgeon.verify(base, linked, logits=False).holds


@pytest.mark.parametrize("metadata", [None, {"format": "pt", "made by": "another tool"}], ids=["none", "more"])
def test_headers_that_others_wrote_stay_as_they_are(
    metadata: dict[str, str] | None, base: Path, tmp_path: Path, plan: Plan
) -> None:
    """Not every tool writes the JSON that surgeon does; each way gives the same files, and undoing the base's."""
    for path in base.glob("*.safetensors"):
        content = path.read_bytes()
        begin = 8 + struct.unpack("<Q", content[:8])[0]
        header = json.loads(content[8:begin])
        tensors = {name: header[name] for name in sorted(header, reverse=True) if name != "__metadata__"}
        text = json.dumps({**tensors, **({"__metadata__": metadata} if metadata else {})}, indent=1).encode()
        text += b" " * (-len(text) % 8)
        path.write_bytes(struct.pack("<Q", len(text)) + text + content[begin:])
    copied, linked = tmp_path / "copied", tmp_path / "linked"
    surgeon.apply(plan(ADAPTERS), base, copied)
    surgeon.apply(plan(ADAPTERS), base, linked, link=True)
    assert files(linked) == files(copied)
    assert shared(linked, base) == 4
    surgeon.revert(copied, tmp_path / "back")
    assert shards(tmp_path / "back").keys() == shards(base).keys()


def test_an_edit_of_either_side_is_found(base: Path, tmp_path: Path, plan: Plan) -> None:
    out = tmp_path / "out"
    assert CliRunner().invoke(app, ["apply", str(plan(ADAPTERS)), str(base), str(out), "--link"]).exit_code == 0
    held = next(path for path in base.glob("*.safetensors"))
    held.chmod(0o644)
    with held.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    found = CliRunner().invoke(app, ["verify", str(base), str(out), "--static"])
    assert found.exit_code == 3
    assert "FAILS base" in " ".join(found.stdout.split())


def test_reverting_links_too(base: Path, tmp_path: Path, plan: Plan) -> None:
    surgeon.apply(plan(ADAPTERS), base, tmp_path / "out")
    reverted = surgeon.revert(tmp_path / "out", tmp_path / "back", link=True)
    assert shared(tmp_path / "back", tmp_path / "out") == 4
    assert reverted.moved.written == 0
    assert shards(tmp_path / "back").keys() == shards(base).keys()


def test_a_link_of_the_hubs_cache_is_followed_to_its_blob(base: Path, tmp_path: Path, plan: Plan) -> None:
    repository = tmp_path / "models--user--name"
    snapshot = repository / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for path in base.iterdir():
        path.rename(repository / "blobs" / path.name)
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    surgeon.apply(plan(ADAPTERS), snapshot, tmp_path / "out", link=True)
    assert shared(tmp_path / "out", repository / "blobs") == 4
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())


@pytest.mark.parametrize("why", ["another disk", "another user's", "stays writable", "cannot be hard-linked"])
def test_what_cannot_be_linked_is_refused(
    why: str, base: Path, tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    out = tmp_path / "out"
    match why:
        case "another disk":
            out = Path("/dev/shm") / f"{tmp_path.name}-out"
            if out.parent.stat().st_dev == base.stat().st_dev:
                pytest.skip("one file system")
        case "another user's":
            monkeypatch.setattr(os, "geteuid", lambda: base.stat().st_uid + 1)
        case "stays writable":
            monkeypatch.setattr(os, "fchmod", lambda *_: None)
        case _:
            monkeypatch.setattr(os, "link", never)
    with pytest.raises(BadInput, match=f"{why}.*leave out --link"):
        surgeon.apply(plan(ADAPTERS), base, out, link=True)
    assert not out.exists()
    assert not list(out.parent.glob(f".{out.name}*"))


def test_a_cut_off_run_leaves_the_base_as_it_is(
    base: Path, tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed when a shard is linked and not yet in the journal: the second run must not write into it."""
    before, left = files(base), [2]
    real = linking.hard_link

    def killed(*arguments: object) -> None:
        real(*arguments)  # type: ignore[arg-type]
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(linked_shards, "hard_link", killed)
        with pytest.raises(KeyboardInterrupt):
            surgeon.apply(plan(ADAPTERS), base, tmp_path / "out", link=True)
    assert not (tmp_path / "out").exists()
    surgeon.apply(plan(ADAPTERS), base, tmp_path / "out", link=True)
    assert files(base) == before
    assert shared(tmp_path / "out", base) == 4


@pytest.mark.parametrize("able", [4, 2], ids=["all", "some"])
@pytest.mark.usefixtures("unproven")
def test_blocks_are_shared_where_the_file_system_can(
    able: int, base: Path, tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call itself is tried below: here a file system that has it, for all files or for some of them."""
    left = [able]

    def cloned(source: int, target: int) -> bool:
        left[0] -= 1
        if left[0] < 0:
            return False
        os.pwrite(target, os.pread(source, os.fstat(source).st_size, 0), 0)
        return True

    surgeon.apply(plan(ADAPTERS), base, tmp_path / "copied")
    monkeypatch.setattr(linked_shards, "can_clone", lambda *_: True)
    monkeypatch.setattr(linked_shards, "clone", cloned)
    monkeypatch.setattr(linked_shards, "_cores", lambda: 1)
    applied = surgeon.apply(plan(ADAPTERS), base, tmp_path / "out")
    assert files(tmp_path / "out") == files(tmp_path / "copied")
    moved = applied.moved
    assert 0 < moved.reflinked <= applied.preview.bytes_unchanged
    assert (moved.reflinked == applied.preview.bytes_unchanged) == (able == 4)
    assert moved.reflinked + moved.written == applied.preview.bytes_to_write
    assert shared(tmp_path / "out", base) == 0


def test_a_clone_is_a_file_of_its_own(tmp_path: Path) -> None:
    """On a file system with reflinks; on another the call says so, and nothing is written."""
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_bytes(os.urandom(10_000))
    with one.open("rb") as source, other.open("wb") as target:
        done = linking.clone(source.fileno(), target.fileno())
        assert linking.can_clone(source.fileno(), tmp_path) == done
    assert other.read_bytes() == (one.read_bytes() if done else b"")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "other"]


def test_preview_names_what_is_written(base: Path, plan: Plan) -> None:
    def shown(*options: str) -> str:
        return CliRunner().invoke(app, ["preview", str(plan(ADAPTERS)), str(base), *options]).stdout

    assert "hard-linked with --link" in shown()
    assert "hard links to the base's files" in shown("--link")
