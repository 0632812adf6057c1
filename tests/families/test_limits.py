"""What a config says of positions and token ids is read wherever its model type writes it."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from surgeon.families.limits import context_of, vocabulary_of


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "dbrx", "bloom", "gemma3", "qwen2_5_vl", "roberta"])
def test_they_are_those_that_transformers_reads(model_type: str) -> None:
    made: Any = AutoConfig.for_model(model_type)
    text = made.get_text_config()
    assert context_of(made.to_dict()) == getattr(text, "max_position_embeddings", None)
    assert vocabulary_of(made.to_dict()) == text.vocab_size


@pytest.mark.parametrize("given", [None, "512", True, 1, [512]])
def test_what_is_no_number_of_positions_is_none(given: Any) -> None:
    assert context_of({"max_position_embeddings": given}) is None
