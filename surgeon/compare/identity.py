"""What the numbers of a study depend on, as digests: what is made under another one is no part of it.

Where files lie makes no difference, so that a study may move with its texts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from surgeon import Checkpoint, __version__, text_files
from surgeon.common.listener import Listener
from surgeon.compare.config.loading import GROUPS, LoadedStudy
from surgeon.compare.config.settings import recalled_by
from surgeon.compare.records import digest

# Training keys that change no number.
_PASSING = ("micro_batch", "checkpointing", "log_every")


def run_digest(common: str, plan: Any, training: Mapping[str, Any]) -> str:
    """Of what a run's numbers depend on.

    Args:
        common: what is common to all runs, by `study_digest`.
        plan: the plan as plain data, or None.
        training: the run's training config.
    """
    settings = {key: value for key, value in training.items() if key not in _PASSING}
    settings["sources"] = [_without_places(source) for source in training["sources"]]
    return digest([common, plan, settings])


def _without_places(source: Mapping[str, Any]) -> dict[str, Any]:
    """A source without its files, whose content is common to all; that a file is held out for it is kept."""
    held = source["validation"]
    in_file = isinstance(held, str) and not held.startswith("split:")
    found = {key: value for key, value in source.items() if key != "path"}
    return found | ({"validation": "a file"} if in_file else {})


def study_digest(loaded: LoadedStudy, base: Checkpoint, listener: Listener) -> str:
    """Of what every number of the study depends on: base, texts, and how losses are measured."""
    study = loaded.config
    listener.begin("reading", base.nbytes)
    held = base.digests(listener.advance)
    texts = []
    for group in GROUPS:
        for text in loaded.texts(group):
            files: list[Any] = [_digest_of(loaded, text.path)]
            if isinstance(text.validation, str):
                files.append(_digest_of(loaded, text.validation))
            texts.append([group, text.called, text.share, text.kind, text.field, files])
    more = {"choosing": study.choosing, "blend": study.blend}
    return digest(
        {
            **{key: value for key, value in more.items() if value},
            "version": __version__,
            "base": held,
            "base_config": base.config,
            "texts": texts,
            "validation": [
                text.validation
                for group in ("new", "original")
                for text in loaded.texts(group)
                if isinstance(text.validation, float)
            ],
            "recall": recalled_by(study).model_dump() if study.recalls else None,
            "documents": study.documents,
            "budget": [study.run_steps or f"{study.bytes} bytes", study.batch, study.length],
        }
    )


def _digest_of(loaded: LoadedStudy, path: str) -> Any:
    """Return the digests of a text's files; of a dataset on the Hub its name."""
    if path.startswith(("dataset:", "split:")):
        return path
    found = []
    for file in text_files(loaded.resolve(path)):
        with file.open("rb") as handle:
            found.append(hashlib.file_digest(handle, "sha256").hexdigest())
    return found
