"""Tiny processors of images and text, written beside a tiny checkpoint as the real models' are.

Each model type has words for its images, a size of pictures that its tiny tower takes, and, in config.json, the ids of
those words.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

_TEMPLATE = (
    "{{%- for m in messages %}}{{%- for part in m.content %}}{{%- if part.type == 'image' %}}{image}"
    "{{%- else %}}{{{{ part.text }}}}{{%- endif %}}{{%- endfor %}}{{%- endfor %}}"
)


@dataclass(frozen=True)
class Eyes:
    """`words` are a tokenizer's by the name it has for them; `ids` fields of config.json for a word's id.

    `image` is what a chat template writes for an image (None: there is no template), `pixels` settings of the image
    processor `kind`, `settings` those of the processor.
    """

    processor: str
    kind: str
    words: dict[str, str]
    ids: dict[str, str]
    pixels: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    image: str | None = None
    # Fields of config.json, and of its part for vision.
    fields: dict[str, Any] = field(default_factory=dict)


_QWEN = Eyes(
    "Qwen3VLProcessor",
    "Qwen2VLImageProcessor",
    {
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "vision_start_token": "<|vision_start|>",
        "vision_end_token": "<|vision_end|>",
    },
    {
        "image_token_id": "image_token",
        "video_token_id": "video_token",
        "vision_start_token_id": "vision_start_token",
        "vision_end_token_id": "vision_end_token",
    },
    {"patch_size": 16, "merge_size": 2, "size": {"shortest_edge": 1024, "longest_edge": 16384}},
    image="<|vision_start|><|image_pad|><|vision_end|>",
    fields={"vision_config": {"out_hidden_size": 64, "num_position_embeddings": 64}},
)
_BOI = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
EYES: dict[str, Eyes] = {
    "gemma3": Eyes(
        "Gemma3Processor",
        "Gemma3ImageProcessor",
        _BOI,
        {"image_token_index": "image_token", "boi_token_index": "boi_token", "eoi_token_index": "eoi_token"},
        {"size": {"height": 64, "width": 64}},
        {"image_seq_length": 4},
        image="<start_of_image>",
        fields={"mm_tokens_per_image": 4, "vision_config": {"image_size": 64}},
    ),
    "mistral3": Eyes(
        "PixtralProcessor",
        "PixtralImageProcessor",
        {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"},
        {"image_token_index": "image_token"},
        {"size": {"longest_edge": 112}, "patch_size": {"height": 14, "width": 14}},
        {"patch_size": 14, "spatial_merge_size": 2},
        image="[IMG]",
        fields={"vision_config": {"image_size": 112}},
    ),
    "qwen3_5_moe": _QWEN,
    "qwen3_vl": replace(
        _QWEN,
        fields={"vision_config": _QWEN.fields["vision_config"] | {"depth": 4, "deepstack_visual_indexes": [1, 2, 3]}},
    ),
    "llava": Eyes(
        "LlavaProcessor",
        "LlavaImageProcessor",
        {"image_token": "<image>"},
        {"image_token_index": "image_token"},
        {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}},
        {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        fields={"image_seq_length": 16, "vision_config": {"image_size": 56}},
    ),
    "paligemma": Eyes(
        "PaliGemmaProcessor",
        "SiglipImageProcessor",
        {"image_token": "<image>"},
        {"image_token_index": "image_token"},
        {"size": {"height": 56, "width": 56}, "image_seq_length": 16},
        fields={"vision_config": {"image_size": 56}},
    ),
    "idefics3": Eyes(
        "Idefics3Processor",
        "Idefics3ImageProcessor",
        {
            "image_token": "<image>",
            "fake": "<fake_token_around_image>",
            "global": "<global-img>",
            "end": "<end_of_utterance>",
        },
        {"image_token_id": "image_token"},
        {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 64}, "do_image_splitting": False},
        {"image_seq_len": 1},
        image="<image>",
        fields={"scale_factor": 2, "vision_config": {"image_size": 64}},
    ),
    "internvl": Eyes(
        "InternVLProcessor",
        "GotOcr2ImageProcessor",
        {
            "context_image_token": "<IMG_CONTEXT>",
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "video_token": "<video>",
        },
        {"image_token_id": "context_image_token"},
        {"size": {"height": 56, "width": 56}, "crop_to_patches": False},
        {"image_seq_length": 4},
        image="<IMG_CONTEXT>",
        fields={"image_seq_length": 4, "vision_config": {"image_size": [56, 56], "num_hidden_layers": 2}},
    ),
    "glm4v": Eyes(
        "Glm4vProcessor",
        "Glm4vImageProcessor",
        {
            "image_token": "<|image|>",
            "video_token": "<|video|>",
            "start": "<|begin_of_image|>",
            "end": "<|end_of_image|>",
            "video_start": "<|begin_of_video|>",
            "video_end": "<|end_of_video|>",
        },
        {
            "image_token_id": "image_token",
            "video_token_id": "video_token",
            "image_start_token_id": "start",
            "image_end_token_id": "end",
        },
        {"size": {"shortest_edge": 1568, "longest_edge": 25088}, "patch_size": 14, "merge_size": 2},
        image="<|begin_of_image|><|image|><|end_of_image|>",
    ),
    "gemma4": Eyes(
        "Gemma4Processor",
        "Gemma4ImageProcessor",
        {
            "image_token": "<|image|>",
            "boi_token": "<|image>",
            "eoi_token": "<image|>",
            "audio_token": "<|audio|>",
            "boa_token": "<|audio>",
            "eoa_token": "<audio|>",
        },
        {
            "image_token_id": "image_token",
            "boi_token_id": "boi_token",
            "eoi_token_id": "eoi_token",
            "audio_token_id": "audio_token",
        },
        {"patch_size": 16, "max_soft_tokens": 70, "pooling_kernel_size": 3},
        {"image_seq_length": 70, "feature_extractor": {"feature_extractor_type": "Gemma4AudioFeatureExtractor"}},
        image="<|image|>",
        fields={
            "vision_config": {
                "model_type": "gemma4_vision",
                "hidden_size": 64,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 32,
                "position_embedding_size": 64,
            }
        },
    ),
    "llama4": Eyes(
        "Llama4Processor",
        "Llama4ImageProcessor",
        {
            "image_token": "<|image|>",
            "start": "<|image_start|>",
            "end": "<|image_end|>",
            "patch": "<|patch|>",
            "x": "<|tile_x_separator|>",
            "y": "<|tile_y_separator|>",
        },
        {"image_token_index": "patch", "boi_token_index": "start", "eoi_token_index": "end"},
        {"size": {"height": 56, "width": 56}, "max_patches": 1},
        {"patch_size": 14},
    ),
}


def seeing(config: dict[str, Any]) -> dict[str, Any]:
    """A tiny config whose tower for images takes pictures of the processor's size."""
    eyes = EYES.get(str(config["model_type"]))
    if eyes is None:
        return config
    made = config | {key: value for key, value in eyes.fields.items() if not isinstance(value, dict)}
    for key, part in eyes.fields.items():
        if isinstance(part, dict):
            made[key] = (made[key] or {}) | part
    return made


def add_processor(folder: Path) -> Path:
    """Give a tiny checkpoint, which has a tokenizer, the words for images and a processor; its config their ids."""
    from tokenizers import Tokenizer

    config = json.loads((folder / "config.json").read_text())
    eyes = EYES[config["model_type"]]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(list(eyes.words.values()))
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["extra_special_tokens"] = eyes.words
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    for name, word in eyes.ids.items():
        config[name] = tokenizer.token_to_id(eyes.words[word])
    (folder / "config.json").write_text(json.dumps(config))
    image = {"image_processor_type": eyes.kind, **eyes.pixels}
    told = {"processor_class": eyes.processor, **eyes.settings, "image_processor": image}
    (folder / "processor_config.json").write_text(json.dumps(told))
    if eyes.image is not None:
        (folder / "chat_template.jinja").write_text(_TEMPLATE.format(image=eyes.image))
    return folder
