"""Checkpoints: how a run ends while one is being written."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

import surgeon
from surgeon.errors import BadInput
from surgeon.training.places import work_folder
from surgeon.training.saved.checkpoints import newest_checkpoint
from surgeon.training.steps import trainer
from tests.training.test_train import config, digests, grown


def test_a_full_disk_ends_the_run_in_a_line_and_it_goes_on_from_what_was_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, run = grown(tmp_path), tmp_path / "run"
    complete, asked = trainer.complete, {"steps": 4, "save_every": 1, "evaluate_every": 4}

    def fails(folder: Path, step: int, *more: int | None) -> None:
        if step == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
        complete(folder, step, *more)

    with monkeypatch.context() as patched, pytest.raises(BadInput, match="the disk is full"):
        patched.setattr(trainer, "complete", fails)
        surgeon.train(out, config(tmp_path, **asked), run, device="cpu")
    kept = newest_checkpoint(work_folder(run))
    assert kept is not None and kept.name == "checkpoint-2"
    assert not run.exists()
    for target in (run, tmp_path / "whole"):
        surgeon.train(out, config(tmp_path, **asked), target, device="cpu")
    assert digests(run) == digests(tmp_path / "whole")
