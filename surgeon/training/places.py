"""Folders next to a run until it is published: its checkpoints, texts that the model writes, an encoder with a head."""

from __future__ import annotations

from pathlib import Path

from surgeon.common import work_folders
from surgeon.data.specs import SourceSpec


def work_folder(to: Path) -> Path:
    """Return the folder of checkpoints of a run that is published as `to`: `.NAME.training`."""
    return work_folders.work_folder(to, "training")


def memory_folder(to: Path) -> Path:
    """Return the folder of texts that the model writes for a run: `.NAME.memory`."""
    return work_folders.work_folder(to, "memory")


def headed_folder(to: Path) -> Path:
    """Return the folder of an encoder with a new classification head: `.NAME.headed`."""
    return work_folders.work_folder(to, "headed")


def written_source(memory: Path, source: SourceSpec) -> Path:
    """Return the file of a source that the model writes."""
    return memory / f"{source.name}.jsonl"
