"""What stops a run from outside: a full disk, Ctrl-C, a second run, a base that changes under it."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import surgeon
from surgeon.cli import app
from surgeon.errors import BadInput
from tests.checkpoints import weights


def fail_after(monkeypatch: pytest.MonkeyPatch, calls: int, code: int) -> None:
    """The kernel's copy succeeds `calls` times, then fails with `code` for good."""
    real = os.copy_file_range
    left = [calls]

    def limited(*arguments: int, **named: int) -> int:
        if left[0] == 0:
            raise OSError(code, os.strerror(code))
        left[0] -= 1
        return real(*arguments, **named)

    monkeypatch.setattr(os, "copy_file_range", limited)


@pytest.mark.parametrize(("code", "words"), [(errno.ENOSPC, "the disk is full"), (errno.EIO, "Input/output error")])
@pytest.mark.usefixtures("unproven")
def test_a_disk_that_fails_in_the_middle(
    code: int, words: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patched:
        fail_after(patched, 8, code)
        result = CliRunner().invoke(app, ["apply", "llama-pro", str(base), str(out)])
    assert result.exit_code == 2
    assert words in result.stderr
    assert "the same command continues" in result.stderr
    assert not out.exists()
    said = CliRunner().invoke(app, ["apply", "llama-pro", str(base), str(out)])
    assert said.exit_code == 0
    assert "continuing an earlier run" in said.stderr
    assert surgeon.verify(base, out, logits=False).holds


@pytest.mark.usefixtures("unproven")
def test_a_disk_that_is_full_while_layers_are_computed(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error ends the run, and what it left out is written later."""
    from surgeon.writing import write

    expected, out = tmp_path / "expected", tmp_path / "out"
    arguments = ["apply", "opt-deus", str(base), str(out), "--max-shard-size", "20KB"]
    surgeon.apply("opt-deus", str(base), expected, max_shard_bytes=20_000)
    real, left = write.write_all, [9]

    def full(*arguments: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(write, "write_all", full)
        result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "the disk is full" in result.stderr
    assert left[0] < 0
    assert not out.exists()
    said = CliRunner().invoke(app, arguments)
    assert said.exit_code == 0, said.stderr
    assert "continuing an earlier run" in said.stderr
    for path in expected.iterdir():
        assert (out / path.name).read_bytes() == path.read_bytes(), path.name


def test_too_little_room_is_told_beforehand(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs(tmp_path)
    fields = list(real)
    fields[4] = 1  # free blocks for us
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(fields))
    result = CliRunner().invoke(app, ["apply", "llama-pro", str(base), str(tmp_path / "out")])
    assert result.exit_code == 2
    assert "are needed" in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base"]


@pytest.mark.usefixtures("unproven")
def test_a_base_that_changes_meanwhile(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from surgeon.checkpoint import piece_bytes

    real = piece_bytes.copy_range
    touched = []

    def touch(*arguments: object, **named: object) -> None:
        real(*arguments, **named)
        if not touched:
            shard = sorted(base.glob("*.safetensors"))[-1]
            os.utime(shard, ns=(1, 1))
            touched.append(shard)

    monkeypatch.setattr(piece_bytes, "copy_range", touch)
    with pytest.raises(BadInput, match="model-0000"):
        surgeon.apply("llama-pro", str(base), tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base"]


GATED_APPLY = """
import os, signal, sys, time
from pathlib import Path
# A shell that starts jobs in the background has them ignore Ctrl-C, and so would this one.
signal.signal(signal.SIGINT, signal.default_int_handler)
from surgeon.writing import small_run
from surgeon.checkpoint import piece_bytes
from surgeon.cli import main
# What is tried on a twin first is copied too.
small_run.prove_small = lambda *_: None
real, copies = piece_bytes.copy_range, 0
def gated(*arguments, **named):
    global copies
    copies += 1
    if copies == 8:
        # Two shards are written by then, and are in the journal before it goes on.
        while journal.read_text().count("\\n") < 2:
            time.sleep(0.01)
        print("begun", flush=True)
        sys.stdin.readline()
    return real(*arguments, **named)
piece_bytes.copy_range = gated
journal = Path(sys.argv[1])
sys.argv = ["surgeon", "apply", "llama-pro", *sys.argv[2:]]
main()
"""


def begin_gated_apply(base: Path, out: Path) -> subprocess.Popen[str]:
    """An `apply` that has written two shards and waits for a line of input."""
    journal = out.parent / f".{out.name}.surgeon" / "journal.jsonl"
    process = subprocess.Popen(
        [sys.executable, "-c", GATED_APPLY, str(journal), str(base), str(out)],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    if process.stdout.readline() != "begun\n":
        raise AssertionError(process.communicate()[1])
    return process


def test_control_c(base: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = begin_gated_apply(base, out)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate()
    assert process.returncode == 130
    proven, *said = [line for line in told.splitlines() if line]
    assert "found on a twin" in proven
    assert said == ["surgeon: interrupted; the same command continues where it stopped"]
    assert not out.exists()
    surgeon.apply("llama-pro", str(base), out)
    assert surgeon.verify(base, out, logits=False).holds


def test_two_runs_onto_one_out(base: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = begin_gated_apply(base, out)
    second = CliRunner().invoke(app, ["apply", "llama-pro", str(base), str(out)])
    assert second.exit_code == 2
    assert str(process.pid) in second.stderr
    _, told = process.communicate("\n")
    assert process.returncode == 0, told
    assert surgeon.verify(base, out, logits=False).holds


@pytest.mark.usefixtures("unproven")
def test_another_plan_s_leftovers_are_set_aside(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patched:
        fail_after(patched, 8, errno.EIO)
        assert CliRunner().invoke(app, ["apply", "llama-pro", str(base), str(out)]).exit_code == 2
    result = CliRunner().invoke(app, ["apply", "copy", str(base), str(out)])
    assert result.exit_code == 0
    assert ".out.surgeon.old-1" in result.stderr
    assert (tmp_path / ".out.surgeon.old-1").is_dir()
    assert ".out.surgeon.old-1: unfinished work of other plans on out" in " ".join(result.stderr.split())
    expected = tmp_path / "expected"
    surgeon.apply("copy", str(base), expected)
    assert weights(out).keys() == weights(expected).keys()
    assert (out / "surgery.json").read_bytes() == (expected / "surgery.json").read_bytes()
