"""No room and calls that fail, of every command that writes: a sample of `python -m tests.injection`, which has all."""

from __future__ import annotations

import errno
import json
import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import surgeon
from surgeon.checkpoint.staging import Staging
from surgeon.cli import app
from surgeon.common.listener import Quiet
from surgeon.errors import BadInput, PromiseBroken
from surgeon.training import gate_fitting
from tests import tiny
from tests.injection.command import Command
from tests.injection.commands import COMMANDS, inputs
from tests.injection.trials import at_random, injected, killed_at

# Of what runs without a model, and so in milliseconds: from which call on, and every how many. The last request of a
# push is its commit.
BYTES_ONLY = {"apply": (3, 41), "delta": (3, 83), "export-slot": (3, 83), "report": (3, 83), "push": (-1, 1)}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return inputs(tmp_path_factory.mktemp("inputs"))


@pytest.mark.parametrize("command", [each for each in COMMANDS if each.name in BYTES_ONLY], ids=list(BYTES_ONLY))
def test_killed_and_failed(command: Command, made: Path, tmp_path: Path) -> None:
    begin, every = BYTES_ONLY[command.name]
    table = injected(command, made, tmp_path, every=every, begin=begin)
    # An ordinary push writes nothing here.
    assert all(found.trials for found in table.values() if found.calls)
    assert [sentence for found in table.values() for sentence in found.wrong] == []


# No text is there yet; half of a batch's lines are; all of them, without the record of it; the text is whole, without
# its name. Of a checkpoint half of one file; all of it, without the record that counts it. The gate's tensors, without
# its figures.
PLACES = {
    "recall": ("replace run.json 1", "write part.jsonl 2", "replace run.json 2", "rename memory.jsonl 1"),
    "train, preserve": ("write part.jsonl 2", "rename known.jsonl 1", "save optimizer.pt 1"),
    "train, all of it, preserve": ("replace run.json 4",),
    "train, gate": ("replace gate.json 1",),
}


