"""What config.json says of how much text a model takes: positions and token ids, wherever its settings stand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surgeon.anatomy.grafted_config import TEXT

# The fields that transformers reads as the number of positions, by model type.
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "model_max_length", "context_length")


def context_of(config: Mapping[str, Any]) -> int | None:
    """Return how many positions a model was made for; None where its config does not say."""
    return _number(config, *_POSITIONS, least=2)


def vocabulary_of(config: Mapping[str, Any]) -> int | None:
    """Return how many tokens a model knows; None where its config does not say."""
    return _number(config, "vocab_size", least=1)


def _number(config: Mapping[str, Any], *fields: str, least: int) -> int | None:
    """Return the first of these fields that is a number, of the text's part if there is one, else of the whole."""
    text = config.get(TEXT)
    parts = [text, config] if isinstance(text, Mapping) else [config]
    found = (part.get(field) for part in parts for field in fields)
    return next((number for number in found if type(number) is int and number >= least), None)
