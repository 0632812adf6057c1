"""The limits that config.json sets on a model's text: numbers of positions and token ids, in whatever part of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surgeon.anatomy.grafted_config import TEXT

# The fields that transformers reads as the number of positions, by model type.
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "model_max_length", "context_length")


def context_of(config: Mapping[str, Any]) -> int | None:
    """Return how many positions a model was made for; None where its config does not state it."""
    return _number(config, *_POSITIONS, least=2)


def vocabulary_of(config: Mapping[str, Any]) -> int | None:
    """Return how many tokens a model's vocabulary has; None where its config does not state it."""
    return _number(config, "vocab_size", least=1)


def _number(config: Mapping[str, Any], *fields: str, least: int) -> int | None:
    """Return the first of these fields that is an integer of at least `least`, from the text part first if there
    is one.
    """
    text = config.get(TEXT)
    parts = [text, config] if isinstance(text, Mapping) else [config]
    found = (part.get(field) for part in parts for field in fields)
    return next((number for number in found if type(number) is int and number >= least), None)
