"""Tiny checkpoints of every family: random weights, several shards, each family's peculiarities switched on.

Made once per test run and copied from there: the suite needs no network and no model of anybody else's.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from surgeon.anatomy.twin import fill_buffers

COMMON: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

# What makes each family itself: biases, sliding windows, query/key norms, post-norms, fused projections, ties.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "mistral": {"sliding_window": 8},
    "qwen2": {
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 3,
        "tie_word_embeddings": True,
    },
    "qwen3": {"head_dim": 16, "tie_word_embeddings": True},
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16},
    "gemma3_text": {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16},
    "olmo2": {},
    "phi3": {"sliding_window": 8},
}

# Encoders, with what makes each itself: RoBERTa's positions begin after the padding's; relative positions, buckets,
# their norm and a convolution in DeBERTa's.
ENCODERS: dict[str, dict[str, Any]] = {
    "roberta": {"pad_token_id": 1, "bos_token_id": 0},
    "deberta": {
        "relative_attention": True,
        "pos_att_type": ["c2p", "p2c"],
        "max_relative_positions": 16,
        "type_vocab_size": 2,
    },
    "deberta-v2": {
        "relative_attention": True,
        "pos_att_type": ["c2p", "p2c"],
        "position_buckets": 8,
        "norm_rel_ebd": "layer_norm",
        "position_biased_input": False,
        "conv_kernel_size": 3,
        "conv_act": "gelu",
    },
}
ENCODER_HEADS = ("ForMaskedLM", "ForSequenceClassification", "")


def config(model_type: str, **overrides: Any) -> Any:
    """The transformers config of a tiny model of this family."""
    from transformers import AutoConfig

    if model_type in ENCODERS:
        common = {key: value for key, value in COMMON.items() if key != "num_key_value_heads"}
        # More positions than decoders have: windows as long as theirs must fit behind the padding's position.
        own = {"max_position_embeddings": 136, "num_labels": 3} | ENCODERS[model_type]
        return AutoConfig.for_model(model_type, **(common | own | overrides))
    return AutoConfig.for_model(model_type, **(COMMON | FAMILIES.get(model_type, {}) | overrides))


def model(
    model_type: str, *, dtype: str = "float32", seed: int = 0, head: str = "ForMaskedLM", **overrides: Any
) -> Any:
    """A tiny model in eval mode; every tensor random, norms, biases and buffers included, so that nothing is special.

    `head` is an encoder's, one of `ENCODER_HEADS`.
    """
    import torch
    import transformers

    torch.manual_seed(seed)
    auto = getattr(transformers, f"AutoModel{head if model_type in ENCODERS else 'ForCausalLM'}")
    built = auto.from_config(config(model_type, **overrides), dtype=getattr(torch, dtype))
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    fill_buffers(built, seed)
    if model_type in ENCODERS:
        # DeBERTa makes two biases in float32 whatever it is asked for.
        built.to(getattr(torch, dtype))
    return built.eval()


@functools.cache
def _made(model_type: str, dtype: str, shard: str, overrides: tuple[tuple[str, Any], ...]) -> Path:
    folder = Path(tempfile.mkdtemp(prefix=f"surgeon-tiny-{model_type}-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    model(model_type, dtype=dtype, **dict(overrides)).save_pretrained(folder, max_shard_size=shard)
    return folder


def checkpoint(
    folder: Path, model_type: str, *, dtype: str = "bfloat16", shard: str = "30KB", **overrides: Any
) -> Path:
    """Write a tiny checkpoint of several shards into `folder` (made if absent) and return it."""
    shutil.copytree(_made(model_type, dtype, shard, tuple(sorted(overrides.items()))), folder, dirs_exist_ok=True)
    return folder


def base_for(plan: str, folder: Path) -> Path:
    """A tiny base that the shipped plan `plan` can be tried on."""
    if plan == "control-llm/merge":
        import surgeon

        surgeon.apply("control-llm/lerp8-mse-0-star", str(base_for("control-llm", folder / "before")), folder / "base")
        return folder / "base"
    if plan == "fold-adapters":
        import surgeon

        surgeon.apply("neutral-residues/adapters", str(base_for("llama", folder / "before")), folder / "base")
        return folder / "base"
    if plan == "recipes/experts-slots":
        import surgeon

        surgeon.apply("recipes/experts", str(base_for("recipes/experts", folder / "before")), folder / "base")
        return folder / "base"
    if plan.startswith("pmoe/next-task"):
        import surgeon

        surgeon.apply("pmoe", str(base_for("pmoe", folder / "before")), folder / "base")
        return folder / "base"
    if plan == "upcycle-experts/beside":
        return checkpoint(folder / "base", "gemma2")
    if plan == "pad-to":
        heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 96}
        return checkpoint(folder / "base", "llama", vocab_size=120, **heads)
    if plan == "extract-text":
        from tests.decoders import tiny_decoder

        return tiny_decoder(folder / "base", "llava", "AutoModelForImageTextToText", dtype="bfloat16")
    if plan == "dequantise":
        from tests.quantised import tiny_quantised

        return tiny_quantised(folder / "base", "qwen3", "fp8")
    if plan in ("drop-experts", "add-experts"):
        sizes = {"num_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2, "head_dim": 16}
        return checkpoint(folder / "base", "qwen3_moe", num_hidden_layers=2, **sizes)
    if plan == "untie-embeddings":
        return checkpoint(folder / "base", "qwen3")
    if plan.startswith("mixture-of-control/glue"):
        return checkpoint(folder / "base", "roberta")
    if plan.startswith(("grow-vocabulary", "special-tokens", "trim-vocabulary", "recipes/language")):
        from tests.vocabularies import byte_level

        return byte_level(checkpoint(folder / "base", "llama", vocab_size=320))
    if plan == "merge-adapter":
        from tests.adapters import lora

        # A shipped plan's own folder has no adapter, so it is sought in the working directory.
        lora(folder / "adapter")
        os.chdir(folder)
    layers = {"num_hidden_layers": 8} if plan.startswith("control-llm") else {}
    return checkpoint(folder / "base", "llama", **layers)
