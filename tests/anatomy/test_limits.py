"""What a config says of positions and token ids is read wherever its model type writes it."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from surgeon.anatomy.limits import context_of, vocabulary_of
from surgeon.anatomy.skeleton import check_counts
from surgeon.errors import BadInput


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "dbrx", "bloom", "gemma3", "qwen2_5_vl", "roberta"])
def test_they_are_those_that_transformers_reads(model_type: str) -> None:
    made: Any = AutoConfig.for_model(model_type)
    text = made.get_text_config()
    assert context_of(made.to_dict()) == getattr(text, "max_position_embeddings", None)
    assert vocabulary_of(made.to_dict()) == text.vocab_size


@pytest.mark.parametrize("given", [None, "512", True, 1, [512]])
def test_what_is_no_number_of_positions_is_none(given: Any) -> None:
    assert context_of({"max_position_embeddings": given}) is None


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_layers": 10**8}, "`num_layers` is 100000000"),
        ({"text_config": {"num_local_experts": 5000}}, "`num_local_experts` is 5000"),
        ({"hidden_size": 2**40}, "`hidden_size` is 1099511627776"),
        ({"attention_types": [[["global", "local"], 10**8]]}, "`attention_types` repeats a list 100000000 times"),
    ],
)
def test_what_would_be_built_one_by_one_is_refused_first(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=f"^config.json: {said}"):
        check_counts(settings)


def test_lists_that_models_have_are_no_counts() -> None:
    check_counts(
        {
            "attention_types": [[["global", "local"], 12]],
            "image_grid_pinpoints": [[2304, 1152]],
            "vocab_size": 200_000,
            "long_factor": [1.0, 2000, 3000],
        }
    )
