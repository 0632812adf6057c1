"""What a researcher asks of training beside `train` itself: whether a config can train a base, and a clean end."""

from __future__ import annotations

import shutil
from pathlib import Path

from surgeon.manifest.checkpoint import Checkpoint
from surgeon.train.config.loading import LoadedConfig


def check_training(out: Checkpoint, config: LoadedConfig) -> None:
    """Raise BadInput where `train` would refuse what the config has train, or its teacher, whatever the texts."""
    from surgeon.train.preparing import check_base_trains

    check_base_trains(out.folder, out.manifest, config)


def discard_run(to: str | Path) -> None:
    """Remove what a call of `train` that ended early keeps beside `to`: checkpoints, and texts that the model wrote."""
    from surgeon.train.saved.work_folder import work_folder
    from surgeon.train.self_generated import memory_folder

    for folder in (work_folder(Path(to)), memory_folder(Path(to))):
        shutil.rmtree(folder, ignore_errors=True)
