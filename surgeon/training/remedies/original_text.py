"""The check that a config has the texts that the terms of `preserve` need."""

from __future__ import annotations

from surgeon.errors import BadInput
from surgeon.training.config.loading import LoadedConfig
from surgeon.training.config.schema import originals_of


def check_original_text(loaded: LoadedConfig) -> None:
    """Raise BadInput where a term of `preserve` needs original text, and no source has the role `original`."""
    spec = loaded.config.preserve
    assert spec is not None
    if originals_of(loaded.config) or not (spec.on == "original" or spec.fisher):
        return
    needs, or_all = ("is estimated", "") if spec.fisher else ("teaches", ", or say `on: all`")
    raise BadInput(
        f"{loaded.where('preserve')}`preserve` {needs} on original text, and no source has the role `original`; add"
        f" one (`surgeon recall` has the base write it){or_all}"
    )