@pytest.mark.parametrize("command", [each for each in COMMANDS if each.name in PLACES], ids=list(PLACES))
def test_killed_where_a_file_is_there_and_its_stamp_is_not(
    command: Command, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the same command ends byte for byte as if it had never been killed."""
    # Three runs fit a gate; how long that takes does not matter here.
    monkeypatch.setattr(gate_fitting, "_STEPS", 50)
    places = PLACES[command.name]
    found = killed_at(command, made, tmp_path, places)
    assert found.wrong == []
    assert found.absent == found.trials == len(places)


def test_killed_at_random_and_two_at_once(made: Path, tmp_path: Path) -> None:
    for command in COMMANDS:
        if command.name in ("report", "push"):
            table = at_random(command, made, tmp_path, trials=1)
            assert [found.trials for found in table.values()] == [1, 1]
            assert [sentence for found in table.values() for sentence in found.wrong] == []


@contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


ARGUMENTS: dict[str, tuple[int, list[str]]] = {
    "apply": (10_000, ["apply", "llama-pro", "base", "OUT"]),
    "merge": (10_000, ["merge", "branched", "OUT", "--windows", "1"]),
    "revert": (10_000, ["revert", "deeper", "OUT"]),
    "delta": (10_000, ["delta", "deeper", "OUT"]),
    "apply --delta": (10_000, ["apply", "--delta", "delta", "base", "OUT"]),
    "export-slot": (3_000, ["export-slot", "slots", "0", "OUT"]),
    "report": (10_000, ["report", "deeper", "--html", "OUT"]),
    # The weights of a checkpoint, by safetensors; then its optimizer's states, by torch; then the run.
    "train: weights": (8_000, ["train", "deeper", "train.yaml", "OUT", "--device", "cpu"]),
    "train: optimizer": (45_000, ["train", "deeper", "train.yaml", "OUT", "--device", "cpu"]),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_no_room(name: str, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(made)
    most, arguments = ARGUMENTS[name]
    out = tmp_path / "out"
    with files_of_at_most(most):
        result = CliRunner().invoke(app, [str(out) if each == "OUT" else each for each in arguments])
    assert result.exit_code == 2, (result.exception, result.stderr)
    last = result.stderr.splitlines()[-1]
    assert last.startswith("surgeon: /")
    assert "file too large for `ulimit -f` or the file system (" in last or "the disk took no more (" in last
    do = "raise that limit" if "too large" in last else "make room"
    assert f"are free there); {do} and run the same command again" in last
    assert not out.exists()
    # Only what is there is said to be kept.
    assert "what was finished is kept in" not in last or (tmp_path / ".out.surgeon").is_dir()


def test_no_room_for_the_demo(tmp_path: Path) -> None:
    from surgeon.lab.learning import demo

    base = tiny.checkpoint(tmp_path / "base", "llama")
    with (
        files_of_at_most(10_000),
        pytest.raises(BadInput, match=r"out: file too large .* \(.* free .*; remove the folder"),
    ):
        demo.run_demo(tmp_path / "out", base=str(base), listener=Quiet())


def test_train_looks_for_room_first(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs(tmp_path)
    fields = list(real)
    fields[4] = 1
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(fields))
    with pytest.raises(BadInput, match=r"B are needed \(3 checkpoints of .*B, and .*B for the run\), .* are free"):
        surgeon.train(made / "deeper", made / "train.yaml", tmp_path / "out", device="cpu")
    assert not list(tmp_path.glob(".out.training/checkpoint-*"))


@pytest.mark.parametrize("place", [(os, "mkdir"), (Path, "write_text"), (Path, "symlink_to")], ids=lambda at: at[1])
def test_no_room_for_temporary_files(place: Any, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That says nothing of the model, so no promise is broken."""
    from surgeon.models.load import load_model

    home, name = place
    real = getattr(home, name)

    def full(path: Any, *given: Any, **named: Any) -> Any:
        if "surgeon-view-" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(path, *given, **named)

    monkeypatch.setattr(home, name, full)
    with pytest.raises(
        BadInput, match=r"no temporary folder can be made|surgeon-view-.*: the disk is full .* make room"
    ):
        load_model(made / "deeper", failure=PromiseBroken)


def test_temporary_files_that_cannot_be_removed(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from surgeon.models.load import load_model

    def broken(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", broken)
        assert load_model(made / "deeper") is not None
    assert list(tmp_path.iterdir())


def test_a_full_device_for_what_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `surgeon plans > /dev/full` finds it: where Python's own buffer is written out."""

    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    from surgeon.cli import failures

    monkeypatch.setattr(failures, "_stop_writing", lambda _where: None)
    monkeypatch.setattr(json, "dumps", lambda *_, **__: full())
    result = CliRunner().invoke(app, ["schema"])
    assert result.exit_code == 2
    assert "the output: the disk is full; make room and run the same command again" in result.stderr


# What else happens to a place while it is written to.


@pytest.mark.usefixtures("unproven")
def test_the_parent_becomes_a_link_meanwhile(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "elsewhere").mkdir()
    publish = Staging.publish

    def swapped(self: Staging) -> None:
        (tmp_path / "here").rename(tmp_path / "away")
        (tmp_path / "here").symlink_to("elsewhere")
        publish(self)

    with monkeypatch.context() as patched:
        patched.setattr(Staging, "publish", swapped)
        with pytest.raises(BadInput, match=r"\.out\.surgeon: moved or replaced while .*/here/out was made"):
            surgeon.apply("llama-pro", str(made / "base"), tmp_path / "here" / "out")
    assert not any((tmp_path / "elsewhere").iterdir())
    (tmp_path / "here").unlink()
    (tmp_path / "away").rename(tmp_path / "here")
    surgeon.apply("llama-pro", str(made / "base"), tmp_path / "here" / "out")
    assert [path.name for path in (tmp_path / "here").iterdir()] == ["out"]


def test_out_on_another_file_system_than_its_staging(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mount at the staging's name, say: nothing is copied over piece by piece."""
    rename = os.rename

    def across(source: Any, target: Any, **named: Any) -> None:
        if Path(target).name == "out":
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), str(source))
        rename(source, target, **named)

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", across)
        with pytest.raises(BadInput, match="Invalid cross-device link; what was finished is kept in"):
            surgeon.apply("llama-pro", str(made / "base"), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    surgeon.apply("llama-pro", str(made / "base"), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_two_at_once_onto_one_run(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second is refused while the first works, and leaves its folder alone: also where it came when none was."""
    from surgeon.training import session

    given = (made / "deeper", made / "train.yaml", tmp_path / "out")
    train, exists, refused = session._train, Path.exists, []

    def meanwhile(run: Any) -> Any:
        def second() -> None:
            try:
                with monkeypatch.context() as patched:
                    patched.setattr(Path, "exists", lambda path: path.name != ".out.training" and exists(path))
                    surgeon.train(*given, device="cpu")
            except BadInput as error:
                refused.append(str(error))

        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
        return train(run)

    monkeypatch.setattr(session, "_train", meanwhile)
    surgeon.train(*given, device="cpu")
    assert len(refused) == 1
    assert f"process {os.getpid()} is writing it; wait for it or choose another folder" in refused[0]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
