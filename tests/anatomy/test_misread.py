"""What transformers reads in a config.json otherwise than its fields say."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.published_configs import PUBLISHED
from surgeon.anatomy.derived import read_otherwise
from surgeon.common.library import config_of, quiet_transformers

CASES: dict[str, tuple[dict[str, Any], str]] = {
    "gpt2": (
        {"n_layer": 4, "num_hidden_layers": 6, "n_head": 2, "num_attention_heads": 4},
        "`n_layer` as 6, not 4, and 1 more so, as another field overrules it",
    ),
    "mixtral": ({"num_experts": 4, "num_local_experts": 8}, "`num_local_experts` as 4, not 8,"),
    "nemotron_h": (
        {"hybrid_override_pattern": "M-M*", "layers_block_type": ["mamba", "moe"]},
        "`hybrid_override_pattern` as ME, not M-M*, as another",
    ),
    "olmo2": ({"torch_dtype": "float16", "dtype": "bfloat16"}, "`torch_dtype` as torch.bfloat16, not float16,"),
    "llava": (
        {"text_config": {"model_type": "mixtral", "num_experts": 4, "num_local_experts": 8}},
        "`text_config.num_local_experts` as 4, not 8,",
    ),
}


def said(config: dict[str, Any], *path: str) -> str:
    from transformers import CONFIG_MAPPING

    with quiet_transformers():
        return read_otherwise(config, config_of(config, CONFIG_MAPPING[config["model_type"]]), path)


@pytest.mark.parametrize("model_type", CASES)
def test_a_field_that_another_overrules_is_said(model_type: str) -> None:
    fields, words = CASES[model_type]
    path = [key for key in fields if key == "text_config"]
    assert words in said({"model_type": model_type, **fields}, *path)


@pytest.mark.parametrize("model_type", PUBLISHED)
def test_published_configs_are_read_as_they_say(model_type: str) -> None:
    assert said({key: value for key, value in PUBLISHED[model_type].items() if key != "auto_map"}) == ""
