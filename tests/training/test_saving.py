"""Checkpoints written beside the steps: what they hold, and how a run ends while one is being written."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
from typer.testing import CliRunner

import surgeon
from surgeon.cli import app
from surgeon.common.interrupting import interrupt
from surgeon.errors import BadInput
from surgeon.training import session
from surgeon.training.places import work_folder
from surgeon.training.saved.checkpoints import COMPLETE_FILE, Saving, is_beside, newest_checkpoint
from surgeon.training.steps import cadence, trainer
from tests.training.test_train import config, digests, grown

FOUR = {"steps": 4, "save_every": 2, "evaluate_every": 4}


def test_a_checkpoint_written_while_steps_go_on_is_that_of_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first file is written only after the next step: the parameters have moved by then, and AdamW's state."""
    out, stepped, waited = grown(tmp_path), threading.Event(), []
    save, ended = safetensors.torch.save_file, cadence.Cadence.on_step_end

    def late(*given: Any, **named: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            waited.append(stepped.wait(60))
        save(*given, **named)

    def step_ends(self: Any, args: Any, state: Any, control: Any, **named: Any) -> Any:
        if state.global_step == 3:
            stepped.set()
        return ended(self, args, state, control, **named)

    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    found = []
    with monkeypatch.context() as patched:
        patched.setattr(safetensors.torch, "save_file", late)
        patched.setattr(cadence.Cadence, "on_step_end", step_ends)
        patched.setattr(session, "_publish", killed)
        for saving in ("beside", "in_step"):
            run = tmp_path / saving
            with pytest.raises(KeyboardInterrupt):
                surgeon.train(out, config(tmp_path, **FOUR, saving=saving), run, device="cpu")
            folders = [work_folder(run) / f"checkpoint-{step}" for step in (2, 4)]
            found.append([json.loads((folder / COMPLETE_FILE).read_text()) for folder in folders])
    assert waited == [True]
    assert found[0] == found[1]
    assert found[0][0]["files"]["trained.safetensors"] != found[0][1]["files"]["trained.safetensors"]


def test_a_full_disk_ends_the_run_in_the_same_line_and_it_goes_on_from_what_was_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How they were written is nothing that the run's numbers depend on."""
    out, run, told = grown(tmp_path), tmp_path / "run", []
    complete, asked = trainer.complete, FOUR | {"save_every": 1}
    for saving, full in (("beside", 2), ("in_step", 3)):

        def fails(folder: Path, step: int, *more: Any, full: int = full) -> None:
            if step == full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
            complete(folder, step, *more)

        with monkeypatch.context() as patched, pytest.raises(BadInput, match="the disk is full") as raised:
            patched.setattr(trainer, "complete", fails)
            surgeon.train(out, config(tmp_path, **asked, saving=saving), run, device="cpu")
        told.append(re.sub(r"checkpoint-\d|[\d.]+ [GTM]B", "…", str(raised.value)))
        kept = newest_checkpoint(work_folder(run))
        assert kept is not None and kept.name == f"checkpoint-{full - 1}"
    assert told[0] == told[1]
    assert not run.exists()
    for target in (run, tmp_path / "whole"):
        surgeon.train(out, config(tmp_path, **asked), target, device="cpu")
    assert digests(run) == digests(tmp_path / "whole")


def test_an_interruption_waits_until_it_is_written() -> None:
    """A second one too, while the first one is waited for."""
    main, written = threading.main_thread().ident, []
    assert main is not None

    def write() -> None:
        time.sleep(0.05)
        signal.pthread_kill(main, signal.SIGINT)
        time.sleep(0.05)
        written.append(True)

    with pytest.raises(KeyboardInterrupt), Saving(beside=True) as saving:
        saving.begin(last=False)
        saving.finish(write)
        raise KeyboardInterrupt
    assert written


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_a_checkpoint_is_written_waits_for_it_and_the_run_goes_on_the_same(
    sent: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer is held until the run, which the signal has ended, waits for it."""
    out, run, ended = grown(tmp_path), tmp_path / "run", threading.Event()
    asked, held = config(tmp_path, **FOUR, saving="beside"), []
    arguments = ["train", str(out), str(asked), str(run), "--device", "cpu"]
    save, step_end = safetensors.torch.save_file, cadence.Cadence.on_step_end
    before = signal.getsignal(signal.SIGTERM)
    # A shell's background job ignores SIGINT, and so would these tests there.
    interrupts = signal.signal(signal.SIGINT, signal.default_int_handler)

    def late(*given: Any, **named: Any) -> None:
        held.append(ended.wait(60))
        save(*given, **named)

    def step_ends(self: Any, args: Any, state: Any, control: Any, **named: Any) -> Any:
        if state.global_step == 3:
            # Else the signal would end the tests.
            assert signal.getsignal(sent) in (signal.default_int_handler, interrupt)
            try:
                signal.raise_signal(sent)
            finally:
                assert newest_checkpoint(work_folder(run)) is None
                ended.set()
        return step_end(self, args, state, control, **named)

    with monkeypatch.context() as patched:
        patched.setattr(safetensors.torch, "save_file", late)
        patched.setattr(cadence.Cadence, "on_step_end", step_ends)
        result = CliRunner().invoke(app, arguments)
    signal.signal(signal.SIGINT, interrupts)
    assert result.exit_code == 130
    assert result.stderr.splitlines()[-1] == "surgeon: interrupted; the same command continues where it stopped"
    assert held == [True] and signal.getsignal(signal.SIGTERM) is before
    kept = newest_checkpoint(work_folder(run))
    assert kept is not None and kept.name == "checkpoint-2" and not run.exists()
    assert CliRunner().invoke(app, arguments).exit_code == 0
    surgeon.train(out, asked, tmp_path / "whole", device="cpu")
    assert digests(run) == digests(tmp_path / "whole")


def test_where_the_copy_is_small_it_is_made() -> None:
    assert is_beside("auto", device="cuda", copy_bytes=7, model_bytes=7)
    assert not is_beside("auto", device="cuda", copy_bytes=8, model_bytes=7)
    assert not is_beside("auto", device="cpu", copy_bytes=7, model_bytes=8)
    assert is_beside("beside", device="cpu", copy_bytes=8, model_bytes=7)
    assert not is_beside("in_step", device="cuda", copy_bytes=1, model_bytes=7)
