"""The labels of a classification head, from config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# The suffix of the names of classifier classes.
_CLASSIFIER = "ForSequenceClassification"


def label_names(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the labels of a checkpoint's classification head, in order; empty where config.json names none."""
    named = config.get("id2label")
    if not isinstance(named, Mapping):
        return ()
    names = [named.get(str(number)) for number in range(len(named))]
    return tuple(str(name) for name in names) if None not in names else ()


def is_classifier(config: Mapping[str, Any]) -> bool:
    """Return whether config.json names a text classifier class, of transformers or shipped by surgeon."""
    return any(str(name).endswith(_CLASSIFIER) for name in config.get("architectures") or ())
