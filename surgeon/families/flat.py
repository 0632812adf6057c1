"""Configs whose text settings stand at the top, as they are published for some models that read images too.

transformers takes such fields for those of `text_config`. A config that has both forms would be read by the nested
one alone, so what surgery changes is written in that form, all of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from surgeon.checkpoint.weights import QUANTISATION

TEXT = "text_config"
# The types of which transformers reads both forms; a test compares them with it.
FLAT = frozenset({"fuyu", "glm5_next", "paddleocr_vl", "qwen2_5_vl", "qwen2_vl"})
# What is the whole model's wherever it stands: fields of every config, of images and sounds, and of the code.
_WHOLE = frozenset(
    {
        *("architectures", "auto_map", "dtype", "id2label", "is_encoder_decoder", "label2id", "model_type"),
        *("num_channels", "output_hidden_states", "problem_type", "return_dict", "tie_word_embeddings", "torch_dtype"),
        *("transformers_version", "chunk_size_feed_forward", QUANTISATION),
    }
)
_BESIDE = re.compile(r"(image|video|vision|audio|patch)_.*|.*_config|_.*")
# What transformers takes for left out in the flat form, where that is another value than in the nested one.
_LEFT_OUT: dict[str, dict[str, Any]] = {"fuyu": {"partial_rotary_factor": 0.5}}


def nested(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with its text settings in `text_config`; as it is where they stand there, or it has none."""
    kind = config.get("model_type")
    moved = [key for key in config if key not in _WHOLE and not _BESIDE.fullmatch(key)]
    if kind not in FLAT or config.get(TEXT) is not None or not moved:
        return dict(config)
    text = {**_LEFT_OUT.get(str(kind), {}), **{key: config[key] for key in moved}}
    return {**{key: value for key, value in config.items() if key not in moved}, TEXT: text}
